"""Which bytes of shared memory belong to which field of which env. Parent and children compute the same."""

from __future__ import annotations

import mmap
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from envfleet._native import BatchStore, Board
from envfleet.contract.episode import Autoreset
from envfleet.contract.spaces import SpaceTree
from envfleet.pool.backend import Line

Field = tuple[int, np.dtype[Any], tuple[int, ...]]  # offset, dtype, shape of one row

_ALIGNMENT = 64  # a cache line, so that no two arrays share one
_FIXED_DTYPES = (np.int32, np.float64, np.bool_, np.bool_, np.uint8)  # as FixedField in batch_store.h
NUM_FIXED = len(_FIXED_DTYPES)


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

    def __init__(self, files: MemoryFiles, shape: PoolShape, obs: SpaceTree, actions: SpaceTree) -> None:
        """Map what the parent has sized with `allocate`."""
        self.num_obs_columns = len(obs.array_leaves)
        has_final = shape.autoreset is Autoreset.SAME_STEP
        self.stores = [
            _batch_store(fd, num_rows, obs, has_final)
            for _, fd, num_rows in zip(
                shape.lines, (files.full, files.first_ready), (shape.num_envs, shape.batch_size), strict=False
            )
        ]
        board_bytes = _board_bytes(shape)
        self._memory = mmap.mmap(files.board, board_bytes + _action_bytes(shape.num_envs, actions))
        self.board = Board(self._memory, shape.num_envs, shape.num_children, shape.batch_size, self.stores)
        self.action_columns: list[np.ndarray[Any, Any] | None] = [  # [N, *leaf.shape]; None for objects
            None
            if field is None
            else np.ndarray((shape.num_envs, *field[2]), field[1], buffer=self._memory, offset=board_bytes + field[0])
            for field in _action_fields(shape.num_envs, actions)
        ]

    @staticmethod
    def allocate(files: MemoryFiles, shape: PoolShape, actions: SpaceTree) -> None:
        """Size the board's file; the batches' files grow by themselves."""
        os.ftruncate(files.board, _board_bytes(shape) + _action_bytes(shape.num_envs, actions))

    def split(
        self, arrays: Sequence[np.ndarray[Any, Any]]
    ) -> tuple[Sequence[np.ndarray[Any, Any]], Sequence[np.ndarray[Any, Any]]]:
        """The columns of observations and of final observations among all arrays of a batch."""
        end = NUM_FIXED + self.num_obs_columns
        return arrays[NUM_FIXED:end], arrays[end:]


def _batch_store(fd: int, num_rows: int, obs: SpaceTree, has_final: bool) -> BatchStore:
    fields: list[Field] = []
    end = 0
    leaves = [(leaf.dtype, leaf.shape) for leaf in obs.leaves if leaf.dtype is not None]
    rows: list[tuple[np.dtype[Any], tuple[int, ...]]] = [(np.dtype(dtype), ()) for dtype in _FIXED_DTYPES]
    for dtype, shape in rows + leaves * (2 if has_final else 1):
        fields.append((end, dtype, shape))
        end = _aligned(end + num_rows * _row_bytes(dtype, shape))
    buffer_bytes = -(-end // mmap.PAGESIZE) * mmap.PAGESIZE
    return BatchStore(fd, num_rows, buffer_bytes, fields)


def _action_fields(num_envs: int, actions: SpaceTree) -> list[Field | None]:
    fields: list[Field | None] = []
    end = 0
    for leaf in actions.leaves:
        if leaf.dtype is None:
            fields.append(None)
        else:
            fields.append((end, leaf.dtype, leaf.shape))
            end = _aligned(end + num_envs * _row_bytes(leaf.dtype, leaf.shape))
    return fields


def _action_bytes(num_envs: int, actions: SpaceTree) -> int:
    return sum(
        _aligned(num_envs * _row_bytes(leaf.dtype, leaf.shape)) for leaf in actions.leaves if leaf.dtype is not None
    )


def _board_bytes(shape: PoolShape) -> int:
    return _aligned(Board.required_bytes(shape.num_envs, shape.num_children, shape.batch_size))


def _row_bytes(dtype: np.dtype[Any], shape: tuple[int, ...]) -> int:
    return dtype.itemsize * int(np.prod(shape, dtype=np.int64))


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
