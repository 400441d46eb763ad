"""Run: head, launcher and what lies between them: started together, watched while one waits, ended together."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
import weakref
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace
from typing import Any, Protocol

from envfleet.cluster.head.config import HeadConfig
from envfleet.cluster.head.head import Head
from envfleet.cluster.head.pending_answers import PendingAnswers, errors_of
from envfleet.cluster.head.restarts import Stage
from envfleet.cluster.run.addressing import advertised_address, listening_address
from envfleet.cluster.run.job_monitor import JobMonitor
from envfleet.cluster.run.progress import Progress
from envfleet.cluster.run.run_folder import make_run_folder, remove_run_folder
from envfleet.cluster.run.sigterm import exit_on_sigterm
from envfleet.cluster.wire.messages import OrderFailed, PoolPlan
from envfleet.cluster.wire.rollouts import RolloutForm
from envfleet.cluster.wire.sockets import KEYS_VARIABLE, RunKeys
from envfleet.contract.errors import ClusterTimeout, JoinTimeout, WorkerFailed, WorkerLost
from envfleet.launchers.launcher import Launcher, WorkerJob, WorkerState

logger = logging.getLogger("envfleet.cluster")

MOST_FAILURES_AT_START = 3
LEAVE_GRACE_S = 5.0
TELL_EVERY_S = 0.5


class Activity(Protocol):
    """What the open orders are for: steps, a rollout, a stream. One at a time."""

    def drop(self) -> None:
        """Something else begins: forget what was begun."""

    def resized(self, num_workers_before: int) -> None:
        """There are more workers now, or fewer."""


class Run:
    """One run of a cluster."""

    def __init__(self, config: HeadConfig, launcher: Launcher) -> None:
        """Bind the head, and have the workers started."""
        self.num_workers = len(config.plans)
        self.num_envs_per_worker = config.plans[0].pool.num_envs
        self._raises_env_errors = config.plans[0].pool.on_env_error == "raise"
        self._config = config
        self._queue_timeout_s = launcher.queue_timeout_s
        self._activity: weakref.ref[Activity] | None = None  # a stream that is forgotten has ended
        self._owner_pid = os.getpid()
        self._is_closed = False
        with contextlib.ExitStack() as undo:  # what was done, if the rest fails
            self._folder = make_run_folder()
            undo.callback(remove_run_folder, self._folder)
            head_address = config.network.head_address or launcher.head_address
            address = listening_address(config.network.address, head_address, launcher, self._folder)
            keys = RunKeys.make() if address.startswith("tcp://") else None
            self.head = Head(config, address, keys)
            undo.callback(self.head.close)
            self.head.start()
            self._found_at = advertised_address(head_address, self.head.address, launcher)
            # Workers here see that their head is gone; what waits in a queue elsewhere does not.
            self._forget_sigterm = (lambda: None) if launcher.is_on_this_host else exit_on_sigterm(self.close)
            undo.callback(self._forget_sigterm)
            job = launcher.launch(self._worker_job(config, keys))
            undo.callback(job.cancel, 0.0)
            self._monitor = JobMonitor(self.head, job, self.num_workers)
            undo.pop_all()

    def close(self) -> None:
        """End everything. In a fork of the owner: nothing, it is not its own."""
        if self._is_closed or os.getpid() != self._owner_pid:
            return
        self._is_closed = True
        with contextlib.ExitStack() as stack:  # all of it, also if Ctrl-C comes in between
            stack.callback(remove_run_folder, self._folder)
            stack.callback(self.head.close)
            stack.callback(self._forget_sigterm)
            stack.callback(self._monitor.cancel, LEAVE_GRACE_S)
            stack.callback(self.head.tell_all_to_stop, "the run is over")
            stack.callback(self._monitor.close)

    def close_when_collected(self) -> None:
        """For the garbage collector, which may call from one of our own threads, in the middle of anything."""
        if self.head.is_in_use_here or self._monitor.is_current_thread:
            threading.Thread(target=self.close, name="envfleet-close").start()
        else:
            self.close()

    def resize(
        self, plans: tuple[PoolPlan, ...], env_pickles: tuple[bytes | None, ...], attributes: Mapping[str, Any]
    ) -> None:
        """More workers, or fewer. Nothing has changed if the launcher's engine refuses."""
        before, after = self._config, replace(self._config, plans=plans, env_pickles=env_pickles)
        num_before, num_after = self.num_workers, len(plans)
        with self._monitor.paused():
            if num_after < num_before:
                self._monitor.resize(num_after)  # those who go: the head forgets them when they do
                self.head.resize(after, attributes)
            else:
                self.head.resize(after, attributes)  # first: it must know workers that join
                try:
                    self._monitor.resize(num_after)
                except BaseException:
                    self.head.resize(before, attributes)
                    raise
            self._config, self.num_workers = after, num_after
        activity = None if self._activity is None else self._activity()
        if activity is not None:
            activity.resized(num_before)

    def wait_until_ready(
        self, timeout_s: float, num_wanted: int | None = None, most_s: float | None = None
    ) -> RolloutForm:
        """Until the pools of so many workers, or of all, are built. Time in a queue counts for itself.

        `most_s`: no longer than this, wherever the time goes.
        """
        num_wanted = self.num_workers if num_wanted is None else min(num_wanted, self.num_workers)

        def is_ready() -> bool:
            if self._num_ready >= num_wanted:
                return True
            self._raise_if_hopeless(self.num_workers - num_wanted)
            return False

        begun_s = time.monotonic()
        starting_s = queueing_s = 0.0
        progress = Progress()
        try:
            while not self.head.wait(is_ready, min(TELL_EVERY_S, timeout_s - starting_s)):
                if most_s is not None and time.monotonic() - begun_s >= most_s:
                    self._raise_join_timeout(f"in {most_s:g} s")
                missing = [worker for worker, desk in enumerate(self.head.desks) if not desk.is_ready]
                pending = [w for w in missing if self._monitor.status(w).state is WorkerState.PENDING]
                if pending:
                    queueing_s += TELL_EVERY_S
                elif time.monotonic() - self._last_progress_s(missing) > TELL_EVERY_S:
                    starting_s += TELL_EVERY_S
                self._show(progress, pending)
                if self._queue_timeout_s is not None and queueing_s > self._queue_timeout_s:
                    self._raise_join_timeout(f"after {queueing_s:g} s in the queue, the launcher's queue_timeout_s")
                if starting_s >= timeout_s:
                    self._raise_join_timeout(f"in {timeout_s:g} s")
        finally:
            progress.close()
        assert self.head.roster.form is not None
        return self.head.roster.form

    def _raise_if_hopeless(self, num_spare: int) -> None:
        posts, desks = self.head.roster.restarts.posts, self.head.desks
        unbuilt = [desk for desk in desks if desk.not_ready is not None]
        if len(unbuilt) > num_spare and (failed := unbuilt[0].not_ready) is not None:
            text = f"{failed.error}\n\n{failed.traceback}"
            raise WorkerFailed(f"{unbuilt[0].member} cannot build its pool: {text}")
        hopeless = [
            worker
            for worker, (post, desk) in enumerate(zip(posts, desks, strict=True))
            if not desk.is_ready and (post.stage is Stage.GIVEN_UP or post.num_losses >= MOST_FAILURES_AT_START)
        ]
        if len(hopeless) > num_spare:
            worker = hopeless[0]
            where = f" (it looked for the head at {self._found_at})"
            raise WorkerLost(f"worker {worker} does not start: {posts[worker].problem}{where}{self._log(worker)}")

    @property
    def _num_ready(self) -> int:
        return sum(desk.is_ready for desk in self.head.desks)

    def _show(self, progress: Progress, pending: list[int]) -> None:
        text = f"{self._num_ready} of {self.num_workers} workers are ready"
        if pending:
            detail = self._monitor.status(pending[0]).detail.partition("\n")[0]
            text += f", {len(pending)} pending: worker {pending[0]}: {detail}"
        progress.show(text, is_news=bool(pending))

    def _raise_join_timeout(self, when: str) -> None:
        num_joined = sum(desk.member is not None for desk in self.head.desks)
        missing = "; ".join(self._about(w) for w, desk in enumerate(self.head.desks) if not desk.is_ready)
        raise JoinTimeout(
            f"{num_joined} of {self.num_workers} workers joined {when}, and not all of them are ready: {missing}. "
            f"They look for the head at {self._found_at}"
        )

    def begin(self, activity: Activity | None) -> None:
        """From now on orders are for this activity; what another one has begun is cancelled. None: for nothing."""
        current = None if self._activity is None else self._activity()
        if current is activity and activity is not None:
            return
        if self._activity is not None:
            self._activity = None
            self.head.cancel_open()
            if current is not None:
                current.drop()
        self._activity = None if activity is None else weakref.ref(activity)

    @property
    def is_busy(self) -> bool:
        """A stream runs, or something else was begun and not finished."""
        return self._activity is not None and self._activity() is not None and self.head.has_open_orders

    def is_doing(self, activity: Activity) -> bool:
        """Are the open orders for this activity? In a fork of the owner nothing is: its locks may be held for ever."""
        is_current = self._activity is not None and self._activity() is activity
        return is_current and not self._is_closed and os.getpid() == self._owner_pid

    def take(self, workers: Iterable[int], if_incomplete: str = "") -> PendingAnswers:
        """The oldest answers of these workers, which are there.

        Args:
            workers: Whose answers.
            if_incomplete: For the error of a worker that could not carry out its order: what becomes of the call.
        """
        answers = [self.head.desks[worker].answers.popleft() for worker in workers]
        errors = [
            error
            # First those without a result: nothing will be returned, and the caller hears one error only.
            for answer in sorted(answers, key=lambda each: not isinstance(each.result, OrderFailed))
            for error in errors_of(
                answer, self.num_envs_per_worker, self.problem, self._raises_env_errors, if_incomplete
            )
        ]
        return PendingAnswers(answers, errors)

    def first_ready(self, workers: Iterable[int]) -> list[int]:
        """Those of these workers whose answers are there, in the order in which they came."""
        desks = self.head.desks
        ready = [worker for worker in workers if desks[worker].answers]
        return sorted(ready, key=lambda worker: desks[worker].answers[0].arrival)

    def wait_for_answers(self, workers: Collection[int], timeout_s: float, then: str) -> None:
        """Until each of these workers has answered. `then` is what the caller can do after ClusterTimeout."""
        self.wait_for_some(workers, len(workers), timeout_s, then)

    def wait_for_some(self, workers: Collection[int], num_workers: int, timeout_s: float, then: str) -> None:
        """Until `num_workers` of these workers have answered."""
        desks = self.head.desks

        def is_done() -> bool:
            num_answered = sum(1 for worker in workers if desks[worker].answers)
            if num_answered < num_workers:
                self._raise_if_given_up(workers, len(workers) - num_workers)
            return num_answered >= num_workers

        self._wait(is_done, workers, timeout_s, then)

    def wait_for_any(self, timeout_s: float, then: str) -> None:
        """Until any worker has answered; as long as one is there or comes back there is hope."""
        workers = range(self.num_workers)

        def is_done() -> bool:
            if any(desk.answers for desk in self.head.desks):
                return True
            self._raise_if_given_up(workers, self.num_workers - 1)
            return False

        self._wait(is_done, workers, timeout_s, then)

    def problem(self, worker: int) -> str:
        """Which process of a worker was lost last, and why."""
        return self.head.desks[worker].problem

    def _wait(self, is_done: Callable[[], bool], workers: Collection[int], timeout_s: float, then: str) -> None:
        """Time in which an answer, or what a worker needs for it, comes on in chunks does not count."""
        if not self.head.wait(is_done, timeout_s, lambda: self._last_progress_s(workers)):
            late = "; ".join(self._about(worker) for worker in workers if not self.head.desks[worker].answers)
            raise ClusterTimeout(f"no answer within {timeout_s:g} s: {late}.\n{then}")

    def _last_progress_s(self, workers: Collection[int]) -> float:
        """When a chunk of a large message to or from one of these workers last arrived."""
        return max((self.head.desks[worker].transfers.progress_s for worker in workers), default=0.0)

    def _raise_if_given_up(self, workers: Collection[int], num_spare: int) -> None:
        posts, desks = self.head.roster.restarts.posts, self.head.desks
        gone = [w for w in workers if posts[w].stage is Stage.GIVEN_UP and not desks[w].answers]
        if len(gone) > num_spare:
            lost = "; ".join(f"{self.problem(worker)}{self._log(worker)}" for worker in gone)
            raise WorkerLost(f"lost, and not replaced any more (max_worker_restarts, or the launcher refuses): {lost}")

    def _about(self, worker: int) -> str:
        """What is known of a worker that should have answered."""
        desk, post = self.head.desks[worker], self.head.roster.restarts.posts[worker]
        name = self.head.roster.name_of(worker)
        status = self._monitor.status(worker)
        heard = "" if desk.member is None else f", heard of {time.monotonic() - desk.member.heard_s:.1f} s ago"
        problem = f", last problem: {post.problem}" if post.problem else ""
        detail = f" ({status.detail})" if status.detail else ""
        place = f", log: {self._monitor.log_place(worker)}"
        return f"{name} is {post.stage.value}{heard}{problem}, its process is {status.state.value}{detail}{place}"

    def _log(self, worker: int) -> str:
        log = self._monitor.log(worker).strip()
        return f"\n-- the end of its log, {self._monitor.log_place(worker)}:\n{log}" if log else ""

    def _worker_job(self, config: HeadConfig, keys: RunKeys | None) -> WorkerJob:
        argv = ("-m", "envfleet.cluster.worker", "--head", self._found_at)
        return WorkerJob(
            num_workers=self.num_workers,
            argv=(*argv, "--silence-s", str(config.timing.silence_s)),
            environment={} if keys is None else {KEYS_VARIABLE: keys.for_workers()},
            run_dir=self._folder,
        )
