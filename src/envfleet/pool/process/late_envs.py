"""LateEnvs: tasks that take longer than the settings allow.

The time of each env counts from when its own task began: a child steps its envs one after the other. Either the caller
hears PoolTimeout, and nothing is lost; or the task is given up. Then the env is interrupted by a signal, and fails as
if it had raised; its child's other envs go on. If it does not react, its process is killed, and replaced as any that
died: tasks that waited behind it are done by the next process.
"""

from __future__ import annotations

import logging
import signal
import time
from collections.abc import Collection
from typing import NamedTuple

from envfleet._native import core
from envfleet.contract.pool_config import PoolConfig
from envfleet.pool.process.child_reports import OP_NAMES
from envfleet.pool.process.children import Children
from envfleet.pool.process.interruption import INTERRUPT_SIGNAL
from envfleet.pool.process.resources import ProcessResources
from envfleet.pool.process.spawner import Signal
from envfleet.pool.process.task_clocks import TaskClocks
from envfleet.pool.waits import HOW_TO_RAISE, WaitLog, limit_text

logger = logging.getLogger("envfleet.pool")

LOOK_S = 0.2  # between two looks at all children
INTERRUPT_GRACE_S = 2.0  # for an env to react to the signal, before its process is killed
NUM_TOLD = 10  # envs that a line of the log names


class AtWork(NamedTuple):
    """What a child is doing, some of whose envs have results to come."""

    child: int
    env_id: int | None  # None: it builds its envs, or has not taken its next task
    doing: str
    since_s: float
    limit: str  # the setting
    limit_s: float | None  # its value

    @property
    def name(self) -> str:
        """Who it is, for a text."""
        return f"env {self.env_id}" if self.env_id is not None else f"child {self.child}"

    def is_over(self, since_s: float, now_s: float) -> bool:
        """Whether the limit has passed, counted from `since_s`."""
        return self.limit_s is not None and now_s - since_s >= self.limit_s


class LateEnvs:
    """Looks at what the children are doing while the parent waits for them."""

    def __init__(
        self, task_queues: core.SharedTaskQueues, clocks: TaskClocks, resources: ProcessResources, children: Children
    ) -> None:
        self._task_queues = task_queues
        self._clocks = clocks
        self._resources = resources
        self._children = children
        self._given_up: dict[int, tuple[float, str]] = {}  # by child: tasks that began before this end; why
        self._next_look_s = 0.0
        self._begun_s = 0.0  # when the present wait began
        self._log = WaitLog(logger, 0.0)

    @property
    def has_given_up(self) -> bool:
        """Whether tasks were given up that have not ended yet."""
        return bool(self._given_up)

    def look(self, begun_s: float, config: PoolConfig, has_own_deadline: bool = False) -> None:
        """Nothing has come for a while in a wait that began at `begun_s`: see to the tasks that are late.

        Raises:
            PoolTimeout: A limit has passed, and late envs are not given up; not if the wait has a deadline of its own.
        """
        now_s = time.monotonic()
        if begun_s != self._begun_s:
            self._begun_s, self._log = begun_s, WaitLog(logger, begun_s)
        if now_s < self._next_look_s:
            return
        self._next_look_s = now_s + LOOK_S
        tasks = self._at_work(config, begun_s)
        self._see_to(tasks, config, now_s)
        self._log.look(now_s, lambda: _told(tasks, now_s))
        if config.gives_up_late or has_own_deadline:
            return
        waited_for = [task for task in tasks if task.child not in self._given_up]
        late = [task for task in waited_for if task.is_over(max(task.since_s, begun_s), now_s)]
        if late:
            first, more = late[0], f" (and {len(late) - 1} more)" if len(late) > 1 else ""
            limit = limit_text(first.limit, first.limit_s)
            text = f"no full batch: {first.name}{more} was {first.doing} for longer than {limit}"
            env_ids = [task.env_id for task in late if task.env_id is not None]
            raise self._children.reports.timeout(text, HOW_TO_RAISE[first.limit], env_ids)

    def glance(self, config: PoolConfig, now_s: float) -> None:
        """Results come, but those of some envs may be late all the same: give these up."""
        if now_s >= self._next_look_s:
            self._next_look_s = now_s + LOOK_S
            self._see_to(self._at_work(config, now_s), config, now_s)

    def give_up(self, env_ids: Collection[int], config: PoolConfig) -> None:
        """End the tasks that these envs are at work on; those that wait behind another env are not begun yet."""
        now_s = time.monotonic()
        for task in self._at_work(config, now_s):
            if task.env_id in env_ids and not self._is_given_up(task):
                why = f"the caller gave {task.name} up, which was {task.doing} for {now_s - task.since_s:.1f} s"
                self._given_up[task.child] = now_s, why
        self._next_look_s = 0.0

    # -- inside --

    def _at_work(self, config: PoolConfig, begun_s: float) -> list[AtWork]:
        busy = self._task_queues.busy_env_ids()
        children = sorted({self._task_queues.child_of(env_id) for env_id in busy})
        return [self._task_of(child, config, begun_s) for child in children]

    def _task_of(self, child: int, config: PoolConfig, begun_s: float) -> AtWork:
        now_s = time.monotonic()  # before the look, so that no task seems younger than it is
        env_id, op, for_s = self._task_queues.doing(child)
        if self._task_queues.wait_replies(child, 1, 0.0) is not core.Waiting.READY:  # its first one: its envs are built
            limits = "start_timeout_s", config.start_timeout_s
            return AtWork(child, None, "building its envs", self._children.spawned_s[child], *limits)
        if env_id is None:  # a process that was stopped, or is still busy with a call
            return AtWork(child, None, "not at work", max(now_s - for_s, begun_s), "timeout_s", config.timeout_s)
        since_s = max(now_s - for_s, self._clocks.renewed_s[child])
        if self._clocks.is_building[child]:
            return AtWork(child, env_id, "being built anew", since_s, "start_timeout_s", config.start_timeout_s)
        return AtWork(child, env_id, OP_NAMES.get(op, "at work"), since_s, "timeout_s", config.timeout_s)

    def _is_given_up(self, task: AtWork) -> bool:
        return task.child in self._given_up and task.since_s < self._given_up[task.child][0]

    def _see_to(self, tasks: list[AtWork], config: PoolConfig, now_s: float) -> None:
        """Give up what is late, and go on with what was given up before."""
        present = {task.child: task for task in tasks}
        for child in list(self._given_up):
            if child not in present or not self._is_given_up(present[child]):  # done, or replaced
                del self._given_up[child]
        if config.gives_up_late:
            for task in tasks:
                if task.child not in self._given_up and task.is_over(task.since_s, now_s):
                    why = f"{task.name} was {task.doing} for longer than {limit_text(task.limit, task.limit_s)}"
                    self._given_up[task.child] = now_s, why
        for child, (before_s, why) in self._given_up.items():
            can_react = present[child].env_id is not None and now_s - before_s < INTERRUPT_GRACE_S
            if can_react:
                self._clocks.given_up_s[child] = before_s
                self._resources.spawner.tell(Signal(child, INTERRUPT_SIGNAL))
            else:
                self._children.killed_because[child] = f"was killed, since {why}"
                self._resources.spawner.tell(Signal(child, signal.SIGKILL))


def _told(tasks: list[AtWork], now_s: float) -> str:
    """The envs that have been at work longest."""
    eldest = sorted(tasks, key=lambda task: task.since_s)
    lines = [f"{task.name} {task.doing} for {now_s - task.since_s:.0f} s" for task in eldest[:NUM_TOLD]]
    more = len(eldest) - NUM_TOLD
    limits = ", ".join(sorted({limit_text(task.limit, task.limit_s) for task in tasks}))
    return f"{', '.join(lines)}{f' and {more} more' if more > 0 else ''} ({limits})"
