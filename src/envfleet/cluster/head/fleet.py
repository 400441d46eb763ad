"""Fleet: the workers of a run, one record each. Who joins, who is ready, who is lost, who is started again."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
from gymnasium import spaces

from envfleet.cluster.checkpoint.content import SavedHead, SavedWorker
from envfleet.cluster.head.answers import Answered
from envfleet.cluster.head.config import HeadConfig
from envfleet.cluster.head.membership import Membership
from envfleet.cluster.head.restarts import Restarts, Stage
from envfleet.cluster.head.worker_record import NOT_REPORTED, Deliver, WorkerRecord
from envfleet.cluster.wire.bounded_msgpack import decode_bounded
from envfleet.cluster.wire.codec import BadMessage, encode
from envfleet.cluster.wire.messages import (
    MOST_HOST_CHARS,
    PROTOCOL_VERSION,
    Cancel,
    ChangeEnvs,
    Join,
    Leaving,
    NotReady,
    Ready,
    Refused,
    Stop,
    Welcome,
)
from envfleet.cluster.wire.plain_values import read_plain
from envfleet.cluster.wire.rollouts import RolloutForm
from envfleet.cluster.wire.spaces import space_of
from envfleet.cluster.wire.transfers import Transfers
from envfleet.cluster.wire.worker_states import SavedState
from envfleet.contract.arrays import Arrays
from envfleet.contract.live_changes import ChangeKind
from envfleet.contract.spaces import SpaceTree
from envfleet.launchers.launcher import WorkerState, WorkerStatus

logger = logging.getLogger("envfleet.cluster")

Frames = list[Any]

_OF_A_CHANGE = ("number", "kind", "name", "args", "kwargs")  # what a checkpoint has of it


class DueWorker(NamedTuple):
    """A worker that is to be started now."""

    worker: int
    is_late: bool  # it was started before, and did not join in time
    is_alive: bool  # the launcher says that a process of it runs, or waits for resources


class Fleet:
    """All workers of a run. `fleet[worker]` is all that the head knows of one."""

    def __init__(
        self,
        config: HeadConfig,
        deliver: Deliver,
        digest_of: Callable[[Frames], bytes] | None,
        refuse: Callable[[str, bytes, str], None],
    ) -> None:
        """Make a record for each worker.

        Args:
            config: What the head must know.
            deliver: Sends a message to a process.
            digest_of: Hashes large messages; None: they are not hashed.
            refuse: Counts and logs a message that is dropped: the reason, the process, the details.
        """
        self._config = config
        self._deliver = deliver
        self._digest_of = digest_of
        self._refuse = refuse
        self._membership = Membership(len(config.plans), config.timing.reconnect_s)
        self._records = [self._new_record(worker, 0.0) for worker in range(len(config.plans))]
        self.form: RolloutForm | None = None  # known when the first worker is ready
        self.metadata: dict[str, Any] = {}  # of its envs
        self.why_no_changes: str | None = None  # its envs cannot be changed while they run
        self._changes: dict[tuple[ChangeKind, str], ChangeEnvs] = {}  # the last of each kind and name
        self.is_stopping = False

    def __getitem__(self, worker: int) -> WorkerRecord:
        """The record of one worker."""
        return self._records[worker]

    def __iter__(self) -> Iterator[WorkerRecord]:
        """The records of all workers, in their order."""
        return iter(self._records)

    def __len__(self) -> int:
        """The number of workers."""
        return len(self._records)

    def start(self, now_s: float) -> None:
        """The launcher is about to be asked for all workers."""
        for record in self:
            record.restarts.started(now_s)

    def resize(self, config: HeadConfig, attributes: Mapping[str, Any], now_s: float) -> None:
        """Have more workers, or fewer: those that are too many are told to stop.

        Args:
            config: With a plan for each worker.
            attributes: Set for all envs before; those of new workers get them, too.
            now_s: The time now.
        """
        num_workers = len(config.plans)
        self._config = config
        for record in self.present:
            if record.worker >= num_workers and record.member is not None:
                record.send(encode(Stop(why="the run goes on with fewer workers")), now_s)
                self._membership.leave(record.member.process)
        del self._records[num_workers:]
        for record in self:
            record.plan, record.env_pickle = config.plans[record.worker], config.env_pickles[record.worker]
        for worker in range(len(self), num_workers):
            self._records.append(self._new_record(worker, now_s))
            self._records[worker].attributes.update(attributes)
        self._membership.num_workers = num_workers

    def _new_record(self, worker: int, now_s: float) -> WorkerRecord:
        config = self._config
        restarts = Restarts(config.timing.max_worker_restarts, config.timing.join_timeout_s, now_s)
        return WorkerRecord(worker, config.plans[worker], config.env_pickles[worker], restarts, self._deliver)

    def keep_change(self, message: ChangeEnvs) -> None:
        """Keep a change for processes that join later."""
        key = message.kind, message.name
        self._changes.pop(key, None)  # so that it goes to the end
        self._changes[key] = message
        assert self.form is not None  # a worker was ready before the caller could make a change
        self.form.newest_change = message.number

    # -- checkpoints --

    def saved_workers(self, states: Mapping[int, SavedState]) -> list[SavedWorker]:
        """All workers, for a checkpoint; `states` are what their processes said of themselves."""
        return [
            record.saved(self._membership.num_processes(record.worker), states.get(record.worker)) for record in self
        ]

    def saved_changes(self) -> list[dict[str, Any]]:
        """The last change of each kind and name, for a checkpoint."""
        changes = [{name: getattr(each, name) for name in _OF_A_CHANGE} for each in self._changes.values()]
        return [{**each, "kind": each["kind"].value} for each in changes]

    def restore(self, saved: SavedHead) -> None:
        """Go on from a checkpoint, before any worker joins."""
        for record, worker in zip(self, saved.workers, strict=True):
            self._membership.restore(record.worker, worker.epoch)
            record.restore(worker)
        for each in saved.changes:
            change = ChangeEnvs(**{**each, "kind": ChangeKind(each["kind"])})
            self._changes[change.kind, change.name] = change

    # -- questions --

    @property
    def present(self) -> list[WorkerRecord]:
        """The workers of which a process takes part, in their order."""
        return [self[member.worker] for member in self._membership.members]

    @property
    def num_ready(self) -> int:
        """The number of workers whose pools are built."""
        return sum(record.is_ready for record in self)

    @property
    def missing(self) -> list[WorkerRecord]:
        """The workers that are not ready."""
        return [record for record in self if not record.is_ready]

    @property
    def has_open_orders(self) -> bool:
        """Whether there are answers to come or to be taken."""
        return any(record.answers or record.orders.is_awaited for record in self)

    def answered(self, workers: Iterable[int]) -> list[int]:
        """Those of `workers` whose answers are there, in the order in which they came."""
        ready = [worker for worker in workers if self[worker].answers]
        return sorted(ready, key=lambda worker: self[worker].answers[0].arrival)

    def take_answers(self, workers: Iterable[int]) -> list[Answered]:
        """The oldest answer of each of `workers`, which all have one."""
        return [self[worker].answers.popleft() for worker in workers]

    def last_progress_s(self, workers: Iterable[int]) -> float:
        """When a chunk of a large message to or from one of `workers` last arrived."""
        return max((self[worker].transfers.progress_s for worker in workers), default=0.0)

    # -- processes --

    def heard_from(self, process: bytes, now_s: float) -> WorkerRecord | None:
        """The worker from whose process a message came. None: it is no member, and its message does not count."""
        member = self._membership.heard_from(process, now_s)
        return None if member is None else self[member.worker]

    def was_member(self, process: bytes) -> bool:
        """Whether a process was a member once."""
        return self._membership.was_member(process)

    def connected(self, process: bytes, now_s: float) -> None:
        """A process has a new connection: chunks that were under way on its old one may be lost."""
        member = self._membership.member(process)
        if member is not None:
            self[member.worker].reconnected(now_s)

    def tick(self, now_s: float) -> None:
        """Ask silent workers, go on with transfers, give up those whose connections were closed for too long."""
        for record in self.present:
            member = record.member
            assert member is not None
            if now_s - member.heard_s > 1.5 * self._config.timing.heartbeat_s or member.gone_s is not None:
                record.send_alive(now_s)
            if record.transfers.is_open:
                record.send_chunks(now_s)
        for member, why in self._membership.take_lost(now_s):
            self._lose(self[member.worker], why, now_s)

    # -- joining --

    def join(self, process: bytes, message: Join, now_s: float) -> None:
        """A process asks to take part."""
        if message.protocol != PROTOCOL_VERSION:
            why = f"the head speaks protocol {PROTOCOL_VERSION}, this worker {message.protocol}: install one version"
            return self._refuse_join(process, message, why)
        before = self._membership.worker(message.worker)
        member = self._membership.join(message.worker, process, message.host, message.pid, now_s)
        if isinstance(member, str):
            return self._refuse_join(process, message, member)
        record = self[member.worker]
        if member is not before:
            if before is not None:
                logger.warning("%s is replaced by a newer process, pid %d on %s", before, member.pid, member.host)
                record.problem = f"{before}: a newer process, pid {member.pid} on {member.host}, has taken its place"
                record.restarts.replaced("a newer process has taken its place")
                self._deliver(before.process, encode(Refused(why="a newer process has taken this worker's place")))
            record.joined(member, Transfers(self._config.timing.resend_s, self._digest_of))
            logger.info("%s has joined", member)
        self._welcome(record, member.epoch, now_s)

    def _welcome(self, record: WorkerRecord, epoch: int, now_s: float) -> None:
        if record.welcome_frames is not None and record.transfers.is_sending(record.welcome_frames):
            return  # it asks again while the answer is on its way
        config, pickled = self._config, record.env_pickle
        welcome = Welcome(
            epoch=epoch,
            first_order=record.orders.num_accepted + 1,
            plan=record.plan,
            sync=config.sync,
            timing=config.timing,
            compression=config.network.compression,
            attributes=record.attributes,
            changes=list(self._changes.values()),
            device=config.worker_device,
        )
        record.welcome_frames = encode(welcome, {} if pickled is None else {"env": np.frombuffer(pickled, np.uint8)})
        record.send(record.welcome_frames, now_s)

    def _refuse_join(self, process: bytes, message: Join, why: str) -> None:
        self._refuse("joins refused", process, f"worker {message.worker} on {message.host[:MOST_HOST_CHARS]!a}: {why}")
        if 0 <= message.worker < len(self) and self[message.worker].restarts.stage is Stage.STARTING:
            self[message.worker].restarts.problem = f"it was refused: {why}"
        self._deliver(process, encode(Refused(why=why)))

    def ready(self, record: WorkerRecord, message: Ready, arrays: Arrays, now_s: float) -> None:
        """Its pool is built: it gets the orders that are open."""
        if record.is_ready:
            return  # it has said so before
        try:
            obs = space_of(decode_bounded(message.observation_space), arrays, "observation_space")
            actions = space_of(decode_bounded(message.action_space), arrays, "action_space")
            metadata = read_plain(message.metadata)
        except BadMessage as error:
            assert record.member is not None
            self._refuse("malformed", record.member.process, str(error))
            return self._refuse_pool(record, f"what it says of its pool cannot be used: {error}", now_s)
        if self.form is None:
            tree = SpaceTree(obs)
            self.form = RolloutForm(tree, SpaceTree(actions), record.plan.pool.num_envs, self._config.sync.num_probes)
            self.form.newest_change = max((each.number for each in self._changes.values()), default=0)
            self.metadata = metadata
            self.why_no_changes = message.why_no_changes
        elif why := _difference(self.form, obs, actions):
            return self._refuse_pool(record, why, now_s)
        record.is_ready = True
        through, others = record.orders.cancelled
        if through or others:
            record.send(encode(Cancel(through=through, others=others)), now_s)
        record.send_open_orders(now_s)
        record.send_alive(now_s)

    # -- leaving --

    def _refuse_pool(self, record: WorkerRecord, why: str, now_s: float) -> None:
        self._tell_refused(record, why)
        self.not_ready(record, NotReady(error=why, traceback=""), now_s)

    def not_ready(self, record: WorkerRecord, message: NotReady, now_s: float) -> None:
        """Its pool cannot be built, or is not like the others'."""
        record.not_ready = message
        self._leave(record)
        self._lose(record, f"its pool cannot be built: {message.error}", now_s)

    def dismiss(self, record: WorkerRecord, why: str, now_s: float) -> None:
        """Its process sends chunks that cannot be put together: what follows them could not be read either."""
        self._tell_refused(record, why)
        self._leave(record)
        self._lose(record, why, now_s)

    def leaving(self, record: WorkerRecord, message: Leaving, now_s: float) -> None:
        """Its process ends by itself."""
        self._leave(record)
        if not self.is_stopping:
            self._lose(record, f"it left: {message.why}", now_s, is_failure=message.is_failure)

    def _tell_refused(self, record: WorkerRecord, why: str) -> None:
        if record.member is not None:
            self._deliver(record.member.process, encode(Refused(why=why)))

    def _leave(self, record: WorkerRecord) -> None:
        if record.member is not None:
            self._membership.leave(record.member.process)

    def _lose(
        self, record: WorkerRecord, why: str, now_s: float, is_failure: bool = True, is_unreachable: bool = False
    ) -> None:
        record.is_ready = False
        record.transfers.drop()
        name = str(record)
        record.problem = f"{name}: {why}"
        stage = record.restarts.lost(why, now_s, is_failure, is_unreachable)
        what_next = "it is replaced" if stage is Stage.LOST else "it has been replaced too often: given up"
        level = logging.DEBUG if record.restarts.is_same_loss else logging.WARNING
        logger.log(level, "%s is lost: %s; %s", name, why, what_next)

    # -- the launcher --

    def is_news(self, worker: int, status: WorkerStatus) -> bool:
        """Whether what the launcher says of a worker may change anything."""
        return status.state is not WorkerState.RUNNING or status != self[worker].status

    def reported(self, worker: int, status: WorkerStatus, now_s: float) -> None:
        """The launcher says how a worker's process is."""
        record = self[worker]
        before, record.status = record.status, status
        num_new = 0 if before is NOT_REPORTED else status.num_failures - before.num_failures  # may count from 0 again
        if num_new > 0 and record.restarts.revived(num_new, status.detail):
            record.problem = f"worker {worker}: {status.detail}"
            logger.warning("worker %d fails again and again: given up: %s", worker, status.detail)
        if status.state is WorkerState.ENDED:
            self._ended(record, status, now_s)
        elif status.state is WorkerState.PENDING and record.restarts.stage is Stage.STARTING:
            record.restarts.started(now_s)  # it waits for resources: its time to join has not begun
        elif status.state is WorkerState.REFUSED and record.restarts.refused(status.detail):
            record.problem = f"worker {worker}: {status.detail}"
            logger.warning("worker %d will not be run: %s", worker, status.detail)

    def _ended(self, record: WorkerRecord, status: WorkerStatus, now_s: float) -> None:
        """Its process has ended, or its host could not be reached."""
        if record.restarts.stage not in (Stage.STARTING, Stage.PRESENT):
            return
        member = self._membership.worker(record.worker)
        if member is not None:
            record.send_alive(now_s)
            if member.gone_s is None:
                return  # the connection is open: it is another process of this worker that has ended
            self._membership.leave(member.process)
        self._lose(record, status.detail, now_s, is_unreachable=status.is_unreachable)

    def take_due(self, now_s: float) -> list[DueWorker]:
        """The workers to start now. Those that did not join in time count as lost, and as late."""
        for record in self:
            if record.restarts.has_missed_join(now_s):
                self._lose(record, f"it has not joined within {self._config.timing.join_timeout_s:g} s", now_s)
                record.restarts.is_late = True
        due = [record for record in self if record.restarts.is_due(now_s)]
        return [DueWorker(record.worker, record.restarts.restarted(now_s), record.is_alive) for record in due]

    def not_started(self, worker: int, why: str, now_s: float) -> None:
        """The launcher could not start a worker now."""
        if worker < len(self) and self[worker].restarts.stage is Stage.STARTING:
            self[worker].restarts.not_started(why, now_s)
            logger.warning("worker %d could not be started, and will be tried again: %s", worker, why)


def _difference(form: RolloutForm, obs: spaces.Space[Any], actions: spaces.Space[Any]) -> str | None:
    """Why a pool does not fit in this run: all envs of a run have the same spaces. None: it fits."""
    if obs == form.obs.space and actions == form.actions.space:
        return None
    return f"its spaces are {obs} and {actions}; the others' are {form.obs.space}, {form.actions.space}"
