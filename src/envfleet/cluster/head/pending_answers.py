"""PendingAnswers: answers whose errors the caller must hear first. Each error names worker, host, env and cause."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable

from envfleet.cluster.head.desk import Answered
from envfleet.cluster.head.membership import Member
from envfleet.cluster.wire.messages import EnvFailure, OrderFailed
from envfleet.cluster.wire.plain_values import read_plain
from envfleet.contract import errors
from envfleet.contract.errors import ChildDied, EnvFailed, PolicyFailed, UsageError, WorkerFailed


class PendingAnswers:
    """Answers of some workers. take() raises their errors, one with each call, before it returns them."""

    def __init__(self, answers: list[Answered], errors: Iterable[Exception]) -> None:
        """`errors` are those of the answers."""
        self._answers = answers
        self._errors = deque(errors)

    @property
    def workers(self) -> list[int]:
        """Whose answers these are."""
        return [each.member.worker for each in self._answers]

    @property
    def is_incomplete(self) -> bool:
        """There is an answer without a result: nothing can be returned."""
        return any(isinstance(each.result, OrderFailed) for each in self._answers)

    def take(self) -> list[Answered]:
        """The answers, if there is no error left."""
        if self._errors:
            raise self._errors.popleft()
        return self._answers


def errors_of(
    answer: Answered, num_envs: int, problem: Callable[[int], str], raises_env_errors: bool, if_incomplete: str
) -> list[Exception]:
    """The exceptions of one worker's answer.

    `problem(worker)` says why it was last lost, `if_incomplete` what becomes of the call if there is no result.
    """
    result, member = answer.result, answer.member
    if isinstance(result, OrderFailed):
        failures = [_env_failed(each, member, if_incomplete) for each in result.failures]
        return failures or [_order_failed(result, member, if_incomplete)]
    if answer.is_after_loss and raises_env_errors:
        env_ids = range(member.worker * num_envs, (member.worker + 1) * num_envs)
        return [
            ChildDied(
                f"lost: {problem(member.worker)}. The episodes of its envs {env_ids.start} to {env_ids.stop - 1} "
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
        return usage(_lines(f"{failure.error} (env {failure.env_id} of the run, {member})", then))
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
    """The usage error of this name: the call is wrong, and the worker found it out."""
    found = getattr(errors, name, None)
    return found if isinstance(found, type) and issubclass(found, UsageError) else None
