"""Which bytes of shared memory belong to which field of which env. Parent and children compute the same."""

from __future__ import annotations

import mmap
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from envfleet._native import Board
from envfleet.contract.episode import Autoreset
from envfleet.contract.spaces import SpaceTree
from envfleet.pool.backend import Line
from envfleet.pool.batch_layout import NUM_FIXED, Column, aligned, batch_store, place_columns
from envfleet.pool.info_columns import InfoColumns


@dataclass(frozen=True, slots=True)
class MemoryFiles:
    """File descriptors of a pool's anonymous memory files. They have no name, so they die with their processes."""

    board: int
    full: int
    first_ready: int
    objects: int
    stacks: int  # where children write their Python stacks when asked

    @classmethod
    def create(cls) -> MemoryFiles:
        """Empty memory files."""
        return cls(*(os.memfd_create(f"envfleet-{name}", os.MFD_CLOEXEC) for name in cls.__slots__))

    def all(self) -> tuple[int, ...]:
        """In the order of the constructor's arguments."""
        return (self.board, self.full, self.first_ready, self.objects, self.stacks)

    def close(self) -> None:
        """Close them here; other processes and mappings keep what they have."""
        for fd in self.all():
            os.close(fd)


@dataclass(frozen=True, slots=True)
class PoolShape:
    """The numbers that determine where everything lies."""

    num_envs: int
    num_children: int
    batch_size: int
    autoreset: Autoreset

    @property
    def lines(self) -> tuple[Line, ...]:
        """The lines of batches this pool has."""
        return (Line.FULL,) if self.batch_size == self.num_envs else (Line.FULL, Line.FIRST_READY)


class SharedArrays:
    """A pool's shared memory as seen by one process: the board, batches, and the actions."""

    def __init__(
        self, files: MemoryFiles, shape: PoolShape, obs: SpaceTree, actions: SpaceTree, infos: InfoColumns
    ) -> None:
        """Map what the parent has sized with `allocate`."""
        row = _columns(obs) + infos.layout
        self._num_row_columns = len(row)
        columns = row * (2 if shape.autoreset is Autoreset.SAME_STEP else 1)
        self.stores = [
            batch_store(fd, num_rows, columns)
            for _, fd, num_rows in zip(
                shape.lines, (files.full, files.first_ready), (shape.num_envs, shape.batch_size), strict=False
            )
        ]
        board_bytes = _board_bytes(shape)
        self._memory = mmap.mmap(files.board, board_bytes + _action_bytes(shape.num_envs, actions))
        self.board = Board(self._memory, shape.num_envs, shape.num_children, shape.batch_size, self.stores)
        self.action_columns: list[np.ndarray[Any, Any] | None]  # [N, *leaf.shape]; None for objects
        self.action_columns = [None] * len(actions.leaves)
        fields, _ = place_columns(shape.num_envs, _columns(actions))
        for leaf, (offset, dtype, row_shape) in zip(actions.array_leaves, fields, strict=True):
            self.action_columns[leaf] = np.ndarray(
                (shape.num_envs, *row_shape), dtype, buffer=self._memory, offset=board_bytes + offset
            )

    @staticmethod
    def allocate(files: MemoryFiles, shape: PoolShape, actions: SpaceTree) -> None:
        """Size the board's file; the batches' files grow by themselves."""
        os.ftruncate(files.board, _board_bytes(shape) + _action_bytes(shape.num_envs, actions))

    def split(
        self, arrays: Sequence[np.ndarray[Any, Any]]
    ) -> tuple[Sequence[np.ndarray[Any, Any]], Sequence[np.ndarray[Any, Any]]]:
        """The columns of rows (observations, declared infos) and of final rows among all arrays of a batch."""
        end = NUM_FIXED + self._num_row_columns
        return arrays[NUM_FIXED:end], arrays[end:]


def _columns(tree: SpaceTree) -> list[Column]:
    return [(leaf.dtype, leaf.shape) for leaf in tree.leaves if leaf.dtype is not None]


def _action_bytes(num_envs: int, actions: SpaceTree) -> int:
    return place_columns(num_envs, _columns(actions))[1]


def _board_bytes(shape: PoolShape) -> int:
    return aligned(Board.required_bytes(shape.num_envs, shape.num_children, shape.batch_size))
