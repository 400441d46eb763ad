"""Run: the head and the launcher's job, started together, watched while the caller waits, ended together."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import threading
import time
import weakref
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace
from typing import Any, Protocol

from envfleet.cluster.checkpoint.content import SavedHead
from envfleet.cluster.head.answers import PendingAnswers, errors_of
from envfleet.cluster.head.config import HeadConfig
from envfleet.cluster.head.head import Head
from envfleet.cluster.head.socket import MOST_EXTENSION
from envfleet.cluster.head.worker_record import WorkerRecord
from envfleet.cluster.run.addressing import advertised_address, listening_address
from envfleet.cluster.run.job_monitor import JobMonitor
from envfleet.cluster.run.progress import Progress
from envfleet.cluster.run.run_folder import make_run_folder, remove_run_folder
from envfleet.cluster.run.sigterm import exit_on_sigterm
from envfleet.cluster.wire.messages import OrderFailed, PoolPlan
from envfleet.cluster.wire.rollouts.rollout_form import RolloutForm
from envfleet.cluster.wire.sockets import RunKeys
from envfleet.contract.errors import CheckpointError, ClusterTimeout, JoinTimeout, WorkerFailed, WorkerLost
from envfleet.contract.worker_environment import KEYS_VARIABLE
from envfleet.launchers.launcher import Launcher, WorkerJob
from envfleet.pool.waits import WaitLog, limit_text

logger = logging.getLogger("envfleet.cluster")

LEAVE_GRACE_S = 5.0
TELL_EVERY_S = 0.5
STARTING_LIMIT = "timing.start_timeout_s; None: no limit"


class Activity(Protocol):
    """What the open orders are for: steps, a rollout, a stream. One at a time."""

    def drop(self) -> None:
        """Forget what was begun: another activity begins."""

    def resized(self, num_workers_before: int) -> None:
        """Adapt to a new number of workers."""


class Run:
    """One run of a cluster: its head, its folder and its launcher's job."""

    def __init__(self, config: HeadConfig, launcher: Launcher, saved: SavedHead | None = None) -> None:
        """Bind the head, and ask the launcher for the workers; with `saved`, go on from a checkpoint."""
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
            self._fleet = self.head.fleet
            undo.callback(self.head.close)
            if saved is not None:
                self.head.restore(saved)
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
        """End workers and head, and remove the run's folder. In a fork of the owner: nothing, they are not its own."""
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
        """Close the run for the garbage collector, which may call from any of our threads at any time."""
        if self.head.is_in_use_here or self._monitor.is_current_thread:
            threading.Thread(target=self.close, name="envfleet-close").start()
        else:
            self.close()

    def resize(
        self, plans: tuple[PoolPlan, ...], env_pickles: tuple[bytes | None, ...], attributes: Mapping[str, Any]
    ) -> None:
        """Have more workers, or fewer. If the launcher's engine refuses, nothing has changed."""
        before, after = self._config, replace(self._config, plans=plans, env_pickles=env_pickles)
        num_before, num_after = self.num_workers, len(plans)
        with self._monitor.paused():
            if num_after < num_before:
                self._monitor.resize(num_after)  # first: the head forgets workers once they are told to end
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
        self, timeout_s: float | None, num_wanted: int | None = None, most_s: float | None = None
    ) -> RolloutForm:
        """Wait until the pools of workers are built.

        Args:
            timeout_s: The longest wait. Time in the launcher's queue, and time in which large messages make progress,
                does not count. None: no limit.
            num_wanted: The number of workers to wait for; None: all.
            most_s: The longest wait, with all of its time; None: no such limit.

        Raises:
            JoinTimeout: They were not ready in time.
            WorkerFailed: A pool cannot be built.
            WorkerLost: A worker does not start.
        """
        num_wanted = self.num_workers if num_wanted is None else min(num_wanted, self.num_workers)

        def is_ready() -> bool:
            if self._fleet.num_ready >= num_wanted:
                return True
            self._raise_if_hopeless(self.num_workers - num_wanted)
            return False

        limit_s = math.inf if timeout_s is None else timeout_s
        begun_s = time.monotonic()
        log = WaitLog(logger, begun_s)
        starting_s = queueing_s = receiving_s = 0.0
        progress = Progress()
        try:
            while not self.head.wait(is_ready, min(TELL_EVERY_S, limit_s - starting_s)):
                if most_s is not None and time.monotonic() - begun_s >= most_s:
                    self._raise_join_timeout(f"in {most_s:g} s")
                missing = self._fleet.missing
                pending = [record for record in missing if record.is_pending]
                if pending:
                    queueing_s += TELL_EVERY_S
                elif time.monotonic() - self._fleet.last_progress_s(record.worker for record in missing) > TELL_EVERY_S:
                    starting_s += TELL_EVERY_S
                else:
                    receiving_s += TELL_EVERY_S
                self._show(progress, pending)
                if not pending:  # the line above tells of queues
                    log.look(time.monotonic(), lambda: "; ".join(map(self._about, self._fleet.missing)))
                if self._queue_timeout_s is not None and queueing_s > self._queue_timeout_s:
                    self._raise_join_timeout(f"after {queueing_s:g} s in the queue, the launcher's queue_timeout_s")
                if starting_s >= limit_s or receiving_s >= MOST_EXTENSION * limit_s:
                    self._raise_join_timeout(f"in {limit_s:g} s ({STARTING_LIMIT})")
        finally:
            progress.close()
        assert self._fleet.form is not None
        return self._fleet.form

    def wait_until_restored(self, timeout_s: float | None) -> None:
        """Wait until the workers that are ready go on where the checkpoint has them.

        Raises:
            CheckpointError: A worker cannot.
            ClusterTimeout: They have not said so in time.
        """

        def is_done() -> bool:
            failed = [record for record in self._fleet if record.restore_problem]
            if failed:
                raise CheckpointError(
                    f"{failed[0]} cannot go on where the checkpoint has it: {failed[0].restore_problem}. Use the same "
                    "backend, wrappers and env_states as the run that saved it; or begin anew without resume, and take "
                    "weights and extra from envfleet.load_checkpoint(path)"
                )
            self._raise_if_hopeless(len(self._fleet) - 1)
            return not any(record.is_ready and record.to_restore is not None for record in self._fleet)

        workers, limit_s = range(self.num_workers), math.inf if timeout_s is None else timeout_s
        if not self.head.wait(is_done, limit_s, lambda: self._fleet.last_progress_s(workers)):
            late = [record.worker for record in self._fleet if record.is_ready and record.to_restore is not None]
            raise ClusterTimeout(f"envs and policies were not restored within {limit_s:g} s: {self.about(late)}")

    @property
    def metadata(self) -> dict[str, Any]:
        """The metadata of the envs, known once a worker is ready."""
        return self._fleet.metadata

    def _raise_if_hopeless(self, num_spare: int) -> None:
        unbuilt = [record for record in self._fleet if record.not_ready is not None]
        if len(unbuilt) > num_spare and (failed := unbuilt[0].not_ready) is not None:
            text = f"{failed.error}\n\n{failed.traceback}"
            raise WorkerFailed(f"{unbuilt[0].member} cannot build its pool: {text}")
        hopeless = [record for record in self._fleet if record.is_hopeless_at_start]
        if len(hopeless) > num_spare:
            worker, problem = hopeless[0].worker, hopeless[0].restarts.problem
            where = f" (it looked for the head at {self._found_at})"
            raise WorkerLost(f"worker {worker} does not start: {problem}{where}{self._log(worker)}")

    def _show(self, progress: Progress, pending: list[WorkerRecord]) -> None:
        text = f"{self._fleet.num_ready} of {self.num_workers} workers are ready"
        if pending:
            detail = pending[0].status.detail.partition("\n")[0]
            text += f", {len(pending)} pending: worker {pending[0].worker}: {detail}"
        progress.show(text, is_news=bool(pending))

    def _raise_join_timeout(self, when: str) -> None:
        num_joined = sum(record.member is not None for record in self._fleet)
        missing = "; ".join(map(self._about, self._fleet.missing))
        raise JoinTimeout(
            f"{num_joined} of {self.num_workers} workers joined {when}, and not all of them are ready: {missing}. "
            f"They look for the head at {self._found_at}"
        )

    def begin(self, activity: Activity | None) -> None:
        """Make this the current activity; orders of the one before it are cancelled. None: there is no activity."""
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
    def activity(self) -> Activity | None:
        """The current activity; None if there is none."""
        return None if self._activity is None else self._activity()

    @property
    def is_busy(self) -> bool:
        """Whether a stream runs, or another activity was begun and not finished."""
        return self._activity is not None and self._activity() is not None and self.head.has_open_orders

    def is_doing(self, activity: Activity) -> bool:
        """Whether this is the current activity. Never in a fork of the owner, whose locks may stay held."""
        is_current = self._activity is not None and self._activity() is activity
        return is_current and not self._is_closed and os.getpid() == self._owner_pid

    def take(self, workers: Iterable[int], if_incomplete: str = "") -> PendingAnswers:
        """Take the oldest answers of these workers, which must all have one.

        Args:
            workers: The workers whose answers to take.
            if_incomplete: What becomes of the call if a worker could not carry out its order; part of the error text.
        """
        answers = self._fleet.take_answers(workers)
        errors = [
            error
            # First those without a result: nothing will be returned, and the caller gets one error only.
            for answer in sorted(answers, key=lambda each: not isinstance(each.result, OrderFailed))
            for error in errors_of(
                answer,
                self.num_envs_per_worker,
                self._fleet[answer.member.worker].problem,
                self._raises_env_errors,
                if_incomplete,
            )
        ]
        return PendingAnswers(answers, errors)

    def first_ready(self, workers: Iterable[int]) -> list[int]:
        """Those of these workers whose answers are there, in the order in which they came."""
        return self._fleet.answered(workers)

    def wait_for_answers(self, workers: Collection[int], timeout_s: float | None, then: str) -> None:
        """Wait until each of these workers has answered. `then` ends the text of ClusterTimeout."""
        self.wait_for_some(workers, len(workers), timeout_s, then)

    def wait_for_some(self, workers: Collection[int], num_workers: int, timeout_s: float | None, then: str) -> None:
        """Wait until `num_workers` of these workers have answered."""

        def is_done() -> bool:
            num_answered = sum(1 for worker in workers if self._fleet[worker].answers)
            if num_answered < num_workers:
                self._raise_if_given_up(workers, len(workers) - num_workers)
            return num_answered >= num_workers

        self._wait(is_done, workers, timeout_s, then)

    def wait_for_any(self, timeout_s: float | None, then: str, is_enough: Callable[[], bool] | None = None) -> None:
        """Wait until any worker has answered. WorkerLost is raised only if all of them are given up.

        Args:
            timeout_s: The longest wait; None: no limit.
            then: The end of the text of ClusterTimeout.
            is_enough: What to wait for instead; None: any answer.
        """
        workers = range(self.num_workers)

        def is_done() -> bool:
            if any(record.answers for record in self._fleet) if is_enough is None else is_enough():
                return True
            self._raise_if_given_up(workers, self.num_workers - 1)
            return False

        self._wait(is_done, workers, timeout_s, then)

    def _wait(self, is_done: Callable[[], bool], workers: Collection[int], timeout_s: float | None, then: str) -> None:
        """Time in which chunks of an answer, or of what a worker needs for it, arrive does not count, see Head.wait."""
        begun_s = time.monotonic()
        limit_s = math.inf if timeout_s is None else timeout_s
        log = WaitLog(logger, begun_s)

        def is_over() -> bool:
            if is_done():
                return True
            log.look(time.monotonic(), lambda: self._late(workers))
            return False

        if not self.head.wait(is_over, limit_s, lambda: self._fleet.last_progress_s(workers)):
            waited_s = time.monotonic() - begun_s
            extended = f" ({waited_s:.0f} s with large messages on their way)" if waited_s > 2 * limit_s else ""
            whose = self.limit_text(limit_s)
            raise ClusterTimeout(f"no answer within {limit_s:g} s{extended}, {whose}: {self._late(workers)}.\n{then}")

    def limit_text(self, timeout_s: float) -> str:
        """Which setting has ended a wait for workers, and how to raise it."""
        if timeout_s != self._config.timing.timeout_s:
            return "the timeout_s of this call"
        pool_s = self._config.plans[0].pool.timeout_s
        return (
            "timing.timeout_s (raise it with timing=Timing(timeout_s=...), None: no limit; how long a step of one env "
            f"may take is another setting, pool=PoolSettings({limit_text('timeout_s', pool_s)}))"
        )

    def _late(self, workers: Collection[int]) -> str:
        return self.about(worker for worker in workers if not self._fleet[worker].answers)

    def _raise_if_given_up(self, workers: Collection[int], num_spare: int) -> None:
        gone = [self._fleet[worker] for worker in workers if self._fleet[worker].is_given_up]
        if len(gone) > num_spare:
            lost = "; ".join(f"{record.problem}{self._log(record.worker)}" for record in gone)
            raise WorkerLost(f"lost, and not replaced any more (max_worker_restarts, or the launcher refuses): {lost}")

    def about(self, workers: Iterable[int]) -> str:
        """What is known of workers that are late."""
        return "; ".join(self._about(self._fleet[worker]) for worker in workers)

    def _about(self, record: WorkerRecord) -> str:
        return record.about(time.monotonic(), self._monitor.log_place(record.worker))

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
