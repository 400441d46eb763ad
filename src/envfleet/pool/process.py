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

from envfleet import _native
from envfleet.contract.batch import StepBatch
from envfleet.contract.errors import ChildDied, EnvFailed, PoolTimeout
from envfleet.contract.spaces import SpaceTree
from envfleet.contract.spec import EnvTraits
from envfleet.pool import process_child
from envfleet.pool.backend import IntArray, Line, PoolConfig, StepAtOnce
from envfleet.pool.building import EnvBuilder
from envfleet.pool.cpus import usable_cpus
from envfleet.pool.guard import Failure, backoff_s
from envfleet.pool.household import Household
from envfleet.pool.info_columns import InfoColumns
from envfleet.pool.nursery import KILL_WAIT_S, SCOUT, Nursery, Signal, Spawn, WatchBoard
from envfleet.pool.object_lane import ObjectLane, Windows
from envfleet.pool.rows import Extras, assemble_batch
from envfleet.pool.scout import Findings, choose_num_workers
from envfleet.pool.shared_arrays import MemoryFiles, PoolShape, SharedArrays

logger = logging.getLogger("envfleet.pool")

WAIT_SLICE_S = 0.2  # how often a wait looks whether the nursery still lives; all else wakes it at once
STACK_WAIT_S = 1.0
MEASURE_WAIT_S = 10.0  # for the scout's steps; they are cut off at 0.2 s unless one of them hangs

_OP_NAMES = {_native.STEP: "in step()", _native.RESET: "in reset()"}


class ProcessBackend:
    """Child processes, each with several envs, and the memory they share with this process."""

    def __init__(self, builders: Sequence[EnvBuilder], config: PoolConfig) -> None:
        """Learn the spaces from a scout, then start the children and have them build the envs."""
        self._config = config
        self.step_at_once: StepAtOnce | None = None
        self._builders = list(builders)
        self._files = MemoryFiles.create()
        self._lane = ObjectLane(self._files.objects)
        self._windows = Windows(config.num_envs)
        self._household = Household(self._files)
        self._finalizer = weakref.finalize(self, Household.shut, self._household)
        deadline_s = time.monotonic() + config.start_timeout_s
        try:
            findings = self._scout(deadline_s)
            self._shape = self._choose_shape(findings)
            self.traits: EnvTraits = findings.traits
            self._obs_tree = SpaceTree(self.traits.observation_space)
            self._action_tree = SpaceTree(self.traits.action_space)
            SharedArrays.allocate(self._files, self._shape, self._action_tree)
            self._info_columns = InfoColumns(self.traits.info_columns)
            self._arrays = SharedArrays(self._files, self._shape, self._obs_tree, self._action_tree, self._info_columns)
            self._board = self._household.board = self._arrays.board
            self._household.num_children = self._shape.num_children
            self._board.clear()
            self._board.let_parent_spin(self._shape.num_children < usable_cpus())
            self._all_env_ids = np.arange(config.num_envs, dtype=np.int32)
            self._num_requests = [1] * self._shape.num_children  # the first reply says that the child is ready
            self._household.nursery.tell(self._watch())
            for child in range(self._shape.num_children):
                self._spawn(child, lost_because=None, delay_s=0.0)
            for child in range(self._shape.num_children):
                self._wait_replies(child, deadline_s, "build its envs", "start_timeout_s")
        except BaseException:
            self.close()
            raise

    def reset(self, env_ids: IntArray, seeds: Sequence[int | None], options: dict[str, Any] | None, line: Line) -> None:
        """See Backend."""
        self._lane.put_code(Windows.options, options)
        for env_id, seed in zip(env_ids.tolist(), seeds, strict=True):
            self._board.set_seed(env_id, seed)
        if line is Line.FULL and len(env_ids) < self._config.num_envs:
            ops = np.full(self._config.num_envs, _native.REPEAT)
            ops[env_ids] = _native.RESET
            self._board.send(self._all_env_ids, ops.tolist(), line)
        else:
            self._board.send(env_ids, _native.RESET, line)

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
                self._lane.put_code(self._windows.action(env_id), objects)
        self._board.send(env_ids, _native.STEP, self._config.line)

    def recv(self, line: Line, timeout_s: float) -> StepBatch:
        """See Backend."""
        deadline_s = time.monotonic() + timeout_s
        while (waited := self._board.wait_full(line, self._slice_s(deadline_s))) != _native.READY:
            self._after_wait(waited)
            if time.monotonic() >= deadline_s:
                raise self._timeout(f"no full batch after {timeout_s:g} s")
        flags, arrays = self._board.take(line)
        columns, final_columns = self._arrays.split(arrays)
        if flags == 0 and self._obs_tree.is_one_array:  # the common case, for which the caller waits
            infos = self._info_columns.read(columns[1:])
            return StepBatch(arrays[0], columns[0], arrays[1], arrays[2], arrays[3], {}, infos)
        extras = self._extras(arrays[0], arrays[4]) if flags else {}
        return assemble_batch(self._obs_tree, arrays[:4], columns, final_columns, extras, self._info_columns)

    def drain(self, timeout_s: float) -> None:
        """See Backend. Failures of envs that nobody waits for any more are only logged."""
        deadline_s = time.monotonic() + timeout_s
        pause_s = 0.0001
        while self._board.busy_env_ids():
            try:
                self._after_wait(_native.NEWS)
            except EnvFailed as error:
                logger.warning("before the reset: %s", str(error))
            if time.monotonic() >= deadline_s:
                raise self._timeout(f"envs still at work after {timeout_s:g} s")
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, 0.01)
        self._board.abandon()

    def call(self, env_ids: Sequence[int], name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
        """See Backend."""
        request = process_child.Call(tuple(env_ids), name, args, kwargs)
        return self._request([request] * self._shape.num_children, f"call {name!r}")

    def set_attr(self, name: str, values: Sequence[Any]) -> None:
        """See Backend."""
        requests = [
            process_child.SetAttr(name, list(values[self._board.first_env(child) : self._board.first_env(child + 1)]))
            for child in range(self._shape.num_children)
        ]
        self._request(requests, f"set {name!r}")

    def close(self) -> None:
        """See Backend."""
        self._finalizer()

    # -- starting --

    def _scout(self, deadline_s: float) -> Findings:
        nursery, lane = self._household.nursery, self._lane
        lane.put_code(Windows.scout, self._builders[0])
        nursery.tell(Spawn(SCOUT, process_child.scout, (self._files, self._config.num_workers is None)))
        measured_by_s = None  # the latest time for its measurement to end, once the env is built
        while (exited := nursery.next_exit(WAIT_SLICE_S)) is None:
            now_s = time.monotonic()
            if not nursery.is_alive:
                raise EnvFailed("the process that starts the envs died before it built one", env_id=0)
            if measured_by_s is None and not lane.is_empty(Windows.traits):
                measured_by_s = now_s + MEASURE_WAIT_S
            if measured_by_s is not None and now_s >= measured_by_s:
                nursery.tell(Signal(SCOUT, signal.SIGKILL))
            elif measured_by_s is None and now_s >= deadline_s:
                raise PoolTimeout(
                    f"the first env was not built after start_timeout_s={self._config.start_timeout_s:g} s; "
                    "if it takes that long, pass a larger start_timeout_s"
                )
        if lane.is_empty(Windows.traits):
            raise ChildDied(f"the process that built the first env {_death(exited.status)}", env_id=0, env_ids=[0])
        traits: EnvTraits | Failure = lane.get(Windows.traits)
        if isinstance(traits, Failure):
            raise traits.to_exception("cannot be built:")
        return Findings(traits, None if lane.is_empty(Windows.timing) else lane.get(Windows.timing))

    def _choose_shape(self, findings: Findings) -> PoolShape:
        num_envs, num_workers = self._config.num_envs, self._config.num_workers
        if num_workers is None:
            num_workers, reason = choose_num_workers(findings, num_envs, usable_cpus())
        else:
            num_workers, reason = min(num_workers, num_envs), "as the caller chose"
        logger.info("%d worker processes for %d envs: %s", num_workers, num_envs, reason)
        return PoolShape(num_envs, num_workers, self._config.rows, self._config.autoreset)

    def _watch(self) -> WatchBoard:
        shape = self._shape
        return WatchBoard(self._files.board, shape.num_envs, shape.num_children, shape.batch_size)

    def _spawn(self, child: int, *, lost_because: str | None, delay_s: float) -> None:
        first, end = self._board.first_env(child), self._board.first_env(child + 1)
        start = process_child.Start(self._builders[first:end], first, self.traits, self._config, lost_because, delay_s)
        self._lane.put_code(self._windows.request(child), start)
        self._household.nursery.tell(Spawn(child, process_child.run, (self._files, self._shape)))

    # -- waiting --

    def _slice_s(self, deadline_s: float) -> float:
        return max(0.0, min(WAIT_SLICE_S, deadline_s - time.monotonic()))

    def _after_wait(self, waited: int) -> None:
        """Nothing came: see to children that died, and raise what the caller has not heard of yet."""
        if not self._household.nursery.is_alive:
            self._replace_nursery()
        if waited != _native.NEWS:
            return
        exits = self._board.take_exits()
        while exits and self._household.nursery.next_exit(0.0):
            pass  # the same news, by the connection that the scout needed
        deaths = [self._replace_child(child, _death(status)) for child, status in exits]
        if error := next((error for error in deaths if error is not None), None):
            raise error
        if (env_id := self._board.next_failed_env()) is not None:
            extras = Extras(*self._lane.get(self._windows.result(env_id)))
            assert extras.failure is not None  # the flag and the report are written together
            raise extras.failure.to_exception()

    def _extras(self, env_ids: np.ndarray[Any, Any], row_flags: np.ndarray[Any, Any]) -> dict[int, Extras]:
        extras: dict[int, Extras] = {}
        for row in np.flatnonzero(row_flags & _native.HAS_OBJECTS).tolist():
            extras[row] = Extras(*self._lane.get(self._windows.result(int(env_ids[row]))))
        return extras

    def _request(self, requests: Sequence[process_child.Call | process_child.SetAttr], what: str) -> list[Any]:
        deadline_s = time.monotonic() + self._config.timeout_s
        for child in range(self._shape.num_children):  # an earlier call may have timed out: its answer comes first
            self._wait_replies(child, deadline_s, "answer an earlier call", "timeout_s")
        for child, request in enumerate(requests):
            self._lane.put_code(self._windows.request(child), request)
            self._num_requests[child] += 1
            self._board.post_request(child)
        replies: list[Any] = []
        for child in range(self._shape.num_children):
            expected = self._num_requests[child]
            self._wait_replies(child, deadline_s, what, "timeout_s")
            if self._num_requests[child] != expected:
                first, end = self._board.first_env(child), self._board.first_env(child + 1)
                raise ChildDied(
                    f"the process of envs {first} to {end - 1} died before it could {what}; a new one takes its place",
                    env_id=first,
                    env_ids=range(first, end),
                )
            replies.append(self._lane.get(self._windows.reply(child)))
        for reply in replies:
            if isinstance(reply, Failure):
                raise reply.to_exception()
        return [value for reply in replies for value in reply]

    def _wait_replies(self, child: int, deadline_s: float, what: str, setting: str) -> None:
        while True:
            waited = self._board.wait_replies(child, self._num_requests[child], self._slice_s(deadline_s))
            if waited == _native.READY:
                return
            self._after_wait(waited)
            if time.monotonic() >= deadline_s:
                text = f"child {child} did not {what} within {setting}={getattr(self._config, setting):g} s"
                raise PoolTimeout(f"{text}\n{self._stack_of(child)}")

    # -- failing --

    def _replace_child(self, child: int, how: str) -> Exception | None:
        """Start another child in place of a dead one; returns what the caller must hear of it."""
        env_id, op, _ = self._board.doing(child)
        pid = self._board.pid(child)
        first, end = self._board.first_env(child), self._board.first_env(child + 1)
        culprit = env_id if env_id >= 0 else first
        reply = self._lane.get(self._windows.reply(child)) if how == _BUILD_FAILED_TEXT else None
        doing = f" while env {env_id} was {_OP_NAMES[op]}" if op in _OP_NAMES and env_id >= 0 else ""
        reason = f"process {pid}, which ran envs {first} to {end - 1}, {how}{doing}"
        self._board.recover(child)
        self._num_requests[child] = 1
        num_failures = self._board.add_failure(culprit)
        self._spawn(child, lost_because=reason, delay_s=backoff_s(num_failures))
        if self._config.max_env_restarts is not None and num_failures <= self._config.max_env_restarts:
            logger.warning("%s; a new one takes its place", reason)
            return None
        if isinstance(reply, Failure):
            return reply.to_exception("cannot be built:")
        return ChildDied(
            f"{reason}; their episodes are lost, and a new process takes its place",
            env_id=culprit,
            env_ids=range(first, end),
        )

    def _replace_nursery(self) -> None:
        logger.warning("the nursery process died, and all children with it; they are started anew")
        self._household.nursery.close()
        pids = [pid for child in range(self._shape.num_children) if (pid := self._board.pid(child))]
        deadline_s = time.monotonic() + KILL_WAIT_S
        while any(os.path.exists(f"/proc/{pid}") for pid in pids) and time.monotonic() < deadline_s:
            time.sleep(0.001)  # the kernel is killing them; none may write any more when its place is cleared
        self._household.nursery = Nursery(self._files.all())
        self._household.nursery.tell(self._watch())
        self._board.take_exits()
        for child in range(self._shape.num_children):
            error = self._replace_child(child, "died with its nursery process")
        if error is not None:
            raise error

    def _timeout(self, headline: str) -> PoolTimeout:
        busy = self._board.busy_env_ids()
        lines = [f"{headline}; still at work: envs {busy}"]
        hung: list[int] = []
        for child in sorted({self._board.child_of(env_id) for env_id in busy}):
            env_id, op, for_s = self._board.doing(child)
            hung += [env_id] if env_id >= 0 else []
            state = f"env {env_id} is {_OP_NAMES.get(op, 'at work')} for {for_s:.1f} s" if env_id >= 0 else "idle"
            waiting = [each for each in busy if self._board.child_of(each) == child and each != env_id]
            lines.append(f"process {self._board.pid(child)}: {state}; envs that wait behind it: {waiting}")
            lines.append(self._stack_of(child))
        return PoolTimeout("\n".join(lines), env_ids=hung)

    def _stack_of(self, child: int) -> str:
        """The Python stack of a child, written by its signal handler even if the interpreter hangs."""
        start = os.fstat(self._files.stacks).st_size
        self._household.nursery.tell(Signal(child, process_child.STACK_SIGNAL))
        deadline_s = time.monotonic() + STACK_WAIT_S
        size = start
        while time.monotonic() < deadline_s:
            time.sleep(0.05)
            now = os.fstat(self._files.stacks).st_size
            if now > start and now == size:
                return os.pread(self._files.stacks, size - start, start).decode(errors="replace").rstrip()
            size = now
        return f"(process {self._board.pid(child)} does not answer the request for its stack)"


_BUILD_FAILED_TEXT = "could not build its envs"


def _death(status: int) -> str:
    """How a process ended, in words."""
    code = os.waitstatus_to_exitcode(status)
    if code == process_child.BUILD_FAILED:
        return _BUILD_FAILED_TEXT
    return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"left with exit status {code}"
