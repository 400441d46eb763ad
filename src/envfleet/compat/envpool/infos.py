"""EnvPool's columns of infos, of ours: the same in every call, without masks, 0 where an env says nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from envfleet.compat.envpool.kind import InfoColumn
from envfleet.contract.arrays import Array


def columns_of(kinds: Sequence[InfoColumn], infos: Mapping[str, Any], num_rows: int) -> dict[str, Array]:
    """A column for each that EnvPool has for this kind of env."""
    columns = {}
    for column in kinds:
        ours = next((infos[name] for name in (column.name, *column.ours) if name in infos), None)
        if ours is None:
            columns[column.name] = np.zeros((num_rows, *column.shape), column.dtype)
        else:
            columns[column.name] = np.asarray(ours).astype(column.dtype, copy=False)
    return columns


def acrobot_state(obs: Array) -> Array:
    """The two angles of Acrobot, which EnvPool has in its infos, of observations [N, 6]: cos 1, sin 1, cos 2, sin 2."""
    return np.stack([np.arctan2(obs[:, 1], obs[:, 0]), np.arctan2(obs[:, 3], obs[:, 2])], axis=1)
