"""Bounds: which rows of a batch hold NaN, or numbers that the space of their leaf does not have.

Usually none do, and that costs one or two passes without a temporary array, or nothing: uint8 holds no other numbers
than Box(0, 255) allows.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from gymnasium import spaces

from envfleet.contract.spaces import Leaf, has_nan

Array = np.ndarray[Any, Any]


class Bounds:
    """The lowest and highest number at each place of a leaf's values; None where its dtype has no other ones."""

    def __init__(self, leaf: Leaf) -> None:
        """Of a leaf that is an array."""
        assert leaf.dtype is not None  # spaces of objects have no numbers
        self.leaf = leaf
        lowest, highest = _range_of(leaf.dtype)
        low, high = _limits_of(leaf.space)
        self.low = None if low is None or bool(np.all(low <= lowest)) else _one_if_equal(low)
        self.high = None if high is None or bool(np.all(high >= highest)) else _one_if_equal(high)

    @property
    def is_choice(self) -> bool:
        """Whether the values are choices, not quantities: a number outside means nothing."""
        return not isinstance(self.leaf.space, spaces.Box)

    def rows_outside(self, values: Array) -> Array | None:
        """Which of the rows `values[...]` have a number outside; None if no row has. NaN is not outside."""
        if not values.size or (self.low is None and self.high is None):
            return None
        num_axes = values.ndim - len(self.leaf.shape)
        outside = None
        if self.low is not None and not bool(np.all(values.min(axis=_reduced(self.low, num_axes)) >= self.low)):
            outside = values < self.low
        if self.high is not None and not bool(np.all(values.max(axis=_reduced(self.high, num_axes)) <= self.high)):
            above = values > self.high
            outside = above if outside is None else outside | above
        return None if outside is None else _rows(outside, num_axes)

    def rows_with_nan(self, values: Array) -> Array | None:
        """Which of the rows `values[...]` have NaN; None if no row has."""
        if values.dtype.kind != "f" or not has_nan(values):
            return None
        return _rows(np.isnan(values), values.ndim - len(self.leaf.shape))


def _one_if_equal(limits: Any) -> Any:
    """One number is compared with the smallest of all, which takes a third of the time."""
    first = np.ravel(limits)[:1]
    return first[0] if first.size and bool(np.all(limits == first[0])) else np.asarray(limits)


def _reduced(limit: Any, num_axes: int) -> tuple[int, ...] | None:
    return None if np.ndim(limit) == 0 else tuple(range(num_axes))


def _rows(places: Array, num_axes: int) -> Array | None:
    rows: Array = np.asarray(places.any(axis=tuple(range(num_axes, places.ndim))))
    return rows if rows.any() else None


def _range_of(dtype: np.dtype[Any]) -> tuple[float, float]:
    if dtype.kind == "f":
        return -np.inf, np.inf
    if dtype.kind == "b":
        return 0, 1
    return int(np.iinfo(dtype).min), int(np.iinfo(dtype).max)


def _limits_of(space: spaces.Space[Any]) -> tuple[Any, Any]:
    if isinstance(space, spaces.Box):
        return space.low, space.high
    if isinstance(space, spaces.Discrete):
        return space.start, space.start + space.n - 1
    if isinstance(space, spaces.MultiDiscrete):
        return space.start, space.start + space.nvec - 1
    if isinstance(space, spaces.MultiBinary):
        return 0, 1
    return None, None
