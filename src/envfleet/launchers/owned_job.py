"""OwnedJob: the guard of every job. It acts only in the process that started the job, and only until cancel().

The job of an engine (Slurm, Ray, ...) lies behind it and does not guard itself.
"""

from __future__ import annotations

import os

from envfleet.launchers.launcher import Job, WorkerState, WorkerStatus


class OwnedJob:
    """A Job that does nothing after `cancel()`, nor in a forked child of the process that started it.

    - After `cancel()`: `restart()`, `resize()` and a second `cancel()` return at once, all workers are ENDED, and logs
      can still be read.
    - In a forked child: `restart()`, `resize()` and `cancel()` return at once, because the workers belong to the
      parent. `status()` returns what was last known before the fork, and the engine is not asked for a log.

    Attributes:
        unguarded: The job of the engine.
    """

    def __init__(self, job: Job) -> None:
        self.unguarded = job
        self._owner_pid = os.getpid()
        self._is_cancelled = False
        self._statuses: dict[int, WorkerStatus] = {}  # the last of each worker

    @property
    def revives(self) -> bool:
        """Whether the engine restarts failed workers by itself."""
        return self.unguarded.revives

    def status(self, worker: int) -> WorkerStatus:
        """Return the state of one worker."""
        if self._is_cancelled:
            return WorkerStatus(WorkerState.ENDED, "the run is over")
        if self._is_forked:
            unknown = WorkerStatus(WorkerState.PENDING, f"its state is known to process {self._owner_pid} only")
            return self._statuses.get(worker, unknown)
        status = self._statuses[worker] = self.unguarded.status(worker)
        return status

    def log(self, worker: int, max_bytes: int = 4000) -> str:
        """Return the end of what a worker has printed."""
        if self._is_forked:
            return f"(its log cannot be read in a fork of process {self._owner_pid}, which started it)"
        return self.unguarded.log(worker, max_bytes)

    def log_place(self, worker: int) -> str:
        """Return where the whole log of a worker is."""
        return self.unguarded.log_place(worker)

    def restart(self, worker: int) -> None:
        """End what is left of a worker and start it again."""
        if not self._is_over:
            self.unguarded.restart(worker)

    def resize(self, num_workers: int) -> None:
        """Start workers up to this number, or end those from this number on."""
        if not self._is_over:
            self.unguarded.resize(num_workers)

    def cancel(self, grace_s: float) -> None:
        """End all workers; they have `grace_s` seconds to leave by themselves."""
        if not self._is_over:
            self._is_cancelled = True  # first: another thread must not start workers meanwhile
            self.unguarded.cancel(grace_s)

    @property
    def _is_over(self) -> bool:
        return self._is_cancelled or self._is_forked

    @property
    def _is_forked(self) -> bool:
        return os.getpid() != self._owner_pid
