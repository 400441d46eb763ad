"""How fast is an envfleet pool compared with its peers, on the same machine and in the same run?

    python benchmarks/pool.py                       every row, about five minutes
    python benchmarks/pool.py --rows cpu noop       some rows
    python benchmarks/pool.py --quick               does it run? Its numbers are not to be quoted

All contenders of a row are built, warmed up, and measured in turn (A, B, A, B, ...) in short windows, so that
a disturbance of the machine meets all of them. Only ratios within a run mean anything.

The peers are the `bench` extra: stable-baselines3 and tianshou (both need torch), box2d and pygame for
LunarLander. One that is missing is reported as not installed.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import datetime
import gc
import importlib.metadata
import importlib.util
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from contenders import GYMNASIUM_SYNC, Actions, Contender, EnvFn, Running, Window, deadline
from workloads import WORKLOADS, ParallelSpeedup, Peer, Workload, burn_iterations_per_s

PACKAGES = ("envfleet", "gymnasium", "stable-baselines3", "tianshou", "numpy", "torch", "box2d")
NUM_ACTION_BATCHES = 64
BUILD_TIMEOUT_S = 120.0
STUCK_AFTER_S = 60.0  # beyond the window itself
MAX_BUSY_CORES_AT_REST = 0.2
PAUSE_S = 0.2  # between windows: the last contender's processes fall asleep, and we see who else is awake


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


def progress(text: str) -> None:
    """Show where we are on stderr: one line rewritten on a terminal, a line each elsewhere."""
    sys.stderr.write(f"\r\x1b[K{text}" if sys.stderr.isatty() else f"{text}\n")
    sys.stderr.flush()


def sample_actions(env_fn: EnvFn, num_envs: int) -> Actions:
    """Random actions for every env, from a fixed seed, so that all contenders get the same."""
    env = env_fn()
    env.action_space.seed(0)
    batches = [[env.action_space.sample() for _ in range(num_envs)] for _ in range(NUM_ACTION_BATCHES)]
    env.close()
    return np.array(batches)


def measure(workload: Workload, iterations_per_s: float, settings: Settings, speedup: ParallelSpeedup) -> RowResult:
    """Build all contenders of a row, measure them in turn, and close them."""
    # The subject comes last: a peer's forked children would inherit its descriptors and hold them open.
    contenders = [*(peer.contender for peer in workload.peers), workload.subject]
    outcomes = {contender.name: Outcome() for contender in contenders}
    missing = [module for module in workload.requires if importlib.util.find_spec(module) is None]
    if missing:
        for outcome in outcomes.values():
            outcome.absent_because = f"not installed: {', '.join(missing)}"
        return RowResult(workload, outcomes, [], [])

    env_fns = [workload.env_fn(env_id, iterations_per_s) for env_id in range(workload.num_envs)]
    actions = sample_actions(env_fns[0], workload.num_envs)
    # Objects of imported libraries would be scanned by every full collection, in windows that allocate much.
    gc.collect()
    gc.freeze()
    with contextlib.ExitStack() as stack:
        running: dict[str, Running] = {}
        for contender in contenders:
            progress(f"{workload.name}: building {contender.name}")
            built = build(contender, env_fns, actions, outcomes[contender.name])
            if built is not None:
                running[contender.name] = built
                stack.callback(close, contender.name, built)
        for name in list(running):
            attempt(name, running, outcomes, settings.warmup_s)
        for outcome in outcomes.values():
            outcome.windows.clear()
        busy_cores_at_rest, parallel_speedups = [], []
        for round_number in range(1, settings.rounds + 1):
            parallel_speedups.append(speedup.measure())
            for name in list(running):
                progress(f"{workload.name}: round {round_number}/{settings.rounds}, {name}")
                busy_cores_at_rest.append(busy_cores(PAUSE_S))
                attempt(name, running, outcomes, settings.window_s)
        progress(f"{workload.name}: closing")
    return RowResult(workload, outcomes, busy_cores_at_rest, parallel_speedups)


def build(contender: Contender, env_fns: list[EnvFn], actions: Actions, outcome: Outcome) -> Running | None:
    """Start a contender, or note in `outcome` why it cannot be."""
    try:
        with deadline(BUILD_TIMEOUT_S, "building"):
            if not contender.is_installed():
                outcome.absent_because = "not installed"
                return None
            return contender.build(env_fns, actions)
    except Exception as error:  # a peer may fail in its own way; the others are still worth measuring
        outcome.fail(error)
        return None


def attempt(name: str, running: dict[str, Running], outcomes: dict[str, Outcome], window_s: float) -> None:
    """Measure one window. A contender that fails is left out of the rounds that follow."""
    try:
        with deadline(window_s + STUCK_AFTER_S, "a window"):
            outcomes[name].windows.append(running[name].run_window(window_s))
    except Exception as error:  # see build
        outcomes[name].fail(error)
        del running[name]


def close(name: str, built: Running) -> None:
    """Close a contender; one that cannot be closed is reported and left to the end of the process."""
    try:
        with deadline(STUCK_AFTER_S, "closing"):
            built.close()
    except Exception as error:  # see build
        progress(f"{name} did not close: {error!r}\n")


def busy_cores(duration_s: float) -> float:
    """How many cores the whole machine keeps busy while we sleep."""
    before_s = _busy_s()
    time.sleep(duration_s)
    return (_busy_s() - before_s) / duration_s


def _busy_s() -> float:
    fields = Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]
    user, nice, system, _idle, _iowait, irq, softirq, steal = map(int, fields)
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")


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
    if GYMNASIUM_SYNC.name in result.outcomes and result.parallel_speedups:
        speedups = result.parallel_speedups
        yield (
            f"{row}: between these rounds all cores together did {statistics.median(speedups):.2f}x"
            f" ({min(speedups):.2f}-{max(speedups):.2f}) the work of one: the ceiling of the ratio to Gymnasium sync,"
            " which uses one."
        )
    busy = statistics.fmean(result.busy_cores_at_rest or [0.0])
    if busy > MAX_BUSY_CORES_AT_REST:
        yield f"{row}: other work kept {busy:.1f} cores busy, which bends the ratios; run again when quiet."


def update_readme(markdown: str) -> None:
    """Put the table between its marks in the README, which states nothing that this script did not measure."""
    readme = Path(__file__).parent.parent / "README.md"
    begin, end = "<!-- begin: benchmarks/pool.py -->\n", "<!-- end: benchmarks/pool.py -->"
    before, _, rest = readme.read_text().partition(begin)
    readme.write_text(before + begin + markdown + end + rest.partition(end)[2])


def parse_args() -> argparse.Namespace:
    """The command line, checked."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    names = [workload.name for workload in WORKLOADS]
    parser.add_argument("--rows", nargs="+", choices=names, default=names, metavar="NAME", help=f"of {names}")
    parser.add_argument("--window-s", type=float, default=1.0, help="length of a window (%(default)s)")
    parser.add_argument("--rounds", type=int, default=11, help="windows of each contender (%(default)s)")
    parser.add_argument("--quick", action="store_true", help="2 rounds of 0.3 s: does it run?")
    parser.add_argument("--results-dir", type=Path, default=Path(__file__).parent / "results")
    args = parser.parse_args()
    if args.window_s <= 0 or args.rounds < 1:
        parser.error(f"--window-s must be above 0 and --rounds at least 1, got {args}")
    return args


def main() -> int:
    """Run the rows asked for; 1 if a contender failed, which a missing package does not count as."""
    args = parse_args()
    settings = Settings(window_s=args.window_s, rounds=args.rounds, warmup_s=min(args.window_s, 1.0))
    if args.quick:
        settings = Settings(window_s=0.3, rounds=2, warmup_s=0.1)
    workloads = [workload for workload in WORKLOADS if workload.name in args.rows]
    args.results_dir.mkdir(parents=True, exist_ok=True)
    json_path, markdown_path = args.results_dir / "pool-partial.json", args.results_dir / "pool-partial.md"

    progress("looking at the machine")
    machine = describe_machine()
    results: list[RowResult] = []
    speedup = ParallelSpeedup(machine["num_cores"])
    for workload in workloads:
        results.append(measure(workload, machine["burn_iterations_per_s"], settings, speedup))
        # After each row, so that a run that is interrupted leaves what it had.
        report = {
            "machine": machine,
            "settings": dataclasses.asdict(settings),
            "rows": [to_json(result) for result in results],
        }
        json_path.write_text(json.dumps(report, indent=1) + "\n")
        markdown_path.write_text(to_markdown(results, machine, settings))
    if len(results) == len(WORKLOADS) and not args.quick:
        # Only now: some rows, or a trial, must not replace the record of a whole run.
        json_path = json_path.replace(args.results_dir / "pool.json")
        markdown_path = markdown_path.replace(args.results_dir / "pool.md")
        update_readme(markdown_path.read_text())
    speedup.close()
    progress(f"written: {json_path} and {markdown_path}\n")
    print(markdown_path.read_text(), end="")
    return int(any(outcome.has_failed for result in results for outcome in result.outcomes.values()))


if __name__ == "__main__":
    sys.exit(main())
