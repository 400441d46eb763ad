"""Columns: what an array of a batch is like. How a batch lays them out is said in native/engine/batch_layout.h."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from envfleet._native import core
from envfleet.contract.arrays import Array
from envfleet.contract.spaces import SpaceTree

Column = tuple[np.dtype[Any], tuple[int, ...]]  # dtype, shape of one row

# Flags of rows as plain numbers: NumPy takes about five times as long for an array & a member of an enum.
HAS_FINAL, HAS_OBJECTS, FAILED = int(core.RowFlag.HAS_FINAL), int(core.RowFlag.HAS_OBJECTS), int(core.RowFlag.FAILED)

_ALIGNMENT = 64  # a cache line, so that no two arrays share one


class BatchArrays(Protocol):
    """The arrays of a batch of B rows, by name: core.BatchArrays, or those of a backend that has no C++ side."""

    @property
    def env_ids(self) -> Array:
        """[B] int32: the env of each row."""

    @property
    def rewards(self) -> Array:
        """[B] float64: the reward of each step."""

    @property
    def terminated(self) -> Array:
        """[B] bool: whether the episode reached its end."""

    @property
    def truncated(self) -> Array:
        """[B] bool: whether the episode was cut short."""

    @property
    def obs(self) -> Sequence[Array]:
        """[B, *leaf.shape] for each leaf of the observation that is an array."""

    @property
    def final_obs(self) -> Sequence[Array]:
        """Likewise; empty if the batch has no room for final observations."""

    @property
    def infos(self) -> Sequence[tuple[Array, Array]]:
        """For each declared info: its values [B, ...], and the mask [B] of the rows that have it."""

    @property
    def final_infos(self) -> Sequence[tuple[Array, Array]]:
        """Likewise, for final infos."""


def columns_of(tree: SpaceTree) -> list[Column]:
    """The columns of the leaves that are arrays."""
    return [(leaf.dtype, leaf.shape) for leaf in tree.leaves if leaf.dtype is not None]


def column_offsets(num_rows: int, columns: Sequence[Column]) -> tuple[list[int], int]:
    """Where columns begin that lie one behind the other, and where the last one ends."""
    offsets, end = [], 0
    for dtype, shape in columns:
        offsets.append(end)
        end = aligned(end + num_rows * dtype.itemsize * int(np.prod(shape, dtype=np.int64)))
    return offsets, end


def aligned(num_bytes: int) -> int:
    """Rounded up to whole cache lines."""
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
