"""FlatInfos: the infos of a rollout, column by column: joined over workers, and nested as learners get them. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from envfleet.contract.arrays import Array
from envfleet.contract.infos.table import Infos, InfoTable, dtype_for_all, mask_key

Path = tuple[str, ...]  # the keys that lead to a column: more than one inside a dictionary
MOST_PADDING, MOST_PADDING_BYTES = 64, 64 << 20  # a joined column that is larger than both is sparse


class Dense(NamedTuple):
    """Numbers, a row for each step of each env, or for each episode."""

    values: Array | None  # [T, N, ...] or [F, ...]; 0 where the mask is False; None: a dictionary has only a mask
    mask: Array  # [T, N] or [F] bool: where the env has the key


class Sparse(NamedTuple):
    """Values of any kind, of those rows that have one."""

    at: Array  # [K, D] int64: where each value belongs; D is 2 for (step, env), 1 for an episode
    values: list[Any]  # K


FlatInfos = dict[Path, Dense | Sparse]


def nested(flat: Mapping[Path, Dense | Sparse], depth: int = 0) -> Infos:
    """Columns by path as dictionaries of columns, `key` and its mask `_key` in each.

    Args:
        flat: The columns. What is sparse becomes a list of (*place, value).
        depth: How many keys of each path to leave out.

    Returns:
        The dictionary.
    """
    infos: Infos = {}
    for path, column in flat.items():
        place = infos
        for key in path[depth:-1]:
            place = place.setdefault(key, {})
        if isinstance(column, Sparse):
            at = column.at.tolist()
            place[path[-1]] = [(*where, value) for where, value in zip(at, column.values, strict=True)]
        else:
            place[path[-1]] = {} if column.values is None else column.values
            place[mask_key(path[-1])] = column.mask
    return infos


def as_table(infos: Mapping[str, Any], num_rows: int, step: int | None = None) -> InfoTable:
    """The infos of one step of a rollout, or of all the ends of episodes in it, as a vector env returns them.

    Args:
        infos: Of the rollout, as `nested` makes them.
        num_rows: Number of envs, or of episodes.
        step: The step; None: these are the infos of the ends.

    Returns:
        The table.
    """
    table = InfoTable(num_rows)
    for key, value in infos.items():
        if isinstance(value, dict):
            table.columns[key] = as_table(value, num_rows, step).columns
        elif isinstance(value, list):
            table.add_objects(key, {place[-2]: place[-1] for place in value if step is None or place[0] == step})
        else:
            table.columns[key] = value if step is None else value[step]
    return table


def joined(parts: Sequence[FlatInfos], shapes: Sequence[tuple[int, ...]], axis: int) -> FlatInfos:
    """The columns of several workers, side by side.

    Args:
        parts: Columns by path of each worker.
        shapes: The shape of the rows of each worker; they differ along `axis` only.
        axis: Along which the workers' rows are put together.

    Returns:
        The columns. Rows of a worker that does not have a key are 0, and False in its mask.
    """
    if len(parts) == 1:
        return parts[0]
    offsets = np.cumsum([0, *(shape[axis] for shape in shapes)])
    shape = (*shapes[0][:axis], int(offsets[-1]), *shapes[0][axis + 1 :])
    paths = dict.fromkeys(path for part in parts for path in part)
    flat: FlatInfos = {}
    for path in paths:
        found = [(index, part[path]) for index, part in enumerate(parts) if path in part]
        is_inside = [isinstance(each, Dense) and each.values is None for _, each in found]
        if any(is_inside):  # what is a number elsewhere has no place beside a dictionary
            found = [each for each, is_it in zip(found, is_inside, strict=True) if is_it]
        places = [(slice(None),) * axis + (slice(offsets[index], offsets[index + 1]),) for index, _ in found]
        common = _common_column([each for _, each in found])
        if common is None or _is_too_sparse(common, shape, found):
            flat[path] = _joined_objects(found, offsets, axis)
            continue
        row_shape, dtype = common
        values = None if dtype is None else np.zeros((*shape, *row_shape), dtype)
        mask = np.zeros(shape, np.bool_)
        for place, (_, column) in zip(places, found, strict=True):
            mask[place] = column.mask  # type: ignore[union-attr]  # all are dense
            if values is not None:
                values[place] = column.values
        flat[path] = Dense(values, mask)
    return flat


def _is_too_sparse(
    common: tuple[tuple[int, ...], np.dtype[Any] | None], shape: tuple[int, ...], found: Sequence[tuple[int, Any]]
) -> bool:
    """Whether a column would be much larger than what came: large values of a few rows, beside many other rows."""
    row_shape, dtype = common
    if dtype is None:
        return False
    num_bytes = math.prod((*shape, *row_shape)) * dtype.itemsize
    came = sum(int(column.values.nbytes) for _, column in found if column.values is not None)
    return num_bytes > max(MOST_PADDING_BYTES, MOST_PADDING * came)


def _common_column(columns: Sequence[Dense | Sparse]) -> tuple[tuple[int, ...], np.dtype[Any] | None] | None:
    """The shape of a row, and the dtype that holds all (None: dictionaries); None: they can only be objects."""
    forms, dtypes = set(), set()
    for column in columns:
        if isinstance(column, Sparse):
            return None
        if column.values is not None:
            forms.add(column.values.shape[column.mask.ndim :])
            dtypes.add(column.values.dtype)
    if not dtypes:
        return (), None
    dtype = dtype_for_all(dtypes)
    return None if dtype is None or len(forms) > 1 else (forms.pop(), dtype)


def _joined_objects(found: Sequence[tuple[int, Dense | Sparse]], offsets: Array, axis: int) -> Sparse:
    at, values = [], []
    for index, column in found:
        if isinstance(column, Sparse):
            its_at, its_values = column.at.copy(), column.values
        else:
            assert column.values is not None
            its_at = np.argwhere(column.mask)
            its_values = list(column.values[column.mask])
        its_at[:, axis] += offsets[index]
        at.append(its_at)
        values += its_values
    places = np.concatenate(at)
    order = np.lexsort(places.T[::-1])
    return Sparse(places[order], [values[index] for index in order])
