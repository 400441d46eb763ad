"""Restarts: whether a worker is there, when it is started again, and when it is given up. Pure: time is an argument."""

from __future__ import annotations

import enum
from dataclasses import dataclass

FIRST_BACKOFF_S = 0.1
MOST_BACKOFF_S = 30.0
UNREACHABLE_S = 2.0  # at most, between two attempts to reach the host of a worker
TRY_AGAIN_S = 5.0  # after the launcher's engine could not start a worker; doubled each time
MOST_TRY_AGAIN_S = 300.0


class Stage(enum.Enum):
    """Where a worker's process is between its start and its loss."""

    STARTING = "starting"  # the launcher was asked for it; it has not joined
    PRESENT = "present"
    LOST = "lost"  # to be started again when its back-off is over
    GIVEN_UP = "given up"


@dataclass(slots=True)
class Restarts:
    """The starts and losses of one worker. It is given up if it keeps failing without an accepted answer."""

    max_restarts: int
    join_timeout_s: float  # from its start until it has joined, while the launcher says that it runs
    since_s: float = 0.0  # when it was last started
    stage: Stage = Stage.STARTING
    restart_s: float = 0.0  # in stage LOST: not before this time
    num_failures: int = 0  # in a row, without an accepted answer between them
    num_outages: int = 0  # times that the present outage of its host was counted, see lost()
    outage_counted_s: float = 0.0  # the outage is not counted again before this time
    num_restarts: int = 0
    problem: str = ""  # the last one
    is_late: bool = False  # it was lost because it did not join
    is_left_to_engine: bool = False  # the launcher's engine restarts it: its next loss was counted before
    is_same_loss: bool = False  # the engine did not restart it, or the outage goes on: the loss was counted before
    num_refusals: int = 0  # of the launcher's engine to start it, in a row

    @property
    def num_losses(self) -> int:
        """Failures and outages in a row; a worker with more than `max_restarts` is given up."""
        return self.num_failures + self.num_outages

    def started(self, now_s: float) -> None:
        """The launcher has been asked to start it, or says that it still waits in a queue."""
        self.stage, self.since_s = Stage.STARTING, now_s

    def joined(self) -> None:
        """It has joined; a worker that was given up may join, too, if somebody started it by hand."""
        self.stage = Stage.PRESENT
        self.is_left_to_engine = False
        self.num_refusals = self.num_outages = 0

    def left_to_engine(self) -> None:
        """It was due, and the launcher's engine restarts it by itself."""
        self.is_left_to_engine = True

    def replaced(self, problem: str) -> None:
        """Its next process has joined before the loss of the last one was noticed."""
        self.num_restarts += 1
        self.problem = problem

    def worked(self) -> None:
        """An answer of it was accepted: failures before that do not count any more."""
        self.num_failures = 0

    def lost(self, problem: str, now_s: float, is_failure: bool = True, is_unreachable: bool = False) -> Stage:
        """It is gone. Returns the new stage, which says whether it will be started again.

        While its host is unreachable it is tried every UNREACHABLE_S, so that it is back soon after the outage. The
        outage is counted at the intervals of the back-off: it uses up the restarts as slowly as failures do.

        Args:
            problem: Why it is gone.
            now_s: The time now.
            is_failure: False for a worker that was told to leave.
            is_unreachable: Its host could not be reached.
        """
        if self.stage in (Stage.LOST, Stage.GIVEN_UP):
            return self.stage
        if self.is_left_to_engine:
            self.stage, self.restart_s, self.is_same_loss, self.is_left_to_engine = Stage.LOST, now_s, True, False
            return self.stage
        self.problem = problem
        if is_unreachable:
            self.is_same_loss = self.num_outages > 0 and now_s < self.outage_counted_s
            if not self.is_same_loss:
                self.num_outages += 1
                self.outage_counted_s = now_s + _backoff_s(self.num_outages)
            self.restart_s = min(self.outage_counted_s, now_s + UNREACHABLE_S)
        else:
            self.num_failures += is_failure
            self.restart_s = now_s + _backoff_s(self.num_failures)
        self.stage = Stage.GIVEN_UP if self.num_losses > self.max_restarts else Stage.LOST
        return self.stage

    def refused(self, problem: str) -> bool:
        """The launcher's engine will not run it: it is given up, unless it is present.

        Returns:
            Whether this changed anything.
        """
        if self.stage in (Stage.PRESENT, Stage.GIVEN_UP):
            return False
        self.stage, self.problem = Stage.GIVEN_UP, problem
        return True

    def revived(self, num_processes: int, problem: str) -> bool:
        """The engine has replaced `num_processes` processes of it. Those that did not join count as failures.

        Returns:
            Whether they are too many, and the worker is given up.
        """
        if self.stage is not Stage.STARTING:
            return False  # a process that had joined is counted when its connection is lost
        if self.is_left_to_engine:
            num_processes, self.is_left_to_engine = num_processes - 1, False
        self.num_failures += num_processes
        self.problem = problem
        if self.num_failures <= self.max_restarts:
            return False
        self.stage = Stage.GIVEN_UP
        return True

    def not_started(self, problem: str, now_s: float) -> None:
        """The launcher could not start it now, which is no failure of the worker. It is tried again."""
        wait_s = min(MOST_TRY_AGAIN_S, TRY_AGAIN_S * 2.0 ** min(self.num_refusals, 60))
        self.num_refusals += 1
        self.stage, self.problem, self.restart_s = Stage.LOST, problem, now_s + wait_s

    def is_due(self, now_s: float) -> bool:
        """Whether it is to be started again now."""
        return self.stage is Stage.LOST and self.restart_s <= now_s

    def restarted(self, now_s: float) -> bool:
        """It was due, and counts as started again. Returns whether it was late: it runs, but has not joined."""
        is_late = self.is_late
        self.num_restarts += not self.is_same_loss
        self.is_late = self.is_same_loss = False
        self.started(now_s)
        return is_late

    def has_missed_join(self, now_s: float) -> bool:
        """Whether it should have joined by now."""
        return self.stage is Stage.STARTING and now_s - self.since_s > self.join_timeout_s


def _backoff_s(num_losses: int) -> float:
    exponent = min(max(num_losses - 1, 0), 60)
    return min(MOST_BACKOFF_S, FIRST_BACKOFF_S * 2.0**exponent)
