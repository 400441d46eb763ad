"""InfoColumns: numbers that an env promises to have in every info travel as arrays, like observations, not as objects.

An env declares them as `info_columns = {"lives": np.dtype(np.int64)}`. What callers get is the same either way.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from envfleet.contract.errors import EnvFleetError
from envfleet.pool.batch_layout import Column

Array = np.ndarray[Any, Any]


class BrokenPromise(EnvFleetError):
    """An env's info lacks a number that the env has declared."""


class InfoColumns:
    """The declared numbers of one row lie in columns [rows], the last of which says whether the row has them.

    Rows without them are not the env's own: its last observation again, or the end of an episode that was lost.
    """

    def __init__(self, dtypes: Mapping[str, np.dtype[Any]]) -> None:
        """The columns for these numbers."""
        self._names = frozenset(dtypes)
        self.layout: list[Column] = [(np.dtype(dtype), ()) for dtype in dtypes.values()]
        self._order = tuple(dtypes)
        if dtypes:
            self.layout.append((np.dtype(np.bool_), ()))

    def rest_of(self, info: dict[str, Any]) -> dict[str, Any]:
        """What is left of an info for the object lane."""
        if info.keys() == self._names:
            return {}
        return {name: value for name, value in info.items() if name not in self._names} if self._names else info

    def write(self, info: Mapping[str, Any], columns: Sequence[Array], row: int) -> None:
        """Write the numbers of a row."""
        if not columns:
            return
        has_them = not self._names.isdisjoint(info)
        try:
            for name, column in zip(self._order, columns, strict=False):
                column[row] = info[name] if has_them else 0
        except (KeyError, TypeError, ValueError) as error:
            text = f"its info must have the numbers {', '.join(self._order)}, which it has declared: {error!r}"
            raise BrokenPromise(text) from None
        columns[-1][row] = has_them

    def read(self, columns: Sequence[Array], rows: Array | None = None) -> dict[str, Any] | None:
        """The joined infos: `key` and its mask `_key`. With `rows`, only those have any: the others hold old values."""
        if not columns:
            return None
        mask = columns[-1]
        if rows is not None:
            mask = np.zeros_like(mask)
            mask[rows] = columns[-1][rows]
        if not mask.any():
            return None
        joined: dict[str, Any] = {}
        for name, column in zip(self._order, columns, strict=False):
            joined[name] = column if rows is None else np.where(mask, column, np.zeros((), column.dtype))
            joined[f"_{name}"] = mask if rows is None else mask.copy()
        return joined
