"""WorkerExit: with which exit code a worker's process ends, so that whoever started it knows what to do."""

from __future__ import annotations

import enum


class WorkerExit(enum.IntEnum):
    """Any other code is a failure, as is death by a signal: such a worker is worth starting again."""

    DONE = 0  # the head said that it is not needed any more
    HEAD_GONE = 3  # it lost the head; there may be none any more
    TOLD_TO_LEAVE = 4  # SIGTERM, or its standard input was closed: whoever sent that knows what follows
    OUT_OF_TIME = 5  # SIGUSR1: it has finished its order, for its time limit is near
