"""The exceptions of EnvFleet. In brackets: what each one also is, so that code written for Gymnasium catches it.

EnvFleetError
├── UsageError             the caller's call is wrong [ValueError]
│   ├── InvalidAction      actions of the wrong shape, dtype or value [gymnasium.error.InvalidAction]
│   ├── EnvBusy            an env has a result to come, so it cannot take another task
│   │                      [gymnasium.error.AlreadyPendingCallError]
│   ├── NothingToReceive   recv() would wait for envs that were not sent [gymnasium.error.NoAsyncCallError]
│   ├── NotReset           step() or send() before the first reset() [gymnasium.error.ResetNeeded]
│   ├── StepOnEndedEpisode with autoreset disabled: this env must be reset first [gymnasium.error.ResetNeeded]
│   ├── SpacesDiffer       the envs of one pool do not have the same spaces [RuntimeError]
│   └── PoolClosed         the pool was closed [gymnasium.error.ClosedEnvironmentError]
├── EnvFailed              the user's environment raised; names it, with its traceback, seed and last action
│   └── ChildDied          the process that ran it was killed or crashed
├── PoolTimeout            a wait reached its deadline; the message says which call goes on
│                          [TimeoutError, multiprocessing.TimeoutError]
├── MissingExtra           an optional package is needed [ImportError]
├── CheckpointError        a checkpoint cannot be written or read, or is of another run
└── ClusterError           the machines
    ├── JoinTimeout        not all workers joined in time
    ├── WorkerLost         a worker died or fell silent, and no replacement is left
    ├── WorkerFailed       a worker could not carry out an order
    │   └── PolicyFailed   the user's policy raised, or cannot be built there
    └── ClusterTimeout     a wait reached its deadline; the message says which call goes on
                           [TimeoutError, multiprocessing.TimeoutError]
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Sequence
from typing import Any

from gymnasium import error

RECV_GOES_ON = "Nothing is lost: recv() goes on waiting for this batch"  # what a timeout of pool and cluster says


class EnvFleetError(Exception):
    """Base of all exceptions that EnvFleet raises on purpose."""


class UsageError(EnvFleetError, ValueError):
    """The call is wrong; the message says what was expected, what came, and what to do."""


class InvalidAction(UsageError, error.InvalidAction):
    """Actions that the action space cannot hold."""


class EnvBusy(UsageError, error.AlreadyPendingCallError):
    """An env was sent a task while its last result is still to be received."""

    def __init__(self, message: str) -> None:
        error.AlreadyPendingCallError.__init__(self, message, "step")


class NothingToReceive(UsageError, error.NoAsyncCallError):
    """Fewer envs are in flight than a batch has rows."""

    def __init__(self, message: str) -> None:
        error.NoAsyncCallError.__init__(self, message, "step")


class NotReset(UsageError, error.ResetNeeded):
    """The pool was stepped before its first reset."""


class StepOnEndedEpisode(UsageError, error.ResetNeeded):
    """With autoreset disabled, an env was stepped after its episode had ended.

    `recv()` returns the batch of that step, in which the env's row repeats its last observation; then reset the env.
    """


class SpacesDiffer(UsageError, RuntimeError):
    """The envs of one pool must have equal observation and action spaces."""


class PoolClosed(UsageError, error.ClosedEnvironmentError):
    """The pool was closed and cannot be used any more."""


class EnvFailed(EnvFleetError):
    """An environment raised.

    Raised by `step()`, `reset()` or `recv()`: `recv()` returns the batch, in which the env's row is truncated.
    Raised by `rollout()` or `step(agent)` of a cluster: the same call returns the rollout; by a stream: `next()` does.
    The text has the message, seed and last action, then the traceback of the env.

    Attributes:
        env_id: Index of the env in its pool. 0 where a vector env of another library does not say which one it was; the
            text says so.
        child_traceback: The traceback as text, from where the env ran.
        seed: The seed of the env's last seeded reset, if it had one.
        last_action: The action of the step that failed; None if it failed in reset() or before.
    """

    def __init__(
        self,
        message: str,
        *,
        env_id: int,
        child_traceback: str = "",
        seed: int | None = None,
        last_action: Any = None,
    ) -> None:
        super().__init__(message)
        self.env_id = env_id
        self.child_traceback = child_traceback
        self.seed = seed
        self.last_action = last_action

    def __str__(self) -> str:
        """Return the message, seed and last action, then the traceback of the env."""
        text = f"{self.args[0]} (seed: {self.seed}, last action: {text_of(self.last_action)})"
        return f"{text}\n\n{self.child_traceback}" if self.child_traceback else text


def text_of(value: Any) -> str:
    """Return `str(value)`, or why it has none: an error must not fail where it is shown."""
    try:
        return str(value)
    except Exception as error:
        return f"<{type(value).__name__} whose text cannot be shown: {type(error).__name__}>"


class ChildDied(EnvFailed):
    """The process that ran some envs died.

    Attributes:
        env_id: Index of the env that ran when the process died.
        env_ids: All envs whose episodes are lost.
    """

    def __init__(self, message: str, *, env_id: int, env_ids: Sequence[int], child_traceback: str = "") -> None:
        super().__init__(message, env_id=env_id, child_traceback=child_traceback)
        self.env_ids = tuple(env_ids)

    def __str__(self) -> str:
        """Return the message, and the traceback if the process could still send it."""
        return f"{self.args[0]}\n\n{self.child_traceback}" if self.child_traceback else str(self.args[0])


class PoolTimeout(EnvFleetError, TimeoutError, multiprocessing.TimeoutError):
    """A wait reached its deadline.

    After `step()`, `reset()` and `recv()` nothing is lost: `recv()` goes on waiting for the same batch. A call of a
    method of envs goes on, but its result is dropped.

    Attributes:
        report: What was waited for: which envs are late, and what they are doing.
        then: What the caller can do now. The message is both.
        env_ids: The envs that are known to be late.
    """

    def __init__(self, report: str, then: str = "", env_ids: Sequence[int] = ()) -> None:
        super().__init__(f"{report}\n{then}" if then else report)
        self.report = report
        self.then = then
        self.env_ids = tuple(env_ids)


class MissingExtra(EnvFleetError, ImportError):
    """An optional package is not installed; the message names the extra that brings it."""


class CheckpointError(EnvFleetError):
    """A checkpoint cannot be written or read, or it does not fit the cluster; the message says what differs.

    A file that was there before stays as it was.
    """


class ClusterError(EnvFleetError):
    """Something is wrong with the machines of a cluster."""


class JoinTimeout(ClusterError):
    """Not all workers joined in time; the message says what is known of the others."""


class WorkerLost(ClusterError):
    """A worker died or fell silent, and it has been replaced as often as the run allows."""


class WorkerFailed(ClusterError):
    """A worker could not carry out an order; it is ready for the next one.

    The message has its traceback, and says what became of the call.
    """


class PolicyFailed(WorkerFailed):
    """The policy raised on a worker, or could not be built there."""


class ClusterTimeout(ClusterError, TimeoutError, multiprocessing.TimeoutError):
    """A wait reached its deadline.

    After `step(actions)`, `reset()` and `recv()` nothing is lost: `recv()` goes on waiting for the same batch. After
    `rollout()` and `step(agent)` the same call does so for the same rollout, after `next()` of a stream `next()`. A
    call of a method of envs is given up.
    """
