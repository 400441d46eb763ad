"""What was measured, as JSON and as a table for people."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Iterator
from typing import Any

import numpy as np

from benchmarks.harness.machine import machine_line
from benchmarks.harness.rows import Comparison, Contender, RowResult, Settings

MAX_BUSY_CORES_AT_REST = 0.2


def to_json(result: RowResult) -> dict[str, Any]:
    """Everything that was measured in a row, window by window."""
    return {
        "name": result.row.name,
        "title": result.row.title,
        "unit": result.row.unit,
        "busy_cores_at_rest": result.busy_cores_at_rest,
        "parallel_speedups": result.parallel_speedups,
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
                "settings": getattr(contender, "settings", {}),
                "numbers": result.numbers(contender),
                **dataclasses.asdict(result.outcomes[contender.name]),
            }
            for contender in result.row.contenders
        },
    }


def to_markdown(results: list[RowResult], machine: dict[str, Any], settings: Settings) -> str:
    """The table for people, and what they must know to read it."""
    lines = [
        machine_line(machine),
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
    return "\n".join([*lines, *([""] if notes else []), *notes]) + "\n"


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
    measured = {name: outcome for name, outcome in result.outcomes.items() if outcome.absent_because is None}
    cpu = "; ".join(
        f"{name} {statistics.median(window.cpu_us for window in outcome.windows) * row.cpu_scale:,.1f} us"
        for name, outcome in measured.items()
        if all(window.cpu_s is not None for window in outcome.windows)
    )
    if cpu:
        yield f"- `{row.name}`, CPU of all processes for each {row.cpu_for}: {cpu}."
    for name, outcome in result.outcomes.items():
        if outcome.about:
            yield f"- `{row.name}`, {name}: {'; '.join(outcome.about.values())}."
        # An async pool may win by starving its slow envs; that must not stay hidden behind one number.
        counts = [window.steps_by_env for window in outcome.windows if window.steps_by_env is not None]
        if counts:
            rates = np.sum(counts, axis=0) / sum(window.duration_s for window in outcome.windows)
            yield f"- `{row.name}`, {name}: single envs got between {rates.min():,.1f} and {rates.max():,.1f} steps/s."
    policy_shares = [f"{name} {share:.0%}" for name, share in _policy_shares(result)]
    if policy_shares:
        yield f"- `{row.name}`: of the loop's time the policy took {'; '.join(policy_shares)}."
    yield from _notes_on_the_machine(result)


def _policy_shares(result: RowResult) -> Iterator[tuple[str, float]]:
    for name, outcome in result.outcomes.items():
        windows = [window for window in outcome.windows if window.policy_s is not None]
        if windows:
            yield name, statistics.median((window.policy_s or 0.0) / window.duration_s for window in windows)


def _notes_on_the_machine(result: RowResult) -> Iterator[str]:
    row, speedups = result.row, result.parallel_speedups
    if speedups:
        yield (
            f"- `{row.name}`: between these rounds all cores together did {statistics.median(speedups):.2f}x"
            f" ({min(speedups):.2f}-{max(speedups):.2f}) the work of one: the limit of the ratio to"
            f" {row.one_core_peer}, which uses one."
        )
    busy = statistics.fmean(result.busy_cores_at_rest or [0.0])
    if busy > MAX_BUSY_CORES_AT_REST:
        yield f"- `{row.name}`: other work kept {busy:.1f} cores busy, which bends the ratios; run again when quiet."
