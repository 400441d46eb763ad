"""Exit codes of a worker's process and of a learner, which tell the launcher or the job's script what to do."""

from __future__ import annotations

import enum


class WorkerExit(enum.IntEnum):
    """Any other code, or death by a signal, is a failure: restart the worker."""

    DONE = 0  # the head does not need it any more
    HEAD_GONE = 3  # it lost the connection to the head, which may have ended
    TOLD_TO_LEAVE = 4  # SIGTERM, or its standard input was closed: the sender decides what follows
    OUT_OF_TIME = 5  # SIGUSR1: its time limit is near, and it has finished its order


class LearnerExit(enum.IntEnum):
    """What the script of a learner's Slurm job acts on. Any other code is final: the job is not requeued."""

    STOPPED = 75  # it was told to stop, and has saved: start it again to go on (sysexits.h: EX_TEMPFAIL)
