"""How EnvPool has the observations and actions of an env: single arrays, int32 for what is discrete."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from gymnasium import spaces

from envfleet.compat.envpool.array_library import NUMPY, ArrayLibrary
from envfleet.contract.arrays import Array

Convert = Callable[[Any], Array]


def observation_form(
    space: spaces.Space[Any], frame_stack: int = 1, library: ArrayLibrary = NUMPY
) -> tuple[spaces.Space[Any], Convert]:
    """EnvPool's observation space for one of ours, and what makes its arrays of our batches."""
    if isinstance(space, spaces.Discrete):
        return space, lambda obs: library.functions.asarray(obs, np.int32)
    if isinstance(space, spaces.Tuple):  # Blackjack: one array of its numbers
        most = max(int(part.n) for part in space.spaces)  # type: ignore[attr-defined]
        stack = library.functions.stack
        return spaces.Box(0, most - 1, (len(space.spaces),), np.int32), lambda obs: stack(obs, axis=1).astype(np.int32)
    assert isinstance(space, spaces.Box)
    if len(space.shape) == 4:  # Atari in colours, [stack, height, width, 3]: a plane for each colour
        stack, height, width, channels = space.shape
        shape = (stack * channels, height, width)
        return spaces.Box(0, 255, shape, np.uint8), lambda obs: np.moveaxis(obs, -1, 2).reshape(len(obs), *shape)
    if frame_stack > 1:
        low, high = (np.stack([bound] * frame_stack) for bound in (space.low, space.high))
        return spaces.Box(low, high, dtype=space.dtype.type), lambda obs: obs
    return space, lambda obs: obs


def action_form(space: spaces.Space[Any], dtype: Any) -> spaces.Space[Any]:
    """EnvPool's action space for one of ours; `dtype` is EnvPool's of continuous actions, None: ours."""
    if isinstance(space, spaces.Box) and dtype is not None:
        return spaces.Box(_widened(space.low, dtype), _widened(space.high, dtype), dtype=dtype)
    return space


def _widened(bounds: Array, dtype: Any) -> Array:
    """The same decimal numbers: 0.4 as float32 becomes 0.4, not 0.4000000059604645."""
    return np.array([float(str(bound)) for bound in bounds.flat], dtype).reshape(bounds.shape)
