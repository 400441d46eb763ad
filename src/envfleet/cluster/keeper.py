"""Keeper: a thread that asks the launcher how its workers are, and has lost ones started again."""

from __future__ import annotations

import logging
import threading

from envfleet.cluster.head import Head
from envfleet.launchers.launcher import Job, WorkerState

logger = logging.getLogger("envfleet.cluster")

LOOK_S = 0.1


class Keeper:
    """Between head and launcher, which do not know each other. The launcher may be slow; nobody waits for it here."""

    def __init__(self, head: Head, job: Job, num_workers: int) -> None:
        """Begin."""
        self._head = head
        self._job = job
        self._num_workers = num_workers
        self._is_closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="envfleet-keeper", daemon=True)
        self._thread.start()

    @property
    def is_current_thread(self) -> bool:
        """Is this the keeper's own thread?"""
        return threading.current_thread() is self._thread

    def close(self) -> None:
        """No worker is started any more."""
        self._is_closing.set()
        self._thread.join(10.0)

    def _run(self) -> None:
        while not self._is_closing.wait(LOOK_S):
            try:
                self._look()
            except Exception:  # the engine may fail for a while; it is asked again
                logger.exception("the launcher failed")

    def _look(self) -> None:
        for worker in range(self._num_workers):
            status = self._job.status(worker)
            if status.state is WorkerState.ENDED:
                self._head.ended(worker, status.detail)
            elif status.state is WorkerState.PENDING:
                self._head.still_pending(worker)
        for worker in self._head.take_due():
            if not self._is_closing.is_set():
                self._job.restart(worker)
