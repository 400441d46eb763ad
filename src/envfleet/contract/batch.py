"""StepBatch: one batch of results as named arrays."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from envfleet.contract.infos import Infos


class StepBatch(NamedTuple):
    """One batch of results. Leased from the pool: its memory is reused only when the last array dies.

    B is the batch size, not the number of envs. A tree is one array, or a dict or tuple of trees, in
    the form of the observation space; values of spaces that are no arrays come as a tuple of B objects.
    """

    env_ids: NDArray[np.int32]  # [B]
    obs: Any  # tree of [B, *leaf.shape]
    rewards: NDArray[np.float64]  # [B]
    terminated: NDArray[np.bool_]  # [B]
    truncated: NDArray[np.bool_]  # [B]
    infos: Infos  # columns of B rows and their masks, see InfoTable; a dict that belongs to the caller
