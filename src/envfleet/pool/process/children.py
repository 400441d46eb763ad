"""Children: the child processes of a pool, from the first one's start to the replacement of those that die."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from envfleet._native import core
from envfleet.contract.arrays import IntArray
from envfleet.contract.errors import ChildDied, EnvFailed, PoolTimeout
from envfleet.contract.pool_config import PoolConfig
from envfleet.contract.spec import EnvTraits
from envfleet.pool.building import EnvBuilder
from envfleet.pool.guard import MOST_HANGS, Failure, backoff_s
from envfleet.pool.process import child as process_child
from envfleet.pool.process.change_channel import NO_CHANGES, ChangeSender
from envfleet.pool.process.child_reports import (
    BROKE_DOWN_TEXT,
    BUILD_FAILED_TEXT,
    KILLED_TEXT,
    ChildReports,
    death_text,
    listed,
)
from envfleet.pool.process.object_channel import FileClosed, ObjectChannel, Windows
from envfleet.pool.process.resources import ProcessResources
from envfleet.pool.process.rows import Extras
from envfleet.pool.process.shared_arrays import PoolShape, SharedArrays
from envfleet.pool.process.spawner import KILL_WAIT_S, ReportExits, Spawn, Spawner
from envfleet.pool.registrations import Registrations
from envfleet.pool.waits import HOW_TO_RAISE, WaitLog, deadline_in, limit_text, slice_s

logger = logging.getLogger("envfleet.pool")

MOST_LOSSES = 3  # children in a row that may be lost at one task of an env, or while they build their envs

_READY, _NEWS = core.Waiting.READY, core.Waiting.NEWS


class Losses(NamedTuple):
    """Children in a row that were lost at one task of an env."""

    num: int = 0
    num_hangs: int = 0  # of these: killed because the env was late


def _nothing() -> None:
    """What is called while waiting if nothing is wanted."""


class Children:
    """Starts the children, answers for them, and puts another in the place of one that died."""

    def __init__(
        self,
        builders: Sequence[EnvBuilder],
        config: PoolConfig,
        shape: PoolShape,
        resources: ProcessResources,
        channel: ObjectChannel,
        windows: Windows,
    ) -> None:
        self._builders = list(builders)
        self._registrations = Registrations.of_this_process()
        self._config = config
        self._shape = shape
        self._resources = resources
        self._files = resources.files
        self._channel = channel
        self._windows = windows
        self._traits: EnvTraits | None = None  # of env 0, once that is built
        self._changes: ChangeSender | None = None  # once the arrays are laid out
        self._has_begun = False
        self._seeds: list[int | None] = [None] * shape.num_envs  # of each env's last seeded reset
        self._losses: dict[int, Losses] = {}  # by env id: at its last task
        self._most_losses = max(config.env_restarts or 0, MOST_LOSSES)
        self._num_not_built = [0] * shape.num_children  # children in a row that were lost while they built their envs
        self._num_requests = [1] * shape.num_children  # the first reply says that the child is ready
        self.spawned_s = [0.0] * shape.num_children  # when each child's process was asked for
        self.killed_because: dict[int, str] = {}  # by child: of the death that is to be noticed next
        self.while_waiting: Callable[[], None] = _nothing  # called several times a second; what it raises is passed on
        SharedArrays.allocate_task_queues(self._files, shape)
        self._task_queues = SharedArrays.task_queues_alone(self._files, shape)
        self.reports = ChildReports(self._task_queues, resources)

    # -- starting --

    def start_first(self, deadline_s: float, *, times_steps: bool) -> EnvTraits:
        """Start the first child. It builds env 0, says what that is like, and waits for the arrays."""
        self._task_queues.clear()
        self._resources.spawner.tell(self._watch())
        self._resources.num_children = self._shape.num_children
        self._spawn(0, times_steps=times_steps)
        log = WaitLog(logger, time.monotonic())
        while self._task_queues.wait_replies(0, 1, slice_s(deadline_s)) is not _READY:
            self.while_waiting()
            log.look(time.monotonic(), lambda: f"the first env is being built ({self._start_limit})")
            if not self._resources.spawner.is_alive:
                raise EnvFailed("the process that starts the envs died before it built one", env_id=0)
            for _, status in self._task_queues.take_exits():
                raise self._why_not_built(death_text(status))
            if time.monotonic() >= deadline_s:
                stack = "" if self._task_queues.pid(0) is None else f"\n{self.reports.stack_of(0)}"
                raise PoolTimeout(
                    f"the first env was not built after {self._start_limit}; "
                    f"if it takes that long, pass a larger start_timeout_s, or None for no limit{stack}"
                )
        self._resources.task_queues = self._task_queues  # from here on an env is there to be closed
        self._traits, why_no_spec = process_child.FirstReply(*self._channel.get(Windows.traits))
        if why_no_spec is not None:
            logger.warning("the spec of the envs is left out, since it cannot be pickled: %s", why_no_spec)
        return self._traits

    def start_others(self, task_queues: core.SharedTaskQueues, changes: ChangeSender, deadline_s: float) -> None:
        """The arrays are laid out, and these are their task queues: let the first child go on, and start the others."""
        self._task_queues = self._resources.task_queues = task_queues
        self._changes = changes
        self.reports = ChildReports(task_queues, self._resources)
        self._num_requests[0] += 1
        task_queues.post_request(0)
        for child in range(1, self._shape.num_children):
            self._spawn(child)
        for child in range(self._shape.num_children):
            self._wait_replies(child, deadline_s, "build its envs", self._start_limit)
        self._has_begun = True

    @property
    def _start_limit(self) -> str:
        return limit_text("start_timeout_s", self._config.start_timeout_s)

    def _why_not_built(self, how: str) -> Exception:
        """The first child died before env 0 was there."""
        if how == BUILD_FAILED_TEXT:
            failure: Failure = self._channel.get(self._windows.reply(0))
            return failure.to_exception("cannot be built:")
        return ChildDied(f"the process that built the first env {how}", env_id=0, env_ids=[0])

    def _watch(self) -> ReportExits:
        shape = self._shape
        return ReportExits(self._files.task_queues, shape.num_envs, shape.num_children, shape.batch_size)

    def _spawn(
        self, child: int, *, times_steps: bool = False, lost_because: str | None = None, delay_s: float = 0.0
    ) -> None:
        env_ids = self.reports.env_ids_of(child)
        start = process_child.Start(
            builders=self._builders[env_ids.start : env_ids.stop],
            registrations=self._registrations,
            first_env=env_ids.start,
            seeds=self._seeds[env_ids.start : env_ids.stop],
            traits=self._traits,
            config=self._config,
            times_steps=times_steps,
            lost_because=lost_because,
            num_losses={each: losses.num for each, losses in self._losses.items() if self._is_given_up(losses)},
            builds_later=self._num_not_built[child] > MOST_LOSSES,
            delay_s=delay_s,
            changes=NO_CHANGES if self._changes is None else self._changes.for_new_child(child),
        )
        self._channel.put_code(self._windows.request(child), start)
        self.spawned_s[child] = time.monotonic() + delay_s
        self._resources.spawner.tell(Spawn(child, process_child.run, (self._files, self._shape)))

    def note_seed(self, env_id: int, seed: int | None) -> None:
        """A reset of this env is sent; None: it has no seed, and that of an earlier reset still counts."""
        if seed is not None:
            self._seeds[env_id] = seed

    def begin_tasks(self, env_ids: IntArray) -> None:
        """Tasks of these envs are sent. One whose last task was given up has a single try more."""
        for env_id in env_ids.tolist() if self._losses else ():
            losses = self._losses.pop(env_id, Losses())
            if self._is_given_up(losses):
                self._losses[env_id] = Losses(min(losses.num, self._most_losses), min(losses.num_hangs, MOST_HANGS - 1))

    def _is_given_up(self, losses: Losses) -> bool:
        return losses.num > self._most_losses or losses.num_hangs >= MOST_HANGS

    # -- asking --

    def ask(self, requests: Sequence[process_child.Request], what: str, timeout_s: float | None) -> list[Any]:
        """Send each child its request, and return what they answer for their envs, in the order of the envs."""
        deadline_s, limit = deadline_in(timeout_s), limit_text("timeout_s", timeout_s)
        self._wait_for_idle(deadline_s, limit)
        for child, request in enumerate(requests):
            self._channel.put_code(self._windows.request(child), request)
            self._num_requests[child] += 1
            self._task_queues.post_request(child)
        expected = list(self._num_requests)  # a child that takes another's place begins to count anew
        replies: list[Any] = []
        for child in range(self._shape.num_children):
            self._wait_replies(child, deadline_s, what, limit)
            lost = [each for each, number in enumerate(expected) if self._num_requests[each] != number]
            if lost:
                raise self._died_before_reply(lost, what)
            replies.append(self._channel.get(self._windows.reply(child)))
        for reply in replies:
            if isinstance(reply, Failure):
                raise reply.to_exception()
        return [value for reply in replies for value in reply]

    def _died_before_reply(self, children: list[int], what: str) -> ChildDied:
        ranges = [self.reports.env_ids_of(child) for child in children]
        envs = ", ".join(f"{each.start} to {each.stop - 1}" for each in ranges)
        if len(children) == 1:
            text = f"the process of envs {envs} died before it could {what}; a new one takes its place"
        else:
            text = f"the processes of envs {envs} died before they could {what}; new ones take their place"
        env_ids = [env_id for each in ranges for env_id in each]
        return ChildDied(text, env_id=env_ids[0], env_ids=env_ids)

    def _wait_for_idle(self, deadline_s: float, limit: str) -> None:
        """Until no child has a request: an earlier call may have timed out, a new child may still build its envs."""
        children = range(self._shape.num_children)
        while any(
            self._task_queues.wait_replies(each, self._num_requests[each], 0.0) is not _READY for each in children
        ):
            for child in children:
                self._wait_replies(child, deadline_s, "answer an earlier call", limit)

    def _wait_replies(self, child: int, deadline_s: float, what: str, limit: str) -> None:
        log = WaitLog(logger, time.monotonic())
        while True:
            waited = self._task_queues.wait_replies(child, self._num_requests[child], slice_s(deadline_s))
            if waited is _READY:
                return
            self.after_wait(waited)
            log.look(time.monotonic(), lambda: f"child {child} has yet to {what} ({limit})")
            if time.monotonic() >= deadline_s:
                text = f"child {child} did not {what} within {limit}"
                remedy = HOW_TO_RAISE[limit.partition("=")[0]]
                raise PoolTimeout(f"{text}\n{self.reports.stack_of(child)}\n{remedy}")

    # -- failing --

    def after_wait(self, waited: core.Waiting) -> None:
        """Nothing came: see to children that died, and raise what the caller has not heard of yet."""
        self.while_waiting()
        if not self._resources.spawner.is_alive:
            self._replace_spawner()
        if waited is not _NEWS:
            return
        deaths = [self._replace_child(child, death_text(status)) for child, status in self._task_queues.take_exits()]
        if error := next((error for error in deaths if error is not None), None):
            raise error
        if (env_id := self._task_queues.next_failed_env()) is not None:
            raise self._failure_of(env_id).to_exception()

    def _failure_of(self, env_id: int) -> Failure:
        try:
            extras = Extras(*self._channel.get(self._windows.result(env_id)))
        except FileClosed:
            raise
        except Exception as error:  # its info, for example, is of a class that this process does not have
            failure = Failure.of(env_id, error)
            return failure._replace(error=f"an exception; its report cannot be unpickled here: {failure.error}")
        assert extras.failure is not None  # the flag and the report are written together
        return extras.failure

    def _replace_child(self, child: int, how: str) -> Exception | None:
        """Start another child in place of a dead one; returns what the caller must hear of it."""
        was_late = how == KILLED_TEXT and child in self.killed_because
        if was_late:
            how = self.killed_because[child]
        self.killed_because.pop(child, None)
        doing, env_ids = self._task_queues.doing(child), self.reports.env_ids_of(child)
        culprit = env_ids.start if doing.env_id is None else doing.env_id
        has_reply = how in (BUILD_FAILED_TEXT, BROKE_DOWN_TEXT)
        reply = self._channel.get(self._windows.reply(child)) if has_reply else None
        reason, child_traceback = self.reports.death_of(child, how), ""
        if isinstance(reply, Failure) and how == BROKE_DOWN_TEXT:
            reason, child_traceback = f"{reason}: {reply.error}", reply.traceback
        if self._task_queues.wait_replies(child, 1, 0.0) is not _READY:
            self._num_not_built[child] += 1
        elif self._num_not_built[child] <= MOST_LOSSES:
            self._num_not_built[child] = 0
        if doing.env_id in self._task_queues.recover(child):
            losses = self._losses.get(culprit, Losses())
            self._losses[culprit] = Losses(losses.num + 1, losses.num_hangs + was_late)
        self._num_requests[child] = 1
        num_failures = self._task_queues.add_failure(culprit)
        is_last = self._config.env_restarts is None or num_failures > self._config.env_restarts
        if self._has_begun or not is_last:  # or there will be no pool whose envs another child could build
            self._spawn(child, lost_because=reason, delay_s=backoff_s(num_failures))
        if not is_last:
            logger.warning("%s; a new one takes its place", reason)
            return None
        if isinstance(reply, Failure) and how == BUILD_FAILED_TEXT:
            return reply.to_exception("cannot be built:")
        return ChildDied(
            f"{reason}; their episodes are lost, and a new process takes its place",
            env_id=culprit,
            env_ids=env_ids,
            child_traceback=child_traceback,
        )

    def _replace_spawner(self) -> None:
        logger.warning("the spawner process died, and all children with it; they are started anew")
        self._resources.spawner.close()
        pids = [pid for child in range(self._shape.num_children) if (pid := self._task_queues.pid(child))]
        deadline_s = time.monotonic() + KILL_WAIT_S
        while any(os.path.exists(f"/proc/{pid}") for pid in pids) and time.monotonic() < deadline_s:
            time.sleep(0.001)  # the kernel is killing them; none may write any more when its place is cleared
        self._resources.spawner = Spawner(self._files.all())
        self._resources.spawner.tell(self._watch())
        self._task_queues.take_exits()
        how = "died with its spawner process"
        errors = [self._replace_child(child, how) for child in range(self._shape.num_children)]
        if error := next((error for error in errors if isinstance(error, ChildDied)), None):
            env_ids = range(self._shape.num_envs)
            raise ChildDied(
                f"the spawner process died, and with it all processes that ran envs: {listed(env_ids)}; "
                "their episodes are lost, and new processes take their place",
                env_id=error.env_id,
                env_ids=env_ids,
            )
