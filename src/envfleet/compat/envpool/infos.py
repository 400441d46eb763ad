"""EnvPool's columns of infos, of ours: the same in every call, without masks, 0 where an env says nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from envfleet.compat.envpool.array_library import NUMPY, ArrayLibrary
from envfleet.compat.envpool.kind import InfoColumn
from envfleet.contract.arrays import Array


def columns_of(
    kinds: Sequence[InfoColumn], infos: Mapping[str, Any], num_rows: int, library: ArrayLibrary = NUMPY
) -> dict[str, Array]:
    """A column for each that EnvPool has for this kind of env."""
    columns = {}
    for column in kinds:
        ours = next((infos[name] for name in (column.name, *column.ours) if name in infos), None)
        dtype = library.dtype_of(column.dtype)
        if ours is None:
            columns[column.name] = library.functions.zeros((num_rows, *column.shape), dtype)
        else:
            columns[column.name] = library.functions.asarray(ours).astype(dtype, copy=False)
    return columns


def acrobot_state(obs: Array, library: ArrayLibrary = NUMPY) -> Array:
    """The two angles of Acrobot, which EnvPool has in its infos, of observations [N, 6]: cos 1, sin 1, cos 2, sin 2."""
    arctan2, stack = library.functions.arctan2, library.functions.stack
    angles: Array = stack([arctan2(obs[:, 1], obs[:, 0]), arctan2(obs[:, 3], obs[:, 2])], axis=1)
    return angles
