"""Staffing: which workers are to be started again, and when it is no use any more. Pure: time is an argument."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

FIRST_BACKOFF_S = 0.1
MOST_BACKOFF_S = 30.0


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
    num_restarts: int = 0
    problem: str = ""  # the last one


@dataclass(slots=True)
class Staffing:
    """Who is to be started again. A worker that keeps failing without getting anything done is given up."""

    num_workers: int
    max_restarts: int
    join_timeout_s: float  # from its start until a worker has joined, while the launcher says that it runs
    posts: list[Post] = field(default_factory=list)

    def __post_init__(self) -> None:
        """A post for each worker."""
        self.posts = [Post() for _ in range(self.num_workers)]

    def started(self, worker: int, now_s: float) -> None:
        """The launcher has been asked to start it, or says that it still waits in a queue."""
        post = self.posts[worker]
        post.stage, post.since_s = Stage.STARTING, now_s

    def joined(self, worker: int) -> None:
        """It is there, also if it was given up: somebody has started it by hand."""
        self.posts[worker].stage = Stage.PRESENT

    def worked(self, worker: int) -> None:
        """An answer of it was accepted: earlier failures do not count any more."""
        self.posts[worker].num_failures = 0

    def lost(self, worker: int, problem: str, now_s: float) -> Stage:
        """It is gone. The new stage says whether it will be started again."""
        post = self.posts[worker]
        if post.stage in (Stage.LOST, Stage.GIVEN_UP):
            return post.stage
        post.problem = problem
        post.num_failures += 1
        if post.num_failures > self.max_restarts:
            post.stage = Stage.GIVEN_UP
        else:
            post.stage = Stage.LOST
            post.restart_s = now_s + min(MOST_BACKOFF_S, FIRST_BACKOFF_S * 2.0 ** min(post.num_failures - 1, 60))
        return post.stage

    def take_due(self, now_s: float) -> list[int]:
        """Workers to start now; they count as started."""
        due = [w for w, post in enumerate(self.posts) if post.stage is Stage.LOST and post.restart_s <= now_s]
        for worker in due:
            self.posts[worker].num_restarts += 1
            self.started(worker, now_s)
        return due

    def late(self, now_s: float) -> list[int]:
        """Workers that should have joined by now."""
        return [
            worker
            for worker, post in enumerate(self.posts)
            if post.stage is Stage.STARTING and now_s - post.since_s > self.join_timeout_s
        ]
