"""JobMonitor: a thread that asks the launcher's job for the status of each worker, and has lost ones restarted."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

from envfleet.cluster.head.fleet import DueWorker
from envfleet.cluster.head.head import Head
from envfleet.contract.errors import ClusterTimeout, EnvFleetError, PoolClosed
from envfleet.launchers.launcher import Job

logger = logging.getLogger("envfleet.cluster")

LOOK_S = 0.1
LONGEST_CALL_S = 10.0  # that the end of a run waits for a call to the launcher's engine
SHORT_WAIT_S = 1.0
PAUSE_WAIT_S = 90.0  # to submit a job may take a minute


class JobMonitor:
    """Stands between head and launcher, which do not know each other. The head never waits for a slow launcher.

    All calls to the job go through the monitor, one at a time.
    """

    def __init__(self, head: Head, job: Job, num_workers: int) -> None:
        self._head = head
        self._job = job
        self._lock = threading.RLock()  # guards the job; always taken before the head's own
        self._num_workers = num_workers
        self._failures: deque[str] = deque(maxlen=16)  # the last ones, which were logged
        self._is_closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="envfleet-monitor", daemon=True)
        self._thread.start()

    @property
    def is_current_thread(self) -> bool:
        """Whether this is the monitor's own thread."""
        return threading.current_thread() is self._thread

    def close(self) -> None:
        """End the thread: no worker is started any more."""
        self._is_closing.set()
        self._thread.join(LONGEST_CALL_S)

    def cancel(self, grace_s: float) -> None:
        """End all workers; they have `grace_s` seconds to leave by themselves."""
        is_ours = self._lock.acquire(timeout=SHORT_WAIT_S)  # close() has waited before
        try:
            self._job.cancel(grace_s)
        finally:
            if is_ours:
                self._lock.release()

    def log(self, worker: int) -> str:
        """The end of a worker's log. Called while an error is reported, so it waits SHORT_WAIT_S at most."""
        if not self._lock.acquire(timeout=SHORT_WAIT_S):
            return "(its log cannot be read: the launcher is busy)"
        try:
            return self._job.log(worker)
        finally:
            self._lock.release()

    def log_place(self, worker: int) -> str:
        """Where a worker's whole log is."""
        return self._job.log_place(worker)

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Keep the monitor from asking for statuses and from starting workers."""
        if not self._lock.acquire(timeout=PAUSE_WAIT_S):
            raise ClusterTimeout(
                f"the launcher was busy for {PAUSE_WAIT_S:g} s. Nothing has changed: call scale() again"
            )
        try:
            yield
        finally:
            self._lock.release()

    def resize(self, num_workers: int) -> None:
        """Start workers up to this number, or end those from this number on."""
        with self._lock:
            self._job.resize(num_workers)
            self._num_workers = num_workers

    def _run(self) -> None:
        while not self._is_closing.wait(LOOK_S):
            with self._lock:
                for worker in range(self._num_workers):
                    self._tolerate(self._look_at, worker)
                self._tolerate(self._start_those_due)

    def _tolerate(self, call: Callable[..., None], *args: Any) -> None:
        """Log what the engine raises: it may fail for a while, or for one worker, and is asked again."""
        try:
            call(*args)
        except PoolClosed:
            self._is_closing.set()
        except Exception as error:
            if repr(error) not in self._failures:  # not every tenth of a second the same
                logger.exception("the launcher failed")
            self._failures.append(repr(error))

    def _look_at(self, worker: int) -> None:
        self._head.reported(worker, self._job.status(worker))

    def _start_those_due(self) -> None:
        for due in self._head.take_due():
            if due.worker < self._num_workers and not self._is_closing.is_set():
                self._start_again(due)

    def _start_again(self, due: DueWorker) -> None:
        if self._job.revives and due.is_alive and not due.is_late:
            return self._head.left_to_engine(due.worker)
        try:
            self._job.restart(due.worker)
        except EnvFleetError as error:
            self._head.not_started(due.worker, str(error))
