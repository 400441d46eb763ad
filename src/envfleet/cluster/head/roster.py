"""Roster: who takes part. Joins, introductions and losses; who is to be started again."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from gymnasium import spaces

from envfleet.cluster.head.config import HeadConfig
from envfleet.cluster.head.desk import Desk
from envfleet.cluster.head.membership import Member, Membership
from envfleet.cluster.head.restarts import Restarts, Stage
from envfleet.cluster.wire.bounded_msgpack import decode_bounded
from envfleet.cluster.wire.codec import BadMessage, encode
from envfleet.cluster.wire.messages import (
    MOST_HOST_CHARS,
    PROTOCOL_VERSION,
    Alive,
    Cancel,
    Join,
    Leaving,
    NotReady,
    Ready,
    Refused,
    Stop,
    Welcome,
)
from envfleet.cluster.wire.orders import Numbered
from envfleet.cluster.wire.plain_values import read_plain
from envfleet.cluster.wire.rollouts import RolloutForm
from envfleet.cluster.wire.spaces import space_of
from envfleet.cluster.wire.transfers import Transfers, num_bytes
from envfleet.contract.spaces import SpaceTree

logger = logging.getLogger("envfleet.cluster")

Arrays = Mapping[str, np.ndarray[Any, Any]]
Frames = list[Any]


class Roster:
    """The workers of a run, and what is said to them about taking part in it."""

    def __init__(
        self,
        config: HeadConfig,
        desks: list[Desk],
        send: Callable[[bytes, Frames], bool | None],
        digest_of: Callable[[Frames], bytes] | None,
        refuse: Callable[[str, bytes, str], None],
    ) -> None:
        """`send` and `refuse` are the head's: to a process; for a reason, of a process, with details.

        `digest_of` is for transfers.
        """
        self._config = config
        self._desks = desks  # the head's own: they come and go here
        self._send = send
        self._digest_of = digest_of
        self._refuse = refuse
        self._membership = Membership(len(desks), config.timing.reconnect_s)
        self.restarts = Restarts(len(desks), config.timing.max_worker_restarts, config.timing.join_timeout_s)
        self.form: RolloutForm | None = None  # known when the first worker is ready
        self.metadata: dict[str, Any] = {}  # of its envs
        self.is_stopping = False

    @property
    def members(self) -> list[Member]:
        """Those who are there, in the order of workers."""
        return self._membership.members

    def name_of(self, worker: int) -> str:
        """How errors name a worker: with the host and pid of its process, if one is there."""
        return str(self._membership.worker(worker) or f"worker {worker}")

    def heard_from(self, process: bytes, now_s: float) -> Member | None:
        """Something came from a process. None: it is no member, and what it says does not count."""
        return self._membership.heard_from(process, now_s)

    def was_member(self, process: bytes) -> bool:
        """It took part once; what it still says does not count."""
        return self._membership.was_member(process)

    def send(self, member: Member, frames: Frames) -> int:
        """What cannot be sent now will be sent again. Returns the number of bytes."""
        if self._desks[member.worker].transfers.add(frames, time.monotonic()) is None:
            return num_bytes(frames) if self._send_now(member, frames) else 0
        self.send_chunks(member)
        return num_bytes(frames)

    def send_order(self, member: Member, order: Numbered) -> int:
        """Orders do not overtake each other. Returns the number of bytes."""
        transfers = self._desks[member.worker].transfers
        order.transfer = transfers.add(order.frames, time.monotonic(), is_in_order=True)
        if order.transfer is None:
            return num_bytes(order.frames) if self._send_now(member, order.frames) else 0
        self.send_chunks(member)
        return num_bytes(order.frames)

    def send_chunks(self, member: Member) -> None:
        """Send what there is room for, of messages that travel in chunks."""
        for frames in self._desks[member.worker].transfers.to_send(time.monotonic()):
            if not self._send_now(member, frames):
                break

    def connected(self, process: bytes) -> None:
        """A process has a new connection: what was under way on its old one may be lost."""
        member = self._membership.member(process)
        if member is not None:
            self._desks[member.worker].transfers.outgoing.connected(time.monotonic())
            self.send_chunks(member)

    def _send_now(self, member: Member, frames: Frames) -> bool:
        is_sent = self._send(member.process, frames)
        if is_sent is None:
            self._membership.connection_closed(member.process, time.monotonic())
        return bool(is_sent)

    def send_alive(self, member: Member) -> None:
        """Also to find out whether it is there."""
        desk = self._desks[member.worker]
        self.send(member, encode(Alive(accepted=desk.ledger.num_accepted, is_ready=desk.is_ready)))

    # -- coming --

    def join(self, process: bytes, message: Join, now_s: float) -> None:
        """A process asks to take part."""
        if message.protocol != PROTOCOL_VERSION:
            why = f"the head speaks protocol {PROTOCOL_VERSION}, this worker {message.protocol}: install one version"
            return self._refuse_join(process, message, why)
        before = self._membership.worker(message.worker)
        member = self._membership.join(message.worker, process, message.host, message.pid, now_s)
        if isinstance(member, str):
            return self._refuse_join(process, message, member)
        desk = self._desks[member.worker]
        if member is not before:
            if before is not None:
                logger.warning("%s is replaced by a newer process, pid %d on %s", before, member.pid, member.host)
                desk.problem = f"{before}: a newer process, pid {member.pid} on {member.host}, has taken its place"
                self.restarts.replaced(member.worker, "a newer process has taken its place")
                self._send(before.process, encode(Refused(why="a newer process has taken this worker's place")))
            desk.joined(member, Transfers(self._config.timing.resend_s, self._digest_of))
            self.restarts.joined(member.worker)
            logger.info("%s has joined", member)
        self._welcome(member, desk)

    def ready(self, member: Member, message: Ready, arrays: Arrays, now_s: float) -> None:
        """Its pool is built: it gets the orders that are open."""
        desk = self._desks[member.worker]
        if desk.is_ready:
            return  # it has said so before
        try:
            obs = space_of(decode_bounded(message.observation_space), arrays, "observation_space")
            actions = space_of(decode_bounded(message.action_space), arrays, "action_space")
            metadata = read_plain(message.metadata)
        except BadMessage as error:
            self._refuse("malformed", member.process, str(error))
            return self._refuse_pool(member, f"what it says of its pool cannot be used: {error}", now_s)
        if self.form is None:
            self.form = RolloutForm(
                SpaceTree(obs), SpaceTree(actions), self._config.plans[0].pool.num_envs, self._config.sync.num_probes
            )
            self.metadata = metadata
        elif why := _difference(self.form, obs, actions):
            return self._refuse_pool(member, why, now_s)
        desk.is_ready = True
        cancelled = [order.number for order in desk.ledger.open if order.is_cancelled]
        if cancelled:
            self.send(member, encode(Cancel(through=cancelled[-1])))
        for order in desk.ledger.open:
            order.sent_s, order.num_repeats = now_s, 0
            self.send_order(member, order)
        self.send_alive(member)

    def _refuse_pool(self, member: Member, why: str, now_s: float) -> None:
        self._send(member.process, encode(Refused(why=why)))
        self.not_ready(member, NotReady(error=why, traceback=""), now_s)

    def _welcome(self, member: Member, desk: Desk) -> None:
        if desk.welcome_frames is not None and desk.transfers.is_sending(desk.welcome_frames):
            return  # it asks again while the answer is on its way
        config = self._config
        pickled = config.env_pickles[member.worker]
        welcome = Welcome(
            epoch=member.epoch,
            first_order=desk.ledger.num_accepted + 1,
            plan=config.plans[member.worker],
            sync=config.sync,
            timing=config.timing,
            compression=config.network.compression,
            attributes=desk.attributes,
        )
        desk.welcome_frames = encode(welcome, {} if pickled is None else {"env": np.frombuffer(pickled, np.uint8)})
        self.send(member, desk.welcome_frames)

    def _refuse_join(self, process: bytes, message: Join, why: str) -> None:
        self._refuse("joins refused", process, f"worker {message.worker} on {message.host[:MOST_HOST_CHARS]!a}: {why}")
        if 0 <= message.worker < len(self._desks) and self.restarts.posts[message.worker].stage is Stage.STARTING:
            self.restarts.posts[message.worker].problem = f"it was refused: {why}"
        self._send(process, encode(Refused(why=why)))

    # -- going --

    def not_ready(self, member: Member, message: NotReady, now_s: float) -> None:
        """Its pool cannot be built, or is not like the others'."""
        self._desks[member.worker].not_ready = message
        self._membership.leave(member.process)
        self._lose(member.worker, f"its pool cannot be built: {message.error}", now_s, member)

    def talks_nonsense(self, member: Member, why: str, now_s: float) -> None:
        """What it sends in chunks cannot be put together, and neither can what follows."""
        self._send(member.process, encode(Refused(why=why)))
        self._membership.leave(member.process)
        self._lose(member.worker, why, now_s, member)

    def leaving(self, member: Member, message: Leaving, now_s: float) -> None:
        """It ends by itself."""
        self._membership.leave(member.process)
        if not self.is_stopping:
            self._lose(member.worker, f"it left: {message.why}", now_s, member, message.is_failure)

    def look_after(self, now_s: float) -> None:
        """Ask those who are silent, go on with transfers, give up those whose connections were closed for too long."""
        for member in self.members:
            if now_s - member.heard_s > 1.5 * self._config.timing.heartbeat_s or member.gone_s is not None:
                self.send_alive(member)
            if self._desks[member.worker].transfers.is_open:
                self.send_chunks(member)
        for member, why in self._membership.take_lost(now_s):
            self._lose(member.worker, why, now_s, member)

    def ended(self, worker: int, process_detail: str, now_s: float, is_unreachable: bool = False) -> None:
        """The launcher says that the worker's process has ended, or that its host could not be reached."""
        member = self._membership.worker(worker)
        if self.restarts.posts[worker].stage not in (Stage.STARTING, Stage.PRESENT):
            return
        if member is not None:
            self.send_alive(member)
            if member.gone_s is None:
                return  # the connection is open: it is another process of this worker that has ended
            self._membership.leave(member.process)
        self._lose(worker, process_detail, now_s, member, is_unreachable=is_unreachable)

    def refused(self, worker: int, why: str) -> None:
        """The launcher's engine will not run a worker."""
        if self.restarts.refused(worker, why):
            self._desks[worker].problem = f"worker {worker}: {why}"
            logger.warning("worker %d will not be run: %s", worker, why)

    def revived(self, worker: int, num_processes: int, problem: str) -> None:
        """The launcher's engine has replaced so many more processes of a worker by itself."""
        if self.restarts.revived(worker, num_processes, problem):
            self._desks[worker].problem = f"worker {worker}: {problem}"
            logger.warning("worker %d fails again and again: given up: %s", worker, problem)

    def not_started(self, worker: int, why: str, now_s: float) -> None:
        """The launcher could not start a worker just now."""
        if worker < len(self._desks) and self.restarts.posts[worker].stage is Stage.STARTING:
            self.restarts.not_started(worker, why, now_s)
            logger.warning("worker %d could not be started, and will be tried again: %s", worker, why)

    def resize(self, config: HeadConfig, now_s: float) -> list[Desk]:
        """More workers, or fewer: those that are too many are told to stop. Returns the desks that are new."""
        num_workers = len(config.plans)
        self._config = config
        for member in self.members:
            if member.worker >= num_workers:
                self.send(member, encode(Stop(why="the run goes on with fewer workers")))
                self._membership.leave(member.process)
        del self._desks[num_workers:]
        new = [Desk() for _ in range(num_workers - len(self._desks))]
        self._desks.extend(new)
        self._membership.num_workers = num_workers
        self.restarts.resize(num_workers, now_s)
        return new

    def still_pending(self, worker: int, now_s: float) -> None:
        """The launcher says that a worker still waits for resources: its time to join has not begun."""
        if self.restarts.posts[worker].stage is Stage.STARTING:
            self.restarts.started(worker, now_s)

    def take_due(self, now_s: float) -> list[tuple[int, bool]]:
        """Workers to be started now. Those that did not join in time count as lost, and as late."""
        for worker in self.restarts.late(now_s):
            self._lose(worker, f"it has not joined within {self._config.timing.join_timeout_s:g} s", now_s)
            self.restarts.posts[worker].is_late = True
        return self.restarts.take_due(now_s)

    def _lose(
        self,
        worker: int,
        why: str,
        now_s: float,
        member: Member | None = None,
        is_failure: bool = True,
        is_unreachable: bool = False,
    ) -> None:
        """`member` is its process, if that had joined."""
        desk = self._desks[worker]
        desk.is_ready = False
        desk.transfers.drop()
        name = str(member or f"worker {worker}")
        desk.problem = f"{name}: {why}"
        stage = self.restarts.lost(worker, why, now_s, is_failure, is_unreachable)
        what_next = "it is replaced" if stage is Stage.LOST else "it has been replaced too often: given up"
        level = logging.DEBUG if self.restarts.posts[worker].is_same_loss else logging.WARNING
        logger.log(level, "%s is lost: %s; %s", name, why, what_next)


def _difference(form: RolloutForm, obs: spaces.Space[Any], actions: spaces.Space[Any]) -> str | None:
    """All envs of a run have the same spaces."""
    if obs == form.obs.space and actions == form.actions.space:
        return None
    return f"its spaces are {obs} and {actions}; the others' are {form.obs.space}, {form.actions.space}"
