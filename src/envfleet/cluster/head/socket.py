"""HeadSocket: the head's ROUTER, and which thread runs its loop when.

The caller of wait() runs the loop in its own thread, so that no answer has to be handed from thread to thread. While
nobody waits a background thread runs it: workers get weights while the learner learns.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import zmq  # noqa: TID253 - only the cluster's own processes come here

from envfleet.cluster.head.connections import Connections, Delivery
from envfleet.cluster.head.handshake_limits import HandshakeLimits
from envfleet.cluster.wire.messages import PROCESS_NAME_BYTES
from envfleet.cluster.wire.sockets import Authenticator, RunKeys, has_message, open_router, recv_frames, send_frames
from envfleet.contract.errors import PoolClosed

logger = logging.getLogger("envfleet.cluster")

TICK_S = 0.25
MOST_EXTENSION = 20  # times its timeout: the longest wait, however many chunks of large messages come
CALLER_STAYS_S = 0.02  # a caller that was here this recently will be back: the background thread keeps away
LET_IN_S = 0.0005
MOST_MESSAGES_A_TURN = 256  # so that no process can keep the loop from everything else


class Receiver(Protocol):
    """The other side of the socket: the head."""

    def connected(self, process: bytes) -> None:
        """A process has sent on a connection that was not known; its message follows."""

    def receive(self, process: bytes, frames: list[Any]) -> None:
        """Take a message; frames are buffers."""

    def tick(self, now_s: float) -> None:
        """Do what is due; called every TICK_S, or later."""


class HeadSocket:
    """One ROUTER for two threads: the caller's, and one in the background. A lock guards it and the receiver."""

    def __init__(
        self, address: str, keys: RunKeys | None, silence_s: float, receiver: Receiver, num_workers: int = 0
    ) -> None:
        """Bind to `address`; `self.address` is the address with the port that was taken."""
        self._receiver = receiver
        self._lock = threading.RLock()
        self._num_waiting = 0
        self._others: list[None] = []  # one entry for each other thread that waits for the lock
        self._caller_s = 0.0
        self._next_tick_s = 0.0
        self._has_more = False
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._authenticator = Authenticator(self._context, keys) if keys is not None else None
        try:
            self._router = open_router(self._context, address, keys, silence_s)
        except BaseException:
            self._close_context()
            raise
        self._connections = Connections()
        self._strangers = HandshakeLimits(self._router, num_workers) if keys is not None else None
        self.address: str = self._router.getsockopt_string(zmq.LAST_ENDPOINT)
        sockets = [self._router] if self._authenticator is None else [self._router, self._authenticator.socket]
        self._fds = [int(each.getsockopt(zmq.FD)) for each in sockets]
        self._turned_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)  # another thread turned the loop
        self._is_closing = threading.Event()
        self._thread = threading.Thread(target=self._turn_in_background, name="envfleet-head", daemon=True)

    @property
    def num_strangers(self) -> int:
        """The number of connections that were refused because they lack the run's key."""
        num_refused = 0 if self._authenticator is None else self._authenticator.num_refused
        return num_refused + (0 if self._strangers is None else self._strangers.num_shut_down)

    @property
    def is_in_use_here(self) -> bool:
        """Whether this is the background thread, or one that holds the lock."""
        return threading.current_thread() is self._thread or self._lock._is_owned()  # type: ignore[attr-defined]

    def start(self) -> None:
        """Start the background thread, which receives messages."""
        self._thread.start()

    @contextlib.contextmanager
    def here(self) -> Iterator[None]:
        """Hold the lock in the caller's thread. The loop runs once after it: sending may hide what came."""
        self._let_others_in()
        with self._lock:
            self._caller_s = time.monotonic()
            yield
            self._turn()

    @contextlib.contextmanager
    def still(self) -> Iterator[None]:
        """Hold the lock in the caller's thread, for a look only: nothing is received, so that a wait misses nothing."""
        with self._lock:
            yield

    @contextlib.contextmanager
    def aside(self) -> Iterator[None]:
        """Hold the lock in another thread, and wake the caller if it waits: a message may have come."""
        self._others.append(None)
        with self._lock:
            self._others.pop()
            if self._is_closing.is_set():
                raise PoolClosed("the cluster is closed")
            yield
            self._turn()
            if self._num_waiting:
                os.eventfd_write(self._turned_fd, 1)

    def wait(
        self, is_done: Callable[[], bool], timeout_s: float, progress_s: Callable[[], float] | None = None
    ) -> bool:
        """Run the loop until `is_done()`, which may raise.

        Args:
            is_done: Whether the wait is over.
            timeout_s: The longest time without progress.
            progress_s: When the last chunk of a large message came. However many come, the wait ends after
                MOST_EXTENSION times `timeout_s`; None: there is no progress to wait for.

        Returns:
            Whether `is_done()` returned True in time.
        """
        begun_s = time.monotonic()
        last_s = begun_s + (MOST_EXTENSION - 1) * timeout_s
        with self._lock:
            self._num_waiting += 1
        try:
            while True:
                self._let_others_in()
                with self._lock:
                    self._caller_s = time.monotonic()
                    self._turn()
                if is_done():
                    return True
                since_s = begun_s if progress_s is None else min(max(begun_s, progress_s()), last_s)
                left_s = since_s + timeout_s - time.monotonic()
                if left_s <= 0:
                    return False
                self._sleep(min(left_s, TICK_S), self._turned_fd)
        finally:
            with self._lock:
                self._num_waiting -= 1

    def send(self, process: bytes, frames: list[Any]) -> Delivery:
        """Send a message to a process; the caller holds the lock."""
        connection = self._connections.newest(process)
        if connection is None:
            return Delivery.CLOSED
        try:
            send_frames(self._router, [connection, *frames])
        except zmq.Again:
            return Delivery.NOT_NOW
        except zmq.ZMQError as error:
            if error.errno == zmq.EHOSTUNREACH:
                self._connections.closed(connection)
                return Delivery.CLOSED
            raise
        return Delivery.SENT

    def close(self) -> None:
        """End the thread and close the sockets."""
        if self._is_closing.is_set():
            return
        self._is_closing.set()
        if self._thread.ident is not None:
            self._thread.join(10.0)
        with self._lock:
            if self._strangers is not None:
                self._strangers.close()
            self._router.close()
            self._close_context()
            os.close(self._turned_fd)

    def _let_others_in(self) -> None:
        """Let other threads take the lock first. Locks are not fair: a busy caller would keep them out."""
        if self._others:
            time.sleep(LET_IN_S)

    def _turn(self) -> None:
        """Receive the messages that have come, and do what is due. The caller holds the lock."""
        now_s = time.monotonic()
        if now_s >= self._next_tick_s:
            self._next_tick_s = now_s + TICK_S
            self._receiver.tick(now_s)
        if self._authenticator is not None:
            self._authenticator.answer()
        # Last: sending may hide that a message came.
        num_received = 0
        while num_received < MOST_MESSAGES_A_TURN and has_message(self._router):
            connection, name, *frames = recv_frames(self._router)
            num_received += 1
            process = name.bytes
            if len(process) == PROCESS_NAME_BYTES and self._connections.heard(connection.bytes, process):
                self._receiver.connected(process)
            self._receiver.receive(process, [frame.buffer for frame in frames])
        self._has_more = num_received == MOST_MESSAGES_A_TURN

    def _turn_in_background(self) -> None:
        while not self._is_closing.is_set():
            if self._num_waiting or time.monotonic() - self._caller_s < CALLER_STAYS_S:
                self._is_closing.wait(CALLER_STAYS_S)
                continue
            self._sleep(TICK_S)
            try:
                with self.aside():
                    pass
            except PoolClosed:
                return
            except Exception:  # a defect of ours: the loop must not end with it
                logger.exception("the head met an error")

    def _sleep(self, timeout_s: float, *fds: int) -> None:
        """Sleep until a message comes, `timeout_s` at most. Uses only the sockets' descriptors, so needs no lock."""
        if self._has_more:
            return
        poll = select.poll()
        for fd in (*self._fds, *fds):
            poll.register(fd, select.POLLIN)
        for ready, _ in poll.poll(max(1.0, timeout_s * 1000)):
            if ready in fds:
                os.eventfd_read(ready)

    def _close_context(self) -> None:
        if self._authenticator is not None:
            self._authenticator.socket.close()
        self._context.term()
