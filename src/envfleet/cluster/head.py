"""Head: moves messages between the wire and the pure files: membership, staffing, orders, rollouts, weights."""

from __future__ import annotations

import logging
import os
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from gymnasium import spaces

from envfleet.cluster.codec import BadMessage, Decoder, encode
from envfleet.cluster.desk import Desk, Result
from envfleet.cluster.head_socket import HeadSocket
from envfleet.cluster.membership import Member, Membership
from envfleet.cluster.messages import (
    PROCESS_NAME_BYTES,
    PROTOCOL_VERSION,
    Alive,
    Announce,
    Cancel,
    FromWorker,
    Heartbeat,
    Join,
    Leaving,
    NotReady,
    OrderCancelled,
    OrderFailed,
    PoolPlan,
    PullCode,
    PullWeights,
    Ready,
    Refused,
    RolloutReady,
    RowsReady,
    Stop,
    ValuesReady,
    Welcome,
)
from envfleet.cluster.orders import Expected, Verdict
from envfleet.cluster.rollouts import RolloutForm
from envfleet.cluster.spaces_wire import space_of
from envfleet.cluster.staffing import Staffing, Stage
from envfleet.cluster.sync import SyncRule
from envfleet.cluster.values_wire import from_plain
from envfleet.cluster.weights import Versions
from envfleet.cluster.wire import RunKeys
from envfleet.contract.errors import UsageError
from envfleet.contract.policy import PolicyCode
from envfleet.contract.spaces import SpaceTree
from envfleet.contract.stats import RunStats

logger = logging.getLogger("envfleet.cluster")

Array = np.ndarray[Any, Any]
Arrays = Mapping[str, Array]
Frames = list[Any]

MOST_SECONDS = 1e6  # of any setting: twelve days


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadConfig:
    """What the head must know."""

    plans: tuple[PoolPlan, ...]  # one for each worker
    env_pickles: tuple[bytes | None, ...]
    sync: SyncRule
    max_worker_restarts: int  # in a row, without an accepted answer
    join_timeout_s: float
    heartbeat_s: float
    silence_s: float  # ZeroMQ closes a connection whose other end has not answered for so long
    reconnect_s: float  # a worker whose connection has been closed for so long is lost
    resend_s: float
    compression: str | None

    def __post_init__(self) -> None:
        """Refuse what cannot work."""
        for name in ("join_timeout_s", "heartbeat_s", "silence_s", "reconnect_s", "resend_s"):
            if not getattr(self, name) > 0:
                raise UsageError(f"{name} must be positive; got {getattr(self, name)!r}")
            if getattr(self, name) > MOST_SECONDS:
                raise UsageError(f"{name} must be at most {MOST_SECONDS:,.0f}; got {getattr(self, name)!r}")
        if self.max_worker_restarts < 0:
            raise UsageError(f"max_worker_restarts must not be negative; got {self.max_worker_restarts}")
        if self.compression not in (None, "zstd"):
            raise UsageError(f"compression must be None or 'zstd'; got {self.compression!r}")


class Head:
    """The learner's end of the wire. All methods are for one thread at a time, beside the one in the background."""

    def __init__(self, config: HeadConfig, address: str, keys: RunKeys | None) -> None:
        """Bind to `address`; `self.address` says where it came to be."""
        num_workers = len(config.plans)
        self.config = config
        self.desks = [Desk() for _ in range(num_workers)]
        self.staffing = Staffing(num_workers, config.max_worker_restarts, config.join_timeout_s)
        self.versions = Versions()
        self.form: RolloutForm | None = None  # known when the first worker is ready
        self.metadata: dict[str, Any] = {}
        self.num_refused: Counter[str] = Counter()
        self._membership = Membership(num_workers, config.reconnect_s)
        self._decoder: Decoder[Any] = Decoder(FromWorker)
        self._num_arrivals = 0
        self._is_stopping = False
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
        self._socket = HeadSocket(address, keys, config.silence_s, self)
        self.address = self._socket.address
        self.wait = self._socket.wait

    def start(self) -> None:
        """From now on workers are answered."""
        now_s = time.monotonic()
        for worker in range(len(self.desks)):
            self.staffing.started(worker, now_s)
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
                    self._send(desk.member, order.frames)

    def set_code(self, code: PolicyCode) -> None:
        """Another policy from now on."""
        with self._socket.here():
            self.versions.set_code(code)

    def publish(self, weights: Mapping[str, Array]) -> bool:
        """New weights; workers hear of them. False: they are what they were."""
        with self._socket.here():
            if not self.versions.publish(weights):
                return False
            for member in self._membership.members:
                desk = self.desks[member.worker]
                frames = encode(Announce(version=self.versions.version, divergence=desk.divergence))
                desk.announcement_bytes += self._send(member, frames)
            return True

    def name_of(self, worker: int) -> str:
        """How errors name a worker: with the host and pid of its process, if one is there."""
        return str(self._membership.worker(worker) or f"worker {worker}")

    @property
    def is_in_use_here(self) -> bool:
        """Is this thread in the middle of using it?"""
        return self._socket.is_in_use_here

    @property
    def has_open_orders(self) -> bool:
        """Some answers are still to come, or to be taken, and somebody waits for them."""
        return any(desk.answers or desk.ledger.wanted for desk in self.desks)

    def cancel_open(self) -> None:
        """Nobody waits for the open orders any more; answers that are there are thrown away."""
        with self._socket.here():
            for desk in self.desks:
                desk.answers.clear()
                through = desk.ledger.cancel_open()
                if through is not None and desk.is_ready and desk.member is not None:
                    self._send(desk.member, encode(Cancel(through=through)))

    def ended(self, worker: int, process_detail: str) -> bool:
        """The launcher says that the worker's process has ended. True if that was news."""
        with self._socket.aside():
            post, member = self.staffing.posts[worker], self._membership.worker(worker)
            if post.stage not in (Stage.STARTING, Stage.PRESENT):
                return False
            if member is not None:
                self._send_alive(member)
                if member.gone_s is None:
                    return False  # the connection is open: it is another process of this worker that has ended
                self._membership.leave(member.process)
            self._lose(worker, process_detail, member)
            return True

    def take_late(self) -> list[int]:
        """Workers that did not join in time: they count as lost now."""
        with self._socket.aside():
            late = self.staffing.late(_now_s())
            for worker in late:
                self._lose(worker, f"it has not joined within {self.config.join_timeout_s:g} s")
            return late

    def take_due(self) -> list[int]:
        """Workers to be started now."""
        with self._socket.aside():
            return self.staffing.take_due(_now_s())

    def still_pending(self, worker: int) -> None:
        """The launcher says that a worker still waits for resources: its time to join has not begun."""
        with self._socket.aside():
            if self.staffing.posts[worker].stage is Stage.STARTING:
                self.staffing.started(worker, _now_s())

    def stats(self) -> RunStats:
        """The counters at this moment."""
        with self._socket.here():
            refused = dict(self.num_refused)
            if self._socket.num_strangers:
                refused["strangers without the key"] = self._socket.num_strangers
            workers = [desk.stats(w, self.staffing.posts[w]) for w, desk in enumerate(self.desks)]
            return RunStats(tuple(workers), self.versions.version, refused)

    def tell_all_to_stop(self, why: str) -> None:
        """The run is over."""
        with self._socket.here():
            self._is_stopping = True
            for member in self._membership.members:
                self._send(member, encode(Stop(why=why)))

    def close(self) -> None:
        """Close sockets and end the thread. In a fork of the owner: nothing, they are not its own."""
        if os.getpid() == self._owner_pid:
            self._socket.close()

    # -- what the socket calls --

    def tick(self, now_s: float) -> None:
        """Find out who is gone."""
        for member in self._membership.members:
            if now_s - member.heard_s > 1.5 * self.config.heartbeat_s or member.gone_s is not None:
                self._send_alive(member)
        for member, why in self._membership.take_lost(now_s):
            self._lose(member.worker, why, member)

    def _lose(self, worker: int, why: str, member: Member | None = None) -> None:
        """`member` is its process, if that had joined."""
        desk = self.desks[worker]
        desk.is_ready = False
        name = str(member or f"worker {worker}")
        desk.problem = f"{name}: {why}"
        stage = self.staffing.lost(worker, why, _now_s())
        what_next = "it is replaced" if stage is Stage.LOST else "it has been replaced too often: given up"
        logger.warning("%s is lost: %s; %s", name, why, what_next)

    def receive(self, process: bytes, frames: list[Any]) -> None:
        """Whatever came, from whomever."""
        if len(process) != PROCESS_NAME_BYTES:  # also what a closed connection has left behind, under a new name
            return self._refuse("malformed", process, "the sender has no name of its own")
        try:
            message, arrays = self._decoder.decode(frames)
        except BadMessage as error:
            return self._refuse("malformed", process, str(error))
        now_s = _now_s()
        if isinstance(message, Join):
            return self._join(process, message, now_s)
        member = self._membership.heard_from(process, now_s)
        if member is None:
            self._refuse("from no member", process, f"{type(message).__name__} of a process that is no member")
            self._socket.send(process, encode(Refused(why="you are no member of this run, or no longer")))
            return None
        desk = self.desks[member.worker]
        if isinstance(message, RolloutReady | RowsReady):
            desk.rollout_bytes += sum(frame.nbytes for frame in frames)
        self._reactions[type(message)](member, desk, message, arrays)

    # -- messages of workers --

    def _join(self, process: bytes, message: Join, now_s: float) -> None:
        if message.protocol != PROTOCOL_VERSION:
            why = f"the head speaks protocol {PROTOCOL_VERSION}, this worker {message.protocol}: install one version"
            return self._refuse_join(process, message, why)
        before = self._membership.worker(message.worker)
        member = self._membership.join(message.worker, process, message.host, message.pid, now_s)
        if isinstance(member, str):
            return self._refuse_join(process, message, member)
        desk = self.desks[member.worker]
        if member is not before:
            if before is not None:
                logger.warning("%s is replaced by a newer process, pid %d on %s", before, member.pid, member.host)
                refused = encode(Refused(why="a newer process has taken this worker's place"))
                self._socket.send(before.process, refused)
            desk.member, desk.is_ready, desk.not_ready = member, False, None
            self.staffing.joined(member.worker)
            logger.info("%s has joined", member)
        config = self.config
        pickled = config.env_pickles[member.worker]
        welcome = Welcome(
            epoch=member.epoch,
            first_order=desk.ledger.num_accepted + 1,
            plan=config.plans[member.worker],
            sync=config.sync,
            heartbeat_s=config.heartbeat_s,
            resend_s=config.resend_s,
            compression=config.compression,
            attributes=desk.attributes,
        )
        self._send(member, encode(welcome, {} if pickled is None else {"env": np.frombuffer(pickled, np.uint8)}))

    def _refuse_join(self, process: bytes, message: Join, why: str) -> None:
        self._refuse("joins refused", process, f"worker {message.worker} on {message.host}: {why}")
        if 0 <= message.worker < len(self.desks) and self.staffing.posts[message.worker].stage is Stage.STARTING:
            self.staffing.posts[message.worker].problem = f"it was refused: {why}"
        self._socket.send(process, encode(Refused(why=why)))

    def _ready(self, member: Member, desk: Desk, message: Ready, arrays: Arrays) -> None:
        if desk.is_ready:
            return  # it has said so before
        try:
            obs: spaces.Space[Any] = space_of(message.observation_space, arrays, "observation_space")
            actions: spaces.Space[Any] = space_of(message.action_space, arrays, "action_space")
            metadata = from_plain(message.metadata)
        except BadMessage as error:
            return self._refuse("malformed", member.process, str(error))
        if self.form is None:
            self.form = RolloutForm(SpaceTree(obs), SpaceTree(actions), self.config.plans[0].num_envs)
            self.metadata = metadata
        elif obs != self.form.obs.space or actions != self.form.actions.space:
            why = (
                f"its spaces are {obs} and {actions}; the others' are {self.form.obs.space}, {self.form.actions.space}"
            )
            desk.not_ready = NotReady(error=why, traceback="")
            self._socket.send(member.process, encode(Refused(why=why)))
            self._membership.leave(member.process)
            return self._lose(member.worker, why, member)
        desk.is_ready = True
        through = max((order.number for order in desk.ledger.open if order.is_cancelled), default=None)
        if through is not None:
            self._send(member, encode(Cancel(through=through)))
        for order in desk.ledger.open:
            order.sent_s, order.num_repeats = _now_s(), 0
            self._send(member, order.frames)
        self._send_alive(member)

    def _answer(self, member: Member, desk: Desk, message: Any, arrays: Arrays) -> None:
        verdict = desk.ledger.judge(message.order)
        if verdict not in (Verdict.ACCEPTED, Verdict.CANCELLED):
            return self._refuse(f"answers {verdict.value}", member.process, f"{member}: answer to {message.order}")
        assert self.form is not None  # it has been given orders, so it has been ready
        try:
            result: Result = desk.checked(message, arrays, member.worker, self.form, self.versions.version)
        except BadMessage as error:
            self._refuse("malformed", member.process, f"{member}: {error}")
            # Its next try would be no better: whoever waits for it must hear of it.
            line = f"its answer is malformed: {error}"
            result = OrderFailed(order=message.order, kind="order", error=line, traceback="")
        self.staffing.worked(member.worker)
        self._num_arrivals += 1
        is_wanted = verdict is Verdict.ACCEPTED
        desk.accept(message, result, is_wanted, member, self._num_arrivals, _now_s())

    def _heartbeat(self, member: Member, desk: Desk, message: Heartbeat, arrays: Arrays) -> None:
        self._send_alive(member)
        if desk.is_ready:
            for order in desk.ledger.overdue(message.received, _now_s(), self.config.resend_s):
                self._send(member, order.frames)

    def _not_ready(self, member: Member, desk: Desk, message: NotReady, arrays: Arrays) -> None:
        desk.not_ready = message
        self._membership.leave(member.process)
        self._lose(member.worker, f"its pool cannot be built: {message.error}", member)

    def _leaving(self, member: Member, desk: Desk, message: Leaving, arrays: Arrays) -> None:
        self._membership.leave(member.process)
        if not self._is_stopping:
            self._lose(member.worker, f"it left: {message.why}", member)

    def _pull_code(self, member: Member, desk: Desk, message: PullCode, arrays: Arrays) -> None:
        frames = self.versions.code_frames()
        if frames is not None:
            desk.weight_bytes += self._send(member, frames)

    def _pull_weights(self, member: Member, desk: Desk, message: PullWeights, arrays: Arrays) -> None:
        frames = self.versions.weight_frames()
        if frames is not None:
            desk.num_pulls += 1
            desk.weight_bytes += self._send(member, frames)

    def _send_alive(self, member: Member) -> None:
        desk = self.desks[member.worker]
        self._send(member, encode(Alive(accepted=desk.ledger.num_accepted, is_ready=desk.is_ready)))

    def _send(self, member: Member, frames: Frames) -> int:
        """What cannot be sent now will be sent again. Returns the number of bytes."""
        is_sent = self._socket.send(member.process, frames)
        if is_sent is None:
            self._membership.connection_closed(member.process, _now_s())
        return _num_bytes(frames) if is_sent else 0

    def _refuse(self, reason: str, process: bytes, detail: str) -> None:
        self.num_refused[reason] += 1
        level = logging.WARNING if self.num_refused[reason] == 1 else logging.DEBUG
        logger.log(level, "a message was dropped (%s): %s; from %s", reason, detail, process.hex())


def _encoded(message: Callable[[int, int], Any], arrays: Arrays, order: int, accepted: int) -> Frames:
    return encode(message(order, accepted), arrays)


def _now_s() -> float:
    return time.monotonic()


def _num_bytes(frames: Frames) -> int:
    return sum(len(frame) if isinstance(frame, bytes) else memoryview(frame).nbytes for frame in frames)
