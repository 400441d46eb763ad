"""What benchmarks/cluster.py measures, row by row: the targets, the numbers, and both as JSON and as a table."""

from __future__ import annotations

import dataclasses
import enum
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from cluster_contenders import Contender, Window
from report import MAX_BUSY_CORES_AT_REST, Settings


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
    cpu_for: str  # what CPU is counted for; so many of what contenders count:
    cpu_scale: float = 1.0
    comparisons: tuple[Comparison, ...]

    @property
    def contenders(self) -> list[Contender]:
        """Each once, in the order in which they are named."""
        every = [each for comparison in self.comparisons for each in (comparison.subject, comparison.other)]
        return list({each.name: each for each in every}.values())


@dataclass(slots=True)
class Outcome:
    """What became of one contender in one row: its windows, or why there are none."""

    windows: list[Window] = field(default_factory=list)
    about: dict[str, str] = field(default_factory=dict)
    absent_because: str | None = None
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
    busy_cores_at_rest: list[float]

    def numbers(self, contender: Contender) -> list[float] | None:
        """One for each window; None for a contender that did not get through them all."""
        outcome = self.outcomes[contender.name]
        return None if outcome.absent_because is not None else [self.row.number(window) for window in outcome.windows]

    def compared(self, comparison: Comparison) -> tuple[float, float, float] | None:
        """Of the medians; lowest and highest of the single rounds."""
        ours, theirs = self.numbers(comparison.subject), self.numbers(comparison.other)
        if not ours or not theirs:
            return None
        by_round = [comparison.value(*pair) for pair in zip(ours, theirs, strict=True)]
        medians = comparison.value(statistics.median(ours), statistics.median(theirs))
        return medians, min(by_round), max(by_round)


def to_json(result: RowResult) -> dict[str, Any]:
    """Everything that was measured in a row, window by window."""
    return {
        "name": result.row.name,
        "title": result.row.title,
        "unit": result.row.unit,
        "busy_cores_at_rest": result.busy_cores_at_rest,
        "comparisons": [
            {
                "subject": each.subject.name,
                "other": each.other.name,
                "target": None if each.target is None else f"{each.kind.value} {each.target:g}",
                "value": result.compared(each),
            }
            for each in result.row.comparisons
        ],
        "contenders": {
            contender.name: {
                "settings": contender.settings,
                "numbers": result.numbers(contender),
                **dataclasses.asdict(result.outcomes[contender.name]),
            }
            for contender in result.row.contenders
        },
    }


def to_markdown(
    results: list[RowResult], curve: dict[str, Any] | None, machine: dict[str, Any], settings: Settings
) -> str:
    """The tables for people, and what they must know to read them."""
    versions = ", ".join(f"{name} {version}" for name, version in machine["packages"].items() if version)
    lines = [
        f"{machine['cpu']}, {machine['num_cores']} shared cores; {machine['date'][:10]};"
        f" Python {machine['python']}; {versions}.",
        f"Median of {settings.rounds} windows of {settings.window_s:g} s, contenders in turn; ratio or difference of"
        " the medians, in brackets the lowest and highest of the single rounds. All processes of a contender share the"
        " cores; targets are set for 2 of them.",
        "",
        "| row | what | contender | | against | | result | target | reached |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for result in results:
        lines += [_comparison_line(result, each) for each in result.row.comparisons]
    notes = [note for result in results for note in _notes(result)]
    lines += [*([""] if notes else []), *notes]
    if curve is not None:
        lines += ["", *_curve_lines(curve)]
    return "\n".join(lines) + "\n"


def _comparison_line(result: RowResult, comparison: Comparison) -> str:
    compared = result.compared(comparison)
    reached = None if compared is None else comparison.is_reached(compared[0])
    cells = [
        f"`{result.row.name}`",
        f"{result.row.title}, {result.row.unit}",
        comparison.subject.name,
        _number(result, comparison.subject),
        comparison.other.name,
        _number(result, comparison.other),
        "-" if compared is None else "{} ({} to {})".format(*map(comparison.described, compared)),
        comparison.described_target,
        "-" if reached is None else "yes" if reached else "**no**",
    ]
    return f"| {' | '.join(cells)} |"


def _number(result: RowResult, contender: Contender) -> str:
    numbers = result.numbers(contender)
    if numbers is None:
        return str(result.outcomes[contender.name].absent_because).replace("|", "/")
    median = statistics.median(numbers)
    return f"{median:,.0f}" if median >= 100 else f"{median:,.2f}"


def _notes(result: RowResult) -> Iterator[str]:
    row = result.row
    cpu = "; ".join(
        f"{name} {statistics.median(window.cpu_us for window in outcome.windows) * row.cpu_scale:,.1f} us"
        for name, outcome in result.outcomes.items()
        if outcome.absent_because is None
    )
    yield f"- `{row.name}`, CPU of all processes for each {row.cpu_for}: {cpu}."
    for name, outcome in result.outcomes.items():
        if outcome.about:
            yield f"- `{row.name}`, {name}: {'; '.join(outcome.about.values())}."
    busy = statistics.fmean(result.busy_cores_at_rest or [0.0])
    if busy > MAX_BUSY_CORES_AT_REST:
        yield f"- `{row.name}`: other work kept {busy:.1f} cores busy, which bends the ratios; run again when quiet."


def _curve_lines(curve: dict[str, Any]) -> list[str]:
    return [
        f"One head and simulated workers, {curve['title']}; no target:",
        "",
        "| workers | rollouts/s | head: CPU us a rollout | head: cores busy |",
        "| --- | --- | --- | --- |",
        *(
            f"| {point['num_workers']} | {point['rollouts_per_s']:,.0f} | {point['head_us_per_rollout']:,.0f} |"
            f" {point['head_cores']:.2f} |"
            for point in curve["points"]
        ),
    ]
