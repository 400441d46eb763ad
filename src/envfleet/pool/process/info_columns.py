"""InfoColumns: numbers that an env declares to have in its infos travel as arrays, like observations, not as objects.

An env declares them as `info_columns = {"lives": np.dtype(np.int64)}`, an array of numbers as
`np.dtype((np.uint8, (128,)))`; callers get them as numbers of that kind.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from envfleet.contract.arrays import Array
from envfleet.contract.infos.table import InfoTable
from envfleet.contract.results import WrongResult
from envfleet.pool.batch_layout import Column


class InfoColumns:
    """Where declared numbers lie in a batch: two arrays of a row for each env, the values and which rows have one."""

    def __init__(self, dtypes: Mapping[str, np.dtype[Any]]) -> None:
        """For the numbers of these names."""
        self._names = frozenset(dtypes)
        self._order = tuple(dtypes)
        self.layout: list[Column] = []
        for each in dtypes.values():
            dtype = np.dtype(each)
            self.layout.append((dtype.base, dtype.shape))

    def rest_of(self, info: dict[str, Any]) -> dict[str, Any]:
        """The part of an info that was not declared, which travels as an object."""
        if not self._names:
            return info
        if info.keys() == self._names:
            return {}
        return {name: value for name, value in info.items() if name not in self._names}

    def write(self, info: Mapping[str, Any], columns: Sequence[tuple[Array, Array]], row: int) -> None:
        """Write the numbers of a row. Raises WrongResult for what is no such number."""
        for name, (values, mask) in zip(self._order, columns, strict=True):
            is_there = name in info
            try:
                values[row] = info[name] if is_there else 0
            except (TypeError, ValueError, OverflowError) as error:
                text = f"its info has declared {name!r} as a number of {values.dtype}; got {info[name]!r} ({error})"
                raise WrongResult(text) from None
            mask[row] = is_there

    def read(self, columns: Sequence[tuple[Array, Array]], num_rows: int) -> InfoTable:
        """The table of the numbers that were written."""
        table = InfoTable(num_rows)
        for name, (values, mask) in zip(self._order, columns, strict=True):
            table.add(name, values, mask)
        return table
