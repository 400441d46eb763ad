"""An env whose observations show what live changes have made of it."""

from __future__ import annotations

import os
from typing import Any

import gymnasium
import numpy as np


class ChangingEnv(gymnasium.Env[Any, Any]):
    """Episodes of `length` steps. The observation is [level, number of calls, option "start", pid, step].

    The level that an episode was begun with is shown until its end: a change in the middle of an episode would show.
    """

    def __init__(self, length: int = 3, fails_at: int | None = None) -> None:
        self.observation_space = gymnasium.spaces.Box(-1e12, 1e12, (5,), np.float64)
        self.action_space = gymnasium.spaces.Discrete(2)
        self.level = 0
        self.calls: list[Any] = []
        self._length = length
        self._fails_at = fails_at  # the level that it cannot come to from another one
        self._last_level: int | None = None
        self._is_doomed = False

    def note(self, value: Any, *, times: int = 1) -> None:
        """What call_at_reset() calls."""
        self.calls += [value] * times

    def kill(self) -> None:
        """What call() calls, to have the process die."""
        os.kill(os.getpid(), 9)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed)
        self._start = (options or {}).pop("start", 0)  # an env may take its options apart
        self._is_doomed = self._last_level not in (None, self.level) and self.level == self._fails_at
        self._last_level = self.level
        self._num_steps = 0
        return self._obs(), {}

    def step(self, action: Any) -> Any:
        if self._is_doomed:
            raise RuntimeError("told to fail")
        self._num_steps += 1
        return self._obs(), 1.0, self._num_steps >= self._length, False, {"level": self.level}

    def _obs(self) -> Any:
        return np.array([self.level, len(self.calls), self._start, os.getpid(), self._num_steps], np.float64)


class SavingChangingEnv(ChangingEnv):
    """Its states have the calls, and not the level: that is what it was built or changed with."""

    def get_state(self) -> Any:
        return list(self.calls), self._start, self._num_steps, self._last_level

    def set_state(self, state: Any) -> None:
        self.calls, self._start, self._num_steps, self._last_level = state


def first_action(weights: Any, obs: Any) -> Any:
    """For a FunctionPolicy."""
    return np.zeros(len(obs), np.int64)
