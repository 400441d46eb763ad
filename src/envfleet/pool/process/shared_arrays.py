"""Which bytes of shared memory belong to which field of which env. Parent and children compute the same."""

from __future__ import annotations

import mmap
import os
from dataclasses import dataclass

import numpy as np

from envfleet._native import core
from envfleet.contract.arrays import Array
from envfleet.contract.episode import Autoreset
from envfleet.contract.spaces import SpaceTree
from envfleet.pool.batch_layout import aligned, column_offsets, columns_of
from envfleet.pool.process.info_columns import InfoColumns
from envfleet.pool.process.task_clocks import TaskClocks


@dataclass(frozen=True, slots=True)
class MemoryFiles:
    """File descriptors of a pool's anonymous memory files. They have no name, so they die with their processes."""

    task_queues: int
    full: int
    first_ready: int
    objects: int
    stacks: int  # where children write their Python stacks when asked
    changes: int  # made while envs run; see ChangeSender

    @classmethod
    def create(cls) -> MemoryFiles:
        """Create the files, all of them empty."""
        return cls(*(os.memfd_create(f"envfleet-{name}", os.MFD_CLOEXEC) for name in cls.__slots__))

    def all(self) -> tuple[int, ...]:
        """In the order of the constructor's arguments."""
        return (self.task_queues, self.full, self.first_ready, self.objects, self.stacks, self.changes)

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
    has_finals: bool  # batches have room for final observations


_AUTORESETS = list(Autoreset)


class SharedArrays:
    """A pool's shared memory as seen by one process: task queues, batches, and the actions."""

    def __init__(
        self, files: MemoryFiles, shape: PoolShape, obs: SpaceTree, actions: SpaceTree, infos: InfoColumns
    ) -> None:
        """Map what the parent has sized with `allocate`."""
        self.stores = [
            core.BatchStore(fd, num_rows, columns_of(obs), infos.layout, shape.has_finals)
            for fd, num_rows in zip((files.full, files.first_ready), _rows_of_lines(shape), strict=False)
        ]
        task_queues_bytes = _task_queues_bytes(shape)
        num_bytes = task_queues_bytes + _action_bytes(shape.num_envs, actions)
        self._memory = mmap.mmap(files.task_queues, num_bytes + _settings_bytes(shape))
        settings = memoryview(self._memory)[num_bytes:]
        self.autoreset_code = settings[:1]
        self.num_changes = settings[8:16].cast("Q")  # [1]: changes that the parent has made
        clocks = 16 + 8 * shape.num_children
        self.num_changes_taken = settings[16:clocks].cast("Q")  # [num_children]: how many of them each child has taken
        self.task_clocks = TaskClocks(settings[clocks:])
        self.task_queues = core.SharedTaskQueues(
            self._memory, shape.num_envs, shape.num_children, shape.batch_size, self.stores
        )
        self.action_columns: list[Array | None]  # [N, *leaf.shape]; None for objects
        self.action_columns = [None] * len(actions.leaves)
        columns = columns_of(actions)
        offsets, _ = column_offsets(shape.num_envs, columns)
        for leaf, offset, (dtype, row_shape) in zip(actions.array_leaves, offsets, columns, strict=True):
            self.action_columns[leaf] = np.ndarray(
                (shape.num_envs, *row_shape), dtype, buffer=self._memory, offset=task_queues_bytes + offset
            )

    @property
    def autoreset(self) -> Autoreset:
        """The autoreset mode of the next task. The parent sets it while no env is at work."""
        return _AUTORESETS[self.autoreset_code[0]]

    @autoreset.setter
    def autoreset(self, mode: Autoreset) -> None:
        self.autoreset_code[0] = _AUTORESETS.index(mode)

    @staticmethod
    def task_queues_alone(files: MemoryFiles, shape: PoolShape) -> core.SharedTaskQueues:
        """The task queues before the spaces are known: for all but batches. The parent has sized its file."""
        stores = [core.BatchStore(-1, num_rows, [], [], has_final=False) for num_rows in _rows_of_lines(shape)]
        memory = mmap.mmap(files.task_queues, _task_queues_bytes(shape))
        return core.SharedTaskQueues(memory, shape.num_envs, shape.num_children, shape.batch_size, stores)

    @staticmethod
    def allocate_task_queues(files: MemoryFiles, shape: PoolShape) -> None:
        """Size the file of the task queues, without actions."""
        os.ftruncate(files.task_queues, _task_queues_bytes(shape))

    @staticmethod
    def allocate(files: MemoryFiles, shape: PoolShape, actions: SpaceTree) -> None:
        """Size the file of the task queues for the actions and settings, too; batches grow by themselves."""
        num_bytes = _task_queues_bytes(shape) + _action_bytes(shape.num_envs, actions)
        os.ftruncate(files.task_queues, num_bytes + _settings_bytes(shape))


def _rows_of_lines(shape: PoolShape) -> tuple[int, ...]:
    """The rows of a batch, for each line that this pool has."""
    return (shape.num_envs,) if shape.batch_size == shape.num_envs else (shape.num_envs, shape.batch_size)


def _action_bytes(num_envs: int, actions: SpaceTree) -> int:
    return column_offsets(num_envs, columns_of(actions))[1]


def _settings_bytes(shape: PoolShape) -> int:
    """The autoreset mode, the counters of changes, and the clocks."""
    return 8 * (2 + shape.num_children) + TaskClocks.required_bytes(shape.num_children)


def _task_queues_bytes(shape: PoolShape) -> int:
    return aligned(core.SharedTaskQueues.required_bytes(shape.num_envs, shape.num_children, shape.batch_size))
