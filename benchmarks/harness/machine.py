"""What benchmarks/pool.py measured: the numbers, and the same as JSON and as a table for people."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import importlib.metadata
import os
import platform
import statistics
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from contenders import GYMNASIUM_SYNC, Window
from workloads import Peer, Workload, burn_iterations_per_s

PACKAGES = ("envfleet", "gymnasium", "envpool", "stable-baselines3", "tianshou", "numpy", "torch", "box2d")
MAX_BUSY_CORES_AT_REST = 0.2


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
    absent_because: str | None = None  # "not installed", or the error that it ended with
    has_failed: bool = False  # absent through an error of its own

    def fail(self, error: Exception) -> None:
        """Keep the error in one line that fits a table."""
        self.absent_because = " ".join(f"failed: {type(error).__name__}: {error}".split())[:200]
        self.has_failed = True

    @property
    def steps_per_s(self) -> list[float]:
        """One speed for each window."""
        return [window.steps_per_s for window in self.windows]

    @property
    def median_steps_per_s(self) -> float | None:
        """None for a contender that did not get through all its windows."""
        return None if self.absent_because is not None else statistics.median(self.steps_per_s)


@dataclass(frozen=True, slots=True)
class Ratio:
    """The subject's speed over a peer's: of the medians, and the extremes of the single rounds."""

    of_medians: float
    lowest: float
    highest: float


@dataclass(frozen=True, slots=True)
class RowResult:
    """One measured row."""

    workload: Workload
    outcomes: dict[str, Outcome]  # by the contender's name
    busy_cores_at_rest: list[float]  # before each window, with all contenders idle: what others do meanwhile
    parallel_speedups: list[float]  # before each round: how much faster all cores are than one

    def ratio(self, peer: Peer) -> Ratio | None:
        """None where one of the two has no numbers."""
        subject = self.outcomes[self.workload.subject.name]
        other = self.outcomes[peer.contender.name]
        if subject.median_steps_per_s is None or other.median_steps_per_s is None:
            return None
        pairs = zip(subject.steps_per_s, other.steps_per_s, strict=True)
        by_round = [ours / theirs for ours, theirs in pairs]
        return Ratio(subject.median_steps_per_s / other.median_steps_per_s, min(by_round), max(by_round))


def describe_machine() -> dict[str, Any]:
    """The machine and the versions: without them a number means nothing."""
    num_cores = len(os.sched_getaffinity(0))
    cpu_models = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line]
    return {
        "cpu": cpu_models[0].partition(":")[2].strip() if cpu_models else platform.machine(),
        "num_cores": num_cores,
        "burn_iterations_per_s": round(burn_iterations_per_s()),
        "system": platform.platform(),
        "python": platform.python_version(),
        "packages": {package: version_of(package) for package in PACKAGES},
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }


def version_of(package: str) -> str | None:
    """The version that is installed, if any."""
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version(package)
    return None


def to_json(result: RowResult) -> dict[str, Any]:
    """Everything that was measured in a row, window by window."""
    workload = result.workload
    ratios = {peer.contender.name: (peer.target_ratio, result.ratio(peer)) for peer in workload.peers}
    return {
        "name": workload.name,
        "title": workload.title,
        "num_envs": workload.num_envs,
        "subject": workload.subject.name,
        "busy_cores_at_rest": result.busy_cores_at_rest,
        "parallel_speedups": result.parallel_speedups,
        "against": {
            name: {"target_ratio": target_ratio, "ratio": ratio and dataclasses.asdict(ratio)}
            for name, (target_ratio, ratio) in ratios.items()
        },
        "contenders": {
            name: {"median_steps_per_s": outcome.median_steps_per_s, **dataclasses.asdict(outcome)}
            for name, outcome in result.outcomes.items()
        },
    }


def to_markdown(results: list[RowResult], machine: dict[str, Any], settings: Settings) -> str:
    """The table for people, around it what they must know to read it."""
    versions = ", ".join(f"{name} {version}" for name, version in machine["packages"].items() if version)
    lines = [
        f"{machine['cpu']}, {machine['num_cores']} shared cores; {machine['date'][:10]};"
        f" Python {machine['python']}; {versions}.",
        f"Env steps/s, median of {settings.rounds} windows of {settings.window_s:g} s, contenders in turn;"
        " ratio of the medians, in brackets the lowest and highest of the single rounds."
        " Targets are set for 2 cores.",
        "",
        "| workload | envs | contender | steps/s | against | steps/s | ratio | target | reached |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for result in results:
        lines += [_comparison_line(result, peer) for peer in result.workload.peers]
    notes = [note for result in results for note in _notes(result)]
    return "\n".join([*lines, *([""] if notes else []), *notes]) + "\n"


def _comparison_line(result: RowResult, peer: Peer) -> str:
    workload = result.workload
    ratio = result.ratio(peer)
    cells = [
        f"{workload.title} (`{workload.name}`)",
        str(workload.num_envs),
        workload.subject.name,
        _speed(result.outcomes[workload.subject.name]),
        peer.contender.name,
        _speed(result.outcomes[peer.contender.name]),
        "-" if ratio is None else f"{ratio.of_medians:.2f}x ({ratio.lowest:.2f}-{ratio.highest:.2f})",
        "-" if peer.target_ratio is None else f"{peer.target_ratio:g}x",
        _reached(ratio, peer.target_ratio),
    ]
    return f"| {' | '.join(cells)} |"


def _reached(ratio: Ratio | None, target_ratio: float | None) -> str:
    if ratio is None or target_ratio is None:
        return "-"
    return "yes" if ratio.of_medians >= target_ratio else "**no**"


def _speed(outcome: Outcome) -> str:
    median = outcome.median_steps_per_s
    return str(outcome.absent_because).replace("|", "/") if median is None else f"{median:,.0f}"


def _notes(result: RowResult) -> Iterator[str]:
    row = f"- `{result.workload.name}`"
    for name, outcome in result.outcomes.items():
        # An async pool may win by starving its slow envs; that must not stay hidden behind one number.
        counts = [window.steps_by_env for window in outcome.windows if window.steps_by_env is not None]
        if counts:
            rates = np.sum(counts, axis=0) / sum(window.duration_s for window in outcome.windows)
            yield f"{row}, {name}: single envs got between {rates.min():,.1f} and {rates.max():,.1f} steps/s."
    policy_shares = [f"{name} {share:.0%}" for name, share in _policy_shares(result)]
    if policy_shares:
        yield f"{row}: of the loop's time the policy took {'; '.join(policy_shares)}."
    if not result.workload.is_native and GYMNASIUM_SYNC.name in result.outcomes and result.parallel_speedups:
        speedups = result.parallel_speedups
        yield (
            f"{row}: between these rounds all cores together did {statistics.median(speedups):.2f}x"
            f" ({min(speedups):.2f}-{max(speedups):.2f}) the work of one: the ceiling of the ratio to Gymnasium sync,"
            " which uses one."
        )
    busy = statistics.fmean(result.busy_cores_at_rest or [0.0])
    if busy > MAX_BUSY_CORES_AT_REST:
        yield f"{row}: other work kept {busy:.1f} cores busy, which bends the ratios; run again when quiet."


def _policy_shares(result: RowResult) -> Iterator[tuple[str, float]]:
    for name, outcome in result.outcomes.items():
        windows = [window for window in outcome.windows if window.policy_s is not None]
        if windows:
            yield name, statistics.median((window.policy_s or 0.0) / window.duration_s for window in windows)


def update_readme(script: str, markdown: str) -> None:
    """Put a script's table between its marks in the README, which states nothing that no script has measured."""
    readme = Path(__file__).parent.parent / "README.md"
    begin, end = f"<!-- begin: benchmarks/{script} -->\n", f"<!-- end: benchmarks/{script} -->"
    before, found, rest = readme.read_text().partition(begin)
    if found:  # a script whose table the README does not show has no marks there
        readme.write_text(before + begin + markdown + end + rest.partition(end)[2])
