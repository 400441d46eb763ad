"""WorkerExit: exit codes of a worker's process, which tell the launcher what to do."""

from __future__ import annotations

import enum


class WorkerExit(enum.IntEnum):
    """Any other code, or death by a signal, is a failure: restart the worker."""

    DONE = 0  # the head does not need it any more
    HEAD_GONE = 3  # it lost the connection to the head, which may have ended
    TOLD_TO_LEAVE = 4  # SIGTERM, or its standard input was closed: the sender decides what follows
    OUT_OF_TIME = 5  # SIGUSR1: its time limit is near, and it has finished its order
