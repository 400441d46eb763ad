"""WorkerRecord: all that the head knows of one worker, and what it sends to it. Pure: time is an argument."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from math import isfinite
from typing import Any

import numpy as np

from envfleet.cluster.checkpoint.content import SavedWorker
from envfleet.cluster.head.answers import Answered, Result
from envfleet.cluster.head.connections import Delivery
from envfleet.cluster.head.divergence import Probes
from envfleet.cluster.head.membership import Member
from envfleet.cluster.head.restarts import Restarts, Stage
from envfleet.cluster.sync import Measurement
from envfleet.cluster.wire.bounded_msgpack import decode_bounded
from envfleet.cluster.wire.codec import BadMessage, encode
from envfleet.cluster.wire.evaluations import checked_episodes
from envfleet.cluster.wire.messages import (
    Alive,
    Collect,
    EnvFailure,
    Evaluate,
    EvaluationProgress,
    EvaluationReady,
    NotReady,
    OrderCancelled,
    OrderFailed,
    PoolPlan,
    RolloutReady,
    RowsReady,
    SaveState,
    StateReady,
    StateRestored,
    ValuesReady,
)
from envfleet.cluster.wire.orders import Numbered, Order, OrderLog
from envfleet.cluster.wire.plain_values import read_plain
from envfleet.cluster.wire.rollouts import Collected, RolloutForm, Rows
from envfleet.cluster.wire.transfers import Transfers, num_bytes
from envfleet.cluster.wire.worker_states import SavedState, checked_state
from envfleet.contract.arrays import Array, Arrays
from envfleet.contract.stats import WorkerStats
from envfleet.launchers.launcher import WorkerState, WorkerStatus

Frames = list[Any]
Deliver = Callable[[bytes, Frames], Delivery]

MOST_LOSSES_AT_START = 3
COUNTERS = (  # those of stats() that go on after a resume
    *("num_steps", "num_rollouts", "num_dropped_rollouts", "num_dropped_steps", "num_pulls", "version", "lag"),
    *("num_nan_rows", "num_out_of_bounds_rows"),
    *("code_bytes", "weight_bytes", "rollout_bytes", "announcement_bytes", "resent_bytes"),
)
NOT_REPORTED = WorkerStatus(WorkerState.RUNNING, "the launcher has not said how it is")


@dataclass(slots=True)
class WorkerRecord:
    """One worker, whichever process it is at present."""

    worker: int
    plan: PoolPlan
    env_pickle: bytes | None
    restarts: Restarts
    deliver: Deliver  # to a process
    status: WorkerStatus = NOT_REPORTED  # of its process, as the launcher said last
    member: Member | None = None  # its last process
    problem: str = ""  # which process was lost last, and why
    is_ready: bool = False  # its pool is built
    not_ready: NotReady | None = None  # its pool cannot be built
    attributes: dict[str, Any] = field(default_factory=dict)  # that set_attr() has set, as they travel
    orders: OrderLog = field(default_factory=OrderLog)
    answers: deque[Answered] = field(default_factory=deque)
    asides: deque[Answered] = field(default_factory=deque)  # answers to orders of no activity, see Activity
    num_played: int = 0  # episodes of the Evaluate order that it carries out, as its last process says
    transfers: Transfers = field(default_factory=lambda: Transfers(0.0, None))  # with its last process
    welcome_frames: Frames | None = None  # for its last process
    process_versions: Array = field(
        default_factory=lambda: np.zeros(0, np.int64)
    )  # of each env: its last process acts with this or newer
    num_steps_ordered: int = 0  # that an env may have made in orders that the last process has answered
    probes: Probes | None = None  # of the last rollouts that the learner took
    measured: Measurement = field(default_factory=Measurement)  # on those probes, or on earlier ones
    to_restore: SavedWorker | None = None  # what its process has been told to go on with, and has not said that it does
    restore_problem: str = ""  # why its process could not
    # Counters for stats()
    num_steps: int = 0
    num_rollouts: int = 0
    num_dropped_rollouts: int = 0
    num_dropped_steps: int = 0
    num_pulls: int = 0
    version: int = 0
    lag: int = 0
    num_nan_rows: int = 0
    num_out_of_bounds_rows: int = 0
    code_bytes: int = 0
    weight_bytes: int = 0
    rollout_bytes: int = 0
    announcement_bytes: int = 0
    resent_bytes: int = 0  # without what the last process and its transfers count
    worker_resent_bytes: int = 0  # as its last process says
    rates: deque[tuple[int, float]] = field(default_factory=lambda: deque(maxlen=10))  # (env steps, seconds)

    def __str__(self) -> str:
        """Its name in errors and logs: with host and pid of its process, if there is one."""
        is_present = self.member is not None and self.restarts.stage is Stage.PRESENT
        return str(self.member) if is_present else f"worker {self.worker}"

    @property
    def is_pending(self) -> bool:
        """Whether its process waits for resources."""
        return self.status.state is WorkerState.PENDING

    @property
    def is_alive(self) -> bool:
        """Whether a process of it runs, or waits for resources, as the launcher says."""
        return self.status.state in (WorkerState.PENDING, WorkerState.RUNNING)

    @property
    def is_hopeless_at_start(self) -> bool:
        """Whether a run that is being started need not wait for it any longer."""
        restarts = self.restarts
        is_given_up = restarts.stage is Stage.GIVEN_UP or restarts.num_losses >= MOST_LOSSES_AT_START
        return not self.is_ready and is_given_up

    @property
    def is_given_up(self) -> bool:
        """Whether it is lost, will not be started again, and left no answer."""
        return self.restarts.stage is Stage.GIVEN_UP and not self.answers

    def joined(self, member: Member, transfers: Transfers) -> None:
        """Another process is the worker now: what the one before it held and showed does not count for it."""
        self.resent_bytes += self.transfers.resent_bytes + self.worker_resent_bytes
        self.worker_resent_bytes = 0
        self.member, self.transfers, self.is_ready, self.not_ready = member, transfers, False, None
        self.welcome_frames = None
        self.process_versions, self.num_steps_ordered = np.zeros(self.plan.pool.num_envs, np.int64), 0
        self.probes, self.measured = None, Measurement()
        self.num_played = 0
        self.restarts.joined()

    # -- sending --

    def send(self, frames: Frames, now_s: float) -> int:
        """Send a message to its process. Returns the number of bytes; 0: it was not sent, and will be sent again."""
        if self.transfers.add(frames, now_s) is None:
            return num_bytes(frames) if self._send_now(frames, now_s) else 0
        self.send_chunks(now_s)
        return num_bytes(frames)

    def issue(self, prepared: Numbered, now_s: float) -> None:
        """Open an order that was prepared, and send it if there is a process that can carry it out."""
        self.orders.issue(prepared)
        if self.is_ready:
            sent_bytes = self.send_order(prepared, now_s)
            if prepared.order is not None and prepared.order.answer is RolloutReady:  # it announces, too
                self.announcement_bytes += sent_bytes

    def send_order(self, issued: Numbered, now_s: float) -> int:
        """Send an order, which does not overtake an earlier one. Returns the number of bytes."""
        issued.transfer = self.transfers.add(issued.frames, now_s, is_in_order=True)
        if issued.transfer is None:
            return num_bytes(issued.frames) if self._send_now(issued.frames, now_s) else 0
        self.send_chunks(now_s)
        return num_bytes(issued.frames)

    def send_chunks(self, now_s: float) -> None:
        """Send the chunks of large messages for which there is room."""
        for frames in self.transfers.to_send(now_s):
            if not self._send_now(frames, now_s):
                break

    def reconnected(self, now_s: float) -> None:
        """Its process has a new connection: chunks that were under way on the old one may be lost."""
        self.transfers.connected(now_s)
        self.send_chunks(now_s)

    def send_alive(self, now_s: float) -> None:
        """Say what was accepted; this also shows whether the connection is open."""
        self.send(encode(Alive(accepted=self.orders.num_accepted, is_ready=self.is_ready)), now_s)

    def send_open_orders(self, now_s: float) -> None:
        """Send all open orders to a process that has just become ready."""
        for order in self.orders.open:
            order.sent_s, order.num_repeats = now_s, 0
            self.send_order(order, now_s)

    def _send_now(self, frames: Frames, now_s: float) -> bool:
        if self.member is None:
            return False
        delivery = self.deliver(self.member.process, frames)
        if delivery is Delivery.CLOSED:
            self.member.connection_closed(now_s)
        return delivery is Delivery.SENT

    # -- checkpoints --

    def saved(self, num_processes: int, state: SavedState | None) -> SavedWorker:
        """For a checkpoint; `state` is what its process said of itself; None: it said nothing."""
        counters = {name: int(getattr(self, name)) for name in COUNTERS}
        counters["resent_bytes"] += self.transfers.resent_bytes + self.worker_resent_bytes
        kept = SavedWorker(epoch=num_processes, counters=counters, attributes=dict(self.attributes))
        if state is None:
            return kept
        measured = self.measured
        return replace(
            kept,
            num_steps_ordered=self.num_steps_ordered,
            process_versions=self.process_versions.copy(),
            measured=(measured.divergence, measured.version, measured.newest_version),
            probes=None if self.probes is None else self.probes.tree(),
            code_id=state.code_id,
            version=state.version,
            state=state.state,
            has_env_states=state.has_env_states,
        )

    def restore(self, saved: SavedWorker) -> None:
        """Go on counting. What its process must be told is the head's business."""
        for name, number in saved.counters.items():
            if name in COUNTERS:
                setattr(self, name, number)
        self.attributes.update(saved.attributes)

    def _went_on(self, saved: SavedWorker) -> None:
        """Its process goes on where another one was: what that had shown counts for it."""
        self.num_steps_ordered = saved.num_steps_ordered
        self.process_versions = np.array(saved.process_versions, np.int64)
        self.measured = Measurement(*saved.measured)
        self.probes = None if saved.probes is None else Probes.of_tree(saved.probes)

    # -- answers --

    def checked(self, message: Any, arrays: Arrays, form: RolloutForm, newest_version: int) -> Result:
        """The result in the answer to the oldest open order. Raises BadMessage."""
        expected = self.orders.open[0].order
        assert expected is not None
        for failure in getattr(message, "failures", ()):
            _check_failure(failure, self.worker * form.num_envs, form.num_envs)
        if isinstance(message, OrderFailed):
            return message
        if isinstance(message, OrderCancelled):
            if not self.orders.open[0].is_cancelled:
                raise BadMessage("an order that is not cancelled was not carried out")
            return []
        if not isinstance(message, expected.answer):
            raise BadMessage(f"{expected.answer.__name__} was expected, {type(message).__name__} came")
        if isinstance(message, RolloutReady):
            return self._checked_rollout(message, arrays, form, newest_version, expected)
        if isinstance(message, RowsReady):
            return form.check_rows(self.worker, decode_bounded(message.info), arrays)
        if isinstance(message, EvaluationReady) and isinstance(expected.message, Evaluate):
            return checked_episodes(message, arrays, expected.message)
        if isinstance(message, StateReady) and isinstance(expected.message, SaveState):
            return checked_state(message, arrays, expected.message)
        return self._checked_values(message, form)

    def _checked_values(self, message: Any, form: RolloutForm) -> list[Any]:
        if isinstance(message, StateRestored):
            return []
        assert isinstance(message, ValuesReady)
        values = read_plain(message.values)
        if not isinstance(values, list) or len(values) != form.num_envs:
            raise BadMessage(f"a list of {form.num_envs} values was expected")
        return values

    def _checked_rollout(
        self, message: RolloutReady, arrays: Arrays, form: RolloutForm, newest_version: int, expected: Order
    ) -> Collected:
        version = message.version
        if not 0 <= version <= newest_version:
            raise BadMessage(f"a rollout of version {version}; possible: 0 to {newest_version}, the newest")
        if not isfinite(message.seconds) or message.seconds < 0:
            raise BadMessage(f"a rollout that took {message.seconds} seconds")
        lag, before = newest_version - version, self.num_steps_ordered
        collected = form.check_rollout(
            *(self.worker, version, lag, expected.num_steps, arrays, message.distribution, before),
            num_columns=self.plan.pool.rows if self._is_of_first_ready(expected) else None,
        )
        last = self.process_versions[collected.column_env_ids]
        if (collected.column_versions < last).any():
            row = int(np.argmax(collected.column_versions < last))
            between = f"from {last[row]}, of its last one, to {newest_version}, the newest"
            raise BadMessage(f"a rollout of version {collected.column_versions[row]}; possible: {between}")
        return form.with_infos(collected, message.infos, expected.infos)

    def _is_of_first_ready(self, order: Order) -> bool:
        """Whether the answer has the envs that were ready first, instead of all."""
        return order.is_of_stream and self.plan.pool.rows < self.plan.pool.num_envs

    def accept(self, message: Any, result: Result, is_wanted: bool, arrival: int, now_s: float) -> None:
        """Close the oldest open order; keep its result if `is_wanted`."""
        assert self.member is not None  # the answer came from it
        issued = self.orders.accept()
        if issued.order is not None:
            # First ready: an env may be one rollout ahead of the rows it has sent, and those can be dropped.
            num_rollouts = 3 if self._is_of_first_ready(issued.order) else 1
            self.num_steps_ordered += num_rollouts * issued.order.num_steps
        if isinstance(result, Collected | Rows):
            self.num_nan_rows += result.suspects.num_nan
            self.num_out_of_bounds_rows += result.suspects.num_out_of_bounds
        if isinstance(result, Collected):
            versions = result.column_versions
            self.process_versions[result.column_env_ids] = versions
            num_env_steps = result.num_steps * result.num_columns
            self.rates.append((num_env_steps, message.seconds))
            if is_wanted:
                self.num_rollouts += 1
                self.num_steps += num_env_steps
                self.version = int(versions.min())
                self.lag = result.version + result.lag - self.version
        elif isinstance(result, Rows):
            self.num_steps += len(result.arrays["rewards"])
            self.rates.append((len(result.arrays["rewards"]), now_s - issued.sent_s))
        if self.to_restore is not None and issued.order is not None and issued.order.answer is StateRestored:
            if isinstance(result, OrderFailed):
                self.restore_problem = result.error
            else:
                self._went_on(self.to_restore)
            self.to_restore = None
        if is_wanted and issued.is_for_caller:  # also an error in place of a result: the caller must hear of it
            is_refused = isinstance(result, OrderFailed) and result is not message
            failures = [] if is_refused else getattr(message, "failures", [])
            is_after_loss = not is_refused and getattr(message, "is_after_loss", False)
            kept = self.asides if issued.order is not None and issued.order.is_aside else self.answers
            kept.append(Answered(message.order, result, failures, is_after_loss, self.member, arrival))
        self.restarts.worked()

    def progressed(self, message: EvaluationProgress) -> None:
        """Episodes of its oldest open order were played. What cannot be does not count."""
        issued = self.orders.open[0] if self.orders.open else None
        order = None if issued is None or issued.order is None else issued.order.message
        if issued is None or issued.number != message.order or issued.is_cancelled:
            return
        if isinstance(order, Evaluate):
            self.num_played = max(self.num_played, min(message.num_done, len(order.seeds)))

    def drop(self, part: Collected) -> None:
        """Count a rollout that is too old for the learner."""
        self.num_dropped_rollouts += 1
        self.num_dropped_steps += part.arrays["rewards"].size

    def rollouts_out(self, newest_version: int) -> list[int]:
        """The lag of each rollout that was ordered and not taken, oldest first; of those to come the largest possible.

        A process that is not ready will begin its orders anew, with the newest policy: they do not count.
        """
        versions = [
            each.result.oldest_version if isinstance(each.result, Collected) else newest_version
            for each in self.answers
            if isinstance(each.result, Collected | OrderFailed)
        ]
        if self.is_ready:
            least = int(self.process_versions.min())
            for issued in self.orders.open:
                order = issued.order
                message = None if order is None else order.message
                if order is not None and isinstance(message, Collect) and not issued.is_cancelled:
                    # It knows the version in the order, and pulls first if it lags more than the order allows. Columns
                    # of envs that are ready first keep the version they were begun with.
                    if message.max_lag is not None and not self._is_of_first_ready(order):
                        least = max(least, message.version - message.max_lag)
                    versions.append(least)
        return [newest_version - version for version in versions]

    # -- for people --

    def about(self, now_s: float, log_place: str) -> str:
        """What is known of a worker that is missing."""
        heard = "" if self.member is None else f", heard of {now_s - self.member.heard_s:.1f} s ago"
        problem = f", last problem: {self.restarts.problem}" if self.restarts.problem else ""
        detail = f" ({self.status.detail})" if self.status.detail else ""
        stage, state = self.restarts.stage.value, self.status.state.value
        return f"{self} is {stage}{heard}{problem}, its process is {state}{detail}, log: {log_place}"

    def stats(self) -> WorkerStats:
        """The counters at this moment."""
        steps, seconds = (sum(each) for each in zip(*self.rates, strict=True)) if self.rates else (0, 0.0)
        return WorkerStats(
            worker=self.worker,
            stage=self.restarts.stage.value,
            host="" if self.member is None else self.member.host,
            pid=None if self.member is None else self.member.pid,
            num_steps=self.num_steps,
            steps_per_s=steps / seconds if seconds > 0 else 0.0,
            version=self.version,
            lag=self.lag,
            divergence=self.measured.divergence,
            num_rollouts=self.num_rollouts,
            num_dropped_rollouts=self.num_dropped_rollouts,
            num_dropped_steps=self.num_dropped_steps,
            num_pulls=self.num_pulls,
            code_bytes=self.code_bytes,
            weight_bytes=self.weight_bytes,
            rollout_bytes=self.rollout_bytes,
            announcement_bytes=self.announcement_bytes,
            resent_bytes=self.resent_bytes + self.transfers.resent_bytes + self.worker_resent_bytes,
            num_restarts=self.restarts.num_restarts,
            problem=self.restarts.problem,
            num_nan_rows=self.num_nan_rows,
            num_out_of_bounds_rows=self.num_out_of_bounds_rows,
        )


def _check_failure(failure: EnvFailure, first_env_id: int, num_envs: int) -> None:
    if not first_env_id <= failure.env_id < first_env_id + num_envs:
        its_envs = f"{first_env_id} to {first_env_id + num_envs - 1}"
        raise BadMessage(f"a failure of env {failure.env_id}; the worker's own are {its_envs}")
    read_plain(failure.last_action)  # the caller will ask for it
