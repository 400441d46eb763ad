"""FrameStack: the last observations of each env, one behind the other, the newest last (EnvPool's `frame_stack`)."""

from __future__ import annotations

import numpy as np

from envfleet.contract.arrays import Array, BoolArray, IntArray


class FrameStack:
    """[num_envs, num_frames, ...]; after a reset all frames are the first observation."""

    def __init__(self, num_envs: int, num_frames: int) -> None:
        self._num_envs = num_envs
        self._num_frames = num_frames
        self._frames: Array | None = None

    def push(self, env_ids: IntArray, obs: Array, is_first: BoolArray) -> Array:
        """Add an observation for each of these envs, and return their stacks."""
        if self._frames is None:
            self._frames = np.zeros((self._num_envs, self._num_frames, *obs.shape[1:]), obs.dtype)
        stacks: Array = np.roll(self._frames[env_ids], -1, axis=1)
        stacks[:, -1] = obs
        stacks[is_first] = obs[is_first][:, None]
        self._frames[env_ids] = stacks
        return stacks
