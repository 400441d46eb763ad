"""InfoStore: infos of many steps, gathered in columns a few rows at a time. Pure.

Infos come in the form of InfoTable, one table for each step; here they become one table for all of them. A column
that changes its dtype from step to step takes one that holds all values; one that changes its shape or kind becomes
objects.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from envfleet.contract.arrays import Array
from envfleet.contract.infos.flat import Dense, FlatInfos, Path, Sparse, nested
from envfleet.contract.infos.table import Infos, InfoTable, dtype_for_all, mask_key

MOST_DIMS = 12  # of a number column's rows
MOST_DEPTH = 16  # of dictionaries
MOST_KEYS = 256
MOST_KEY_CHARS = 256
NOT_INFOS = frozenset(each for key in ("final_obs", "final_info") for each in (key, mask_key(key)))


@dataclass(slots=True)
class InfoBudget:
    """What the columns of one rollout may take, together."""

    bytes_left: int | None  # None: any number
    keys_left: int = MOST_KEYS

    def take(self, num_bytes: int, num_keys: int = 1) -> bool:
        """Whether there is room for that much more; if so it is taken."""
        if num_keys > self.keys_left or (self.bytes_left is not None and num_bytes > self.bytes_left):
            return False
        self.keys_left -= num_keys
        if self.bytes_left is not None:
            self.bytes_left -= num_bytes
        return True


class _Column:
    """The numbers that rows have under one key."""

    __slots__ = ("_mask", "batch_shape", "dtype", "num_full", "row_shape", "values")

    def __init__(self, num_rows: int, row_shape: tuple[int, ...], dtype: np.dtype[Any]) -> None:
        self.row_shape, self.dtype = row_shape, dtype
        self.batch_shape: tuple[int, ...] = ()  # of the last values that were written, which fit
        self.values: Array = np.zeros((num_rows, *row_shape), dtype)
        self._mask: Array = np.zeros(num_rows, np.bool_)
        self.num_full = 0  # the first rows, all of which have the key: not written into the mask yet

    @property
    def mask(self) -> Array:
        """[R] bool: the rows that have the key."""
        if self.num_full:
            self._mask[: self.num_full] = True
            self.num_full = 0
        return self._mask

    @mask.setter
    def mask(self, mask: Array) -> None:
        self._mask = mask

    def widen(self, dtype: np.dtype[Any]) -> None:
        self.values, self.dtype = self.values.astype(dtype), dtype


class _Objects:
    """Values of any kind of one key."""

    __slots__ = ("rows", "values")

    def __init__(self) -> None:
        self.rows: list[int] = []
        self.values: list[Any] = []


class InfoStore:
    """Columns of `num_rows` rows, those of which were written that have the key."""

    def __init__(
        self,
        num_rows: int,
        budget: InfoBudget,
        keys: Collection[str] | None = None,
        has_objects: bool = False,
        path: Path = (),
        left_out: dict[str, str] | None = None,
    ) -> None:
        """Make an empty store.

        Args:
            num_rows: Number of rows; `grow` makes more.
            budget: What the columns may take.
            keys: Those to keep; None: all.
            has_objects: Keep values that are no numbers, too.
            path: The keys that lead here.
            left_out: Where to note what is left out, by key, and why.
        """
        self._num_rows = num_rows
        self._budget = budget
        self._keys = None if keys is None else frozenset(keys)
        self._has_objects = has_objects
        self._path = path
        self.left_out: dict[str, str] = {} if left_out is None else left_out
        self._columns: dict[str, _Column] = {}
        self._plan: list[tuple[str, str, _Column]] = []  # of the columns: key, key of its mask
        self._inside: dict[str, tuple[InfoStore, Array]] = {}  # dictionaries, and their masks [R]
        self._objects: dict[str, _Objects] = {}
        self._skipped: set[str] = set() if path else set(NOT_INFOS)

    def grow(self, num_rows: int) -> None:
        """Have at least `num_rows` rows. A column for which there is no room is left out."""
        if num_rows <= self._num_rows:
            return
        before, self._num_rows = self._num_rows, max(num_rows, 2 * self._num_rows)
        for key, column in list(self._columns.items()):
            num_bytes = column.values.nbytes + column.mask.nbytes
            if before and not self._budget.take(num_bytes * self._num_rows // before - num_bytes, 0):
                self._leave_out(key, f"{column.dtype} {column.row_shape}, for which there is no more room")
                continue
            column.values, column.mask = _grown(column.values, self._num_rows), _grown(column.mask, self._num_rows)
        for key, (store, mask) in self._inside.items():
            store.grow(num_rows)
            self._inside[key] = store, _grown(mask, self._num_rows)

    def write(self, at: slice | Array, infos: Infos, rows: Array | None = None) -> None:
        """Write infos in the form of InfoTable. Each row is written once.

        Args:
            at: The rows of this store, as many as are written.
            infos: Columns and their masks.
            rows: The rows of `infos` to write; None: all.
        """
        num_written, others = 0, []
        first, stop = (at.start, at.stop) if isinstance(at, slice) else (-1, -1)
        all_true, ndarray = b"\1" * (stop - first), np.ndarray
        for key, its_mask, column in self._plan:
            values = infos.get(key)
            if values is None:
                continue
            mask = infos.get(its_mask)
            if mask is None or type(values) is not ndarray or values.dtype != column.dtype:
                others.append(key)
                continue
            shape = values.shape
            if shape != column.batch_shape:
                if shape[1:] != column.row_shape:
                    others.append(key)
                    continue
                column.batch_shape = shape
            if rows is not None:
                values, mask = values[rows], mask[rows]
            column.values[at] = values
            if first == column.num_full and mask.tobytes() == all_true:  # half the time of writing it
                column.num_full = stop
            else:
                column.mask[at] = mask
            num_written += 2
        if num_written != len(infos):
            self._write_rest(at, infos, rows, others)

    def has_columns_of(self, infos: Infos) -> bool:
        """Whether these infos are numbers that fit the columns, and nothing else."""
        num_keys, ndarray = 2 * len(self._plan), np.ndarray
        if len(infos) != num_keys and len(infos) - sum(key in infos for key in NOT_INFOS) != num_keys:
            return False
        for key, _, column in self._plan:
            values = infos.get(key)
            if type(values) is not ndarray or values.dtype is not column.dtype:
                return False
        return True

    def write_steps(self, first: int, num_rows: int, steps: Sequence[Infos]) -> None:
        """Write the infos of several steps: what write() does with each, in less than half the time.

        Args:
            first: The first row of this store.
            num_rows: Number of rows of each step.
            steps: Columns and their masks of each step; has_columns_of() each of them.
        """
        stop = first + num_rows * len(steps)
        try:
            masks = np.concatenate([infos[each] for _, each, _ in self._plan for infos in steps])
            is_full = masks.all()
            for (key, _, column), mask in zip(self._plan, masks.reshape(len(self._plan), -1), strict=True):
                np.concatenate([infos[key] for infos in steps], out=column.values[first:stop], casting="no")
                if is_full and first == column.num_full:
                    column.num_full = stop
                else:
                    column.mask[first:stop] = mask
        except (KeyError, TypeError, ValueError):  # a mask is missing, or a shape is another: one by one
            for infos in steps:
                self.write(slice(first, first + num_rows), infos)
                first += num_rows

    def flat(self, shape: tuple[int, ...], order: Array | None = None) -> FlatInfos:
        """All columns by their paths.

        Args:
            shape: Of the rows: (steps, envs), or (episodes,).
            order: The row of the store that each row shall be; None: as they were written.

        Returns:
            The columns. They share memory with the store.
        """
        num_rows = math.prod(shape)
        flat: FlatInfos = {}
        for key, column in self._columns.items():
            values, mask = (_ordered(each, num_rows, order) for each in (column.values, column.mask))
            flat[*self._path, key] = Dense(values.reshape(*shape, *column.row_shape), mask.reshape(shape))
        for key, objects in self._objects.items():
            rows = np.array(objects.rows, np.int64)
            if order is not None:
                rows = np.argsort(order)[rows]
            sorting = np.argsort(rows, kind="stable")
            at = np.stack(np.unravel_index(rows[sorting], shape), 1)
            flat[*self._path, key] = Sparse(at, [objects.values[index] for index in sorting])
        for key, (store, mask) in self._inside.items():
            flat[*self._path, key] = Dense(None, _ordered(mask, num_rows, order).reshape(shape))
            flat |= store.flat(shape, order)
        return flat

    # -- inside --

    def _write_rest(self, at: slice | Array, infos: Infos, rows: Array | None, others: list[str]) -> None:
        """What `write` does not know yet, or what is of another kind than before."""
        for key, value in infos.items():
            if key in self._skipped or (key in self._columns and key not in others):
                continue
            if not isinstance(key, str) or (key[:1] == "_" and key[1:] in infos):
                continue
            if self._keys is not None and key not in self._keys:
                self._skipped |= {key, mask_key(key)}
                continue
            if not isinstance(value, dict) and (not isinstance(value, np.ndarray) or not value.ndim):
                continue  # it has no rows
            mask = infos.get(mask_key(key))
            if mask is None:
                mask = np.ones(_num_rows(value), np.bool_)
            if rows is not None:
                mask = mask[rows]
            if mask.any():
                self._write_one(at, key, value, mask, rows)

    def _write_one(self, at: slice | Array, key: str, value: Any, mask: Array, rows: Array | None) -> None:
        if isinstance(value, dict):
            if key not in self._columns and key not in self._objects and self._room_inside(key):
                store, its_mask = self._inside[key]
                store.write(at, value, rows)
                its_mask[at] = mask
                return
        else:
            value = value if rows is None else value[rows]
            if key not in self._inside and key not in self._objects and self._room_for(key, value):
                column = self._columns.get(key)
                if column is not None:
                    column.values[at] = value
                    column.mask[at] = mask
                return
            rows = None
        self._write_objects(at, key, value, mask, rows)

    def _room_for(self, key: str, values: Array) -> bool:
        """Make a column that these values fit into. False: they can only be objects."""
        dtype, row_shape, column = values.dtype, values.shape[1:], self._columns.get(key)
        if not dtype.isnative:
            dtype = dtype.newbyteorder("=")
        if dtype.kind not in "biuf" or dtype.itemsize > 8 or len(row_shape) > MOST_DIMS:
            return False
        if column is not None:
            common = dtype_for_all({dtype, column.dtype})
            if common is None or row_shape != column.row_shape:
                return False
            if common != column.dtype:
                if not self._budget.take(column.values.size * (common.itemsize - column.dtype.itemsize), 0):
                    self._leave_out(key, f"{common} {row_shape}, for which there is no more room")
                    return True
                column.widen(common)
            return True
        num_bytes = self._num_rows * (1 + math.prod(row_shape) * dtype.itemsize)
        if self._budget.take(num_bytes) and self._is_sendable(key):
            self._columns[key] = column = _Column(self._num_rows, row_shape, dtype)
            self._plan.append((key, mask_key(key), column))
        else:
            self._leave_out(
                key, f"{dtype} of shape {row_shape} in each of {self._num_rows:,} rows, {num_bytes:,} bytes"
            )
        return True

    def _room_inside(self, key: str) -> bool:
        """Have a store for a dictionary. False: it can only be an object."""
        if key in self._inside:
            return True
        if len(self._path) >= MOST_DEPTH or not self._is_sendable(key) or not self._budget.take(self._num_rows):
            return False
        path = (*self._path, key)
        store = InfoStore(self._num_rows, self._budget, None, self._has_objects, path, self.left_out)
        self._inside[key] = store, np.zeros(self._num_rows, np.bool_)
        return True

    def _write_objects(self, at: slice | Array, key: str, value: Any, mask: Array, rows: Array | None) -> None:
        """One object for each row that has the key."""
        if key not in self._objects:
            was_number = key in self._columns or key in self._inside
            if not self._has_objects or not self._is_sendable(key) or not (was_number or self._budget.take(0)):
                if was_number or self._has_objects:
                    self._leave_out(key, "its values change their kind or shape from step to step")
                self._skipped |= {key, mask_key(key)}
                return
            self._objects[key] = self._turned_to_objects(key)
        objects, places = self._objects[key], np.arange(self._num_rows)[at]
        table = InfoTable(len(mask), {key: value})
        for index in np.flatnonzero(mask):
            objects.rows.append(int(places[index]))
            row = int(index if rows is None else rows[index])
            objects.values.append(_copied(table.entry(key, row)))

    def _turned_to_objects(self, key: str) -> _Objects:
        """What was written of this key before."""
        objects = _Objects()
        column, inside = self._columns.pop(key, None), self._inside.pop(key, None)
        self._plan = [each for each in self._plan if each[0] != key]
        if column is not None:
            objects.rows = np.flatnonzero(column.mask).tolist()
            objects.values = [column.values[row] for row in objects.rows]
        elif inside is not None:
            store, mask = inside
            table = InfoTable(self._num_rows, nested(store.flat((self._num_rows,)), len(self._path) + 1))
            objects.rows = np.flatnonzero(mask).tolist()
            objects.values = [table.row(row) for row in objects.rows]
        return objects

    def _leave_out(self, key: str, why: str) -> None:
        self._columns.pop(key, None)
        self._inside.pop(key, None)
        self._plan = [each for each in self._plan if each[0] != key]
        self._skipped |= {key, mask_key(key)}
        if len(self.left_out) < MOST_KEYS:
            self.left_out["/".join((*self._path, key))[:MOST_KEY_CHARS]] = why

    @staticmethod
    def _is_sendable(key: str) -> bool:
        return len(key) <= MOST_KEY_CHARS and key.isprintable()


def _grown(array: Array, num_rows: int) -> Array:
    more: Array = np.zeros((num_rows, *array.shape[1:]), array.dtype)
    more[: len(array)] = array
    return more


def _ordered(array: Array, num_rows: int, order: Array | None) -> Array:
    array = array[:num_rows]
    return array if order is None else array[order]


def _num_rows(value: Any) -> int:
    """Of a column, or a dictionary of columns."""
    if isinstance(value, dict):
        return max((_num_rows(each) for each in value.values()), default=0)
    return len(value) if isinstance(value, np.ndarray) and value.ndim else 0


def _copied(value: Any) -> Any:
    """The env may change its own, and arrays are leased."""
    if isinstance(value, np.generic | str | bytes | int | float | None):
        return value
    try:
        return copy.deepcopy(value)
    except Exception:  # of a class that cannot be copied
        return value
