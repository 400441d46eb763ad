"""The process backend: the parent of child processes that run any Python env."""

from __future__ import annotations

import logging
import os
import signal
import time
import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np

from envfleet._native import core
from envfleet.contract.arrays import Array, IntArray
from envfleet.contract.batch import StepBatch
from envfleet.contract.episode import Autoreset
from envfleet.contract.errors import ChildDied, EnvFailed, PoolTimeout, StepOnEndedEpisode
from envfleet.contract.live_changes import Change
from envfleet.contract.pool_config import Line, PoolConfig
from envfleet.contract.spaces import SpaceTree
from envfleet.contract.spec import EnvTraits
from envfleet.pool.backend import StepAtOnce
from envfleet.pool.building import EnvBuilder
from envfleet.pool.guard import Failure, backoff_s
from envfleet.pool.process import child as process_child
from envfleet.pool.process.change_channel import NO_CHANGES, ChangeSender
from envfleet.pool.process.cpus import usable_cpus
from envfleet.pool.process.info_columns import InfoColumns
from envfleet.pool.process.object_channel import FileClosed, ObjectChannel, Windows
from envfleet.pool.process.resources import ProcessResources
from envfleet.pool.process.rows import Extras, assemble_batch
from envfleet.pool.process.shared_arrays import MemoryFiles, PoolShape, SharedArrays
from envfleet.pool.process.spawner import KILL_WAIT_S, ReportExits, Signal, Spawn, Spawner
from envfleet.pool.process.step_timing import StepTimes, advice
from envfleet.pool.registrations import Registrations

logger = logging.getLogger("envfleet.pool")

WAIT_SLICE_S = 0.2  # how often a wait looks whether the spawner still lives; all else wakes it at once
STACK_WAIT_S = 1.0

_READY, _NEWS = core.Waiting.READY, core.Waiting.NEWS
_OP_NAMES = {core.Op.STEP: "in step()", core.Op.RESET: "in reset()"}


class ProcessBackend:
    """Child processes, each with several envs, and the memory they share with this process."""

    steps_some = True
    why_no_changes: str | None = None

    def __init__(self, builders: Sequence[EnvBuilder], config: PoolConfig) -> None:
        """Start the children and have them build the envs: env 0 first, which tells the spaces."""
        self._config = config
        self.step_at_once: StepAtOnce | None = None
        self.is_step_pending = False
        self._builders = list(builders)
        self._registrations = Registrations.of_this_process()
        self._warnings: set[str] = set()  # that were logged
        self._files = MemoryFiles.create()
        self._channel = ObjectChannel(self._files.objects)
        self._windows = Windows(config.num_envs)
        self._resources = ProcessResources(self._files)
        self._finalizer = weakref.finalize(self, ProcessResources.shut, self._resources)
        self._shape = self._choose_shape()
        self._has_begun = False
        self._num_requests = [1] * self._shape.num_children  # the first reply says that the child is ready
        self._all_env_ids = np.arange(config.num_envs, dtype=np.int32)
        # A caller who has chosen the number needs no advice on it.
        self._awaits_step_times = config.num_workers is None and self._shape.num_children < config.num_envs
        deadline_s = time.monotonic() + config.start_timeout_s
        try:
            self.traits: EnvTraits = self._begin_with_first(deadline_s)
            self._obs_tree = SpaceTree(self.traits.observation_space)
            self._action_tree = SpaceTree(self.traits.action_space)
            self._info_columns = InfoColumns(self.traits.info_columns)
            SharedArrays.allocate(self._files, self._shape, self._action_tree)
            self._arrays = SharedArrays(self._files, self._shape, self._obs_tree, self._action_tree, self._info_columns)
            self._arrays.autoreset = config.autoreset
            self._changes = ChangeSender(self._files.changes, self._arrays)
            self._task_queues = self._resources.task_queues = self._arrays.task_queues
            self._task_queues.let_parent_spin(self._shape.num_children < usable_cpus())
            self._num_requests[0] += 1
            self._task_queues.post_request(0)
            for child in range(1, self._shape.num_children):
                self._spawn(child)
            for child in range(self._shape.num_children):
                self._wait_replies(child, deadline_s, "build its envs", "start_timeout_s")
            self._has_begun = True
        except BaseException:
            self.close()
            raise

    def reset(self, env_ids: IntArray, seeds: Sequence[int | None], options: dict[str, Any] | None, line: Line) -> None:
        """See Backend."""
        self._channel.put_code(Windows.options, options, "options")
        for env_id, seed in zip(env_ids.tolist(), seeds, strict=True):
            self._task_queues.set_seed(env_id, seed)
        if line is Line.FULL and len(env_ids) < self._config.num_envs:
            self._task_queues.send_reset_of_some(env_ids)
        else:
            self._task_queues.send(env_ids, core.Op.RESET, line)

    def send(self, env_ids: IntArray | None, action_leaves: list[Any]) -> None:
        """See Backend."""
        for column, leaf in zip(self._arrays.action_columns, action_leaves, strict=True):
            if column is not None:
                column[... if env_ids is None else env_ids] = leaf
        if env_ids is None:
            env_ids = self._all_env_ids
        if self._action_tree.object_leaves:
            for row, env_id in enumerate(env_ids.tolist()):
                objects = [action_leaves[leaf][row] for leaf in self._action_tree.object_leaves]
                self._channel.put_code(self._windows.action(env_id), objects, "actions")
        self._task_queues.send(env_ids, core.Op.STEP, self._config.line)

    def repeat(self, env_ids: IntArray) -> None:
        """See Backend."""
        self._task_queues.send(env_ids, core.Op.REPEAT, Line.FULL)

    def recv(self, line: Line, timeout_s: float) -> StepBatch:
        """See Backend."""
        deadline_s = time.monotonic() + timeout_s
        while (waited := self._task_queues.wait_full(line, self._slice_s(deadline_s))) is not _READY:
            self._after_wait(waited)
            if time.monotonic() >= deadline_s:
                raise self._timeout(f"no full batch after {timeout_s:g} s")
        if self._awaits_step_times:
            self._hear_of_step_times()
        flags, arrays = self._task_queues.take(line)
        if flags == 0 and self._obs_tree.is_one_array:  # the common case, for which the caller waits
            infos = self._info_columns.read(arrays.infos, len(arrays.env_ids)).columns
            return StepBatch(arrays.env_ids, arrays.obs[0], arrays.rewards, arrays.terminated, arrays.truncated, infos)
        extras = self._extras(arrays.env_ids, arrays.row_flags) if flags else {}
        return assemble_batch(self._obs_tree, arrays, extras, self._info_columns)

    def drain(self, timeout_s: float) -> None:
        """See Backend. Failures of envs that nobody waits for any more are only logged."""
        deadline_s = time.monotonic() + timeout_s
        pause_s = 0.0001
        while self._task_queues.busy_env_ids():
            try:
                self._after_wait(_NEWS)
            except (EnvFailed, StepOnEndedEpisode) as error:
                logger.warning("before the reset: %s", str(error))
            if time.monotonic() >= deadline_s:
                raise self._timeout(f"envs still at work after {timeout_s:g} s")
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, 0.01)
        self._task_queues.abandon()

    def call(self, env_ids: Sequence[int], name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
        """See Backend."""
        request = process_child.Call(tuple(env_ids), name, args, kwargs)
        return self._request([request] * self._shape.num_children, f"call {name!r}")

    def set_attr(self, env_ids: Sequence[int], name: str, values: Sequence[Any]) -> None:
        """See Backend."""
        by_child: list[dict[int, Any]] = [{} for _ in range(self._shape.num_children)]
        for env_id, value in zip(env_ids, values, strict=True):
            by_child[self._task_queues.child_of(env_id)][env_id] = value
        self._request([process_child.SetAttr(name, each) for each in by_child], f"set {name!r}")

    def change(self, change: Change) -> None:
        """See Backend. Children look for changes before each task."""
        self._changes.send(change)

    def switch_autoreset(self, mode: Autoreset) -> bool:
        """See Backend. Children, also those that take the place of others, look at the mode before each task."""
        self._arrays.autoreset = mode
        return True

    def close(self) -> None:
        """See Backend."""
        self._finalizer()

    def abandon(self) -> None:
        """See Backend. ProcessResources sees to it."""

    # -- starting --

    def _choose_shape(self) -> PoolShape:
        num_envs, num_workers = self._config.num_envs, self._config.num_workers
        if num_workers is None:
            num_workers, reason = usable_cpus(), "one for each CPU"
        else:
            reason = "as the caller chose"
        num_workers = min(num_workers, num_envs)
        logger.info("%d worker processes for %d envs: %s", num_workers, num_envs, reason)
        return PoolShape(num_envs, num_workers, self._config.rows, self._config.has_finals)

    def _begin_with_first(self, deadline_s: float) -> EnvTraits:
        """Start the first child. It builds env 0, says what that is like, and waits for the arrays."""
        SharedArrays.allocate_task_queues(self._files, self._shape)
        task_queues = self._task_queues = SharedArrays.task_queues_alone(self._files, self._shape)
        task_queues.clear()
        self._resources.spawner.tell(self._watch())
        self._resources.num_children = self._shape.num_children
        self._spawn(0, is_first=True)
        while task_queues.wait_replies(0, 1, self._slice_s(deadline_s)) is not _READY:
            if not self._resources.spawner.is_alive:
                raise EnvFailed("the process that starts the envs died before it built one", env_id=0)
            for _, status in task_queues.take_exits():
                raise self._why_not_built(_death(status))
            if time.monotonic() >= deadline_s:
                stack = "" if task_queues.pid(0) is None else f"\n{self._stack_of(0)}"
                raise PoolTimeout(
                    f"the first env was not built after start_timeout_s={self._config.start_timeout_s:g} s; "
                    f"if it takes that long, pass a larger start_timeout_s{stack}"
                )
        self._resources.task_queues = task_queues  # from here on an env is there to be closed
        traits: EnvTraits = self._channel.get(Windows.traits)
        return traits

    def _why_not_built(self, how: str) -> Exception:
        """The first child died before env 0 was there."""
        if how == _BUILD_FAILED_TEXT:
            failure: Failure = self._channel.get(self._windows.reply(0))
            return failure.to_exception("cannot be built:")
        return ChildDied(f"the process that built the first env {how}", env_id=0, env_ids=[0])

    def _watch(self) -> ReportExits:
        shape = self._shape
        return ReportExits(self._files.task_queues, shape.num_envs, shape.num_children, shape.batch_size)

    def _spawn(
        self, child: int, *, is_first: bool = False, lost_because: str | None = None, delay_s: float = 0.0
    ) -> None:
        first, end = self._task_queues.first_env(child), self._task_queues.first_env(child + 1)
        start = process_child.Start(
            builders=self._builders[first:end],
            registrations=self._registrations,
            first_env=first,
            traits=None if is_first else self.traits,
            config=self._config,
            times_steps=is_first and self._awaits_step_times,
            lost_because=lost_because,
            delay_s=delay_s,
            changes=NO_CHANGES if is_first else self._changes.for_new_child(child),
        )
        self._channel.put_code(self._windows.request(child), start)
        self._resources.spawner.tell(Spawn(child, process_child.run, (self._files, self._shape)))

    # -- waiting --

    def _slice_s(self, deadline_s: float) -> float:
        return max(0.0, min(WAIT_SLICE_S, deadline_s - time.monotonic()))

    def _after_wait(self, waited: core.Waiting) -> None:
        """Nothing came: see to children that died, and raise what the caller has not heard of yet."""
        if not self._resources.spawner.is_alive:
            self._replace_spawner()
        if waited is not _NEWS:
            return
        deaths = [self._replace_child(child, _death(status)) for child, status in self._task_queues.take_exits()]
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

    def _hear_of_step_times(self) -> None:
        """Once the first child knows how its envs spend their time: advise more processes if they mostly wait."""
        if self._channel.is_empty(Windows.step_times):
            return
        self._awaits_step_times = False
        times: StepTimes = self._channel.get(Windows.step_times)
        if text := advice(times, self._shape.num_children, self._shape.num_envs, usable_cpus()):
            logger.warning(text)
        else:
            logger.info("%d worker processes fit: %s", self._shape.num_children, times)

    def _extras(self, env_ids: Array, row_flags: Array) -> dict[int, Extras]:
        extras: dict[int, Extras] = {}
        for row in np.flatnonzero(row_flags & core.RowFlag.HAS_OBJECTS).tolist():
            has_final = bool(row_flags[row] & core.RowFlag.HAS_FINAL)
            extras[row] = self._extras_of(int(env_ids[row]), has_final)
        return extras

    def _extras_of(self, env_id: int, has_final: bool) -> Extras:
        try:
            extras = Extras(*self._channel.get(self._windows.result(env_id)))
        except FileClosed:
            raise
        except Exception as error:  # the row must not be lost for it
            self._warn(f"the info of env {env_id} is left out, since it cannot be unpickled here: {error!r}")
            return Extras({}, {} if has_final else None, None, None, None)
        for name in extras.left_out:
            self._warn(f"{name} is left out, since it cannot be pickled")
        return extras

    def _warn(self, text: str) -> None:
        """Log a warning once."""
        if text not in self._warnings:
            self._warnings.add(text)
            logger.warning("%s", text)

    def _request(self, requests: Sequence[process_child.Request], what: str) -> list[Any]:
        deadline_s = time.monotonic() + self._config.timeout_s
        self._wait_for_idle(deadline_s)
        for child, request in enumerate(requests):
            self._channel.put_code(self._windows.request(child), request)
            self._num_requests[child] += 1
            self._task_queues.post_request(child)
        expected = list(self._num_requests)  # a child that takes another's place begins to count anew
        replies: list[Any] = []
        for child in range(self._shape.num_children):
            self._wait_replies(child, deadline_s, what, "timeout_s")
            lost = [each for each, number in enumerate(expected) if self._num_requests[each] != number]
            if lost:
                raise self._died_before_reply(lost, what)
            replies.append(self._channel.get(self._windows.reply(child)))
        for reply in replies:
            if isinstance(reply, Failure):
                raise reply.to_exception()
        return [value for reply in replies for value in reply]

    def _died_before_reply(self, children: list[int], what: str) -> ChildDied:
        ranges = [
            range(self._task_queues.first_env(child), self._task_queues.first_env(child + 1)) for child in children
        ]
        envs = ", ".join(f"{each.start} to {each.stop - 1}" for each in ranges)
        if len(children) == 1:
            text = f"the process of envs {envs} died before it could {what}; a new one takes its place"
        else:
            text = f"the processes of envs {envs} died before they could {what}; new ones take their place"
        env_ids = [env_id for each in ranges for env_id in each]
        return ChildDied(text, env_id=env_ids[0], env_ids=env_ids)

    def _wait_for_idle(self, deadline_s: float) -> None:
        """Until no child has a request: an earlier call may have timed out, a new child may still build its envs."""
        children = range(self._shape.num_children)
        while any(
            self._task_queues.wait_replies(each, self._num_requests[each], 0.0) is not _READY for each in children
        ):
            for child in children:
                self._wait_replies(child, deadline_s, "answer an earlier call", "timeout_s")

    def _wait_replies(self, child: int, deadline_s: float, what: str, setting: str) -> None:
        while True:
            waited = self._task_queues.wait_replies(child, self._num_requests[child], self._slice_s(deadline_s))
            if waited is _READY:
                return
            self._after_wait(waited)
            if time.monotonic() >= deadline_s:
                text = f"child {child} did not {what} within {setting}={getattr(self._config, setting):g} s"
                raise PoolTimeout(f"{text}\n{self._stack_of(child)}")

    # -- failing --

    def _replace_child(self, child: int, how: str) -> Exception | None:
        """Start another child in place of a dead one; returns what the caller must hear of it."""
        doing = self._task_queues.doing(child)
        first, end = self._task_queues.first_env(child), self._task_queues.first_env(child + 1)
        culprit = first if doing.env_id is None else doing.env_id
        has_reply = how in (_BUILD_FAILED_TEXT, _BROKE_DOWN_TEXT)
        reply = self._channel.get(self._windows.reply(child)) if has_reply else None
        is_in_env = doing.env_id is not None and doing.op in _OP_NAMES
        during = f" while env {doing.env_id} was {_OP_NAMES[doing.op]}" if is_in_env else ""
        name = f"process {pid}, which ran" if (pid := self._task_queues.pid(child)) else "the new process of"
        reason = f"{name} envs {first} to {end - 1}, {how}{during}"
        child_traceback = ""
        if isinstance(reply, Failure) and how == _BROKE_DOWN_TEXT:
            reason, child_traceback = f"{reason}: {reply.error}", reply.traceback
        self._task_queues.recover(child)
        self._num_requests[child] = 1
        num_failures = self._task_queues.add_failure(culprit)
        is_last = self._config.env_restarts is None or num_failures > self._config.env_restarts
        if self._has_begun or not is_last:  # or there will be no pool whose envs another child could build
            self._spawn(child, lost_because=reason, delay_s=backoff_s(num_failures))
        if not is_last:
            logger.warning("%s; a new one takes its place", reason)
            return None
        if isinstance(reply, Failure) and how == _BUILD_FAILED_TEXT:
            return reply.to_exception("cannot be built:")
        return ChildDied(
            f"{reason}; their episodes are lost, and a new process takes its place",
            env_id=culprit,
            env_ids=range(first, end),
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
            raise ChildDied(
                "the spawner process died, and with it all processes that ran envs; "
                "all episodes are lost, and new processes take their place",
                env_id=error.env_id,
                env_ids=range(self._shape.num_envs),
            )

    def _timeout(self, headline: str) -> PoolTimeout:
        busy = self._task_queues.busy_env_ids()
        lines = [f"{headline}; still at work: envs {busy}"]
        hung: list[int] = []
        for child in sorted({self._task_queues.child_of(env_id) for env_id in busy}):
            env_id, op, for_s = self._task_queues.doing(child)
            hung += [] if env_id is None else [env_id]
            waiting = [each for each in busy if self._task_queues.child_of(each) == child and each != env_id]
            if self._task_queues.wait_replies(child, 1, 0.0) is not _READY:  # a child's first reply: its envs are built
                lines.append(f"{self._name_of(child)} is building its envs; envs that wait for that: {waiting}")
            else:
                state = (
                    f"env {env_id} is {_OP_NAMES.get(op, 'at work')} for {for_s:.1f} s"
                    if env_id is not None
                    else "idle"
                )
                lines.append(f"{self._name_of(child)}: {state}; envs that wait behind it: {waiting}")
            if self._task_queues.pid(child):
                lines.append(self._stack_of(child))
        return PoolTimeout("\n".join(lines), env_ids=hung)

    def _stack_of(self, child: int) -> str:
        """The Python stack of a child, written by its signal handler even if the interpreter hangs."""
        start = os.fstat(self._files.stacks).st_size
        self._resources.spawner.tell(Signal(child, process_child.STACK_SIGNAL))
        deadline_s = time.monotonic() + STACK_WAIT_S
        size = start
        while time.monotonic() < deadline_s:
            time.sleep(0.05)
            now = os.fstat(self._files.stacks).st_size
            if now > start and now == size:
                return os.pread(self._files.stacks, size - start, start).decode(errors="replace").rstrip()
            size = now
        return f"({self._name_of(child)} does not answer the request for its stack)"

    def _name_of(self, child: int) -> str:
        """Its pid, if it has started: one that takes another's place may have to wait first."""
        pid = self._task_queues.pid(child)
        first, end = self._task_queues.first_env(child), self._task_queues.first_env(child + 1)
        return f"process {pid}" if pid else f"the new process of envs {first} to {end - 1}"


_BUILD_FAILED_TEXT = "could not build its envs"
_BROKE_DOWN_TEXT = "broke down"


def _death(status: int) -> str:
    """How a process ended, in words."""
    code = os.waitstatus_to_exitcode(status)
    if code == process_child.BUILD_FAILED:
        return _BUILD_FAILED_TEXT
    if code == process_child.BROKE_DOWN:
        return _BROKE_DOWN_TEXT
    return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"left with exit status {code}"
