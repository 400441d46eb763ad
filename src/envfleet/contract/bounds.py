"""Bounds: which rows of a batch hold NaN, or numbers outside the space of their leaf.

Usually none do, and finding that out costs one or two passes without a temporary array, or nothing: uint8 holds no
numbers outside Box(0, 255).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from gymnasium import spaces

from envfleet.contract.arrays import Array
from envfleet.contract.spaces import Leaf, has_nan

MOST_COLUMNS = 32


class Bounds:
    """The lowest and highest number at each place of an array leaf; None where the dtype has no numbers beyond them."""

    def __init__(self, leaf: Leaf) -> None:
        assert leaf.dtype is not None  # spaces of objects have no numbers
        self.leaf = leaf
        lowest, highest = _range_of(leaf.dtype)
        low, high = (np.broadcast_to(np.asarray(limit), leaf.shape) for limit in _limits_of(leaf.space))
        self.low = None if bool(np.all(low <= lowest)) else low
        self.high = None if bool(np.all(high >= highest)) else high
        self._size = low.size
        self._parts = _parts(low.reshape(-1), high.reshape(-1), low > lowest, high < highest)
        self._sees_nan = bool(np.all((low > lowest) | (high < highest)))  # a comparison with NaN fails

    @property
    def is_choice(self) -> bool:
        """Whether the values are choices, not quantities: a number outside has no meaning."""
        return not isinstance(self.leaf.space, spaces.Box)

    def rows_outside(self, values: Array) -> Array | None:
        """Find rows with numbers outside the space. NaN does not count.

        Args:
            values: [..., *leaf.shape].

        Returns:
            A mask of the rows, [...] bool; None if no row has any.
        """
        return None if self._are_inside(values) else self._rows_outside(values)

    def rows_with_nan(self, values: Array) -> Array | None:
        """Find rows with NaN.

        Args:
            values: [..., *leaf.shape].

        Returns:
            A mask of the rows, [...] bool; None if no row has any.
        """
        if values.dtype.kind != "f" or not has_nan(values):
            return None
        return _rows(np.isnan(values), values.ndim - len(self.leaf.shape))

    def suspects(self, values: Array) -> tuple[Array | None, Array | None]:
        """Find both, in fewer passes.

        Args:
            values: [..., *leaf.shape].

        Returns:
            The results of rows_with_nan() and rows_outside().
        """
        if not self._are_inside(values):
            return self.rows_with_nan(values), self._rows_outside(values)
        return None if self._sees_nan else self.rows_with_nan(values), None

    def _are_inside(self, values: Array) -> bool:
        """Whether all bounded numbers of all rows are inside, and none of them is NaN."""
        if not self._parts or not values.size:
            return True
        flat = values.reshape(-1, self._size)
        for part in self._parts:
            numbers = flat if part.column is None else flat[:, part.column]
            if part.low is not None and not (np.minimum.reduce(numbers, axis=part.axis) >= part.low).all():
                return False
            if part.high is not None and not (np.maximum.reduce(numbers, axis=part.axis) <= part.high).all():
                return False
        return True

    def _rows_outside(self, values: Array) -> Array | None:
        outside = np.zeros(values.shape, np.bool_)
        if self.low is not None:
            outside |= values < self.low
        if self.high is not None:
            outside |= values > self.high
        return _rows(outside, values.ndim - len(self.leaf.shape))


class _Part(NamedTuple):
    """Numbers that are compared at once."""

    column: int | None  # of the flattened values; None: all of them
    axis: int | None  # that is reduced; None: both
    low: Any
    high: Any


def _parts(low: Array, high: Array, has_low: Array, has_high: Array) -> list[_Part]:
    """Short rows are compared column by column: NumPy reduces many short rows slowly."""
    has_low, has_high = has_low.reshape(-1), has_high.reshape(-1)
    if not (has_low.any() or has_high.any()):
        return []
    if (low == low[0]).all() and (high == high[0]).all():
        return [_Part(None, None, low[0] if has_low[0] else None, high[0] if has_high[0] else None)]
    if len(low) > MOST_COLUMNS:
        return [_Part(None, 0, low if has_low.any() else None, high if has_high.any() else None)]
    return [
        _Part(column, None, low[column] if has_low[column] else None, high[column] if has_high[column] else None)
        for column in np.flatnonzero(has_low | has_high).tolist()
    ]


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
    return 0, 1  # MultiBinary
