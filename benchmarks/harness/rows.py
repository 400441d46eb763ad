"""What a benchmark consists of: rows, each of which compares contenders; and what was measured of them."""

from __future__ import annotations

import enum
import statistics
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol


class NotInstalled(Exception):
    """A package that the contender needs is not there."""


class Contender(Protocol):
    """One way to do what a row measures. Rows know how to start theirs."""

    @property
    def name(self) -> str: ...


@dataclass(frozen=True, slots=True)
class Window:
    """What one contender did in one window."""

    count: int  # env steps or bytes, as the row has it
    duration_s: float
    cpu_s: float | None = None  # of all its processes; None: not measured
    steps_by_env: list[int] | None = None  # None: every env was stepped equally often, or they were not counted
    policy_s: float | None = None  # of the duration, in the policy that chose the actions; None: there was none
    more: dict[str, float] = field(default_factory=dict)

    @property
    def rate(self) -> float:
        return self.count / self.duration_s

    @property
    def cpu_us(self) -> float:
        """For each of `count`, and of what was done before the clock ran."""
        assert self.cpu_s is not None
        return self.cpu_s / (self.count + self.more.get("uncounted", 0)) * 1e6


class Running(Protocol):
    """A contender that is built. Between windows it is idle."""

    @property
    def about(self) -> dict[str, str]:
        """Versions and what was chosen, for the report."""

    def run_window(self, window_s: float) -> Window: ...

    def close(self) -> object: ...


Start = Callable[[Any], Running]  # of a contender; raises NotInstalled, or an error of the contender's own


class Target(enum.Enum):
    """How the subject's number is held against another's."""

    RATIO_AT_LEAST = "at least"
    RATIO_AT_MOST = "at most"
    ADDED_AT_MOST = "adds at most"


@dataclass(frozen=True, slots=True)
class Comparison:
    """The subject against one other contender."""

    subject: Contender
    other: Contender
    kind: Target
    target: float | None = None  # None: for reference

    def value(self, subject: float, other: float) -> float:
        return subject - other if self.kind is Target.ADDED_AT_MOST else subject / other

    def is_reached(self, value: float) -> bool | None:
        if self.target is None:
            return None
        return value >= self.target if self.kind is Target.RATIO_AT_LEAST else value <= self.target

    def described(self, value: float) -> str:
        return f"{value:+,.0f} us" if self.kind is Target.ADDED_AT_MOST else f"{value:.2f}x"

    @property
    def described_target(self) -> str:
        if self.target is None:
            return "-"
        number = f"{self.target:g} us" if self.kind is Target.ADDED_AT_MOST else f"{self.target:g}x"
        return f"{self.kind.value} {number}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One question."""

    name: str  # for --rows
    title: str
    unit: str
    number: Callable[[Window], float]  # of a window, in that unit
    comparisons: tuple[Comparison, ...]
    cpu_for: str = ""  # what CPU is counted for, where it is measured
    cpu_scale: float = 1.0  # how many of what the contenders count make one of those
    requires: tuple[str, ...] = ()  # modules that the environment itself needs
    one_core_peer: str | None = None  # a contender that uses one core: how much all cores do is the limit of its ratio

    @property
    def contenders(self) -> list[Contender]:
        """Each once. Subjects last: children that a peer forks would inherit descriptors of theirs."""
        every = [*(each.other for each in self.comparisons), *(each.subject for each in self.comparisons)]
        return list({each.name: each for each in every}.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """How long is measured."""

    window_s: float
    rounds: int
    warmup_s: float


@dataclass(slots=True)
class Outcome:
    """What became of one contender in one row: its windows, or why there are none."""

    windows: list[Window] = field(default_factory=list)
    about: dict[str, str] = field(default_factory=dict)
    absent_because: str | None = None  # "not installed", or the error that it ended with
    has_failed: bool = False  # absent through an error of its own

    def fail(self, error: Exception) -> None:
        """Keep the error in one line that fits a table."""
        self.absent_because = " ".join(f"failed: {type(error).__name__}: {error}".split())[:200]
        self.has_failed = True


@dataclass(frozen=True, slots=True)
class RowResult:
    """One measured row."""

    row: Row
    outcomes: dict[str, Outcome]  # by the contender's name
    busy_cores_at_rest: list[float]  # before each window, with all contenders idle: what others do meanwhile
    parallel_speedups: list[float]  # before each round, where the row asks for it: how much faster all cores are

    def numbers(self, contender: Contender) -> list[float] | None:
        """One for each window; None for a contender that did not get through them all."""
        outcome = self.outcomes[contender.name]
        return None if outcome.absent_because is not None else [self.row.number(window) for window in outcome.windows]

    def compared(self, comparison: Comparison) -> tuple[float, float, float] | None:
        """Of the medians; lowest and highest of the single rounds. None where one of the two has no numbers."""
        ours, theirs = self.numbers(comparison.subject), self.numbers(comparison.other)
        if not ours or not theirs:
            return None
        by_round = [comparison.value(*pair) for pair in zip(ours, theirs, strict=True)]
        medians = comparison.value(statistics.median(ours), statistics.median(theirs))
        return medians, min(by_round), max(by_round)
