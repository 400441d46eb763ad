"""InfoTable: the infos of many envs in one dictionary, as Gymnasium's vector envs return them. The only home of it.

Each `key` is a column with a row for each env, and `_key` is its mask: True in the rows whose env has the key. A
dictionary in the info of an env becomes a dictionary of columns. `final_obs` is a column of objects, one observation in
each row whose episode ended in a same-step reset; `final_info` holds the columns of the infos of these last steps;
`env_error` says in each row of a failed env what was wrong.

The native backend builds the same form in C++, in the call that returns the batch: `PyNativePool::infos` in
native/bind/native_pool.cc is the twin of `InfoTable.add`. It knows columns and their masks; what an env's failure and a
same-step reset add to them is added here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from envfleet.contract.arrays import Array

Info = dict[str, Any]  # of one env
Infos = dict[str, Any]  # of many envs: columns and their masks

_ENV_ERROR = "env_error"
_FINAL_OBS = "final_obs"
_FINAL_INFO = "final_info"
_EPISODE = "episode"


def error_info(reason: str) -> Info:
    """The info of one env that failed for `reason`."""
    return {_ENV_ERROR: reason}


def has_error(columns: Mapping[str, Any], num_rows: int) -> Array:
    """[num_rows] bool: whether the env of each row failed."""
    mask = columns.get(mask_key(_ENV_ERROR))
    return np.zeros(num_rows, np.bool_) if mask is None else np.asarray(mask, np.bool_)


@dataclass(slots=True, eq=False)
class InfoTable:
    """Columns of `num_rows` rows, and the mask of each. `add...` change this table; all else returns another one.

    What has no rows (a version number beside columns, say) is carried along unchanged.
    """

    num_rows: int
    columns: Infos = field(default_factory=dict)  # what callers of step() get

    @classmethod
    def from_rows(cls, infos: Mapping[int, Mapping[str, Any]], num_rows: int) -> InfoTable:
        """The table of single infos, given by row.

        Numbers and arrays become columns of their own dtype, dictionaries become dictionaries of columns, and
        everything else becomes a column of objects. Where rows differ in dtype the column takes one that holds all of
        them; where they differ in shape, objects. (Gymnasium casts to the dtype of the first row, fails on another
        shape, and makes objects of NumPy's bools.)
        """
        by_key: dict[str, dict[int, Any]] = {}
        for row, info in infos.items():
            for key, value in info.items():
                by_key.setdefault(key, {})[row] = value
        table = cls(num_rows)
        for key, values in by_key.items():
            if all(isinstance(value, dict) for value in values.values()):
                table._set(key, cls.from_rows(values, num_rows).columns, list(values))
            else:
                table._set(key, _column_of(values, num_rows), list(values))
        return table

    @classmethod
    def from_vector_env(cls, infos: Mapping[str, Any], num_rows: int) -> InfoTable:
        """The table of what a vector env returned; a mask that is missing is True in all rows.

        Values without a row for each env are the same for all. What is inside a dictionary has masks only if the vector
        env gave them. Final observations stay as they came, since some vector envs have one array of them.
        """
        table = cls(num_rows)
        for key, value in infos.items():
            table.columns[key] = value if key == _FINAL_OBS else _rows_of_each(value, num_rows)
            if not key.startswith("_") and mask_key(key) not in infos:
                table.columns[mask_key(key)] = np.ones(num_rows, np.bool_)
        return table

    @classmethod
    def join(cls, tables: Sequence[InfoTable]) -> InfoTable:
        """Tables one below the other: what one pool with all their envs would return.

        Where a table does not have a key, its rows are 0, None or False. What has no rows is kept from the first table
        that has it.
        """
        keys = dict.fromkeys(key for table in tables for key in table.columns)
        return cls(sum(table.num_rows for table in tables), {key: _joined(key, tables) for key in keys})

    # -- adding --

    def add(self, key: str, column: Array, mask: Array) -> None:
        """Add a column, unless no row has it."""
        if mask.any():
            self.columns[key], self.columns[mask_key(key)] = column, mask

    def add_rows(self, infos: Mapping[int, Mapping[str, Any]]) -> None:
        """Add the columns of single infos, given by row. They replace columns of the same name."""
        if infos:
            self.columns |= InfoTable.from_rows(infos, self.num_rows).columns

    def add_errors(self, rows: Array, reason: str, last_obs: Sequence[Any] | None = None) -> None:
        """Say in `rows` that their envs failed.

        Args:
            rows: The rows of the envs that failed.
            reason: What was wrong.
            last_obs: After a same-step reset, the last observation of each of them: the reason is then in their final
                infos, too.
        """
        if last_obs is not None:
            final_infos = InfoTable(self.num_rows)
            final_infos.add_errors(rows, reason)
            self.add_finals(rows, last_obs, final_infos)
        self._set(_ENV_ERROR, _object_column(dict.fromkeys(rows.tolist(), reason), self.num_rows), rows)

    def add_finals(self, rows: Array, obs: Sequence[Any], infos: InfoTable | None = None) -> None:
        """Add what a same-step reset leaves of the episodes that ended.

        Args:
            rows: The rows whose episodes ended.
            obs: The last observation of each of them.
            infos: The infos of the last steps, in a table with as many rows as this one; None if they are not known.
        """
        self._set(_FINAL_OBS, _object_column(dict(zip(rows.tolist(), obs, strict=True)), self.num_rows), rows)
        if infos is not None:
            self._set(_FINAL_INFO, infos.columns, rows)

    def add_objects(self, key: str, values: Mapping[int, Any]) -> None:
        """Add a column of objects, given by row."""
        self._set(key, _object_column(values, self.num_rows), list(values))

    def add_episodes(self, rows: Array, returns: Array, lengths: Array, seconds: Array) -> None:
        """Add the statistics of episodes that ended, as Gymnasium's RecordEpisodeStatistics writes them.

        Args:
            rows: The rows whose episodes ended. What an env says of its episodes itself is kept.
            returns: The return of each of these episodes.
            lengths: Its number of steps.
            seconds: How long it took.
        """
        if _EPISODE in self.columns or mask_key(_EPISODE) in self.columns:
            return
        given = {"r": returns, "l": lengths, "t": np.round(seconds, 6)}
        columns = {key: np.zeros(self.num_rows, values.dtype) for key, values in given.items()}
        for key, values in given.items():
            columns[key][rows] = values
        self._set(_EPISODE, columns, rows)

    # -- reading --

    @property
    def final_obs(self) -> Any:
        """The column of last observations; None if there is none."""
        return self.columns.get(_FINAL_OBS)

    @property
    def final_infos(self) -> InfoTable:
        """The infos of the last steps of episodes; empty if there are none."""
        return self._inside(_FINAL_INFO)

    def row(self, row: int) -> Info:
        """The info of one env: the inverse of `from_rows`."""
        info: Info = _row(self.columns, row)
        return info

    def rows(self) -> list[Info]:
        """The info of each env: `row()` of all rows."""
        infos: list[Info] = [{} for _ in range(self.num_rows)]
        for key, column in self.columns.items():
            mask = self.columns.get(mask_key(key))
            if mask is not None:
                values = self._inside(key).rows() if isinstance(column, dict) else column
                for row in np.flatnonzero(mask).tolist():
                    infos[row][key] = values[row]
        return infos

    def entry(self, key: str, row: int) -> Any:
        """What one env has under `key`; of a dictionary of columns, its own dictionary."""
        return _row(self.columns[key], row)

    def select(self, rows: Array) -> InfoTable:
        """The table of these rows, in this order."""
        return InfoTable(len(rows), {key: _selected(value, rows) for key, value in self.columns.items()})

    def only(self, rows: Array) -> InfoTable:
        """A table of the same size in which only `rows` have anything."""
        return InfoTable(self.num_rows).put_rows(rows, self.select(rows))

    def put_rows(self, rows: Array, table: InfoTable) -> InfoTable:
        """A table whose `rows` are those of `table`, and the others as here. Keys that no row has are left out."""
        put: Infos = {}
        for key in [*self.columns, *(key for key in table.columns if key not in self.columns)]:
            old, new = self.columns.get(key), table.columns.get(key)
            if isinstance(old, dict) or isinstance(new, dict):
                put[key] = self._inside(key).put_rows(rows, table._inside(key)).columns
            else:
                put[key] = _put(old, new, rows, self.num_rows)
        gone = [key for key in put if mask_key(key) in put and not put[mask_key(key)].any()]
        masks = {mask_key(key) for key in gone}
        return InfoTable(
            self.num_rows, {key: column for key, column in put.items() if key not in gone and key not in masks}
        )

    def copy(self) -> InfoTable:
        """The same in arrays that nobody else has."""
        return InfoTable(self.num_rows, _copied(self.columns))

    def _inside(self, key: str) -> InfoTable:
        """A dictionary of columns as a table; an empty one if `key` is none."""
        column = self.columns.get(key)
        return InfoTable(self.num_rows, column if isinstance(column, dict) else {})

    def _has_rows(self, key: str) -> bool:
        column = self.columns.get(key)
        return isinstance(column, np.ndarray) and column.ndim > 0 and len(column) == self.num_rows

    def _set(self, key: str, column: Any, rows: Array | list[int]) -> None:
        mask = np.zeros(self.num_rows, np.bool_)
        mask[rows] = True
        self.columns[key], self.columns[mask_key(key)] = column, mask


def _object_column(values: Mapping[int, Any], num_rows: int) -> Array:
    """A column of objects, given by row; None in all other rows."""
    column = np.empty(num_rows, object)  # of None
    for row, value in values.items():
        column[row] = value
    return column


def mask_key(key: str) -> str:
    """The key of the mask of a column."""
    return f"_{key}"


def _column_of(values: Mapping[int, Any], num_rows: int) -> Array:
    kinds = {type(value) for value in values.values()}
    dtypes: set[np.dtype[Any]] = set()
    shape: tuple[int, ...] = ()
    if all(kind in (int, float, bool, np.bool_) or issubclass(kind, np.number) for kind in kinds):
        # The type, not the value, decides: Python's int is int64 here, and True stays a bool.
        dtypes = {np.dtype(kind) for kind in kinds}
    elif kinds == {np.ndarray} and len({value.shape for value in values.values()}) == 1:
        arrays = list(values.values())
        dtypes, shape = {value.dtype for value in arrays}, arrays[0].shape
    dtype = dtype_for_all(dtypes) if dtypes else None
    if dtype is None:
        return _object_column(values, num_rows)
    column = np.zeros((num_rows, *shape), dtype)
    try:
        for row, value in values.items():
            column[row] = value
    except (TypeError, OverflowError):  # an int beyond 64 bits
        return _object_column(values, num_rows)
    return column


def dtype_for_all(dtypes: set[np.dtype[Any]]) -> np.dtype[Any] | None:
    """A dtype that holds the values of all; None: only objects can. Bools beside numbers stay bools, as objects."""
    if len({dtype == np.bool_ for dtype in dtypes}) > 1:
        return None
    try:
        return np.result_type(*dtypes)
    except TypeError:  # dates beside numbers
        return None


def _rows_of_each(value: Any, num_rows: int) -> Any:
    """A row for each env: what has none of its own is the same for all."""
    if isinstance(value, dict):
        return {key: _rows_of_each(each, num_rows) for key, each in value.items()}
    try:
        array = np.asarray(value)
    except ValueError:  # of lists of different lengths
        array = np.empty((), object)
    if array.ndim and len(array) == num_rows and array.dtype.kind not in "US":
        return array
    if not array.ndim and array.dtype.kind in "biufc":
        return np.full(num_rows, array)
    is_each = isinstance(value, list | tuple) or array.ndim > 0
    rows = value if is_each and len(value) == num_rows else [value] * num_rows
    return _object_column(dict(enumerate(rows)), num_rows)


def _copied(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _copied(each) for key, each in value.items()}
    return value.copy() if isinstance(value, np.ndarray) else value


def _selected(value: Any, rows: Array) -> Any:
    if isinstance(value, dict):
        return {key: _selected(each, rows) for key, each in value.items()}
    return value[rows] if isinstance(value, np.ndarray) and value.ndim else value


def _row(column: Any, row: int) -> Any:
    """The entry of one env; of a dictionary of columns, the dictionary of that env."""
    if not isinstance(column, dict):
        return column[row]
    masks = [(key, column.get(mask_key(key))) for key in column]
    return {key: _row(column[key], row) for key, mask in masks if mask is not None and mask[row]}


def _put(old: Array | None, new: Array | None, rows: Array, num_rows: int) -> Array:
    given = [each for each in (old, new) if each is not None]
    shapes = {each.shape[1:] for each in given}
    if len(shapes) > 1 or any(each.dtype == object for each in given):
        column = _object_column({} if old is None else dict(enumerate(old)), num_rows)
        for index, row in enumerate(rows.tolist()):
            column[row] = None if new is None else new[index]
        return column
    column = np.zeros((num_rows, *shapes.pop()), np.result_type(*given))
    if old is not None:
        column[:] = old
    column[rows] = np.zeros((), column.dtype) if new is None else new
    return column


# -- joining --


def _joined(key: str, tables: Sequence[InfoTable]) -> Any:
    columns = [table.columns[key] for table in tables if table._has_rows(key)]
    any_dicts = any(isinstance(table.columns.get(key), dict) for table in tables)
    if not columns and any_dicts:
        return InfoTable.join([table._inside(key) for table in tables]).columns
    if not columns:
        return next(table.columns[key] for table in tables if key in table.columns)
    dtype = None if any_dicts else _common_dtype(columns)
    if dtype is None:
        return _joined_objects(key, tables)
    joined: Array = np.zeros((sum(table.num_rows for table in tables), *columns[0].shape[1:]), dtype)
    if dtype == np.object_:
        joined[...] = None
    start = 0
    for table in tables:
        if table._has_rows(key):
            joined[start : start + table.num_rows] = table.columns[key]
        start += table.num_rows
    return joined


def _common_dtype(columns: Sequence[Array]) -> np.dtype[Any] | None:
    """The dtype of joined columns; None: rows become objects."""
    dtypes = {column.dtype for column in columns}
    if len({column.shape[1:] for column in columns}) > 1:
        return None
    if np.dtype(object) in dtypes and len(dtypes) > 1:
        return None
    return dtype_for_all(dtypes)


def _joined_objects(key: str, tables: Sequence[InfoTable]) -> Array:
    """One object for each row that has the key."""
    values: dict[int, Any] = {}
    start = 0
    for table in tables:
        column = table.columns.get(key)
        if isinstance(column, dict) or table._has_rows(key):
            rows: Sequence[int] = range(table.num_rows)
            if table._has_rows(mask_key(key)):
                rows = np.flatnonzero(table.columns[mask_key(key)]).tolist()
            values |= {start + row: _row(column, row) for row in rows}
        start += table.num_rows
    return _object_column(values, start)
