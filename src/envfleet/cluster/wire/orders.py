"""Ledger and Outbox: orders and answers, numbered; each is carried out, and accepted, exactly once. Pure.

Both ends go back to the oldest number that may have been lost, and send everything from there again.
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from envfleet.cluster.wire.transfers import Transfer

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
class Expected:
    """What the answer to an order must be, if it is not that the order failed."""

    answer: type
    num_steps: int = 0  # of a rollout


@dataclass(slots=True)
class Numbered:
    """An order or an answer as it was sent, to be sent again if need be."""

    number: int
    frames: Frames
    sent_s: float
    expects: Expected | None = None  # of an order
    num_repeats: int = 0
    is_cancelled: bool = False
    transfer: Transfer | None = None  # if it travels in chunks

    def is_overdue(self, now_s: float, resend_s: float) -> bool:
        """Is it time to send it again? Ever more rarely: a slow network must not be filled with repetitions.

        What travels in chunks is not repeated while it does.
        """
        if self.transfer is not None:
            if self.transfer.done_s is None:
                return False
            self.sent_s = max(self.sent_s, self.transfer.done_s)
        return now_s - self.sent_s > min(resend_s * 2.0 ** min(self.num_repeats, 60), max(resend_s, LONGEST_RESEND_S))

    def repeat(self, now_s: float) -> None:
        """It is sent again."""
        self.sent_s = now_s
        self.num_repeats += 1


@dataclass(slots=True)
class Ledger:
    """The head's book about one worker. It outlives the worker's processes: a new one gets all open orders again."""

    num_issued: int = 0
    num_accepted: int = 0  # orders are answered in their order, so this number says which
    open: deque[Numbered] = field(default_factory=deque)

    def prepared(self, frames_of: Callable[[int, int], Frames], expects: Expected, now_s: float) -> Numbered:
        """The next order, if it is issued; `frames_of(order, accepted)` encodes it, and may raise."""
        return Numbered(self.num_issued + 1, frames_of(self.num_issued + 1, self.num_accepted), now_s, expects)

    def issue(self, order: Numbered) -> None:
        """An order that was prepared is about to be sent."""
        self.num_issued = order.number
        self.open.append(order)

    @property
    def wanted(self) -> bool:
        """Is there an open order whose answer somebody waits for?"""
        return any(not order.is_cancelled for order in self.open)

    def judge(self, number: int) -> Verdict:
        """What is to be done with an answer; changes nothing."""
        if number <= 0 or number > self.num_issued:
            return Verdict.UNKNOWN
        if number <= self.num_accepted:
            return Verdict.DUPLICATE
        if number > self.num_accepted + 1:
            return Verdict.EARLY
        return Verdict.CANCELLED if self.open[0].is_cancelled else Verdict.ACCEPTED

    def accept(self) -> Numbered:
        """Close the oldest open order: its answer is accepted."""
        self.num_accepted += 1
        return self.open.popleft()

    def cancel_open(self) -> int | None:
        """Nobody waits for the open orders any more. Returns the last of them; None: there is none."""
        for order in self.open:
            order.is_cancelled = True
        return self.open[-1].number if self.open else None

    def overdue(self, received: int, now_s: float, resend_s: float) -> list[Numbered]:
        """Orders to send again: `received` is the last that the worker knows of."""
        late = [order for order in self.open if order.number > received and order.is_overdue(now_s, resend_s)]
        for order in late:
            order.repeat(now_s)
        return late


@dataclass(slots=True)
class Outbox:
    """The worker's side: what it received, and the answers that the head has not accepted yet."""

    received: int  # the last order that came
    unaccepted: deque[Numbered] = field(default_factory=deque)

    def is_next(self, number: int) -> bool:
        """Is this the order to carry out next? Anything else came before, or too early: it will come again."""
        if number != self.received + 1:
            return False
        self.received = number
        return True

    def add(self, number: int, frames: Frames, now_s: float) -> Numbered:
        """An answer is about to be sent."""
        self.unaccepted.append(Numbered(number, frames, now_s))
        return self.unaccepted[-1]

    def accepted(self, number: int) -> None:
        """The head has accepted all answers up to this one."""
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
