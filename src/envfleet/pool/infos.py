"""Infos of single envs, joined to one dictionary as Gymnasium's vector envs have it: `key` and its mask `_key`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from envfleet.contract.arrays import Array


def join_infos(infos: Mapping[int, Mapping[str, Any]], num_rows: int) -> dict[str, Any]:
    """`infos` by row -> for each key an array of `num_rows` values, and a mask of the rows that have it.

    Numbers and arrays become arrays of their own dtype, dictionaries are joined in turn, and everything
    else becomes an array of objects. Where rows differ in dtype the array takes one that holds all of
    them; where they differ in shape, objects. (Gymnasium casts to the first row's dtype, and fails on
    another shape.)
    """
    columns: dict[str, dict[int, Any]] = {}
    for row, info in infos.items():
        for key, value in info.items():
            columns.setdefault(key, {})[row] = value
    joined: dict[str, Any] = {}
    for key, column in columns.items():
        if all(isinstance(value, dict) for value in column.values()):
            joined[key] = join_infos(column, num_rows)
        else:
            joined[key] = _join_column(column, num_rows)
        mask = np.zeros(num_rows, dtype=np.bool_)
        mask[list(column)] = True
        joined[f"_{key}"] = mask
    return joined


def object_column(column: Mapping[int, Any], num_rows: int) -> Array:
    """An array of objects, None in rows that have none."""
    array = np.full(num_rows, fill_value=None, dtype=object)
    for row, value in column.items():
        array[row] = value
    return array


def _join_column(column: Mapping[int, Any], num_rows: int) -> Array:
    values = list(column.values())
    kinds = {type(value) for value in values}
    dtypes: set[np.dtype[Any]] = set()
    if all(kind in (int, float, bool) or issubclass(kind, np.number) for kind in kinds):
        # The type, not the value, decides: Python's int is int64 here, and True stays a bool.
        dtypes, shape = {np.dtype(kind) for kind in kinds}, ()
    elif kinds == {np.ndarray} and len({value.shape for value in values}) == 1:
        dtypes, shape = {value.dtype for value in values}, values[0].shape
    if not dtypes or len({dtype == np.bool_ for dtype in dtypes}) > 1:
        return object_column(column, num_rows)
    try:
        array = np.zeros((num_rows, *shape), dtype=np.result_type(*dtypes))
        for row, value in column.items():
            array[row] = value
    except (TypeError, OverflowError):  # strings beside numbers; an int beyond 64 bits
        return object_column(column, num_rows)
    return array
