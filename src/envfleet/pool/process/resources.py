"""ProcessResources: what must go when a process backend goes, whether it is closed, collected or its process ends."""

from __future__ import annotations

import os
import signal
import weakref

from envfleet._native import core
from envfleet.pool.process.shared_arrays import MemoryFiles
from envfleet.pool.process.spawner import Signal, Spawner

CLOSE_GRACE_S = 5.0  # for envs to close themselves


class ProcessResources:
    """What must go when the backend goes: processes and memory files. Holds no reference to the backend."""

    def __init__(self, files: MemoryFiles) -> None:
        """Start the spawner, which inherits `files`."""
        self.files = files
        self.spawner = Spawner(files.all())
        self.task_queues: core.SharedTaskQueues | None = None
        self.num_children = 0
        self.kills_busy = False  # children that are at work get no time to close their envs
        self._owner_pid = os.getpid()
        _all_resources.add(self)

    def shut(self) -> None:
        """End all processes and close the files. In a fork of the owner: nothing, they are not its own."""
        if os.getpid() != self._owner_pid:
            return
        grace_s = 0.0
        if self.task_queues is not None:
            grace_s = CLOSE_GRACE_S
            for child in range(self.num_children):
                self.task_queues.post_stop(child)
            if self.kills_busy:
                for child in {self.task_queues.child_of(env_id) for env_id in self.task_queues.busy_env_ids()}:
                    self.spawner.tell(Signal(child, signal.SIGKILL))
        self.spawner.close(grace_s)
        self.files.close()


_all_resources: weakref.WeakSet[ProcessResources] = weakref.WeakSet()


def _abandon_in_fork() -> None:
    for resources in _all_resources:
        resources.spawner.abandon()


os.register_at_fork(after_in_child=_abandon_in_fork)
