"""Interruption: ends the task of an env that takes too long from within, by an exception in the env's own code.

The parent sends a signal. Its handler runs between two instructions of Python, and after a sleep or a blocking read was
cut off; an env that hangs in C never runs it, and the parent kills the process (see LateEnvs).
"""

from __future__ import annotations

import signal
import time
from types import FrameType

from envfleet._native import core
from envfleet.contract.episode import Episode
from envfleet.contract.pool_config import PoolConfig
from envfleet.pool.guard import EnvTimedOut, GuardedEpisode
from envfleet.pool.process.task_clocks import TaskClocks

INTERRUPT_SIGNAL = signal.SIGRTMIN + 8  # not used by Python, and hardly by any env

# Below these functions the env's code runs, and GuardedEpisode takes what it raises for a failure of the env.
_ENV_CODE = {function.__code__ for function in (Episode.step, Episode.reset, GuardedEpisode._rebuild_if_needed)}
_OP_NAMES = {core.Op.STEP: "step()", core.Op.RESET: "reset()"}


class Interruption:
    """A child's end. The clock of its task, too: see GuardedEpisode."""

    def __init__(self, child: int, task_queues: core.SharedTaskQueues, clocks: TaskClocks, config: PoolConfig) -> None:
        """Take the signal from now on."""
        self._child = child
        self._task_queues = task_queues
        self._clocks = clocks
        self._config = config
        self.renew()
        signal.signal(INTERRUPT_SIGNAL, self._on_signal)

    def renew(self, *, is_building: bool = False) -> None:
        """Count the time of the task from now on; while it builds an env, `start_timeout_s` is its limit."""
        self._clocks.is_building[self._child] = is_building
        self._clocks.renewed_s[self._child] = time.monotonic()

    def _on_signal(self, signum: int, frame: FrameType | None) -> None:
        _, op, for_s = self._task_queues.doing(self._child)
        now_s = time.monotonic()
        since_s = max(now_s - for_s, self._clocks.renewed_s[self._child])
        is_late = since_s < self._clocks.given_up_s[self._child]  # or that task is done, and this is the next one
        if is_late and _is_in_env(frame):
            raise EnvTimedOut(self._text(op, now_s - since_s))

    def _text(self, op: core.Op, for_s: float) -> str:
        is_building = bool(self._clocks.is_building[self._child])
        doing = "constructor" if is_building else _OP_NAMES.get(op, "task")
        limit_s = self._config.start_timeout_s if is_building else self._config.timeout_s
        name = "start_timeout_s" if is_building else "timeout_s"
        text = f"its {doing} had not returned after {for_s:.1f} s"
        if limit_s is None or for_s < limit_s:
            return f"{text}, and the caller gave it up"
        return f"{text}: {name}={limit_s:g} s is the limit; raise it (None: no limit) if the env needs longer"


def ignore_interruptions() -> None:
    """Until an env is there to be interrupted."""
    signal.signal(INTERRUPT_SIGNAL, signal.SIG_IGN)


def _is_in_env(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code in _ENV_CODE:
            return True
        frame = frame.f_back
    return False
