"""Spaces that a native env declares in C++, as Gymnasium's."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from gymnasium import spaces

from envfleet.contract.arrays import Array


class SpaceDescription(NamedTuple):
    """A space as native/bind/values.h describes it, field for field."""

    kind: str
    dtype: str
    shape: tuple[int, ...]
    low: list[float]  # one for all elements, or one for each
    high: list[float]
    num_values: list[int]  # of each element of a discrete space
    keys: list[str]  # of a Dict
    parts: list[tuple[Any, ...]]  # of a Dict or Tuple: their descriptions


def gymnasium_space(description: tuple[Any, ...]) -> spaces.Space[Any]:
    """The space that native/bind/values.h describes."""
    space = SpaceDescription(*description)
    if space.kind == "box":
        low, high = (_bound(values, space.shape, space.dtype) for values in (space.low, space.high))
        return spaces.Box(low, high, space.shape, np.dtype(space.dtype).type)
    if space.kind == "discrete":
        return spaces.Discrete(space.num_values[0])
    if space.kind == "multi_discrete":
        return spaces.MultiDiscrete(space.num_values)
    if space.kind == "multi_binary":
        return spaces.MultiBinary(space.shape)
    if space.kind == "dict":
        return spaces.Dict(list(zip(space.keys, map(gymnasium_space, space.parts), strict=True)))
    return spaces.Tuple([gymnasium_space(part) for part in space.parts])


def _bound(values: list[float], shape: tuple[int, ...], dtype: str) -> Array:
    bound = np.array(values, dtype=dtype)
    return np.full(shape, bound[0], dtype) if bound.size == 1 else bound.reshape(shape)
