"""EpisodeMetrics: what the last episodes of all workers came to, on average. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from envfleet.cluster.wire.rollouts.collected import Collected
from envfleet.contract.arrays import Array
from envfleet.contract.infos.flat import Dense

NUM_EPISODES = 100  # the last ones, of all workers, over which is averaged
RETURN, LENGTH = "episode_return", "episode_length"


@dataclass(frozen=True)
class Ended:
    """The episodes that ended in one rollout: of each number the episodes that have it, and its values."""

    num_episodes: int
    numbers: dict[str, tuple[Array, Array]]


class EpisodeMetrics:
    """Returns, lengths and the numbers in the infos of last steps, of the last NUM_EPISODES episodes.

    Rollouts are added often and means are asked for seldom: adding keeps arrays, and the rest is done when asked.
    """

    def __init__(self) -> None:
        self._ended: deque[Ended] = deque()
        self._num_episodes = 0

    def add(self, collected: Collected) -> None:
        """Add the episodes that ended in a worker's rollout."""
        num_episodes = len(collected.arrays["episode_returns"])
        if not num_episodes:
            return
        last = slice(max(0, num_episodes - NUM_EPISODES), None)
        num_episodes = min(num_episodes, NUM_EPISODES)
        everyone = np.arange(num_episodes)
        numbers = {  # copies, for the rollout's memory is not to be kept
            RETURN: (everyone, collected.arrays["episode_returns"][last].astype(np.float64)),
            LENGTH: (everyone, collected.arrays["episode_lengths"][last].astype(np.float64)),
        }
        for path, column in collected.final_infos.items():
            if isinstance(column, Dense) and column.values is not None and column.values.ndim == 1:
                which = np.flatnonzero(column.mask[last])
                if len(which):
                    numbers.setdefault("/".join(path), (which, column.values[last][which].astype(np.float64)))
        self._keep(Ended(num_episodes, numbers))

    @property
    def episodes(self) -> list[dict[str, float]]:
        """The numbers of each of the last episodes, for a checkpoint."""
        episodes: list[dict[str, float]] = []
        for ended in self._ended:
            of_these: list[dict[str, float]] = [{} for _ in range(ended.num_episodes)]
            for name, (which, values) in ended.numbers.items():
                for episode, value in zip(which.tolist(), values.tolist(), strict=True):
                    of_these[episode][name] = value
            episodes += of_these
        return episodes[-NUM_EPISODES:]

    def restore(self, episodes: Iterable[dict[str, float]]) -> None:
        """Go on after these episodes."""
        for episode in episodes:
            numbers = {name: (np.zeros(1, int), np.full(1, value)) for name, value in episode.items()}
            self._keep(Ended(1, numbers))

    def means(self) -> dict[str, float]:
        """The mean of each number over those of the last episodes that have it; empty: no episode has ended."""
        sums: dict[str, list[float]] = {RETURN: [], LENGTH: []}
        for episode in self.episodes:
            for name, value in episode.items():
                sums.setdefault(name, []).append(value)
        return {name: float(np.mean(values)) for name, values in sums.items() if values}

    def _keep(self, ended: Ended) -> None:
        self._ended.append(ended)
        self._num_episodes += ended.num_episodes
        while self._num_episodes - self._ended[0].num_episodes >= NUM_EPISODES:
            self._num_episodes -= self._ended.popleft().num_episodes
