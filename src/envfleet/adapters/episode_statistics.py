"""EpisodeStatistics: returns, lengths and seconds of episodes, for libraries that expect them in the infos."""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from envfleet.adapters.vector_source import SourceStep
from envfleet.contract.arrays import BoolArray, FloatArray
from envfleet.contract.infos.table import Info, mask_key

EPISODE = "episode"


class EpisodeStatistics:
    """What the running episode of each env has come to."""

    def __init__(self, num_envs: int, has_own_rewards: bool) -> None:
        """`has_own_rewards`: the infos have what the games gave, and the learner's rewards are clipped."""
        self._has_own_rewards = has_own_rewards
        self._returns = np.zeros(num_envs, np.float64)
        self._lengths = np.zeros(num_envs, np.int64)
        self._begun_s = np.zeros(num_envs, np.float64)

    def reset(self, rows: Any = slice(None)) -> None:
        """Begin again: all envs, or those of a mask, were reset."""
        self._returns[rows] = 0.0
        self._lengths[rows] = 0
        self._begun_s[rows] = time.perf_counter()

    def add(self, step: SourceStep) -> dict[int, Info]:
        """Count a step; `{"r": return, "l": length, "t": seconds}` of the episodes that have ended, by row."""
        ended = step.ended
        self._returns += _own_rewards(step, ended) if self._has_own_rewards else step.rewards
        self._lengths += 1
        rows = np.flatnonzero(ended)
        if not len(rows):
            return {}
        now_s = time.perf_counter()
        statistics = {
            row: {
                "r": np.float32(self._returns[row]),
                "l": np.int32(self._lengths[row]),
                "t": np.float32(round(now_s - self._begun_s[row], 6)),
            }
            for row in rows.tolist()
        }
        self.reset(ended)
        return statistics


def _own_rewards(step: SourceStep, ended: BoolArray) -> FloatArray:
    """[N]: the games' own, which are in the infos; those of the step where they are not."""
    rewards = step.rewards
    # Of episodes that have ended, the infos are those of the reset.
    for infos, rows in ((step.table.columns, ~ended), (step.table.final_infos.columns, ended)):
        own, has_own = infos.get("reward"), infos.get(mask_key("reward"))
        if isinstance(own, np.ndarray) and own.shape == rewards.shape and has_own is not None:
            rewards = np.where(rows & has_own, own, rewards)
    return rewards
