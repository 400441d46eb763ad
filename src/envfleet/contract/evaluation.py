"""Evaluation: whole episodes that a policy has played, and what they came to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from envfleet.contract.arrays import Array, BoolArray
from envfleet.contract.infos.table import Info, Infos, InfoTable, has_error


@dataclass(frozen=True, slots=True, eq=False)
class Episodes:
    """E episodes that were played to their ends, one row each."""

    returns: Array  # [E] float64, sums of rewards
    lengths: Array  # [E] int64, steps
    terminated: BoolArray  # [E]
    truncated: BoolArray  # [E]
    infos: Sequence[Info]  # of the last step of each
    frames: Sequence[Array] = ()  # of the first few, each [length + 1, height, width, 3]


@dataclass(frozen=True, slots=True, eq=False)
class Evaluation:
    """Whole episodes of one policy, in the order of their numbers; E of them.

    Which episodes these are was decided before the first of them began: none is missing because it took long. Episode e
    begins with `seeds[e]`, on whichever env or worker it is played.
    """

    returns: Array  # [E] float64, sums of rewards
    lengths: Array  # [E] int64, steps
    terminated: BoolArray  # [E]
    truncated: BoolArray  # [E]; both may be True in the same row
    infos: Infos = field(repr=False)  # of the last step of each: columns of E rows and their masks, see InfoTable
    seeds: Array = field(repr=False)  # [E] int64, with which each began
    seed: int  # from which those come: evaluate(..., seed=evaluation.seed) plays the same episodes
    frames: tuple[Array, ...] = field(default=(), repr=False)  # of the first few, each [length + 1, height, width, 3]

    @classmethod
    def of(cls, episodes: Episodes, seeds: Sequence[int], seed: int) -> Evaluation:
        """The evaluation that consists of these episodes.

        Args:
            episodes: What was played.
            seeds: The seed of each episode.
            seed: The seed from which these were made.

        Returns:
            The evaluation.
        """
        infos = InfoTable.from_rows(dict(enumerate(episodes.infos)), len(episodes.infos))
        return cls(
            returns=episodes.returns,
            lengths=episodes.lengths,
            terminated=episodes.terminated,
            truncated=episodes.truncated,
            infos=infos.columns,
            seeds=np.array(seeds, np.int64),
            seed=seed,
            frames=tuple(episodes.frames),
        )

    @property
    def num_episodes(self) -> int:
        """E, the number of episodes."""
        return len(self.returns)

    @property
    def mean_return(self) -> float:
        """The mean of the episodes' returns."""
        return float(self.returns.mean())

    @property
    def std_return(self) -> float:
        """Standard deviation of the returns."""
        return float(self.returns.std())

    @property
    def standard_error(self) -> float:
        """Standard error of the mean return; NaN for a single episode."""
        return float(self.returns.std(ddof=1) / np.sqrt(len(self.returns))) if len(self.returns) > 1 else float("nan")

    @property
    def min_return(self) -> float:
        """The lowest return of an episode."""
        return float(self.returns.min())

    @property
    def max_return(self) -> float:
        """The highest return of an episode."""
        return float(self.returns.max())

    @property
    def mean_length(self) -> float:
        """The mean number of steps of an episode."""
        return float(self.lengths.mean())

    @property
    def failed(self) -> BoolArray:
        """[E]: whether the episode was cut short because its env failed (pools with `on_env_error="restart"`)."""
        return has_error(self.infos, self.num_episodes)

    def __str__(self) -> str:
        """Return the summary in one line."""
        text = (
            f"{self.num_episodes} episodes: return {self.mean_return:.2f} ± {self.std_return:.2f} "
            f"({self.min_return:.2f} to {self.max_return:.2f}), length {self.mean_length:.1f}"
        )
        num_failed = int(self.failed.sum())
        return f"{text}, {num_failed} cut short by failures" if num_failed else text


def seeds_of_episodes(seed: int, num_episodes: int) -> list[int]:
    """The seed of each episode. That of episode e depends on `seed` and e only."""
    return [int(word) >> 1 for word in np.random.SeedSequence(seed).generate_state(num_episodes, np.uint32)]


def fresh_seed() -> int:
    """A seed that was not used before."""
    return int(np.random.SeedSequence().generate_state(1)[0]) >> 1


def joined_episodes(parts: Sequence[tuple[Sequence[int], Episodes]]) -> Episodes:
    """Episodes that were played in several places, in the order of their numbers.

    Args:
        parts: The numbers of the episodes of each place, and these episodes. All together are 0, 1, 2, ...
    """
    order = np.argsort(np.concatenate([np.asarray(numbers, np.int64) for numbers, _ in parts]))
    infos = [info for _, each in parts for info in each.infos]
    frames = {number: frame for numbers, each in parts for number, frame in zip(numbers, each.frames, strict=False)}
    return Episodes(
        returns=np.concatenate([each.returns for _, each in parts])[order],
        lengths=np.concatenate([each.lengths for _, each in parts])[order],
        terminated=np.concatenate([each.terminated for _, each in parts])[order],
        truncated=np.concatenate([each.truncated for _, each in parts])[order],
        infos=[infos[index] for index in order.tolist()],
        frames=[frames[number] for number in sorted(frames)],
    )
