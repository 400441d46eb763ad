"""StepBatch: one batch of results as named arrays."""

from __future__ import annotations

from typing import NamedTuple

from envfleet.contract.arrays import Array, BoolArray, FloatArray, IntArray, Tree
from envfleet.contract.infos.table import Infos


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
    infos: Infos  # columns of B rows and their masks, see InfoTable; a dict that belongs to the caller
