"""RingEnv: images that cost nothing to make, so that benchmarks/cluster.py measures the wire that carries them."""

from __future__ import annotations

import functools
from typing import Any

import gymnasium as gym
import numpy as np

FRAME_SHAPE = (84, 84)
NUM_STACKED = 4
OBS_BYTES = NUM_STACKED * FRAME_SHAPE[0] * FRAME_SHAPE[1]
NUM_FRAMES = 4096  # 29 MB: more than the caches hold for long
FIRST_FRAMES = 61  # envs begin in different places of the ring


@functools.cache
def ring() -> np.ndarray:
    """[NUM_FRAMES + NUM_STACKED, 84, 84] random bytes, which nothing can compress; one for all envs of a process."""
    return np.random.default_rng(0).integers(0, 256, (NUM_FRAMES + NUM_STACKED, *FRAME_SHAPE), np.uint8)


class RingEnv(gym.Env[np.ndarray, np.int64]):
    """Shows four frames of a ring. `stacked`: one of them is new in each step; otherwise all four. It never ends."""

    num_made = 0

    def __init__(self, stacked: bool) -> None:
        """Each env of a process begins somewhere else."""
        self.observation_space = gym.spaces.Box(0, 255, (NUM_STACKED, *FRAME_SHAPE), np.uint8)
        self.action_space = gym.spaces.Discrete(2)
        self._frames = ring()
        self._stride = 1 if stacked else NUM_STACKED
        self._place = RingEnv.num_made * FIRST_FRAMES % NUM_FRAMES
        RingEnv.num_made += 1

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[np.ndarray, dict[str, Any]]:
        """The frames at this env's place."""
        return self._frames[self._place : self._place + NUM_STACKED], {}

    def step(self, action: np.int64) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        """The frames at its next place: a view, no copy."""
        place = self._place = (self._place + self._stride) % NUM_FRAMES
        return self._frames[place : place + NUM_STACKED], 0.0, False, False, {}


def no_action(obs: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """A policy that costs nothing either; not beside the agent, which would bring torch along."""
    num_rows = len(obs)
    return np.zeros(num_rows, np.int64), np.zeros(num_rows, np.float32)
