"""Desk: what the head keeps for one worker: open orders, accepted answers, counters. Pure."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from math import isfinite
from typing import Any, NamedTuple

from envfleet.cluster.head.divergence import Probes
from envfleet.cluster.head.membership import Member
from envfleet.cluster.head.restarts import Post
from envfleet.cluster.sync import Measurement
from envfleet.cluster.wire.bounded_msgpack import decode_bounded
from envfleet.cluster.wire.codec import BadMessage
from envfleet.cluster.wire.messages import (
    EnvFailure,
    NotReady,
    OrderCancelled,
    OrderFailed,
    RolloutReady,
    RowsReady,
    ValuesReady,
)
from envfleet.cluster.wire.orders import OrderLog
from envfleet.cluster.wire.plain_values import read_plain
from envfleet.cluster.wire.rollouts import Collected, RolloutForm, Rows
from envfleet.cluster.wire.transfers import Transfers
from envfleet.contract.arrays import Arrays
from envfleet.contract.stats import WorkerStats

Result = Rows | Collected | list[Any] | OrderFailed


class Answered(NamedTuple):
    """An answer that was accepted."""

    order: int
    result: Result
    failures: list[EnvFailure]
    is_after_loss: bool
    member: Member
    arrival: int  # answers of all workers are counted in the order in which they were accepted


@dataclass(slots=True)
class Desk:
    """What the head keeps for one worker, whichever process it is."""

    orders: OrderLog = field(default_factory=OrderLog)
    answers: deque[Answered] = field(default_factory=deque)
    is_ready: bool = False
    not_ready: NotReady | None = None
    member: Member | None = None  # the last one
    attributes: dict[str, Any] = field(default_factory=dict)  # what set_attr() has set, as it travels
    problem: str = ""  # which process was lost last, and why
    num_steps: int = 0
    num_rollouts: int = 0
    num_pulls: int = 0
    version: int = 0
    lag: int = 0
    process_version: int = 0  # of the policy in the last rollout of the present process
    num_steps_ordered: int = 0  # of each env, in rollouts that the present process has answered
    num_nan_rows: int = 0
    num_out_of_bounds_rows: int = 0
    probes: Probes | None = None  # of the last rollouts that the learner took
    measured: Measurement = field(default_factory=Measurement)  # on those probes, or on earlier ones
    code_bytes: int = 0
    weight_bytes: int = 0
    rollout_bytes: int = 0
    announcement_bytes: int = 0
    resent_bytes: int = 0  # without what the present process and its transfers count
    worker_resent_bytes: int = 0  # as its present process says
    welcome_frames: list[Any] | None = None  # for its present process
    transfers: Transfers = field(default_factory=lambda: Transfers(0.0, None))  # with its present process
    rates: deque[tuple[int, float]] = field(default_factory=lambda: deque(maxlen=10))  # (env steps, seconds)

    def joined(self, member: Member, transfers: Transfers) -> None:
        """Another process is the worker now: what the one before it held and showed is not its own."""
        self.resent_bytes += self.transfers.outgoing.resent_bytes + self.worker_resent_bytes
        self.worker_resent_bytes = 0
        self.member, self.transfers, self.is_ready, self.not_ready = member, transfers, False, None
        self.welcome_frames = None
        self.process_version = self.num_steps_ordered = 0
        self.probes, self.measured = None, Measurement()

    def checked(self, message: Any, arrays: Arrays, worker: int, form: RolloutForm, newest_version: int) -> Result:
        """The result in the answer to the oldest open order. Raises BadMessage."""
        expects = self.orders.open[0].order
        assert expects is not None
        for failure in getattr(message, "failures", ()):
            _check_failure(failure, worker * form.num_envs, form.num_envs)
        if isinstance(message, OrderFailed):
            return message
        if isinstance(message, OrderCancelled):
            if not self.orders.open[0].is_cancelled:
                raise BadMessage("an order that is not cancelled was not carried out")
            return []
        if not isinstance(message, expects.answer):
            raise BadMessage(f"{expects.answer.__name__} was expected, {type(message).__name__} came")
        if isinstance(message, RolloutReady):
            return self._checked_rollout(message, arrays, worker, form, newest_version, expects.num_steps)
        if isinstance(message, RowsReady):
            return form.check_rows(worker, decode_bounded(message.info), arrays)
        assert isinstance(message, ValuesReady)
        values = read_plain(message.values)
        if not isinstance(values, list) or len(values) != form.num_envs:
            raise BadMessage(f"a list of {form.num_envs} values was expected")
        return values

    def _checked_rollout(
        self, message: RolloutReady, arrays: Arrays, worker: int, form: RolloutForm, newest_version: int, num_steps: int
    ) -> Collected:
        version = message.version
        if not self.process_version <= version <= newest_version:
            between = f"from {self.process_version}, of its last one, to {newest_version}, the newest"
            raise BadMessage(f"a rollout of version {version}; possible: {between}")
        if not isfinite(message.seconds) or message.seconds < 0:
            raise BadMessage(f"a rollout that took {message.seconds} seconds")
        lag, before = newest_version - version, self.num_steps_ordered
        return form.check_rollout(worker, version, lag, num_steps, arrays, message.distribution, before)

    def accept(
        self,
        message: Any,
        result: Result,
        is_wanted: bool,
        member: Member,
        arrival: int,
        now_s: float,
    ) -> None:
        """Close the oldest open order; keep its result if somebody waits for it."""
        order = self.orders.accept()
        if order.order is not None:
            self.num_steps_ordered += order.order.num_steps
        if isinstance(result, Collected | Rows):
            self.num_nan_rows += result.suspects.num_nan
            self.num_out_of_bounds_rows += result.suspects.num_out_of_bounds
        if isinstance(result, Collected):
            self.process_version = result.version
            num_env_steps = result.num_steps * len(result.arrays["rewards"][0])
            self.rates.append((num_env_steps, message.seconds))
            if is_wanted:
                self.num_rollouts += 1
                self.num_steps += num_env_steps
                self.version, self.lag = result.version, result.lag
        elif isinstance(result, Rows):
            self.num_steps += len(result.arrays["rewards"])
            self.rates.append((len(result.arrays["rewards"]), now_s - order.sent_s))
        if is_wanted:  # also an error in place of what nobody can use: who waits must hear of it
            is_refused = isinstance(result, OrderFailed) and result is not message
            failures = [] if is_refused else getattr(message, "failures", [])
            is_after_loss = not is_refused and getattr(message, "is_after_loss", False)
            self.answers.append(Answered(message.order, result, failures, is_after_loss, member, arrival))

    def stats(self, worker: int, post: Post) -> WorkerStats:
        """The counters, for others."""
        steps, seconds = (sum(each) for each in zip(*self.rates, strict=True)) if self.rates else (0, 0.0)
        return WorkerStats(
            worker=worker,
            stage=post.stage.value,
            host="" if self.member is None else self.member.host,
            pid=None if self.member is None else self.member.pid,
            num_steps=self.num_steps,
            steps_per_s=steps / seconds if seconds > 0 else 0.0,
            version=self.version,
            lag=self.lag,
            divergence=self.measured.divergence,
            num_rollouts=self.num_rollouts,
            num_pulls=self.num_pulls,
            code_bytes=self.code_bytes,
            weight_bytes=self.weight_bytes,
            rollout_bytes=self.rollout_bytes,
            announcement_bytes=self.announcement_bytes,
            resent_bytes=self.resent_bytes + self.transfers.outgoing.resent_bytes + self.worker_resent_bytes,
            num_restarts=post.num_restarts,
            problem=post.problem,
            num_nan_rows=self.num_nan_rows,
            num_out_of_bounds_rows=self.num_out_of_bounds_rows,
        )


def _check_failure(failure: EnvFailure, first_env_id: int, num_envs: int) -> None:
    if not first_env_id <= failure.env_id < first_env_id + num_envs:
        its_envs = f"{first_env_id} to {first_env_id + num_envs - 1}"
        raise BadMessage(f"a failure of env {failure.env_id}; the worker's own are {its_envs}")
    read_plain(failure.last_action)  # the caller will ask for it
