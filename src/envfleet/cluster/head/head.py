"""Head: moves messages between the socket and those who decide: fleet, orders, rollouts, versions. Under one lock."""

from __future__ import annotations

import logging
import os
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from envfleet.cluster.checkpoint.content import SavedHead, SavedWorker
from envfleet.cluster.head.answers import Result
from envfleet.cluster.head.config import HeadConfig
from envfleet.cluster.head.episode_metrics import EpisodeMetrics
from envfleet.cluster.head.fleet import DueWorker, Fleet
from envfleet.cluster.head.policy_versions import PolicyVersions
from envfleet.cluster.head.socket import HeadSocket
from envfleet.cluster.head.worker_record import WorkerRecord
from envfleet.cluster.info_choice import MOST_INFO_BYTES, InfoChoice
from envfleet.cluster.wire.codec import BadMessage, Decoder, encode
from envfleet.cluster.wire.evaluations import WEIGHT
from envfleet.cluster.wire.messages import (
    PROCESS_NAME_BYTES,
    AboutChunks,
    Announce,
    Cancel,
    ChangeEnvs,
    Collect,
    EvaluationProgress,
    EvaluationReady,
    FromWorker,
    Heartbeat,
    Join,
    Leaving,
    NotReady,
    OrderCancelled,
    OrderFailed,
    PullCode,
    PullWeights,
    Ready,
    Refused,
    RestoreState,
    RolloutReady,
    RowsReady,
    StateReady,
    StateRestored,
    Stop,
    ValuesReady,
    Weights,
)
from envfleet.cluster.wire.orders import Order, Verdict
from envfleet.cluster.wire.rollouts import Collected, Rows
from envfleet.cluster.wire.row_checks import SuspectRows
from envfleet.cluster.wire.sockets import RunKeys
from envfleet.cluster.wire.transfers import Digests
from envfleet.cluster.wire.weights import digest
from envfleet.cluster.wire.worker_states import STATE, SavedState
from envfleet.contract.arrays import Array, Arrays
from envfleet.contract.policy import PolicyCode
from envfleet.contract.stats import RunStats
from envfleet.launchers.launcher import WorkerStatus

logger = logging.getLogger("envfleet.cluster")


MOST_LEFT_OUT = 1024  # infos of which the log says that they are left out


class Head:
    """The learner's end of the wire. All methods are for one thread at a time, beside the one in the background."""

    def __init__(self, config: HeadConfig, address: str, keys: RunKeys | None) -> None:
        """Bind to `address`; `self.address` is the address with the port that was taken."""
        self.versions = PolicyVersions(config.network.weights_dtype == "bfloat16")
        self._measure_s = 0.0
        self._num_measurements = 0
        self._num_refused: Counter[str] = Counter()
        self._decoder: Decoder[Any] = Decoder(FromWorker)
        self._resend_s = config.timing.resend_s
        self._num_arrivals = 0
        self._warned_of: set[str] = set()  # kinds of suspect rows that were logged
        self._left_out: set[str] = set()  # infos that rollouts do not carry, as they were logged
        self._metrics = EpisodeMetrics()
        self._owner_pid = os.getpid()
        self._reactions: dict[type, Callable[[WorkerRecord, Any, Arrays], None]] = {
            Ready: self._ready,
            NotReady: self._not_ready,
            Heartbeat: self._heartbeat,
            RowsReady: self._answer,
            RolloutReady: self._answer,
            ValuesReady: self._answer,
            EvaluationReady: self._answer,
            EvaluationProgress: self._evaluation_progress,
            StateReady: self._answer,
            StateRestored: self._answer,
            OrderFailed: self._answer,
            OrderCancelled: self._answer,
            PullCode: self._pull_code,
            PullWeights: self._pull_weights,
            Leaving: self._leaving,
        }
        self._socket = HeadSocket(address, keys, config.timing.silence_s, self, len(config.plans))
        digest_of = None if keys is None else Digests().of
        self.fleet = Fleet(config, self._socket.send, digest_of, self._refuse)
        self.address = self._socket.address
        self.wait = self._socket.wait

    def start(self) -> None:
        """Answer workers from now on."""
        self.fleet.start(_now_s())
        self._socket.start()

    # -- for the caller --

    def issue(self, orders: Mapping[int, Order]) -> dict[int, int]:
        """Issue an order to each of some workers. Returns their numbers, by worker.

        An order is kept, and given to a worker's replacement if need be, until its answer is accepted.
        """
        with self._socket.here():
            now_s = _now_s()
            # All are encoded before one is issued: an order that cannot be encoded must not leave half of them behind.
            prepared = {worker: self.fleet[worker].orders.prepare(order, now_s) for worker, order in orders.items()}
            for worker, issued in prepared.items():
                self.fleet[worker].issue(issued, now_s)
            return {worker: issued.number for worker, issued in prepared.items()}

    def change(self, message: ChangeEnvs) -> None:
        """Have the envs of all workers apply a change, also those of workers and processes that come later."""
        with self._socket.here():
            now_s = _now_s()
            # A worker that was given up and comes back all the same has it from its Welcome.
            records = [record for record in self.fleet if not record.is_given_up]
            prepared = [(record, record.orders.prepare(Order(message), now_s)) for record in records]
            self.fleet.keep_change(message)
            for record, issued in prepared:
                record.issue(issued, now_s)

    def collect(
        self, worker: int, num_steps: int, infos: InfoChoice, max_lag: int | None = None, stream: int = 0
    ) -> Order:
        """An order for a rollout, which also tells the worker of the newest version.

        Args:
            worker: The worker.
            num_steps: Steps of each env.
            infos: What the rollout carries of the envs' infos.
            max_lag: The worker pulls first if its policy is more versions behind; None: only if the rule says so.
            stream: The number of the stream that it is for; 0: for none.
        """
        measured = self.fleet[worker].measured
        return Order(
            Collect(
                num_steps=num_steps,
                code_id=self.versions.code_id,
                version=self.versions.version,
                divergence=measured.divergence,
                measured_version=measured.version,
                infos=infos,
                max_lag=max_lag,
                stream=stream,
            )
        )

    def rollouts_out(self) -> dict[int, list[int]]:
        """Of each worker that is ready or has answered: see WorkerRecord.rollouts_out(). Does not receive."""
        with self._socket.still():
            newest = self.versions.version
            return {
                record.worker: record.rollouts_out(newest) for record in self.fleet if record.is_ready or record.answers
            }

    def announce(self) -> None:
        """Tell all workers of the newest version."""
        with self._socket.here():
            for record in self.fleet.present:
                measured = record.measured
                news = Announce(
                    version=self.versions.version, divergence=measured.divergence, measured_version=measured.version
                )
                record.announcement_bytes += record.send(encode(news), _now_s())

    def set_code(self, code: PolicyCode) -> None:
        """Make another policy the newest."""
        with self._socket.here():
            self.versions.set_code(code)

    def adopt_code(self, code: PolicyCode, weights: Mapping[str, Array]) -> None:
        """Take the code of the policy that was restored. Raises UsageError if the agent's weights do not fit."""
        with self._socket.here():
            self.versions.adopt_code(code, weights)

    def publish(self, weights: Mapping[str, Array]) -> bool:
        """Make these weights the newest version. Returns whether they differ from the last ones."""
        with self._socket.here():
            return self.versions.publish(weights)

    def count_measurement(self, seconds: float) -> None:
        """Count a measurement of divergences that took this many seconds."""
        self._num_measurements += 1
        self._measure_s += seconds

    @property
    def is_in_use_here(self) -> bool:
        """Whether this thread is in the middle of using the head."""
        return self._socket.is_in_use_here

    @property
    def has_open_orders(self) -> bool:
        """Whether there are answers to come or to be taken."""
        with self._socket.here():
            return self.fleet.has_open_orders

    def cancel_open(self) -> None:
        """Cancel all open orders, and drop the answers that were not taken."""
        with self._socket.here():
            for record in self.fleet:
                record.answers.clear()
                through = record.orders.cancel_open()
                if through is not None and record.is_ready:
                    record.send(encode(Cancel(through=through)), _now_s())

    def cancel_aside(self, worker: int, number: int) -> None:
        """Cancel one order of no activity, if it is open, and drop its answer. All other orders stay."""
        with self._socket.here():
            record = self.fleet[worker]
            record.orders.cancel(number)
            record.asides.clear()
            if record.is_ready:
                record.send(encode(Cancel(through=0, others=[number])), _now_s())

    def refuse_answer(self, worker: int, detail: str) -> None:
        """Count an answer that was accepted, and turned out to be of no use."""
        with self._socket.here():
            member = self.fleet[worker].member
            self._refuse("malformed", b"" if member is None else member.process, f"{member}: {detail}")

    def resize(self, config: HeadConfig, attributes: Mapping[str, Any]) -> None:
        """Have more workers, or fewer. `attributes` of all envs are set in those of new workers, too."""
        with self._socket.here():
            self.fleet.resize(config, attributes, _now_s())

    def stats(self) -> RunStats:
        """The counters at this moment."""
        with self._socket.here():
            refused = dict(self._num_refused)
            if self._socket.num_strangers:
                refused["strangers without the key"] = self._socket.num_strangers
            workers = tuple(record.stats() for record in self.fleet)
            return RunStats(
                workers,
                self.versions.version,
                refused,
                self._num_measurements,
                self._measure_s,
                metrics=self._metrics.means(),
            )

    def tell_all_to_stop(self, why: str) -> None:
        """Tell all workers that the run is over."""
        with self._socket.here():
            self.fleet.is_stopping = True
            for record in self.fleet.present:
                record.send(encode(Stop(why=why)), _now_s())

    def close(self) -> None:
        """Close sockets and end the thread. In a fork of the owner: nothing, they are not its own."""
        if os.getpid() == self._owner_pid:
            self._socket.close()

    # -- checkpoints --

    def saved(self, states: Mapping[int, SavedState]) -> SavedHead:
        """What the head knows, for a checkpoint; `states` are what workers said of themselves."""
        with self._socket.here():
            versions, newest = self.versions, self.versions.version
            weights: dict[int, Arrays] = {newest: dict(versions.weights)} if newest else {}
            for state in states.values():
                if state.code_id == versions.code_id and versions.are_alike(state.weights):
                    weights.setdefault(state.version, dict(state.weights))
            return SavedHead(
                code_id=versions.code_id,
                version=newest,
                weights=weights,
                changes=self.fleet.saved_changes(),
                episodes=self._metrics.episodes,
                num_refused=dict(self._num_refused),
                num_measurements=self._num_measurements,
                measure_s=self._measure_s,
                workers=self.fleet.saved_workers(states),
            )

    def restore(self, saved: SavedHead) -> None:
        """Go on from a checkpoint: before start(). Each worker's first order has it go on where it was."""
        self.versions.restore(saved.code_id, saved.version, saved.weights.get(saved.version, {}))
        self._metrics.restore(saved.episodes)
        self._num_refused.update(saved.num_refused)
        self._num_measurements, self._measure_s = saved.num_measurements, saved.measure_s
        self.fleet.restore(saved)
        for record, worker in zip(self.fleet, saved.workers, strict=True):
            if worker.state is not None:
                record.to_restore = worker
                order = self._restoring(worker, worker.state, saved)
                record.issue(record.orders.prepare(order, _now_s()), _now_s())

    def _restoring(self, worker: SavedWorker, state: Array, saved: SavedHead) -> Order:
        """The order to go on, with the weights that the worker held."""
        message: Weights | None = None
        weights: Arrays = {}
        if worker.version >= 0 and worker.code_id == saved.code_id:
            if worker.version == saved.version:
                message, weights = self.versions.packed_weights()
            elif worker.version in saved.weights:
                weights = saved.weights[worker.version]
                message = Weights(version=worker.version, code_id=saved.code_id, digest=digest(weights), bfloat16=[])
        arrays = {STATE: state, **{f"{WEIGHT}{name}": each for name, each in weights.items()}}
        return Order(RestoreState(weights=message), arrays)

    # -- for the launcher's monitor --

    def reported(self, worker: int, status: WorkerStatus) -> None:
        """The launcher says how a worker's process is."""
        if self.fleet.is_news(worker, status):
            with self._socket.aside():
                self.fleet.reported(worker, status, _now_s())

    def take_due(self) -> list[DueWorker]:
        """The workers to start now."""
        with self._socket.aside():
            return self.fleet.take_due(_now_s())

    def left_to_engine(self, worker: int) -> None:
        """A worker that was due is left to the launcher's engine."""
        with self._socket.aside():
            self.fleet[worker].restarts.left_to_engine()

    def not_started(self, worker: int, why: str) -> None:
        """The launcher could not start a worker now."""
        with self._socket.aside():
            self.fleet.not_started(worker, why, _now_s())

    # -- what the socket calls --

    def tick(self, now_s: float) -> None:
        """Send again what was not received, and drop who is lost, if it is time."""
        self.fleet.tick(now_s)

    def connected(self, process: bytes) -> None:
        """A process has a new connection."""
        self.fleet.connected(process, _now_s())

    def receive(self, process: bytes, frames: list[Any]) -> None:
        """Take a message of any process, well-formed or not."""
        if len(process) != PROCESS_NAME_BYTES:
            return self._refuse("malformed", process[:PROCESS_NAME_BYTES], "the sender has no name of its own")
        try:
            message, arrays = self._decoder.decode(frames)
        except BadMessage as error:
            return self._refuse("malformed", process, str(error))
        now_s = _now_s()
        if isinstance(message, Join):
            return self.fleet.join(process, message, now_s)
        record = self.fleet.heard_from(process, now_s)
        if record is None:
            if self.fleet.was_member(process):  # it may not have heard yet that it is none any more
                self._num_refused["from a former member"] += 1
            else:
                self._refuse("from no member", process, f"{type(message).__name__} of a process that is no member")
            self._socket.send(process, encode(Refused(why="you are no member of this run, or no longer")))
            return None
        if isinstance(message, AboutChunks):
            self._take_chunk(record, process, message, arrays, now_s)
        else:
            self._react(record, frames, message, arrays)

    def _take_chunk(
        self, record: WorkerRecord, process: bytes, chunk: AboutChunks, arrays: Arrays, now_s: float
    ) -> None:
        try:
            frames = record.transfers.take(chunk, arrays, now_s)
        except BadMessage as error:
            self._refuse("malformed", process, f"{record}: {error}")
            return self.fleet.dismiss(record, f"what it sends cannot be put together: {error}", now_s)
        record.send_chunks(now_s)
        if frames is None:
            return None
        try:
            message, arrays = self._decoder.decode(frames)
            if not isinstance(message, tuple(self._reactions)):
                raise BadMessage(f"{type(message).__name__} does not travel in chunks")
        except BadMessage as error:
            return self._refuse("malformed", process, f"{record}: {error}")
        self._react(record, frames, message, arrays)

    def _react(self, record: WorkerRecord, frames: Sequence[Any], message: Any, arrays: Arrays) -> None:
        if isinstance(message, RolloutReady | RowsReady):
            record.rollout_bytes += sum(frame.nbytes for frame in frames)
        self._reactions[type(message)](record, message, arrays)

    # -- messages of workers --

    def _answer(self, record: WorkerRecord, message: Any, arrays: Arrays) -> None:
        member, form = record.member, self.fleet.form
        assert member is not None
        if form is None:
            return self._refuse("malformed", member.process, f"{member}: an answer, but no worker was ever ready")
        verdict = record.orders.judge(message.order)
        if verdict not in (Verdict.ACCEPTED, Verdict.CANCELLED):
            return self._refuse(f"answers {verdict.value}", member.process, f"{member}: answer to {message.order}")
        try:
            result: Result = record.checked(message, arrays, form, self.versions.version)
        except BadMessage as error:
            self._refuse("malformed", member.process, f"{member}: {error}")
            # Its next attempt would be no better: the caller that waits for it must hear of it.
            line = f"its answer is malformed: {error}"
            result = OrderFailed(order=message.order, kind="order", error=line, traceback="")
        if isinstance(result, OrderFailed) and not record.orders.open[0].is_for_caller:
            what = "take a change of its envs" if record.to_restore is None else "go on where the checkpoint has it"
            logger.warning("%s could not %s: %s", member, what, result.error)
        self._num_arrivals += 1
        record.accept(message, result, verdict is Verdict.ACCEPTED, self._num_arrivals, _now_s())
        if isinstance(result, Rows | Collected) and result.suspects:
            self._warn_of(result.suspects, record, form.num_envs)
        if isinstance(result, Collected) and verdict is Verdict.ACCEPTED:
            self._metrics.add(result)
            self._warn_of_left_out(message.infos.left_out, record)

    def _warn_of(self, suspects: SuspectRows, record: WorkerRecord, num_envs: int) -> None:
        """Log each kind once in a run: envs that return such rows do it often."""
        worker = record.worker
        for what, env, counter in (
            ("NaN in its observation or reward", suspects.nan_env, "num_nan_rows"),
            ("an observation outside its space", suspects.out_of_bounds_env, "num_out_of_bounds_rows"),
        ):
            if env is not None and what not in self._warned_of:
                self._warned_of.add(what)
                text = "env %d of %s gave %s. Such rows are passed on, and counted in stats().workers[%d].%s"
                logger.warning(text, worker * num_envs + env, record, what, worker, counter)

    def _warn_of_left_out(self, left_out: Sequence[str], record: WorkerRecord) -> None:
        """Log each info that a rollout does not carry once in a run."""
        new = [each for each in left_out if each not in self._left_out]
        if new and len(self._left_out) < MOST_LEFT_OUT:
            self._left_out.update(new)
            logger.warning(
                "the rollouts of %s come without the infos %s. If no keys are chosen, at most %d MiB of numbers are "
                "sent; rollout(..., infos=('key', ...)) and stream(..., infos=...) send the keys that you choose, of "
                "any size, and infos=() sends none",
                record,
                ", ".join(map(ascii, new)),
                MOST_INFO_BYTES >> 20,
            )

    def _evaluation_progress(self, record: WorkerRecord, message: EvaluationProgress, arrays: Arrays) -> None:
        record.progressed(message)

    def _heartbeat(self, record: WorkerRecord, message: Heartbeat, arrays: Arrays) -> None:
        now_s = _now_s()
        record.worker_resent_bytes = message.resent_bytes
        record.send_alive(now_s)
        if record.is_ready:
            for order in record.orders.overdue(message.received, now_s, self._resend_s):
                record.resent_bytes += record.send_order(order, now_s)
            through, others = record.orders.cancelled
            if through or others:  # the first message may have been lost with a connection
                record.send(encode(Cancel(through=through, others=others)), now_s)

    def _ready(self, record: WorkerRecord, message: Ready, arrays: Arrays) -> None:
        if not record.is_ready:  # it has no policy yet: it will pull this version or a newer one
            record.process_versions[:] = self.versions.version
        self.fleet.ready(record, message, arrays, _now_s())

    def _not_ready(self, record: WorkerRecord, message: NotReady, arrays: Arrays) -> None:
        self.fleet.not_ready(record, message, _now_s())

    def _leaving(self, record: WorkerRecord, message: Leaving, arrays: Arrays) -> None:
        self.fleet.leaving(record, message, _now_s())

    def _pull_code(self, record: WorkerRecord, message: PullCode, arrays: Arrays) -> None:
        frames = self.versions.code_frames()
        if frames is not None and not record.transfers.is_sending(frames):  # it has asked twice
            record.code_bytes += record.send(frames, _now_s())

    def _pull_weights(self, record: WorkerRecord, message: PullWeights, arrays: Arrays) -> None:
        frames = self.versions.weight_frames()
        if frames is not None and not record.transfers.is_sending(frames):
            record.num_pulls += 1
            record.weight_bytes += record.send(frames, _now_s())

    def _refuse(self, reason: str, process: bytes, detail: str) -> None:
        self._num_refused[reason] += 1
        level = logging.WARNING if self._num_refused[reason] == 1 else logging.DEBUG
        logger.log(level, "a message was dropped (%s): %s; from %s", reason, detail, process.hex())


def _now_s() -> float:
    return time.monotonic()
