"""Desk: what the head keeps for one worker: open orders, accepted answers, counters. Pure."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from envfleet.cluster.membership import Member
from envfleet.cluster.messages import EnvFailure, NotReady, OrderFailed
from envfleet.cluster.orders import Ledger
from envfleet.cluster.rollouts import Collected, Rows


class Answered(NamedTuple):
    """An answer that was accepted."""

    order: int
    result: Rows | Collected | list[Any] | OrderFailed
    failures: list[EnvFailure]
    is_after_loss: bool
    member: Member
    arrival: int  # answers of all workers are counted in the order in which they were accepted


@dataclass(slots=True)
class Desk:
    """What the head keeps for one worker, whichever process it is."""

    ledger: Ledger = field(default_factory=Ledger)
    answers: deque[Answered] = field(default_factory=deque)
    is_ready: bool = False
    not_ready: NotReady | None = None
    member: Member | None = None  # the last one
    problem: str = ""  # which process was lost last, and why
    num_steps: int = 0
    num_rollouts: int = 0
    num_pulls: int = 0
    version: int = 0
    lag: int = 0
    divergence: float | None = None
    weight_bytes: int = 0
    rollout_bytes: int = 0
    announcement_bytes: int = 0
    rates: deque[tuple[int, float]] = field(default_factory=lambda: deque(maxlen=10))  # (env steps, seconds)
