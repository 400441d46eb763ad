"""ChangeSender and ChangeReceiver: changes of envs, from the parent to all children, also while these are at work.

Each change has a window of a memory file of its own, and is counted once it is written; a child looks at the count
before each task. When all children have taken all changes the file is emptied.
"""

from __future__ import annotations

import os
from typing import NamedTuple

from envfleet.contract.live_changes import Change, LiveChanges
from envfleet.pool.pickling import pickled_code
from envfleet.pool.process.object_channel import ObjectChannel
from envfleet.pool.process.shared_arrays import SharedArrays


class ChangesSoFar(NamedTuple):
    """What a new child begins with."""

    changes: list[Change]  # the last of each kind and name
    num_changes: int  # that were made before it began


NO_CHANGES = ChangesSoFar([], 0)


class ChangeSender:
    """The parent's end: writes changes for all children."""

    def __init__(self, fd: int, arrays: SharedArrays) -> None:
        self._fd = fd
        self._channel = ObjectChannel(fd)
        self._num_changes = arrays.num_changes
        self._num_taken = arrays.num_changes_taken
        self._changes = LiveChanges()

    def send(self, change: Change) -> None:
        """Write a change for all children. Raises UsageError if it cannot be pickled."""
        change = change._replace(arguments=pickled_code(change.arguments, "arguments"))
        num_before = self._num_changes[0]
        if all(taken == num_before for taken in self._num_taken):
            os.ftruncate(self._fd, 0)
        self._channel.put(num_before + 1, change)
        self._changes.add(change)
        self._num_changes[0] = num_before + 1

    def for_new_child(self, child: int) -> ChangesSoFar:
        """What a child that is about to be started begins with; the later ones are kept for it."""
        self._num_taken[child] = self._num_changes[0]
        return ChangesSoFar(self._changes.last, self._num_changes[0])


class ChangeReceiver:
    """A child's end: reads the changes that are new to it."""

    def __init__(self, fd: int, arrays: SharedArrays, child: int, begun_with: ChangesSoFar) -> None:
        self._channel = ObjectChannel(fd)
        self._arrays = arrays
        self._child = child
        self.num_taken = begun_with.num_changes
        self.changes = LiveChanges(begun_with.changes)  # of this child's envs

    def take(self) -> None:
        """Take all changes that were made. Raises FileClosed."""
        while self.num_taken < self._arrays.num_changes[0]:
            self.changes.add(self._channel.get(self.num_taken + 1))
            self.num_taken += 1
        self._arrays.num_changes_taken[self._child] = self.num_taken
