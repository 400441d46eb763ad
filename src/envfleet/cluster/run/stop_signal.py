"""StopSignal: a learner learns that it is to save and stop, in time, and between two updates."""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from types import FrameType, TracebackType
from typing import Any, Self

from envfleet.contract.exits import LearnerExit

logger = logging.getLogger("envfleet")

# Slurm sends SIGTERM to all processes of a job, and the job's script may pass it on 5 s later: that is no second one.
SAME_S = 10.0


class StopSignal:
    """Notes SIGTERM and SIGUSR1 instead of ending the process, so that a training loop can save first.

    `envfleet slurm-script -- COMMAND` has SIGUSR1 sent before the job's time limit; SIGTERM is sent by `kill`, by
    `scancel`, and when a job is preempted.

        with envfleet.ClusterEnv(..., resume=path if os.path.exists(path) else None) as cluster:
            with envfleet.StopSignal(path) as stop:
                while not done and not stop.is_set:
                    ...  # an update
                cluster.save(path, extra=...)
        sys.exit(stop.exit_code)

    Use it after the cluster has started: whatever waits for workers in a queue still ends on SIGTERM. A second SIGTERM,
    10 s after the first or later, raises SystemExit. In threads other than the main one nothing happens.

    Args:
        checkpoint: The file that the learner saves to; None: it saves nothing.

    Attributes:
        number: The first signal that came; None: none has.
    """

    def __init__(self, checkpoint: str | os.PathLike[str] | None = None) -> None:
        self.number: int | None = None
        self._first_term_s: float | None = None
        self._checkpoint = checkpoint
        self._saved_before = _identity(checkpoint)
        self._before: dict[int, Any] = {}

    @property
    def is_set(self) -> bool:
        """Whether a signal has come: save and leave the loop."""
        return self.number is not None

    @property
    def exit_code(self) -> int:
        """The code with which the learner must exit.

        0: no signal came. 75 (`LearnerExit.STOPPED`): one came, and the checkpoint was written since this object was
        made; the job's script then requeues the job. Otherwise 128 plus the number of the signal: a learner that saves
        nothing must not be started again, because it would never get further.
        """
        if self.number is None:
            return 0
        saved = _identity(self._checkpoint)
        if saved is not None and saved != self._saved_before:
            return int(LearnerExit.STOPPED)
        if self._checkpoint is not None:
            logger.error("nothing was saved to %s: the run cannot go on from there", self._checkpoint)
        return 128 + self.number

    def __enter__(self) -> Self:
        """Begin to note signals."""
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGUSR1):
                self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Have signals do again what they did before; SIGTERM, once it came, stays noted while the cluster closes."""
        for number, handler in self._before.items():
            if number == signal.SIGTERM and self._first_term_s is not None:
                continue  # the job's script may pass it on once more: that must not end a learner that has saved
            if signal.getsignal(number) == self._note:  # not if somebody has set another since
                signal.signal(number, signal.SIG_DFL if handler is None else handler)
        self._before.clear()

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.number = self.number or number
        if number == signal.SIGTERM:
            now_s = time.monotonic()
            if self._first_term_s is None:
                self._first_term_s = now_s
            elif now_s - self._first_term_s > SAME_S:
                raise SystemExit(128 + number)


def _identity(file: str | os.PathLike[str] | None) -> tuple[int, int, int] | None:
    """What differs once a file was written anew; its time alone would not do, for file servers have their own clock."""
    try:
        status = None if file is None else os.stat(file)
    except OSError:
        return None
    return None if status is None else (status.st_ino, status.st_mtime_ns, status.st_size)
