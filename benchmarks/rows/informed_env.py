"""InformedEnv: the walk of informed.h in Python, for benchmarks/infos.py."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

NUM_INFOS = 10


class InformedEnv(gymnasium.Env[Any, Any]):
    """A walk along a line, with ten numbers in each info, or none; a step takes about 20 us of arithmetic."""

    observation_space = spaces.Box(-1e9, 1e9, (4,), np.float32)
    action_space = spaces.Discrete(2)

    def __init__(self, silent: bool = False) -> None:
        self._is_silent = silent
        self._place = self._speed = 0.0
        self._num_steps = 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Begin somewhere between 0 and 1."""
        super().reset(seed=seed)
        self._place, self._speed, self._num_steps = self.np_random.random(), 0.0, 0
        return self._obs(), self._info()

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Push to the left or to the right."""
        for _ in range(200):
            self._speed = 0.999 * self._speed + (-0.0005 if action == 0 else 0.0005)
            self._place += 0.01 * self._speed
        self._num_steps += 1
        return self._obs(), self._place, False, self._num_steps >= 200, self._info()

    def _obs(self) -> Any:
        return np.array([self._place, self._speed, 1.0, 1.0], np.float32)

    def _info(self) -> dict[str, Any]:
        return {} if self._is_silent else {f"number_{index}": self._place + index for index in range(NUM_INFOS)}
