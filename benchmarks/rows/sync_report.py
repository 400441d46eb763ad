"""What benchmarks/sync.py measured: one line for each training, and the table made of them."""

from __future__ import annotations

import dataclasses
import datetime
import os
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

import envfleet

PACKAGES = ("gymnasium", "torch", "box2d")
TARGETS = {"cartpole": 4, "lunarlander": 4, "dqn": 20, "sac": 20, "catch-cnn": 4}  # times fewer pulls, or bytes


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
    """Every rule of every task, seeds together; and what the targets say of them."""
    lines = [
        f"{os.cpu_count()} shared cores; {datetime.datetime.now(datetime.UTC).date()}; "
        f"envfleet {envfleet.__version__}, "
        f"{', '.join(f'{name} {version(name)}' for name in PACKAGES)}. "
        "Median over seeds. Pulls are a worker's; `fewer`: than with every_update. Bytes: weights and announcements of "
        "all workers. Measuring: share of the learner's time.",
        "",
        "| task | rule | seeds | return: median (each) | versions | pulls | fewer | bytes | measuring |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
        *(_row(runs, task, rule) for task in _tasks(runs) for rule in _rules(runs, task)),
        "",
        "| target | task | reached | |",
        "| --- | --- | --- | --- |",
        *(line for task in _tasks(runs) for line in _targets(runs, task)),
    ]
    return "\n".join(lines)


def _tasks(runs: Sequence[Run]) -> list[str]:
    return list(dict.fromkeys(run.task for run in runs))


def _rules(runs: Sequence[Run], task: str) -> list[str]:
    return list(dict.fromkeys(run.rule for run in runs if run.task == task))


def _of(runs: Sequence[Run], task: str, rule: str) -> list[Run]:
    return [run for run in runs if run.task == task and run.rule == rule]


def _median(runs: Sequence[Run], number: Callable[[Run], float]) -> float:
    return statistics.median(number(run) for run in runs)


def _pulls(run: Run) -> float:
    return run.pulls


def _return(run: Run) -> float:
    return run.mean_return


def _bytes(run: Run) -> float:
    return run.weight_bytes + run.announcement_bytes


def _row(runs: Sequence[Run], task: str, rule: str) -> str:
    own, always = _of(runs, task, rule), _of(runs, task, "every_update")
    each = ", ".join(f"{value:.0f}" for value in sorted(map(_return, own)))
    cells = [
        f"`{task}`",
        rule,
        str(len(own)),
        f"{_median(own, _return):.0f} ({each})",
        f"{_median(own, lambda run: run.versions):,.0f}",
        f"{_median(own, _pulls):,.1f}",
        f"{_median(always, _pulls) / _median(own, _pulls):.1f}x",
        f"{_median(own, _bytes) / 1e6:,.2f} MB",
        f"{_median(own, lambda run: run.measure_share):.1%}",
    ]
    return f"| {' | '.join(cells)} |"


def _targets(runs: Sequence[Run], task: str) -> Iterator[str]:
    if task not in TARGETS:
        return
    aps, always = _of(runs, task, "aps"), _of(runs, task, "every_update")
    fewest = TARGETS[task]
    number, what = (_bytes, "bytes") if task == "catch-cnn" else (_pulls, "pulls")
    ratio = _median(always, number) / _median(aps, number)
    yield _target(f"{fewest}x fewer {what} than every_update", task, ratio >= fewest, f"{ratio:.1f}x")
    if task != "catch-cnn":
        lowest, own = min(map(_return, always)), _median(aps, _return)
        text = f"{own:.0f}; every_update {lowest:.0f} to {max(map(_return, always)):.0f}"
        yield _target("return within the seeds' spread of every_update", task, own >= lowest, text)
    for rule in _rules(runs, task):
        if rule.startswith("every:"):
            other, own = _median(_of(runs, task, rule), _return), _median(aps, _return)
            seeds = sorted(run.seed for run in aps)
            text = f"{own:.0f} to {other:.0f} on seeds {seeds[0]}-{seeds[-1]}"
            yield _target(f"return at least that of {rule}, with as many pulls", task, own >= other, text)
    share = _median(aps, lambda run: run.measure_share)
    yield _target("measuring under 3 % of the learner's time", task, share < 0.03, f"{share:.1%}")


def _target(what: str, task: str, is_reached: bool, found: str) -> str:
    return f"| {what} | `{task}` | {'yes' if is_reached else '**no**'} | {found} |"
