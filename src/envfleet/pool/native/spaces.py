"""Spaces that a native env declares in C++, as Gymnasium's."""

from __future__ import annotations

from typing import Any

import numpy as np
from gymnasium import spaces

from envfleet.contract.arrays import Array

Description = tuple[str, str, tuple[int, ...], list[float], list[float], list[int], list[str], list[Any]]


def gymnasium_space(description: Description) -> spaces.Space[Any]:
    """The space that native/bind/values.h describes."""
    kind, dtype, shape, low, high, num_values, keys, parts = description
    if kind == "box":
        return spaces.Box(_bound(low, shape, dtype), _bound(high, shape, dtype), shape, np.dtype(dtype).type)
    if kind == "discrete":
        return spaces.Discrete(num_values[0])
    if kind == "multi_discrete":
        return spaces.MultiDiscrete(num_values)
    if kind == "multi_binary":
        return spaces.MultiBinary(shape)
    if kind == "dict":
        return spaces.Dict(list(zip(keys, map(gymnasium_space, parts), strict=True)))
    return spaces.Tuple([gymnasium_space(part) for part in parts])


def _bound(values: list[float], shape: tuple[int, ...], dtype: str) -> Array:
    bound = np.array(values, dtype=dtype)
    return np.full(shape, bound[0], dtype) if bound.size == 1 else bound.reshape(shape)
