"""StepBatch: one batch of results as named arrays."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from envfleet.contract.arrays import BoolArray, FloatArray, IntArray


class StepBatch(NamedTuple):
    """One batch of results. Leased from the pool: its memory is reused only when the last array dies.

    B is the batch size, not the number of envs. A tree is one array, or a dict or tuple of trees, in
    the form of the observation space; values of spaces that are no arrays come as a tuple of B objects.
    """

    env_ids: IntArray  # [B]
    obs: Any  # tree of [B, *leaf.shape]
    rewards: FloatArray  # [B]
    terminated: BoolArray  # [B]
    truncated: BoolArray  # [B]
    infos: dict[int, dict[str, Any]]  # by row; rows with nothing to say are absent
    info_columns: dict[str, Any] | None = None  # joined already: `key` and its mask `_key`
    final_rows: NDArray[np.intp] | None = None  # same-step autoreset: rows whose episode ended here
    final_obs: Any = None  # tree of [B, *leaf.shape]; only `final_rows` are meaningful
    final_infos: dict[int, dict[str, Any]] | None = None  # by row
    final_info_columns: dict[str, Any] | None = None  # joined already
