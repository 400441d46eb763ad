"""Membership: which process is which worker, and which are lost. Pure: time is an argument, nothing is sent."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from envfleet.cluster.wire.messages import MOST_HOST_CHARS, is_host_name

NUM_FORMER_KEPT = 1024


@dataclass(slots=True)
class Member:
    """One process of a worker, known by the random name it gave itself. A worker's newest process counts."""

    worker: int
    process: bytes
    epoch: int  # counts the processes this worker has had, from 1
    host: str
    pid: int
    heard_s: float
    gone_s: float | None = None  # when its connection was found closed; it was not heard of since

    def connection_closed(self, now_s: float) -> None:
        """A message could not be sent to it: its connection is closed."""
        if self.gone_s is None:
            self.gone_s = now_s

    def __str__(self) -> str:
        """Its name in errors and logs."""
        return f"worker {self.worker} (host {self.host}, pid {self.pid})"


@dataclass(slots=True)
class Membership:
    """The processes that take part. A worker is lost when its connection stays closed, however long it is silent.

    ZeroMQ's own threads close a connection whose other end does not answer; neither an env nor the GIL can stop them.
    """

    num_workers: int
    reconnect_s: float  # the longest time for which a connection may stay closed
    _members: dict[bytes, Member] = field(default_factory=dict)  # by process
    _present: dict[int, Member] = field(default_factory=dict)  # by worker
    _epochs: dict[int, int] = field(default_factory=dict)
    _former: deque[bytes] = field(default_factory=lambda: deque(maxlen=NUM_FORMER_KEPT))

    def join(self, worker: int, process: bytes, host: str, pid: int, now_s: float) -> Member | str:
        """Admit a process as worker `worker`, or return the reason for refusing it. Asking twice changes nothing.

        The newest process wins: a launcher may take a process that still runs for dead, never the other way round.
        """
        if not 0 <= worker < self.num_workers:
            return f"this run has workers 0 to {self.num_workers - 1}, no worker {worker}"
        if process in self._former:
            return "a newer process has taken this worker's place"
        if not is_host_name(host):
            return f"a host name has 1 to {MOST_HOST_CHARS} characters, all of printable ASCII"
        if pid < 1:
            return f"no process has the pid {pid}"
        member = self._members.get(process)
        if member is not None:
            if member.worker != worker:
                return f"this process is worker {member.worker} already"
            self.heard_from(process, now_s)
            return member
        older = self._present.get(worker)
        if older is not None:
            self.leave(older.process)
        self._epochs[worker] = self._epochs.get(worker, 0) + 1
        member = Member(worker, process, self._epochs[worker], host, pid, now_s)
        self._members[process] = self._present[worker] = member
        return member

    def heard_from(self, process: bytes, now_s: float) -> Member | None:
        """Note that a message came from a process. None: it is no member, and its message does not count."""
        member = self._members.get(process)
        if member is not None:
            member.heard_s = max(now_s, member.heard_s)
            member.gone_s = None
        return member

    def was_member(self, process: bytes) -> bool:
        """Whether a process was a member once, and left, was lost, replaced or dismissed."""
        return process in self._former

    def leave(self, process: bytes) -> Member | None:
        """A process has left, ended, or been replaced; messages that it still sends do not count."""
        member = self._members.pop(process, None)
        if member is not None:
            self._former.append(process)
            if self._present.get(member.worker) is member:
                del self._present[member.worker]
        return member

    def take_lost(self, now_s: float) -> list[tuple[Member, str]]:
        """Forget and return the members that are lost, and why."""
        lost = []
        for member in list(self._members.values()):
            if member.gone_s is not None and now_s - member.gone_s > self.reconnect_s:
                lost.append((member, f"its connection has been closed for {self.reconnect_s:g} s"))
        for member, _ in lost:
            self.leave(member.process)
        return lost

    def member(self, process: bytes) -> Member | None:
        """The member that is this process; None: there is none."""
        return self._members.get(process)

    def worker(self, worker: int) -> Member | None:
        """The process that is worker `worker` at present; None: there is none."""
        return self._present.get(worker)

    def num_processes(self, worker: int) -> int:
        """The number of processes that worker `worker` has had."""
        return self._epochs.get(worker, 0)

    def restore(self, worker: int, num_processes: int) -> None:
        """Worker `worker` has had processes before the run was resumed."""
        self._epochs[worker] = num_processes

    @property
    def members(self) -> list[Member]:
        """All members, in the order of workers."""
        return [self._present[worker] for worker in sorted(self._present)]
