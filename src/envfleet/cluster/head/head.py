"""Head: moves messages between the wire and what decides: roster, orders, rollouts, weights. Under one lock."""

from __future__ import annotations

import logging
import os
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from envfleet.cluster.head.config import HeadConfig
from envfleet.cluster.head.desk import Desk, Result
from envfleet.cluster.head.membership import Member
from envfleet.cluster.head.policy_versions import PolicyVersions
from envfleet.cluster.head.roster import Roster
from envfleet.cluster.head.socket import HeadSocket
from envfleet.cluster.wire.codec import BadMessage, Decoder, encode
from envfleet.cluster.wire.messages import (
    PROCESS_NAME_BYTES,
    AboutChunks,
    Announce,
    Cancel,
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
    RolloutReady,
    RowsReady,
    Stop,
    ValuesReady,
)
from envfleet.cluster.wire.orders import Expected, Verdict
from envfleet.cluster.wire.rollouts import Collected, Rows
from envfleet.cluster.wire.row_checks import SuspectRows
from envfleet.cluster.wire.sockets import RunKeys
from envfleet.cluster.wire.transfers import Digests
from envfleet.contract.policy import PolicyCode
from envfleet.contract.stats import RunStats

logger = logging.getLogger("envfleet.cluster")

Array = np.ndarray[Any, Any]
Arrays = Mapping[str, Array]
Frames = list[Any]


class Head:
    """The learner's end of the wire. All methods are for one thread at a time, beside the one in the background."""

    def __init__(self, config: HeadConfig, address: str, keys: RunKeys | None) -> None:
        """Bind to `address`; `self.address` says where it came to be."""
        self.desks = [Desk() for _ in config.plans]
        self.versions = PolicyVersions(config.network.weights_dtype == "bfloat16")
        self.measure_s = 0.0
        self.num_measurements = 0
        self.num_refused: Counter[str] = Counter()
        self._decoder: Decoder[Any] = Decoder(FromWorker)
        self._resend_s = config.timing.resend_s
        self._num_arrivals = 0
        self._warned_of: set[str] = set()  # what of envs was told once
        self._owner_pid = os.getpid()
        self._reactions: dict[type, Callable[[Member, Desk, Any, Arrays], None]] = {
            Ready: self._ready,
            NotReady: self._not_ready,
            Heartbeat: self._heartbeat,
            RowsReady: self._answer,
            RolloutReady: self._answer,
            ValuesReady: self._answer,
            OrderFailed: self._answer,
            OrderCancelled: self._answer,
            PullCode: self._pull_code,
            PullWeights: self._pull_weights,
            Leaving: self._leaving,
        }
        self._socket = HeadSocket(address, keys, config.timing.silence_s, self, len(config.plans))
        digest_of = None if keys is None else Digests().of
        self.roster = Roster(config, self.desks, self._socket.send, digest_of, self._refuse)
        self.address = self._socket.address
        self.wait = self._socket.wait

    def start(self) -> None:
        """From now on workers are answered."""
        for worker in range(len(self.desks)):
            self.roster.restarts.started(worker, _now_s())
        self._socket.start()

    # -- for the caller --

    def issue(self, orders: Mapping[int, tuple[Callable[[int, int], Any], Arrays]], expects: Expected) -> None:
        """Give an order to each of some workers: `message(order, accepted)`, and its arrays.

        An order is kept, and given to a worker's replacement if need be, until its answer is accepted.
        """
        with self._socket.here():
            # All are encoded before one is given: what cannot be sent must not leave half of them behind.
            issued = [
                (desk, desk.ledger.prepared(partial(_encoded, message, arrays), expects, _now_s()))
                for desk, (message, arrays) in ((self.desks[worker], each) for worker, each in orders.items())
            ]
            for desk, order in issued:
                desk.ledger.issue(order)
                if desk.is_ready and desk.member is not None:
                    num_bytes = self.roster.send_order(desk.member, order)
                    if expects.answer is RolloutReady:  # this order announces, too
                        desk.announcement_bytes += num_bytes

    def set_code(self, code: PolicyCode) -> None:
        """Another policy from now on."""
        with self._socket.here():
            self.versions.set_code(code)

    def publish(self, weights: Mapping[str, Array]) -> bool:
        """New weights. False: they are what they were."""
        with self._socket.here():
            return self.versions.publish(weights)

    def announce(self) -> None:
        """Tell all workers of the newest version."""
        with self._socket.here():
            for member in self.roster.members:
                desk = self.desks[member.worker]
                news = Announce(
                    version=self.versions.version,
                    divergence=desk.divergence,
                    measured_version=desk.measured_version,
                )
                desk.announcement_bytes += self.roster.send(member, encode(news))

    @property
    def is_in_use_here(self) -> bool:
        """Is this thread in the middle of using it?"""
        return self._socket.is_in_use_here

    @property
    def has_open_orders(self) -> bool:
        """Some answers are still to come, or to be taken, and somebody waits for them."""
        with self._socket.here():
            return any(desk.answers or desk.ledger.wanted for desk in self.desks)

    def cancel_open(self) -> None:
        """Nobody waits for the open orders any more; answers that are there are thrown away."""
        with self._socket.here():
            for desk in self.desks:
                desk.answers.clear()
                through = desk.ledger.cancel_open()
                if through is not None and desk.is_ready and desk.member is not None:
                    self.roster.send(desk.member, encode(Cancel(through=through)))

    def ended(self, worker: int, process_detail: str, is_unreachable: bool = False) -> None:
        """The launcher says that the worker's process has ended, or that its host could not be reached."""
        with self._socket.aside():
            self.roster.ended(worker, process_detail, _now_s(), is_unreachable)

    def still_pending(self, worker: int) -> None:
        """The launcher says that a worker still waits for resources: its time to join has not begun."""
        with self._socket.aside():
            self.roster.still_pending(worker, _now_s())

    def refused(self, worker: int, why: str) -> None:
        """The launcher says that its engine will not run a worker."""
        with self._socket.aside():
            self.roster.refused(worker, why)

    def revived(self, worker: int, num_processes: int, problem: str) -> None:
        """The launcher says that its engine has replaced so many more processes of a worker by itself."""
        with self._socket.aside():
            self.roster.revived(worker, num_processes, problem)

    def take_due(self) -> list[tuple[int, bool]]:
        """Workers to be started now; True: it runs, but did not join in time."""
        with self._socket.aside():
            return self.roster.take_due(_now_s())

    def left_to_engine(self, worker: int) -> None:
        """A worker that was due is left to the launcher's engine."""
        with self._socket.aside():
            self.roster.restarts.left_to_engine(worker)

    def not_started(self, worker: int, why: str) -> None:
        """The launcher could not start a worker just now."""
        with self._socket.aside():
            self.roster.not_started(worker, why, _now_s())

    def resize(self, config: HeadConfig, attributes: Mapping[str, Any]) -> None:
        """More workers, or fewer, from now on. `attributes` of all envs are set in those of new workers, too."""
        with self._socket.here():
            for desk in self.roster.resize(config, _now_s()):
                desk.attributes.update(attributes)

    def stats(self) -> RunStats:
        """The counters at this moment."""
        with self._socket.here():
            refused = dict(self.num_refused)
            if self._socket.num_strangers:
                refused["strangers without the key"] = self._socket.num_strangers
            workers = [desk.stats(w, self.roster.restarts.posts[w]) for w, desk in enumerate(self.desks)]
            return RunStats(tuple(workers), self.versions.version, refused, self.num_measurements, self.measure_s)

    def tell_all_to_stop(self, why: str) -> None:
        """The run is over."""
        with self._socket.here():
            self.roster.is_stopping = True
            for member in self.roster.members:
                self.roster.send(member, encode(Stop(why=why)))

    def close(self) -> None:
        """Close sockets and end the thread. In a fork of the owner: nothing, they are not its own."""
        if os.getpid() == self._owner_pid:
            self._socket.close()

    # -- what the socket calls --

    def tick(self, now_s: float) -> None:
        """Time has passed."""
        self.roster.look_after(now_s)

    def connected(self, process: bytes) -> None:
        """A process has a new connection."""
        self.roster.connected(process)

    def receive(self, process: bytes, frames: list[Any]) -> None:
        """Whatever came, from whomever."""
        if len(process) != PROCESS_NAME_BYTES:
            return self._refuse("malformed", process[:PROCESS_NAME_BYTES], "the sender has no name of its own")
        try:
            message, arrays = self._decoder.decode(frames)
        except BadMessage as error:
            return self._refuse("malformed", process, str(error))
        now_s = _now_s()
        if isinstance(message, Join):
            return self.roster.join(process, message, now_s)
        member = self.roster.heard_from(process, now_s)
        if member is None:
            if self.roster.was_member(process):  # it may not have heard yet that it is none any more
                self.num_refused["from a former member"] += 1
            else:
                self._refuse("from no member", process, f"{type(message).__name__} of a process that is no member")
            self._socket.send(process, encode(Refused(why="you are no member of this run, or no longer")))
            return None
        if isinstance(message, AboutChunks):
            self._take_chunk(member, message, arrays, now_s)
        else:
            self._react(member, frames, message, arrays)

    def _take_chunk(self, member: Member, chunk: AboutChunks, arrays: Arrays, now_s: float) -> None:
        try:
            frames = self.desks[member.worker].transfers.take(chunk, arrays, now_s)
        except BadMessage as error:
            self._refuse("malformed", member.process, f"{member}: {error}")
            return self.roster.talks_nonsense(member, f"what it sends cannot be put together: {error}", now_s)
        self.roster.send_chunks(member)
        if frames is None:
            return None
        try:
            message, arrays = self._decoder.decode(frames)
            if not isinstance(message, tuple(self._reactions)):
                raise BadMessage(f"{type(message).__name__} does not travel in chunks")
        except BadMessage as error:
            return self._refuse("malformed", member.process, f"{member}: {error}")
        self._react(member, frames, message, arrays)

    def _react(self, member: Member, frames: Sequence[Any], message: Any, arrays: Arrays) -> None:
        desk = self.desks[member.worker]
        if isinstance(message, RolloutReady | RowsReady):
            desk.rollout_bytes += sum(frame.nbytes for frame in frames)
        self._reactions[type(message)](member, desk, message, arrays)

    # -- messages of workers --

    def _answer(self, member: Member, desk: Desk, message: Any, arrays: Arrays) -> None:
        verdict = desk.ledger.judge(message.order)
        if verdict not in (Verdict.ACCEPTED, Verdict.CANCELLED):
            return self._refuse(f"answers {verdict.value}", member.process, f"{member}: answer to {message.order}")
        assert self.roster.form is not None  # it has been given orders, so it has been ready
        try:
            result: Result = desk.checked(message, arrays, member.worker, self.roster.form, self.versions.version)
        except BadMessage as error:
            self._refuse("malformed", member.process, f"{member}: {error}")
            # Its next try would be no better: whoever waits for it must hear of it.
            line = f"its answer is malformed: {error}"
            result = OrderFailed(order=message.order, kind="order", error=line, traceback="")
        self.roster.restarts.worked(member.worker)
        self._num_arrivals += 1
        is_wanted = verdict is Verdict.ACCEPTED
        desk.accept(message, result, is_wanted, member, self._num_arrivals, _now_s())
        if isinstance(result, Rows | Collected) and result.suspects:
            self._warn_of(result.suspects, member, self.roster.form.num_envs)

    def _warn_of(self, suspects: SuspectRows, member: Member, num_envs: int) -> None:
        """Once of each kind in a run: envs that do so do it often."""
        for what, env, counter in (
            ("NaN in its observation or reward", suspects.nan_env, "num_nan_rows"),
            ("an observation outside its space", suspects.out_of_bounds_env, "num_out_of_bounds_rows"),
        ):
            if env is not None and what not in self._warned_of:
                self._warned_of.add(what)
                text = "env %d of %s gave %s. Such rows are passed on, and counted in stats().workers[%d].%s"
                logger.warning(text, member.worker * num_envs + env, member, what, member.worker, counter)

    def refuse_answer(self, worker: int, detail: str) -> None:
        """Count an answer that was accepted, and turned out to be of no use."""
        with self._socket.here():
            member = self.desks[worker].member
            self._refuse("malformed", b"" if member is None else member.process, f"{member}: {detail}")

    def _heartbeat(self, member: Member, desk: Desk, message: Heartbeat, arrays: Arrays) -> None:
        desk.worker_resent_bytes = message.resent_bytes
        self.roster.send_alive(member)
        if desk.is_ready:
            for order in desk.ledger.overdue(message.received, _now_s(), self._resend_s):
                desk.resent_bytes += self.roster.send_order(member, order)

    def _ready(self, member: Member, desk: Desk, message: Ready, arrays: Arrays) -> None:
        self.roster.ready(member, message, arrays, _now_s())

    def _not_ready(self, member: Member, desk: Desk, message: NotReady, arrays: Arrays) -> None:
        self.roster.not_ready(member, message, _now_s())

    def _leaving(self, member: Member, desk: Desk, message: Leaving, arrays: Arrays) -> None:
        self.roster.leaving(member, message, _now_s())

    def _pull_code(self, member: Member, desk: Desk, message: PullCode, arrays: Arrays) -> None:
        frames = self.versions.code_frames()
        if frames is not None and not desk.transfers.is_sending(frames):  # it was asked again before it can have come
            desk.code_bytes += self.roster.send(member, frames)

    def _pull_weights(self, member: Member, desk: Desk, message: PullWeights, arrays: Arrays) -> None:
        frames = self.versions.weight_frames()
        if frames is not None and not desk.transfers.is_sending(frames):
            desk.num_pulls += 1
            desk.weight_bytes += self.roster.send(member, frames)

    def _refuse(self, reason: str, process: bytes, detail: str) -> None:
        self.num_refused[reason] += 1
        level = logging.WARNING if self.num_refused[reason] == 1 else logging.DEBUG
        logger.log(level, "a message was dropped (%s): %s; from %s", reason, detail, process.hex())


def _encoded(message: Callable[[int, int], Any], arrays: Arrays, order: int, accepted: int) -> Frames:
    return encode(message(order, accepted), arrays)


def _now_s() -> float:
    return time.monotonic()
