"""EpisodeMetrics: what the last episodes of all workers came to, on average. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

import numpy as np

from envfleet.cluster.wire.rollouts import Collected
from envfleet.contract.flat_infos import Dense

NUM_EPISODES = 100  # the last ones, of all workers, over which is averaged
RETURN, LENGTH = "episode_return", "episode_length"


class EpisodeMetrics:
    """Returns, lengths and the numbers in the infos of last steps, of the last NUM_EPISODES episodes."""

    def __init__(self) -> None:
        self._episodes: deque[dict[str, float]] = deque(maxlen=NUM_EPISODES)

    def add(self, collected: Collected) -> None:
        """Add the episodes that ended in a worker's rollout."""
        num_episodes = len(collected.arrays["episode_returns"])
        if not num_episodes:
            return
        last = slice(max(0, num_episodes - NUM_EPISODES), None)
        episodes: list[dict[str, float]] = [{} for _ in range(num_episodes)[last]]
        for path, column in collected.final_infos.items():
            if isinstance(column, Dense) and column.values is not None and column.values.ndim == 1:
                name, values = "/".join(path), column.values[last].astype(np.float64)
                for row in np.flatnonzero(column.mask[last]).tolist():
                    episodes[row][name] = float(values[row])
        for name, array in ((RETURN, "episode_returns"), (LENGTH, "episode_lengths")):
            for episode, value in zip(episodes, collected.arrays[array][last].tolist(), strict=True):
                episode[name] = float(value)
        self._episodes.extend(episodes)

    @property
    def episodes(self) -> list[dict[str, float]]:
        """The numbers of each of the last episodes, for a checkpoint."""
        return list(self._episodes)

    def restore(self, episodes: Iterable[dict[str, float]]) -> None:
        """Go on after these episodes."""
        self._episodes.extend(episodes)

    def means(self) -> dict[str, float]:
        """The mean of each number over those of the last episodes that have it; empty: no episode has ended."""
        sums: dict[str, list[float]] = {RETURN: [], LENGTH: []}
        for episode in self._episodes:
            for name, value in episode.items():
                sums.setdefault(name, []).append(value)
        return {name: float(np.mean(values)) for name, values in sums.items() if values}
