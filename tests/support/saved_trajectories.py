"""Trajectories from a saved state on: one after the other, they must be equal."""

from __future__ import annotations

from typing import Any

import numpy as np
from gymnasium.vector import AutoresetMode

import envfleet


class Walker:
    """Steps a pool with actions that are recorded, and resets ended envs where the pool does not."""

    def __init__(self, pool: envfleet.EnvPool, seed: int = 5) -> None:
        self.pool = pool
        self._actions = np.random.default_rng(seed)
        self.ended = np.zeros(pool.num_envs, np.bool_)

    def actions(self, num_steps: int) -> list[Any]:
        """Actions of `num_steps` steps, for a pool of envs with a Discrete action space."""
        return list(self._actions.integers(0, self.pool.single_action_space.n, (num_steps, self.pool.num_envs)))

    def walk(self, actions: list[Any]) -> list[Any]:
        """What the pool returns."""
        results = []
        is_disabled = self.pool.autoreset_mode is AutoresetMode.DISABLED
        for each in actions:
            if is_disabled and self.ended.any():
                results.append(self.pool.reset(options={"reset_mask": self.ended.copy()}))
            results.append(self.pool.step(each))
            self.ended = results[-1][2] | results[-1][3]
        return results
