"""Household: what must go when a process backend goes, whether it is closed, collected or its process ends."""

from __future__ import annotations

import os
import weakref

from envfleet import _native
from envfleet.pool.nursery import Nursery
from envfleet.pool.shared_arrays import MemoryFiles

CLOSE_GRACE_S = 5.0  # for envs to close themselves


class Household:
    """What must go when the backend goes: processes and memory files. Holds no reference to the backend."""

    def __init__(self, files: MemoryFiles) -> None:
        """Start the nursery."""
        self.files = files
        self.nursery = Nursery(files.all())
        self.board: _native.Board | None = None
        self.num_children = 0
        self._owner_pid = os.getpid()
        _households.add(self)

    def shut(self) -> None:
        """End all processes and close the files. In a fork of the owner: nothing, they are not its own."""
        if os.getpid() != self._owner_pid:
            return
        grace_s = 0.0
        if self.board is not None:
            grace_s = CLOSE_GRACE_S
            for child in range(self.num_children):
                self.board.post_stop(child)
        self.nursery.close(grace_s)
        self.files.close()


_households: weakref.WeakSet[Household] = weakref.WeakSet()


def _abandon_in_fork() -> None:
    for household in _households:
        household.nursery.abandon()


os.register_at_fork(after_in_child=_abandon_in_fork)
