"""HandshakeLimits: bounds what connections cost the head before they have proved that they hold the run's key.

ZeroMQ reads what a stranger sends, up to one frame, and closes the connection when the handshake fails or takes too
long. Until then each costs a descriptor and memory. The kernel counts the bytes of each connection, so this needs
nothing of ZeroMQ but its word that a connection was accepted.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass

import zmq  # noqa: TID253 - only the cluster's own processes come here

from envfleet.cluster.wire.sockets import has_message, recv_event

MOST_PENDING = 64  # connections without a finished handshake; each costs MOST_FRAME_BYTES at most
MOST_PENDING_WORKERS = 1024  # of a larger fleet some connect again a moment later
MOST_HANDSHAKE_BYTES = 16 << 10  # a worker sends less than 1 kB
# A handshake is finished when the other side has acknowledged the head's greeting (64 bytes), WELCOME (170) and READY
# (67); without the key it gets no READY.
READY_BYTES = 64 + 170 + 40
LOOK_S = 0.02  # while there are such connections
IDLE_S = 0.25
_STOPPED = int(zmq.EVENT_MONITOR_STOPPED)
_BYTES_AT = struct.Struct("=120xQQ")  # bytes_acked and bytes_received in the kernel's struct tcp_info


@dataclass(slots=True)
class _Pending:
    fd: int
    since_s: float
    num_received: int = 0


class HandshakeLimits:
    """Watches a ROUTER that is bound to tcp. Its descriptors are never closed here, only shut down."""

    def __init__(self, router: zmq.Socket[bytes], num_workers: int) -> None:
        """Begin to watch. All of `num_workers` may connect at once."""
        self._most_pending = MOST_PENDING + min(num_workers, MOST_PENDING_WORKERS)
        self._router = router
        self._port = int(router.getsockopt_string(zmq.LAST_ENDPOINT).rpartition(":")[2])
        self._events = router.get_monitor_socket(zmq.EVENT_ACCEPTED | zmq.EVENT_MONITOR_STOPPED)
        self._pending: dict[int, _Pending] = {}  # by inode: descriptors are used again, inodes are not
        self.num_shut_down = 0
        # Opened before strangers can use up all descriptors.
        self._nothing = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
        self._duplicate = os.dup(self._nothing)
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="envfleet-strangers", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread. Before the router is closed."""
        self._is_over.set()
        self._thread.join(5.0)
        self._router.disable_monitor()  # before the other end is closed, or it waits for somebody to read
        self._events.close()
        os.close(self._duplicate)
        os.close(self._nothing)

    def _watch(self) -> None:
        while not self._is_over.is_set():
            self._events.poll(int(1000 * (LOOK_S if self._pending else IDLE_S)))
            next_look_s = time.monotonic() + LOOK_S
            while has_message(self._events) and time.monotonic() < next_look_s:
                event, fd = recv_event(self._events)
                if event == _STOPPED:
                    return
                self._accepted(fd)
            for inode in list(self._pending):
                self._look_at(inode)

    def _accepted(self, fd: int) -> None:
        with contextlib.suppress(OSError), self._opened(fd) as connection:  # it may be closed again
            if connection.getsockname()[1] != self._port:
                return  # it is closed, and the number means something else by now
            self._pending.setdefault(_inode(connection), _Pending(fd, time.monotonic()))
        while len(self._pending) > self._most_pending:
            # Who has sent least goes: a worker talks at once. Of equals the newest, or none would come to an end.
            inode, pending = min(self._pending.items(), key=lambda each: (each[1].num_received, -each[1].since_s))
            self._look_at(inode, least_bytes=pending.num_received + 1)

    def _look_at(self, inode: int, least_bytes: int = 0) -> None:
        """Forget it if it is no stranger or gone; shut it down if it has sent too much, or less than `least_bytes`."""
        pending = self._pending[inode]
        with contextlib.suppress(OSError), self._opened(pending.fd) as connection:
            if _inode(connection) == inode:
                num_acknowledged, pending.num_received = _num_bytes(connection)
                if num_acknowledged <= READY_BYTES:
                    if least_bytes <= pending.num_received <= MOST_HANDSHAKE_BYTES:
                        return
                    self.num_shut_down += 1
                    connection.shutdown(socket.SHUT_RDWR)  # ZeroMQ notices, and closes it
        del self._pending[inode]

    @contextlib.contextmanager
    def _opened(self, fd: int) -> Iterator[socket.socket]:
        """A duplicate of a connection: meanwhile its descriptor cannot come to mean another. Raises OSError."""
        os.dup2(fd, self._duplicate, inheritable=False)
        connection = socket.socket(socket.AF_INET, socket.SOCK_STREAM, 0, fileno=self._duplicate)
        try:
            yield connection
        finally:
            connection.detach()
            os.dup2(self._nothing, self._duplicate, inheritable=False)


def _inode(connection: socket.socket) -> int:
    return os.fstat(connection.fileno()).st_ino


def _num_bytes(connection: socket.socket) -> tuple[int, int]:
    """Bytes that the other side has acknowledged, and bytes that came from it."""
    try:
        info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
        num_acknowledged, num_received = _BYTES_AT.unpack_from(info)
    except (OSError, struct.error):  # it is closed, or the kernel is older than 4.1: leave it alone
        return READY_BYTES + 1, 0
    return int(num_acknowledged), int(num_received)
