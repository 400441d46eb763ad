"""WorkerSocket: a worker's DEALER. Messages come and large ones travel in chunks, also while the worker computes."""

from __future__ import annotations

import logging
import secrets
import select
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import zmq  # noqa: TID253 - only the cluster's own processes come here

from envfleet.cluster.wire.codec import BadMessage, Decoder
from envfleet.cluster.wire.messages import PROCESS_NAME_BYTES, AboutChunks, FromHead
from envfleet.cluster.wire.sockets import has_message, open_dealer, recv_frames, send_frames
from envfleet.cluster.wire.transfers import Transfer, Transfers, digest_of
from envfleet.cluster.worker.watchdog import Watchdog
from envfleet.contract.arrays import Arrays
from envfleet.contract.errors import ClusterError

logger = logging.getLogger("envfleet.worker")


FIRST_RESEND_S = 5.0  # until the head has said how long
BACKGROUND_S = 0.02
ALONE_S = 2.0  # seconds without a look by the worker's own thread, after which the background thread receives
CHECK_S = 1.0
CLOSE_S = 5.0


class WorkerSocket:
    """One connection to the head. A background thread goes on with large messages while the worker computes.

    While the worker's own thread does not come for long it receives all else, too.
    """

    def __init__(
        self,
        address: str,
        keys: str | None,
        silence_s: float,
        take: Callable[[Any, Arrays], None],
        while_alone: Callable[[], None],
    ) -> None:
        """Connect.

        Args:
            address: Of the head.
            keys: Of the run.
            silence_s: Seconds without an answer after which a connection is closed.
            take: Called with each message and its arrays, in any thread, with `lock` held.
            while_alone: Called once a second, in another thread, with `lock` held, while the worker's own stays away.
        """
        self._take = take
        self._while_alone = while_alone
        self._process = secrets.token_bytes(PROCESS_NAME_BYTES)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._dealer = open_dealer(self._context, address, keys, silence_s)
        is_ipc = address.startswith("ipc://")
        self._watchdog = Watchdog(self._dealer, Path(address.removeprefix("ipc://")) if is_ipc else None)
        self._dealer.connect(address)
        self._fd = int(self._dealer.getsockopt(zmq.FD))
        self._decoder: Decoder[Any] = Decoder(FromHead)
        self.lock = threading.RLock()  # guards the socket, and all that `take` changes
        self._transfers = Transfers(FIRST_RESEND_S, None if is_ipc else digest_of)
        self._num_connected = 0
        self._failure: Exception | None = None  # in the background
        self._received_s = time.monotonic()  # when the worker's own thread was last here
        self._is_sending = threading.Event()
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._send_in_background, name="envfleet-sending", daemon=True)
        self._thread.start()

    @property
    def head_is_gone(self) -> bool:
        """Whether the connection has been closed for too long."""
        return self._watchdog.head_is_gone

    @property
    def progress_s(self) -> float:
        """When a chunk of a large message last arrived, here or at the head."""
        return self._transfers.progress_s

    @property
    def received_chunk_s(self) -> float:
        """When a chunk of a large message last came."""
        return self._transfers.incoming.progress_s

    @property
    def resent_bytes(self) -> int:
        """Bytes of chunks that were sent more than once."""
        return self._transfers.resent_bytes

    def set_resend_s(self, resend_s: float) -> None:
        """Ask about chunks that are not known to have arrived after this many seconds."""
        self._transfers.outgoing.resend_s = resend_s

    def send(self, frames: list[Any], is_in_order: bool = False) -> Transfer | None:
        """Send a message. Returns its transfer if it travels in chunks, else None."""
        with self.lock:
            transfer = self._transfers.add(frames, time.monotonic(), is_in_order)
            if transfer is None:
                self._send_now(frames)
            else:
                self._send_chunks()
            return transfer

    def receive(self, waits: bool) -> None:
        """Take all messages that have come, after a short wait for the first if `waits`."""
        with self.lock:
            self._received_s = time.monotonic()
            if self._failure is not None:
                raise self._failure
            self._receive_all(waits)
            self._received_s = time.monotonic()

    def close(self) -> None:
        """Close the connection; messages that were sent have half a second to go out."""
        self._is_over.set()
        self._is_sending.set()
        self._thread.join(CLOSE_S)
        with self.lock:
            self._dealer.setsockopt(zmq.LINGER, 500)
            self._watchdog.close()
            self._dealer.close()
            self._context.term()
        self._watchdog.remove_head_folder()

    def _receive_all(self, waits: bool) -> None:
        try:
            while waits or has_message(self._dealer):
                frames = recv_frames(self._dealer, waits)
                waits = False
                self._receive([frame.buffer for frame in frames])
        except zmq.Again:
            pass
        self._send_chunks()

    def _receive(self, frames: list[Any]) -> None:
        try:
            message, arrays = self._decoder.decode(frames)
        except BadMessage as error:
            logger.warning("a message of the head was dropped: %s", error)
            return
        if not isinstance(message, AboutChunks):
            return self._take(message, arrays)
        try:
            whole = self._transfers.take(message, arrays, time.monotonic())
        except BadMessage as error:
            raise ClusterError(f"what the head sends in chunks cannot be put together: {error}") from error
        self._send_chunks()
        if whole is not None:
            self._receive(whole)

    def _send_chunks(self) -> None:
        """Send the chunks for which there is room, and answers to chunks that came."""
        now_s = time.monotonic()
        if self._num_connected != self._watchdog.num_connected:
            self._num_connected = self._watchdog.num_connected
            self._transfers.connected(now_s)
        for frames in self._transfers.to_send(now_s):
            if not self._send_now(frames):
                break
        if self._transfers.has_outgoing:
            self._is_sending.set()

    def _send_now(self, frames: list[Any]) -> bool:
        try:
            send_frames(self._dealer, [self._process, *frames])
        except zmq.Again:
            logger.debug("the connection is full or closed: what was to be sent will be sent again")
            return False
        return True

    def _send_in_background(self) -> None:
        """Send the chunks of a rollout while the next one is collected; receive, if nobody else does."""
        poll = select.poll()
        poll.register(self._fd, select.POLLIN)
        next_check_s = 0.0
        while not self._is_over.is_set():
            is_sending = self._is_sending.wait(CHECK_S)
            if time.monotonic() - self._received_s > ALONE_S and time.monotonic() >= next_check_s:
                next_check_s = time.monotonic() + CHECK_S
                if not self._receive_alone():
                    return
            if not is_sending:
                continue
            poll.poll(BACKGROUND_S * 1000)
            if time.monotonic() - self._received_s < BACKGROUND_S:
                self._is_over.wait(BACKGROUND_S)  # the worker's own thread is receiving
                continue
            with self.lock:
                if not self._received_in_background():
                    return
                if not self._transfers.has_outgoing:
                    self._is_sending.clear()

    def _received_in_background(self) -> bool:
        """Take all messages that have come, with the lock held. False: the thread is to end."""
        if self._is_over.is_set():
            return False
        try:
            self._receive_all(waits=False)
        except Exception as error:  # raised by the next receive()
            self._failure = self._failure or error
            return False
        return True

    def _receive_alone(self) -> bool:
        """The worker's own thread stays away: do its part. False: the thread is to end."""
        with self.lock:
            if not self._received_in_background():
                return False
            self._while_alone()
            return True
