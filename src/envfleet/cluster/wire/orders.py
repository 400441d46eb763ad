"""Order, OrderLog and Outbox: orders and answers are numbered; each is carried out, and accepted, exactly once. Pure.

Both ends go back to the oldest number that may have been lost, and send everything from there again.
"""

from __future__ import annotations

import enum
from collections import deque
from dataclasses import dataclass, field
from typing import Any

import msgspec

from envfleet.cluster.info_choice import InfoChoice
from envfleet.cluster.wire.codec import encode
from envfleet.cluster.wire.messages import (
    ANSWER_TO,
    Answer,
    ChangeEnvs,
    Collect,
    Evaluate,
    OrderMessage,
    RestoreState,
    SaveState,
)
from envfleet.cluster.wire.transfers import Transfer
from envfleet.contract.arrays import Arrays

Frames = list[Any]

LONGEST_RESEND_S = 60.0


class Verdict(enum.Enum):
    """What the head does with an answer."""

    ACCEPTED = "accepted"
    CANCELLED = "accepted, and thrown away: the head had cancelled the order"
    DUPLICATE = "dropped: it was accepted before"
    EARLY = "dropped: an earlier answer is missing; both will come again"
    UNKNOWN = "dropped: there is no such order"


@dataclass(frozen=True, slots=True)
class Order:
    """What the head wants of a worker. The message gets its number when the order is issued."""

    message: OrderMessage
    arrays: Arrays = field(default_factory=dict)

    @property
    def answer(self) -> type[Answer]:
        """The type of the answer, unless the order fails."""
        return ANSWER_TO[type(self.message)]

    @property
    def num_steps(self) -> int:
        """The number of steps of the rollout that is wanted; 0 for all other orders."""
        return self.message.num_steps if isinstance(self.message, Collect) else 0

    @property
    def infos(self) -> InfoChoice:
        """What the rollout that is wanted shall carry of the envs' infos."""
        assert isinstance(self.message, Collect)
        return self.message.infos

    @property
    def is_for_caller(self) -> bool:
        """Whether a caller waits for the answer."""
        return not isinstance(self.message, ChangeEnvs | RestoreState)

    @property
    def is_aside(self) -> bool:
        """Whether it belongs to no activity, and may be given beside one."""
        return isinstance(self.message, Evaluate | SaveState)

    @property
    def is_of_stream(self) -> bool:
        """Whether a rollout for a stream is wanted."""
        return isinstance(self.message, Collect) and self.message.stream > 0

    def encoded(self, number: int, accepted: int) -> Frames:
        """The frames to send. Raises what `encode` raises."""
        return encode(msgspec.structs.replace(self.message, order=number, accepted=accepted), self.arrays)


@dataclass(slots=True)
class Numbered:
    """An order or an answer as it was sent, to be sent again if need be."""

    number: int
    frames: Frames
    sent_s: float
    order: Order | None = None  # None: an answer
    num_repeats: int = 0
    is_cancelled: bool = False
    transfer: Transfer | None = None  # if it travels in chunks

    @property
    def is_for_caller(self) -> bool:
        """Whether a caller waits for the answer to this order."""
        return self.order is not None and self.order.is_for_caller

    def is_overdue(self, now_s: float, resend_s: float) -> bool:
        """Whether to send it again. The pauses grow, so that repetitions do not fill a slow network.

        A message that travels in chunks is not repeated while it does.
        """
        if self.transfer is not None:
            if self.transfer.done_s is None:
                return False
            self.sent_s = max(self.sent_s, self.transfer.done_s)
        return now_s - self.sent_s > min(resend_s * 2.0 ** min(self.num_repeats, 60), max(resend_s, LONGEST_RESEND_S))

    def repeat(self, now_s: float) -> None:
        """Note that it is sent again."""
        self.sent_s = now_s
        self.num_repeats += 1


@dataclass(slots=True)
class OrderLog:
    """The orders of one worker. It outlives the worker's processes: a new process gets all open orders again."""

    num_issued: int = 0
    num_accepted: int = 0  # answers come in the order of the orders, so this is also the number of the last one
    open: deque[Numbered] = field(default_factory=deque)

    def prepare(self, order: Order, now_s: float) -> Numbered:
        """Number and encode an order; changes nothing, so that an order that cannot be encoded is not issued."""
        number = self.num_issued + 1
        return Numbered(number, order.encoded(number, self.num_accepted), now_s, order)

    def issue(self, prepared: Numbered) -> None:
        """Open an order that was prepared."""
        self.num_issued = prepared.number
        self.open.append(prepared)

    @property
    def is_awaited(self) -> bool:
        """Whether there is an open order that is not cancelled, and for whose answer a caller waits."""
        return any(not each.is_cancelled and each.is_for_caller for each in self.open)

    def judge(self, number: int) -> Verdict:
        """What to do with the answer to order `number`; changes nothing."""
        if number <= 0 or number > self.num_issued:
            return Verdict.UNKNOWN
        if number <= self.num_accepted:
            return Verdict.DUPLICATE
        if number > self.num_accepted + 1:
            return Verdict.EARLY
        return Verdict.CANCELLED if self.open[0].is_cancelled else Verdict.ACCEPTED

    def accept(self) -> Numbered:
        """Close the oldest open order and return it: its answer is accepted."""
        self.num_accepted += 1
        return self.open.popleft()

    def cancel_open(self) -> int | None:
        """Cancel all open orders. Returns the number of the last one; None: there is none."""
        for order in self.open:
            order.is_cancelled = True
        return self.open[-1].number if self.open else None

    def cancel(self, number: int) -> None:
        """Cancel one order, if it is open."""
        for order in self.open:
            if order.number == number:
                order.is_cancelled = True

    @property
    def cancelled(self) -> tuple[int, list[int]]:
        """Cancelled orders that are open: all up to this one (0: none), and others behind it."""
        numbers = [order.number for order in self.open if order.is_cancelled]
        through = 0
        for order in self.open:
            if not order.is_cancelled:
                break
            through = order.number
        return through, [number for number in numbers if number > through]

    def overdue(self, received: int, now_s: float, resend_s: float) -> list[Numbered]:
        """Orders to send again; `received` is the number of the last order that reached the worker."""
        late = [order for order in self.open if order.number > received and order.is_overdue(now_s, resend_s)]
        for order in late:
            order.repeat(now_s)
        return late


@dataclass(slots=True)
class Outbox:
    """The worker's side: the last order it received, and the answers that the head has not accepted yet."""

    received: int  # the number of the last order that came
    unaccepted: deque[Numbered] = field(default_factory=deque)

    def is_next(self, number: int) -> bool:
        """Whether this order is to be carried out next. Any other came before, or came early and will come again."""
        if number != self.received + 1:
            return False
        self.received = number
        return True

    def add(self, number: int, frames: Frames, now_s: float) -> Numbered:
        """Keep an answer that is about to be sent."""
        self.unaccepted.append(Numbered(number, frames, now_s))
        return self.unaccepted[-1]

    def accepted(self, number: int) -> None:
        """Forget the answers up to `number`: the head has accepted them."""
        while self.unaccepted and self.unaccepted[0].number <= number:
            self.unaccepted.popleft()

    def overdue(self, now_s: float, resend_s: float) -> list[Numbered]:
        """Answers to send again."""
        if not self.unaccepted or not self.unaccepted[0].is_overdue(now_s, resend_s):
            return []
        late = [answer for answer in self.unaccepted if answer.transfer is None or answer.transfer.done_s is not None]
        for answer in late:
            answer.repeat(now_s)
        return late
