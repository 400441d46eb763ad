"""Infos of vector envs, in one form: each `key` an array with a row for each env, and a mask `_key`.

What is inside a dictionary has masks only if the vector env gave them, as with Gymnasium's own.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from envfleet.contract.arrays import Array
from envfleet.pool.infos import object_column

_NOT_INFOS = ("env_id", "players")  # EnvPool and ale-py say there which env a row belongs to


def with_masks(infos: Mapping[str, Any], num_rows: int) -> dict[str, Any]:
    """Infos of a vector env, with the masks that are missing."""
    joined: dict[str, Any] = {}
    for key, value in infos.items():
        if key in _NOT_INFOS:
            continue
        joined[key] = value if key == "final_obs" else _columns(value, num_rows)
        if not key.startswith("_") and f"_{key}" not in infos:
            joined[f"_{key}"] = np.ones(num_rows, np.bool_)
    return joined


def copied(infos: Mapping[str, Any]) -> dict[str, Any]:
    """The same in arrays that nobody else has."""
    return {
        key: copied(value) if isinstance(value, dict) else value.copy() if isinstance(value, np.ndarray) else value
        for key, value in infos.items()
    }


def rows_of(infos: Mapping[str, Any], rows: Array) -> dict[str, Any]:
    """The chosen rows of joined infos; what has no rows stays as it is."""
    return {key: _rows(value, rows) for key, value in infos.items()}


def put_rows(into: Mapping[str, Any], infos: Mapping[str, Any], rows: Array, num_rows: int) -> dict[str, Any]:
    """Joined infos in which `rows` come from `infos`, the others from `into`; nothing is written into either."""
    joined: dict[str, Any] = {}
    for key in [*into, *(key for key in infos if key not in into)]:
        old: Any = into.get(key)
        new: Any = infos.get(key)
        if isinstance(old, dict) or isinstance(new, dict):
            joined[key] = put_rows(
                old if isinstance(old, dict) else {}, new if isinstance(new, dict) else {}, rows, num_rows
            )
        else:
            joined[key] = _put(old, new, rows, num_rows)
    gone = [key for key in joined if f"_{key}" in joined and not joined[f"_{key}"].any()]
    return {key: value for key, value in joined.items() if key not in gone and key.removeprefix("_") not in gone}


def _rows(value: Any, rows: Array) -> Any:
    if isinstance(value, dict):
        return rows_of(value, rows)
    return value[rows] if isinstance(value, np.ndarray) and value.ndim else value


def _put(old: Array | None, new: Array | None, rows: Array, num_rows: int) -> Array:
    given = [each for each in (old, new) if each is not None]
    shapes = {each.shape[1:] for each in given}
    if len(shapes) > 1 or any(each.dtype == object for each in given):
        column = object_column({} if old is None else dict(enumerate(old)), num_rows)
        for index, row in enumerate(rows.tolist()):
            column[row] = None if new is None else new[index]
        return column
    column = np.zeros((num_rows, *shapes.pop()), np.result_type(*given))
    if old is not None:
        column[:] = old
    column[rows] = np.zeros((), column.dtype) if new is None else new
    return column


def _columns(value: Any, num_rows: int) -> Any:
    """A row for each env: what has none of its own is the same for all."""
    if isinstance(value, dict):
        return {key: _columns(each, num_rows) for key, each in value.items()}
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
    return object_column(dict(enumerate(rows)), num_rows)
