"""StepBatch: one batch of results as named arrays."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from envfleet.contract.arrays import Array, BoolArray, FloatArray, IntArray, Tree


class StepBatch(NamedTuple):
    """One batch of results, leased from the pool: the memory is reused only when the last array on it is gone.

    B is the batch size, not the number of envs. A tree is one array, or a dict or tuple of trees in the form of the
    observation space; values of spaces that are no arrays are a tuple of B objects.
    """

    env_ids: IntArray  # [B]
    obs: Tree[Array]  # tree of [B, *leaf.shape]
    rewards: FloatArray  # [B]
    terminated: BoolArray  # [B]
    truncated: BoolArray  # [B]
    infos: dict[int, dict[str, Any]]  # by row; a row without infos has no entry
    info_columns: dict[str, Any] | None = None  # infos that are arrays already: `key` [B, ...] and its mask `_key` [B]
    final_rows: NDArray[np.intp] | None = None  # same-step autoreset: rows whose episode ended in this step
    final_obs: Tree[Array] | None = None  # tree of [B, *leaf.shape]; only `final_rows` are meaningful
    final_infos: dict[int, dict[str, Any]] | None = None  # by row
    final_info_columns: dict[str, Any] | None = None  # as info_columns, for the final infos
