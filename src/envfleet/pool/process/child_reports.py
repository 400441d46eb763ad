"""ChildReports: what the children of a pool are doing, and how they died, in words."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence

from envfleet._native import core
from envfleet.contract.errors import PoolTimeout
from envfleet.pool.process import child as process_child
from envfleet.pool.process.resources import ProcessResources
from envfleet.pool.process.spawner import Signal

STACK_WAIT_S = 1.0
NUM_LISTED = 10  # ids that a text lists
BUILD_FAILED_TEXT = "could not build its envs"
BROKE_DOWN_TEXT = "broke down"
KILLED_TEXT = "was killed by SIGKILL"
OP_NAMES = {core.Op.STEP: "in step()", core.Op.RESET: "in reset()"}


def death_text(status: int) -> str:
    """How a process ended, in words."""
    code = os.waitstatus_to_exitcode(status)
    if code == process_child.BUILD_FAILED:
        return BUILD_FAILED_TEXT
    if code == process_child.BROKE_DOWN:
        return BROKE_DOWN_TEXT
    return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"left with exit status {code}"


def listed(env_ids: Sequence[int]) -> str:
    """`envs 0, 1, 2`: the first ten by their ids, and how many more there are."""
    text = ", ".join(str(env_id) for env_id in env_ids[:NUM_LISTED])
    more = len(env_ids) - NUM_LISTED
    return f"envs {text} and {more} more" if more > 0 else f"envs {text}"


class ChildReports:
    """Looks at the children's task queues, and asks children for their Python stacks."""

    def __init__(self, task_queues: core.SharedTaskQueues, resources: ProcessResources) -> None:
        """`resources` has the spawner, which may be replaced by another one."""
        self._task_queues = task_queues
        self._resources = resources

    def env_ids_of(self, child: int) -> range:
        """The envs that a child runs."""
        return range(self._task_queues.first_env(child), self._task_queues.first_env(child + 1))

    def name_of(self, child: int) -> str:
        """Its pid, if it has started: one that takes another's place may have to wait first."""
        pid, env_ids = self._task_queues.pid(child), self.env_ids_of(child)
        return f"process {pid}" if pid else f"the new process of envs {env_ids.start} to {env_ids.stop - 1}"

    def stack_of(self, child: int) -> str:
        """The Python stack of a child, written by its signal handler even if the interpreter hangs."""
        stacks = self._resources.files.stacks
        start = os.fstat(stacks).st_size
        self._resources.spawner.tell(Signal(child, process_child.STACK_SIGNAL))
        deadline_s = time.monotonic() + STACK_WAIT_S
        size = start
        while time.monotonic() < deadline_s:
            time.sleep(0.05)
            now = os.fstat(stacks).st_size
            if now > start and now == size:
                return os.pread(stacks, size - start, start).decode(errors="replace").rstrip()
            size = now
        return f"({self.name_of(child)} does not answer the request for its stack)"

    def death_of(self, child: int, how: str) -> str:
        """Which process died, how, and what one of its envs was doing."""
        doing, env_ids = self._task_queues.doing(child), self.env_ids_of(child)
        is_in_env = doing.env_id is not None and doing.op in OP_NAMES and f"env {doing.env_id} was" not in how
        during = f" while env {doing.env_id} was {OP_NAMES[doing.op]}" if is_in_env else ""
        name = f"process {pid}, which ran" if (pid := self._task_queues.pid(child)) else "the new process of"
        return f"{name} envs {env_ids.start} to {env_ids.stop - 1}, {how}{during}"

    def timeout(self, headline: str, remedy: str = "", late: Sequence[int] | None = None) -> PoolTimeout:
        """The error of a wait that lasted too long: which envs are still at work, where they hang, and what to do.

        `late` are the envs to name; None: all that are at work.
        """
        busy = self._task_queues.busy_env_ids()
        lines = [f"{headline}; still at work: envs {busy}"]
        hung: list[int] = []
        for child in sorted({self._task_queues.child_of(env_id) for env_id in busy}):
            env_id, op, for_s = self._task_queues.doing(child)
            hung += [] if env_id is None else [env_id]
            waiting = [each for each in busy if self._task_queues.child_of(each) == child and each != env_id]
            # A child's first reply: its envs are built.
            if self._task_queues.wait_replies(child, 1, 0.0) is not core.Waiting.READY:
                lines.append(f"{self.name_of(child)} is building its envs; envs that wait for that: {waiting}")
            else:
                state = (
                    f"env {env_id} is {OP_NAMES.get(op, 'at work')} for {for_s:.1f} s" if env_id is not None else "idle"
                )
                lines.append(f"{self.name_of(child)}: {state}; envs that wait behind it: {waiting}")
            if self._task_queues.pid(child):
                lines.append(self.stack_of(child))
        lines += [remedy] if remedy else []
        return PoolTimeout("\n".join(lines), env_ids=hung if late is None else late)
