"""The sockets of both ends: ipc in a private folder on one host, tcp with CURVE everywhere else."""

from __future__ import annotations

import os
import stat
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import zmq  # noqa: TID253 - only the cluster's own processes come here
from zmq.utils import z85  # noqa: TID253

from envfleet.cluster.wire.messages import MOST_FRAME_BYTES
from envfleet.contract.errors import ClusterError, UsageError
from envfleet.contract.worker_environment import KEYS_VARIABLE

# Plain numbers are quicker than enums.
_EVENTS, _POLLIN = int(zmq.EVENTS), int(zmq.POLLIN)
_NOBLOCK, _MORE = int(zmq.NOBLOCK), int(zmq.NOBLOCK | zmq.SNDMORE)
_MONITOR_EVENT = struct.Struct("=Hi")
LONGEST_WAIT_MS = 200  # of a worker for a message: then it sees what else is to be done
ZAP_ENDPOINT = "inproc://zeromq.zap.01"  # where ZeroMQ asks whether a client may connect
HANDSHAKE_S = 3.0  # a connection that has not proved by then that it has the run's key is closed


@dataclass(frozen=True, slots=True)
class RunKeys:
    """The keys of one run: a process without them can neither join nor read."""

    head_public: bytes
    head_secret: bytes = field(repr=False)
    worker_public: bytes
    worker_secret: bytes = field(repr=False)

    @classmethod
    def make(cls) -> RunKeys:
        """Make new keys for head and workers."""
        return cls(*zmq.curve_keypair(), *zmq.curve_keypair())

    def for_workers(self) -> str:
        """What a worker needs, as text for its environment: not the head's secret."""
        return b" ".join((self.head_public, self.worker_public, self.worker_secret)).decode()


def read_keys(path: Path) -> str:
    """The keys of a run from a file that only this user can read."""
    try:
        status = path.stat()
        text = path.read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ClusterError(f"the file with the run's keys cannot be read: {error}") from error
    if status.st_uid != os.getuid() or stat.S_IMODE(status.st_mode) & 0o077:
        raise ClusterError(f"{path} has the run's keys: it must belong to this user, and be closed to others (0600)")
    return text


def open_router(
    context: zmq.Context[zmq.Socket[bytes]], address: str, keys: RunKeys | None, silence_s: float
) -> zmq.Socket[bytes]:
    """The head's socket, bound; LAST_ENDPOINT says where."""
    router = context.socket(zmq.ROUTER)
    try:
        router.linger = 0
        # No ROUTER_HANDOVER: libzmq 4.3.5 aborts the process when a connection that was handed over dies (ADR 28).
        router.setsockopt(zmq.ROUTER_MANDATORY, 1)  # to hear of closed connections when sending
        router.setsockopt(zmq.HANDSHAKE_IVL, int(HANDSHAKE_S * 1000))
        _set_limits(router, silence_s)
        if address.startswith("tcp://"):
            if keys is None:
                raise UsageError("a tcp address needs keys")
            router.curve_server = True
            router.curve_secretkey = keys.head_secret
            router.curve_publickey = keys.head_public
            router.setsockopt(zmq.ZAP_DOMAIN, b"envfleet")
            if address.count(":") > 2:
                router.setsockopt(zmq.IPV6, 1)
        router.bind(address)
    except zmq.ZMQError as error:
        router.close()
        raise ClusterError(f"the head cannot bind to {address!r}: {error.strerror}") from error
    except BaseException:
        router.close()  # or its context would wait for it
        raise
    return router


def open_dealer(
    context: zmq.Context[zmq.Socket[bytes]], address: str, keys: str | None, silence_s: float
) -> zmq.Socket[bytes]:
    """A worker's socket, not yet connected, so that nothing is missed by who watches it.

    It has no ROUTING_ID: each of its connections is a new one to the head, and each message brings the worker's name.
    """
    dealer = context.socket(zmq.DEALER)
    dealer.linger = 0
    dealer.setsockopt(zmq.RCVTIMEO, LONGEST_WAIT_MS)
    dealer.setsockopt(zmq.RECONNECT_IVL, 100)
    dealer.setsockopt(zmq.RECONNECT_IVL_MAX, 2000)
    _set_limits(dealer, silence_s)
    if "[" in address:
        dealer.setsockopt(zmq.IPV6, 1)
    if address.startswith("ipc://"):
        _require_private(Path(address.removeprefix("ipc://")).parent)
    elif keys is None:
        raise ClusterError(f"a worker needs the keys of the run to connect to {address}: set {KEYS_VARIABLE}")
    else:
        parts = keys.encode().split()
        if list(map(len, parts)) != [40, 40, 40]:
            raise ClusterError(f"{KEYS_VARIABLE}, or the file with the keys, must hold three keys of 40 characters")
        head_public, worker_public, worker_secret = parts
        dealer.curve_serverkey = head_public
        dealer.curve_publickey = worker_public
        dealer.curve_secretkey = worker_secret
    return dealer


class Authenticator:
    """Answers ZeroMQ's question who may connect: only those who have the run's key."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], keys: RunKeys) -> None:
        """Must be there before the router is bound."""
        self._allowed = z85.decode(keys.worker_public)
        self.num_refused = 0
        self.socket = context.socket(zmq.REP)
        self.socket.linger = 0
        self.socket.bind(ZAP_ENDPOINT)

    def answer(self) -> None:
        """Answer all questions there are."""
        while has_message(self.socket):
            # version, request id, domain, address, identity, mechanism, credentials (the client's public key)
            question = self.socket.recv_multipart(zmq.NOBLOCK)
            is_allowed = len(question) == 7 and question[5] == b"CURVE" and question[6] == self._allowed
            self.num_refused += not is_allowed
            code, text = (b"200", b"OK") if is_allowed else (b"400", b"not a worker of this run")
            self.socket.send_multipart([b"1.0", question[1], code, text, b"", b""])


def has_message(socket: zmq.Socket[bytes]) -> bool:
    """Whether something came. Quicker than to try, and to catch an exception."""
    return bool(int(socket.getsockopt(_EVENTS)) & _POLLIN)


def recv_event(monitor: zmq.Socket[bytes]) -> tuple[int, int]:
    """The next event of a monitor, and its value. (zmq.utils.monitor would import asyncio into each worker.)"""
    event, value = _MONITOR_EVENT.unpack_from(monitor.recv_multipart()[0])
    return event, value


def send_frames(socket: zmq.Socket[bytes], frames: Sequence[Any]) -> None:
    """One message. Raises zmq.Again if it cannot be sent now.

    Frames are copied, and are no larger than a chunk: to have a frame freed that was not copied, pyzmq needs a thread,
    which takes the GIL each time, and seven descriptors that it keeps for good.
    """
    last = len(frames) - 1
    for index, frame in enumerate(frames):
        socket.send(frame, _NOBLOCK if index == last else _MORE, copy=True)


def recv_frames(socket: zmq.Socket[bytes], waits: bool = False) -> list[zmq.Frame]:
    """One message, without a copy. `waits`: for RCVTIMEO, then raises zmq.Again; quicker than to poll."""
    frames = [socket.recv(0 if waits else _NOBLOCK, copy=False)]
    while frames[-1].more:
        frames.append(socket.recv(_NOBLOCK, copy=False))
    return frames


def _set_limits(socket: zmq.Socket[bytes], silence_s: float) -> None:
    """How large a frame may be, and how long a connection may be silent.

    ZeroMQ's own threads ask each other whether they are there: no env and no GIL can keep them from it. The number of
    received messages has no limit: at a limit ZeroMQ stops reading, and libzmq 4.3.5 aborts the process when a
    connection dies that it does not read from (ADR 28). The window of transfers limits what can come.
    """
    socket.setsockopt(zmq.MAXMSGSIZE, MOST_FRAME_BYTES)
    socket.setsockopt(zmq.RCVHWM, 0)
    socket.setsockopt(zmq.HEARTBEAT_IVL, int(silence_s * 1000 / 3))
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, int(silence_s * 1000))


def _require_private(folder: Path) -> None:
    """Require a folder of our own: a process that can make a socket there can send us code."""
    try:
        status = os.stat(folder)
    except OSError as error:
        raise ClusterError(f"the head's folder is not there: {error}") from error
    if status.st_uid != os.getuid() or stat.S_IMODE(status.st_mode) & 0o077:
        raise ClusterError(f"{folder} must belong to this user, and be closed to all others (mode 0700)")
