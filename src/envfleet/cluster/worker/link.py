"""Link: a worker's end of the wire. Receives orders, sends answers until they are accepted, says that it is alive."""

from __future__ import annotations

import logging
import os
import socket
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from envfleet.cluster.sync import News
from envfleet.cluster.wire.codec import encode
from envfleet.cluster.wire.messages import (
    MOST_HOST_CHARS,
    PROTOCOL_VERSION,
    Alive,
    Announce,
    Cancel,
    Code,
    Heartbeat,
    Join,
    Leaving,
    OrderMessage,
    PullCode,
    PullWeights,
    Refused,
    Stop,
    Weights,
    Welcome,
    is_host_name,
)
from envfleet.cluster.wire.orders import Numbered, Outbox
from envfleet.cluster.wire.transfers import num_bytes
from envfleet.cluster.worker.socket import FIRST_RESEND_S, WorkerSocket
from envfleet.contract.arrays import Arrays
from envfleet.contract.errors import ClusterError
from envfleet.contract.exits import WorkerExit

logger = logging.getLogger("envfleet.worker")


JOIN_S = 60.0  # for an answer to Join
PULL_S = 60.0  # for an answer to a pull, or the next chunk of it
ASK_AGAIN_S = 1.0
FINISH_S = 10.0  # for the head to accept the last answers of a worker that leaves
BEFORE_EXIT_S = 0.2
STUCK_S = 3.0  # for a worker that is to leave, but is in the step of an env; then its process is ended
HEAD_SILENT_S = 600.0  # without an answer to a heartbeat, though the connection is open: the head is gone


class Cancelled(Exception):
    """The head has cancelled the order."""


class Leave(Exception):
    """The worker is to end now: the text says why, the exit code says it to the launcher."""

    def __init__(self, why: str, code: WorkerExit = WorkerExit.DONE) -> None:
        super().__init__(why)
        self.code = code


class Link:
    """One connection to the head, for one thread. While that is busy with a step, another one says that it is alive."""

    def __init__(self, address: str, worker: int, keys: str | None, silence_s: float) -> None:
        self.worker = worker
        self._orders: deque[tuple[Any, Arrays]] = deque()
        self._outbox = Outbox(received=0)
        self._welcome: tuple[Welcome, Arrays] | None = None
        self._code: tuple[Code, Arrays] | None = None
        self._weights: tuple[Weights, Arrays] | None = None
        self._next_beat_s = 0.0
        self._num_unanswered = 0  # heartbeats
        self._heartbeat_s = 1.0
        self._resend_s = FIRST_RESEND_S
        self._ready: Numbered | None = None  # to be said again until the head has heard it
        self._resent_bytes = 0  # of messages; the transfers count their chunks
        self._compression: str | None = None
        self._told_to_leave: Leave | None = None  # by the head
        self.news = News()  # as it was announced
        self.cancelled_through = 0
        self._cancelled: set[int] = set()  # single orders behind that
        self.leave_because: str | None = None  # set by a signal handler or another thread: at once
        self.finish_because: str | None = None  # set by a signal handler: when the present order is done
        host = socket.gethostname()
        host = host if is_host_name(host) else ascii(host)[:MOST_HOST_CHARS]
        self._join = encode(Join(protocol=PROTOCOL_VERSION, worker=worker, host=host, pid=os.getpid()))
        self._leaves = False  # Leave was raised: the worker closes its pool
        self._stuck_s: float | None = None  # since when it ought to leave, and does not
        self._socket = WorkerSocket(address, keys, silence_s, self._take, self._while_alone)

    def join(self) -> tuple[Welcome, Arrays]:
        """Ask the head to take this worker in. Returns the welcome and its arrays."""
        welcome, arrays = self._ask(self._join, lambda: self._welcome, JOIN_S, "to take this worker in")
        self._outbox = Outbox(received=welcome.first_order - 1)
        self._heartbeat_s, self._resend_s = welcome.timing.heartbeat_s, welcome.timing.resend_s
        self._socket.set_resend_s(welcome.timing.resend_s)
        self._compression = welcome.compression
        return welcome, arrays

    def say_ready(self, message: Any, arrays: Arrays) -> None:
        """Say that the pool is built; repeated until the head has heard it."""
        self._ready = Numbered(0, encode(message, arrays), time.monotonic())
        self._ready.transfer = self._socket.send(self._ready.frames)

    def say(self, message: Any) -> None:
        """Send a message that needs no answer."""
        self._socket.send(encode(message))

    def next_order(self) -> tuple[OrderMessage, Arrays]:
        """Wait for the next order. Raises Leave if there will be none."""
        begun_s: float | None = None
        while True:
            if self.finish_because is None:
                if self._orders:
                    return self._orders.popleft()
            else:  # orders that are not begun are for the next process of this worker
                begun_s = begun_s or time.monotonic()
                if not self._outbox.unaccepted or time.monotonic() > self._last_progress_s(begun_s) + FINISH_S:
                    raise Leave(self.finish_because, WorkerExit.OUT_OF_TIME)
            self._receive(waits=True)

    def look(self) -> None:
        """Between two steps, or during a long one: send a heartbeat and receive, if that is due; else do nothing."""
        if time.monotonic() >= self._next_beat_s or self._to_leave() is not None:
            self._receive(waits=False)

    def is_cancelled(self, order: int) -> bool:
        """Whether the head has cancelled an order."""
        return order <= self.cancelled_through or order in self._cancelled

    def drain(self) -> None:
        """Receive what has come, without waiting."""
        self._receive(waits=False)

    def answer(self, message: Any, arrays: Arrays | None = None) -> None:
        """Answer an order. The arrays must not change until the head has accepted the answer."""
        frames = encode(message, arrays, self._compression)
        with self._socket.lock:
            answer = self._outbox.add(message.order, frames, time.monotonic())
            answer.transfer = self._socket.send(frames, is_in_order=True)

    def pull_code(self, held_code_id: int, order: int) -> tuple[Code, Arrays]:
        """Ask for the code of the newest policy. Raises Cancelled if the head cancels `order` meanwhile."""
        self._code = None
        pull = encode(PullCode(held_code_id=held_code_id))
        code: tuple[Code, Arrays] = self._ask(pull, lambda: self._code, PULL_S, "for the policy's code", order)
        self._code = None  # it may be as large as the weights: the policy has its own copy
        return code

    def pull_weights(self, held_version: int, newest: int, order: int) -> tuple[Weights, Arrays]:
        """Ask for the weights of version `newest` or newer. Raises Cancelled if the head cancels `order` meanwhile."""
        self._weights = None

        def came() -> tuple[Weights, Arrays] | None:
            # An older one is the answer to a question that was asked twice.
            return self._weights if self._weights is not None and self._weights[0].version >= newest else None

        pull = encode(PullWeights(held_version=held_version))
        weights: tuple[Weights, Arrays] = self._ask(pull, came, PULL_S, "for weights", order)
        self._weights = None
        return weights

    def close(self, why: str, is_failure: bool) -> None:
        """Tell the head that the worker ends, and close the connection."""
        self._socket.send(encode(Leaving(why=why, is_failure=is_failure)))
        self._socket.close()

    # -- inside --

    def _ask(
        self, question: list[Any], answer: Callable[[], Any], timeout_s: float, what: str, order: int | None = None
    ) -> Any:
        """Ask until there is an answer, or the order for which it is asked is cancelled.

        While an answer arrives in chunks it is not asked for again, and the deadline is put off.
        """
        asked_s, next_s, ask_again_s = time.monotonic(), 0.0, ASK_AGAIN_S
        while (came := answer()) is None:
            now_s = time.monotonic()
            if order is not None and order <= self.cancelled_through:
                raise Cancelled
            if order is None and self.finish_because is not None:  # it has not begun anything
                raise Leave(self.finish_because, WorkerExit.OUT_OF_TIME)
            if now_s > self._last_progress_s(asked_s) + timeout_s:
                raise ClusterError(f"the head did not answer within {timeout_s:g} s when asked {what}")
            is_first = next_s == 0.0  # chunks that came before it was asked are of another answer
            if is_first or now_s >= max(next_s, self._socket.received_chunk_s + ASK_AGAIN_S):
                self._socket.send(question)
                next_s, ask_again_s = now_s + ask_again_s, 2 * ask_again_s
            self._receive(waits=True)
        return came

    def _last_progress_s(self, begun_s: float) -> float:
        """When a chunk last came or was received by the head, or `begun_s` if that was later."""
        return max(begun_s, self._socket.progress_s)

    def _receive(self, waits: bool) -> None:
        """Take all messages that have come, after a short wait for the first if `waits`, and do what is due."""
        self._socket.receive(waits)
        if (leave := self._to_leave()) is not None:
            self._leaves = True
            raise leave
        with self._socket.lock:
            self._do_what_is_due(time.monotonic())

    def _to_leave(self) -> Leave | None:
        """Why the worker must end now; None: it need not."""
        if self._told_to_leave is not None:
            return self._told_to_leave
        if self._socket.head_is_gone:
            return Leave("the head is gone", WorkerExit.HEAD_GONE)
        if self.leave_because is not None:
            return Leave(self.leave_because, WorkerExit.TOLD_TO_LEAVE)
        return None

    def _while_alone(self) -> None:
        """In another thread: the worker's own is in the step of an env, or builds its pool, or in the policy."""
        now_s = time.monotonic()
        leave = self._to_leave()
        if leave is None:
            self._do_what_is_due(now_s)
        elif not self._leaves:
            self._stuck_s = self._stuck_s or now_s
            if now_s - self._stuck_s >= STUCK_S:
                logger.error("leaving: %s; an env, or the policy, is still at work, and ends with this process", leave)
                self._socket.send(encode(Leaving(why=str(leave), is_failure=False)))
                time.sleep(BEFORE_EXIT_S)  # for the message to go out
                os._exit(leave.code)

    def _take(self, message: Any, arrays: Arrays) -> None:
        """Take a message; called in any thread, with the socket's lock held."""
        self._num_unanswered = 0
        if isinstance(message, Stop):
            self._told_to_leave = Leave(message.why)
        elif isinstance(message, Refused):
            self._told_to_leave = Leave(f"the head refused: {message.why}")
        elif isinstance(message, OrderMessage):
            self._outbox.accepted(message.accepted)
            if self._welcome is not None and self._outbox.is_next(message.order):
                self._orders.append((message, arrays))
        elif isinstance(message, Alive):
            self._outbox.accepted(message.accepted)
            self._ready = None if message.is_ready else self._ready
        elif isinstance(message, Announce):
            self.news = self.news.after_announcement(message)
        else:
            self._keep(message, arrays)

    def _keep(self, message: Any, arrays: Arrays) -> None:
        """Keep a message that a caller waits for."""
        if isinstance(message, Weights):
            self._weights = (message, arrays)
        elif isinstance(message, Cancel):
            self.cancelled_through = max(self.cancelled_through, message.through)
            self._cancelled.update(message.others)
        elif isinstance(message, Code):
            self._code = (message, arrays)
        elif isinstance(message, Welcome):
            self._welcome = self._welcome or (message, arrays)

    def _do_what_is_due(self, now_s: float) -> None:
        if self._welcome is None or now_s < self._next_beat_s:
            return
        if self._num_unanswered * self._heartbeat_s > HEAD_SILENT_S:
            self._told_to_leave = Leave(
                f"the head has not answered {self._num_unanswered} heartbeats", WorkerExit.HEAD_GONE
            )
            return
        self._num_unanswered += 1
        self._next_beat_s = now_s + min(self._heartbeat_s, self._resend_s)
        resent_bytes = self._resent_bytes + self._socket.resent_bytes
        self._socket.send(encode(Heartbeat(received=self._outbox.received, resent_bytes=resent_bytes)))
        with self._socket.lock:
            late = self._outbox.overdue(now_s, self._resend_s)
            if self._ready is not None and self._ready.is_overdue(now_s, self._resend_s):
                self._ready.sent_s = now_s
                late.append(self._ready)
            for answer in late:
                logger.info("answer %d is sent again", answer.number)
                self._resent_bytes += num_bytes(answer.frames)
                answer.transfer = self._socket.send(answer.frames, is_in_order=True)
