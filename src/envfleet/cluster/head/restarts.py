"""Restarts: which workers are to be started again, and when it is no use any more. Pure: time is an argument."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

FIRST_BACKOFF_S = 0.1
MOST_BACKOFF_S = 30.0
UNREACHABLE_S = 2.0  # at most, between two tries to reach the host of a worker
TRY_AGAIN_S = 5.0  # when the launcher's engine could not start one; then twice as long each time
MOST_TRY_AGAIN_S = 300.0


class Stage(enum.Enum):
    """Where a worker is."""

    STARTING = "starting"  # the launcher was asked for it; it has not joined
    PRESENT = "present"
    LOST = "lost"  # to be started again when its back-off is over
    GIVEN_UP = "given up"


@dataclass(slots=True)
class Post:
    """The place of one worker."""

    stage: Stage = Stage.STARTING
    since_s: float = 0.0
    restart_s: float = 0.0  # in stage LOST: not before
    num_failures: int = 0  # in a row, without an accepted answer between them
    num_outages: int = 0  # times that the present outage of its host was counted, see Restarts.lost
    outage_counted_s: float = 0.0  # it is not counted again before
    num_restarts: int = 0
    problem: str = ""  # the last one
    is_late: bool = False  # it was lost because it did not join
    is_left_to_engine: bool = False  # the launcher's engine is to start it again: what it says next is no new loss
    is_same_loss: bool = False  # the engine has not done so, or the outage goes on: that was counted before
    num_refusals: int = 0  # of the launcher's engine to start it, in a row

    @property
    def num_losses(self) -> int:
        """Failures and outages in a row: too many, and the worker is given up."""
        return self.num_failures + self.num_outages


@dataclass(slots=True)
class Restarts:
    """Who is to be started again. A worker that keeps failing without getting anything done is given up."""

    num_workers: int
    max_restarts: int
    join_timeout_s: float  # from its start until a worker has joined, while the launcher says that it runs
    posts: list[Post] = field(default_factory=list)

    def __post_init__(self) -> None:
        """A post for each worker."""
        self.posts = [Post() for _ in range(self.num_workers)]

    def resize(self, num_workers: int, now_s: float) -> None:
        """From now on there are so many; new ones are about to be started."""
        del self.posts[num_workers:]
        self.posts += [Post(since_s=now_s) for _ in range(num_workers - len(self.posts))]
        self.num_workers = num_workers

    def started(self, worker: int, now_s: float) -> None:
        """The launcher has been asked to start it, or says that it still waits in a queue."""
        post = self.posts[worker]
        post.stage, post.since_s = Stage.STARTING, now_s

    def joined(self, worker: int) -> None:
        """It is there, also if it was given up: somebody has started it by hand."""
        self.posts[worker].stage = Stage.PRESENT
        self.posts[worker].is_left_to_engine = False
        self.posts[worker].num_refusals = self.posts[worker].num_outages = 0

    def left_to_engine(self, worker: int) -> None:
        """A worker that was due is not restarted by us: the launcher's engine is at it."""
        self.posts[worker].is_left_to_engine = True

    def replaced(self, worker: int, problem: str) -> None:
        """Its next process has joined before it was known that the last one is gone."""
        self.posts[worker].num_restarts += 1
        self.posts[worker].problem = problem

    def worked(self, worker: int) -> None:
        """An answer of it was accepted: earlier failures do not count any more."""
        self.posts[worker].num_failures = 0

    def lost(
        self, worker: int, problem: str, now_s: float, is_failure: bool = True, is_unreachable: bool = False
    ) -> Stage:
        """It is gone. The new stage says whether it will be started again. Who was told to leave has not failed.

        While its host is unreachable a worker is tried every UNREACHABLE_S, so that it is back soon after the outage.
        The outage is counted at the intervals of the back-off: it uses up the restarts as slowly as failures do.
        """
        post = self.posts[worker]
        if post.stage in (Stage.LOST, Stage.GIVEN_UP):
            return post.stage
        if post.is_left_to_engine:
            post.stage, post.restart_s, post.is_same_loss, post.is_left_to_engine = Stage.LOST, now_s, True, False
            return post.stage
        post.problem = problem
        if is_unreachable:
            post.is_same_loss = post.num_outages > 0 and now_s < post.outage_counted_s
            if not post.is_same_loss:
                post.num_outages += 1
                post.outage_counted_s = now_s + _backoff_s(post.num_outages)
            post.restart_s = min(post.outage_counted_s, now_s + UNREACHABLE_S)
        else:
            post.num_failures += is_failure
            post.restart_s = now_s + _backoff_s(post.num_failures)
        post.stage = Stage.GIVEN_UP if post.num_losses > self.max_restarts else Stage.LOST
        return post.stage

    def refused(self, worker: int, problem: str) -> bool:
        """The launcher's engine will not run it: it is given up, unless it is there. False: nothing has changed."""
        post = self.posts[worker]
        if post.stage in (Stage.PRESENT, Stage.GIVEN_UP):
            return False
        post.stage, post.problem = Stage.GIVEN_UP, problem
        return True

    def revived(self, worker: int, num_processes: int, problem: str) -> bool:
        """The engine has replaced so many more processes of it. Those that did not even join count as failures.

        True: they are too many, and the worker is given up.
        """
        post = self.posts[worker]
        if post.stage is not Stage.STARTING:
            return False  # one that had joined is noticed, and counted, when its connection is lost
        if post.is_left_to_engine:
            num_processes, post.is_left_to_engine = num_processes - 1, False
        post.num_failures += num_processes
        post.problem = problem
        if post.num_failures <= self.max_restarts:
            return False
        post.stage = Stage.GIVEN_UP
        return True

    def not_started(self, worker: int, problem: str, now_s: float) -> None:
        """The launcher could not start it just now: that is no failure of the worker. It is tried again."""
        post = self.posts[worker]
        wait_s = min(MOST_TRY_AGAIN_S, TRY_AGAIN_S * 2.0 ** min(post.num_refusals, 60))
        post.num_refusals += 1
        post.stage, post.problem, post.restart_s = Stage.LOST, problem, now_s + wait_s

    def take_due(self, now_s: float) -> list[tuple[int, bool]]:
        """Workers to start now, and whether each is late: it runs, but has not joined. They count as started."""
        due = [w for w, post in enumerate(self.posts) if post.stage is Stage.LOST and post.restart_s <= now_s]
        late = [self.posts[worker].is_late for worker in due]
        for worker in due:
            self.posts[worker].num_restarts += not self.posts[worker].is_same_loss
            self.posts[worker].is_late = self.posts[worker].is_same_loss = False
            self.started(worker, now_s)
        return list(zip(due, late, strict=True))

    def late(self, now_s: float) -> list[int]:
        """Workers that should have joined by now."""
        return [
            worker
            for worker, post in enumerate(self.posts)
            if post.stage is Stage.STARTING and now_s - post.since_s > self.join_timeout_s
        ]


def _backoff_s(num_losses: int) -> float:
    exponent = min(max(num_losses - 1, 0), 60)
    return min(MOST_BACKOFF_S, FIRST_BACKOFF_S * 2.0**exponent)
