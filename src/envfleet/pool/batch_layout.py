"""Where the arrays of a batch lie in its buffer."""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from typing import Any

import numpy as np

from envfleet._native import core

Field = tuple[int, np.dtype[Any], tuple[int, ...]]  # offset, dtype, shape of one row
Column = tuple[np.dtype[Any], tuple[int, ...]]  # dtype, shape of one row

_ALIGNMENT = 64  # a cache line, so that no two arrays share one
_FIXED_DTYPES = (np.int32, np.float64, np.bool_, np.bool_, np.uint8)  # as FixedField in batch_store.h
NUM_FIXED = len(_FIXED_DTYPES)


def batch_store(fd: int, num_rows: int, columns: Sequence[Column]) -> core.BatchStore:
    """Batches with the fixed arrays and these columns, in a memory file, or private with fd = -1."""
    fixed: list[Column] = [(np.dtype(dtype), ()) for dtype in _FIXED_DTYPES]
    fields, end = place_columns(num_rows, [*fixed, *columns])
    return core.BatchStore(fd, num_rows, -(-end // mmap.PAGESIZE) * mmap.PAGESIZE, fields)


def place_columns(num_rows: int, columns: Sequence[Column]) -> tuple[list[Field], int]:
    """Columns one behind the other, and where the last one ends."""
    fields: list[Field] = []
    end = 0
    for dtype, shape in columns:
        fields.append((end, dtype, shape))
        end = aligned(end + num_rows * dtype.itemsize * int(np.prod(shape, dtype=np.int64)))
    return fields, end


def aligned(num_bytes: int) -> int:
    """Rounded up to whole cache lines."""
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
