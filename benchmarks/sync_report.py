"""What benchmarks/sync.py measured: one line for each training, and the table made of them."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One training."""

    task: str
    rule: str
    seed: int
    mean_return: float  # of the last 100 episodes, or as many as the example takes
    num_steps: int
    versions: int  # published
    pulls: float  # of one worker, the mean
    weight_bytes: int  # of all workers
    announcement_bytes: int
    measure_s: float
    learn_s: float  # without waiting for rollouts
    duration_s: float

    @property
    def line(self) -> str:
        """For whoever waits."""
        return (
            f"{self.task}, {self.rule}, seed {self.seed}: return {self.mean_return:.1f}, {self.pulls:.1f} pulls for "
            f"{self.versions} versions, measuring {self.measure_share:.1%} of learning, {self.duration_s:.0f} s"
        )

    @property
    def measure_share(self) -> float:
        """Of the learner's time."""
        return self.measure_s / (self.learn_s + self.measure_s)

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return dataclasses.asdict(self)


def table(runs: Sequence[Run]) -> str:
    """Every rule of every task, seeds together."""
    lines = [
        "Median over seeds; pulls and versions are a worker's; fewer: versions for each pull. Bytes: weights and "
        "announcements of all workers.",
        "",
        "| task | rule | seeds | return: median (each) | versions | pulls | fewer | bytes | measuring |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for task in dict.fromkeys(run.task for run in runs):
        for rule in dict.fromkeys(run.rule for run in runs if run.task == task):
            lines.append(_row([run for run in runs if run.task == task and run.rule == rule]))
    return "\n".join(lines)


def _row(runs: Sequence[Run]) -> str:
    returns = sorted(run.mean_return for run in runs)
    pulls, versions = statistics.median(run.pulls for run in runs), statistics.median(run.versions for run in runs)
    num_bytes = statistics.median(run.weight_bytes + run.announcement_bytes for run in runs)
    share = statistics.median(run.measure_share for run in runs)
    each = ", ".join(f"{value:.0f}" for value in returns)
    cells = [
        f"`{runs[0].task}`",
        runs[0].rule,
        str(len(runs)),
        f"{statistics.median(returns):.0f} ({each})",
        f"{versions:,.0f}",
        f"{pulls:,.1f}",
        f"{versions / pulls:.1f}x",
        f"{num_bytes / 1e6:,.2f} MB",
        f"{share:.1%}",
    ]
    return f"| {' | '.join(cells)} |"
