"""The exceptions of EnvFleet.

EnvFleetError
├── UsageError             the caller's call is wrong (also a ValueError)
│   ├── InvalidAction      actions of the wrong shape, dtype or value
│   ├── EnvBusy            an env has a result to come, so it cannot take another task
│   ├── NothingToReceive   recv() would wait for envs that nobody has sent
│   ├── NotReset           step() or send() before the first reset()
│   ├── StepOnEndedEpisode with autoreset disabled: this env must be reset first
│   ├── SpacesDiffer       the envs of one pool do not have the same spaces
│   └── PoolClosed         the pool was closed
├── EnvFailed              the user's environment raised; names it, with its traceback, seed and last action
│   └── ChildDied          the process that ran it was killed or crashed
├── PoolTimeout            a wait reached its deadline; nothing is lost (also a TimeoutError)
├── MissingExtra           an optional package is needed (also an ImportError)
└── ClusterError           the machines
    ├── JoinTimeout        not all workers joined in time
    ├── WorkerLost         a worker died or fell silent, and no replacement is left
    ├── WorkerFailed       a worker could not carry out an order
    │   └── PolicyFailed   the user's policy raised, or cannot be built there
    └── ClusterTimeout     a wait reached its deadline; nothing is lost (also a TimeoutError)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


class EnvFleetError(Exception):
    """Base of all exceptions that EnvFleet raises on purpose."""


class UsageError(EnvFleetError, ValueError):
    """The call is wrong; the message says what was expected, what came, and what to do."""


class InvalidAction(UsageError):
    """Actions that the action space cannot hold."""


class EnvBusy(UsageError):
    """An env was sent a task while the result of the last one is still to be received."""


class NothingToReceive(UsageError):
    """Fewer envs are in flight than a batch has rows."""


class NotReset(UsageError):
    """The pool was stepped before its first reset."""


class StepOnEndedEpisode(UsageError):
    """With autoreset disabled, an env was stepped after its episode had ended."""


class SpacesDiffer(UsageError):
    """The envs of one pool must have equal observation and action spaces."""


class PoolClosed(UsageError):
    """The pool was closed and cannot be used any more."""


class EnvFailed(EnvFleetError):
    """An environment raised.

    Attributes:
        env_id: Index of the env in its pool.
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
        """`message` says what happened; the details are appended to it."""
        super().__init__(message)
        self.env_id = env_id
        self.child_traceback = child_traceback
        self.seed = seed
        self.last_action = last_action

    def __str__(self) -> str:
        """The message, then seed and last action, then the traceback of the env."""
        text = f"{self.args[0]} (seed: {self.seed}, last action: {text_of(self.last_action)})"
        return f"{text}\n\n{self.child_traceback}" if self.child_traceback else text


def text_of(value: Any) -> str:
    """`str(value)`, or why there is none: an error must not fail where it is shown."""
    try:
        return str(value)
    except Exception as error:
        return f"<{type(value).__name__} whose text cannot be shown: {type(error).__name__}>"


class ChildDied(EnvFailed):
    """The process that ran some envs died. `env_ids` are all whose episodes are lost."""

    def __init__(self, message: str, *, env_id: int, env_ids: Sequence[int]) -> None:
        """`env_id` is the env that ran when the process died."""
        super().__init__(message, env_id=env_id)
        self.env_ids = tuple(env_ids)

    def __str__(self) -> str:
        """The message alone: nobody is left who could tell more."""
        return str(self.args[0])


class PoolTimeout(EnvFleetError, TimeoutError):
    """A wait reached its deadline. Nothing is lost: the same call may be made again."""


class MissingExtra(EnvFleetError, ImportError):
    """An optional package is not installed; the message names the extra that brings it."""


class ClusterError(EnvFleetError):
    """Something is wrong with the machines of a cluster."""


class JoinTimeout(ClusterError):
    """Not all workers joined in time; the message says what is known of the others."""


class WorkerLost(ClusterError):
    """A worker died or fell silent, and it has been replaced as often as the run allows."""


class WorkerFailed(ClusterError):
    """A worker could not carry out an order; it is ready for the next one. The message has its traceback."""


class PolicyFailed(WorkerFailed):
    """The policy raised on a worker, or could not be built there."""


class ClusterTimeout(ClusterError, TimeoutError):
    """A wait reached its deadline. Nothing is lost: the same call may be made again."""
