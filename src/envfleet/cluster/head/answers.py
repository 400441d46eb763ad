"""Answered and PendingAnswers: accepted answers, and the errors in them, which the caller hears first.

Each error names worker, host, env and cause.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Any, NamedTuple

from envfleet.cluster.head.membership import Member
from envfleet.cluster.wire.messages import EnvFailure, OrderFailed
from envfleet.cluster.wire.plain_values import read_plain
from envfleet.cluster.wire.rollouts import Collected, Rows
from envfleet.cluster.wire.worker_states import SavedState
from envfleet.contract import errors
from envfleet.contract.errors import ChildDied, EnvFailed, PolicyFailed, UsageError, WorkerFailed
from envfleet.contract.evaluation import Episodes

Result = Rows | Collected | list[Any] | Episodes | SavedState | OrderFailed


class Answered(NamedTuple):
    """An answer that was accepted."""

    order: int
    result: Result
    failures: list[EnvFailure]
    is_after_loss: bool
    member: Member
    arrival: int  # counts the answers of all workers in the order in which they were accepted


class PendingAnswers:
    """Answers of some workers, with the errors in them. take() raises one error with each call, then returns."""

    def __init__(self, answers: list[Answered], errors: Iterable[Exception]) -> None:
        self._answers = answers
        self._errors = deque(errors)

    @property
    def workers(self) -> list[int]:
        """The workers whose answers these are."""
        return [each.member.worker for each in self._answers]

    @property
    def is_incomplete(self) -> bool:
        """Whether an answer has no result, so that nothing can be returned."""
        return any(isinstance(each.result, OrderFailed) for each in self._answers)

    def take(self) -> list[Answered]:
        """Raise the next error; return the answers if there is none left."""
        if self._errors:
            raise self._errors.popleft()
        return self._answers


def errors_of(
    answer: Answered, num_envs: int, problem: str, raises_env_errors: bool, if_incomplete: str
) -> list[Exception]:
    """The exceptions of one worker's answer.

    Args:
        answer: The answer.
        num_envs: The number of envs of each worker.
        problem: Which process of the worker was lost last, and why.
        raises_env_errors: Whether envs that were lost with their worker are an error.
        if_incomplete: What becomes of the call if there is no result; the end of the error text.
    """
    result, member = answer.result, answer.member
    if isinstance(result, OrderFailed):
        failures = [_env_failed(each, member, if_incomplete) for each in result.failures]
        return failures or [_order_failed(result, member, if_incomplete)]
    if answer.is_after_loss and raises_env_errors:
        env_ids = range(member.worker * num_envs, (member.worker + 1) * num_envs)
        return [
            ChildDied(
                f"lost: {problem}. The episodes of its envs {env_ids.start} to {env_ids.stop - 1} "
                f"end here; {member} has taken over",
                env_id=env_ids.start,
                env_ids=env_ids,
            )
        ]
    return [_env_failed(each, member) for each in answer.failures]


def _order_failed(failed: OrderFailed, member: Member, then: str) -> Exception:
    kind = PolicyFailed if failed.kind == "policy" else WorkerFailed
    usage = _usage_error(failed.error.partition(":")[0])
    if usage is not None:
        return usage(_lines(f"{member}: {failed.error}", then))
    trace = f"\n{failed.traceback.rstrip()}" if failed.traceback else ""
    return kind(_lines(f"{member}: {failed.error}", trace, then))


def _env_failed(failure: EnvFailure, member: Member, then: str = "") -> Exception:
    usage = _usage_error(failure.kind)
    if usage is not None:
        return usage(_lines(f"env {failure.env_id} of {member}: {failure.error}", then))
    return EnvFailed(
        _lines(f"env {failure.env_id} of {member}: {failure.error}", then),
        env_id=failure.env_id,
        child_traceback=failure.traceback,
        seed=failure.seed,
        last_action=read_plain(failure.last_action),
    )


def _lines(*parts: str) -> str:
    return "\n".join(filter(None, parts))


def _usage_error(name: str) -> type[UsageError] | None:
    """The usage error of this name, which a worker raised because the caller's call is wrong."""
    found = getattr(errors, name, None)
    return found if isinstance(found, type) and issubclass(found, UsageError) else None
