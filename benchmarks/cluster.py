"""What does the cluster cost, and how fast is it compared with its peers, on the same machine and in the same run?

    python benchmarks/cluster.py --peers-python PATH     every row, about a quarter of an hour
    python benchmarks/cluster.py --rows rollout step     some rows
    python benchmarks/cluster.py --quick                 does it run? Its numbers are not to be quoted

All contenders of a row are built, warmed up, and measured in turn (A, B, A, B, ...) in short windows, so that a
disturbance of the machine meets all of them. Only ratios within a run mean anything.

The peers, RLlib and TorchRL, want another Gymnasium than we do: `--peers-python` names an interpreter that has them
(pip install torch==2.13.0, then 'ray[rllib]==2.60.0' torchrl==0.14.1). One that is missing is reported as such.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

from cluster_contenders import (
    LOCAL_STEP,
    RLLIB,
    ZEROMQ_ECHO,
    ContenderFailed,
    NotInstalled,
    Running,
    cluster_rollout,
    cluster_step,
    cluster_stream,
    one_process,
    torchrl,
    zeromq,
)
from cluster_envs import OBS_BYTES
from cluster_fleet import FLEET_ROW, fleet_curve
from cluster_report import Comparison, Outcome, Row, RowResult, Target, to_json, to_markdown
from pool import PAUSE_S, busy_cores, progress
from report import Settings, describe_machine, update_readme, version_of

PACKAGES = ("envfleet", "gymnasium", "torch", "pyzmq", "msgspec", "numpy")
TCP = "tcp://127.0.0.1:0"
SMALL, MIDDLE = 8, 64  # envs of a worker
NUM_STEPS = 64
POLICIES = ("module", "traced", "numpy")  # see cluster_rollout()


def _image_row(stacked: bool) -> Row:
    stream = cluster_stream(stacked, MIDDLE, NUM_STEPS)
    num_bytes = (NUM_STEPS + 1) * MIDDLE * OBS_BYTES  # of the observations of one rollout
    return Row(
        name="images-stacked" if stacked else "images-fresh",
        title=f"2 workers send 64 envs x 64 steps x 4x84x84 uint8, {'one frame' if stacked else 'all frames'} new",
        unit="GB/s of observations",
        number=lambda window: window.rate / 1e9,
        cpu_for="GB",
        cpu_scale=1e9,
        comparisons=(
            Comparison(stream, zeromq(num_bytes), Target.RATIO_AT_LEAST, 0.8),
            Comparison(stream, zeromq(num_bytes, refill=True), Target.RATIO_AT_LEAST),
        ),
    )


ROWS = (
    Row(
        name="rollout",
        title="CartPole-v1, 2 workers x 8 envs, MLP 2x64, sampling only",
        unit="env steps/s",
        cpu_for="env step",
        number=lambda window: window.rate,
        comparisons=(
            *(Comparison(cluster_rollout(SMALL, policy), RLLIB, Target.RATIO_AT_LEAST, 8.0) for policy in POLICIES),
            *(
                Comparison(cluster_rollout(SMALL, policy), torchrl(is_compiled=True), Target.RATIO_AT_LEAST, 3.0)
                for policy in POLICIES
            ),
            Comparison(cluster_rollout(SMALL), torchrl(is_compiled=False), Target.RATIO_AT_LEAST, 3.0),
        ),
    ),
    Row(
        name="cpu",
        title="CartPole-v1, 2 workers x 64 envs, MLP 2x64, CPU of all processes",
        unit="us for each env step",
        cpu_for="env step",
        number=lambda window: window.cpu_us,
        comparisons=(
            Comparison(cluster_rollout(MIDDLE), one_process(2, MIDDLE), Target.RATIO_AT_MOST, 1.15),
            Comparison(cluster_rollout(MIDDLE), one_process(1, MIDDLE, num_processes=2), Target.RATIO_AT_MOST),
            Comparison(cluster_rollout(MIDDLE), one_process(2, MIDDLE, True), Target.RATIO_AT_MOST),
            Comparison(cluster_rollout(MIDDLE), one_process(1, 2 * MIDDLE), Target.RATIO_AT_MOST),
        ),
    ),
    Row(
        name="step",
        title="step(actions), CartPole-v1, 2 workers x 64 envs",
        unit="us for each step of the batch",
        cpu_for="step of the batch",
        number=lambda window: window.more["median_us"],
        comparisons=(
            Comparison(cluster_step(None), LOCAL_STEP, Target.ADDED_AT_MOST, 400.0),
            Comparison(cluster_step(TCP), LOCAL_STEP, Target.ADDED_AT_MOST, 400.0),
            Comparison(cluster_step(None), ZEROMQ_ECHO, Target.ADDED_AT_MOST),
        ),
    ),
    _image_row(stacked=True),
    _image_row(stacked=False),
)


def measure(row: Row, settings: Settings, peers_python: str) -> RowResult:
    """Build all contenders of a row, measure them in turn, and close them."""
    outcomes = {contender.name: Outcome() for contender in row.contenders}
    busy_cores_at_rest: list[float] = []
    with contextlib.ExitStack() as stack:
        running: dict[str, Running] = {}
        for contender in row.contenders:
            progress(f"{row.name}: building {contender.name}")
            outcome = outcomes[contender.name]
            try:
                running[contender.name] = stack.enter_context(Running(contender, peers_python))
                outcome.about = running[contender.name].about
            except NotInstalled as error:
                outcome.absent_because = f"not installed: {error}"
            except (ContenderFailed, TimeoutError, OSError) as error:
                outcome.fail(error)
        for name in list(running):
            _attempt(name, running, outcomes, settings.warmup_s)
        for outcome in outcomes.values():
            outcome.windows.clear()
        for round_number in range(1, settings.rounds + 1):
            for name in list(running):
                progress(f"{row.name}: round {round_number}/{settings.rounds}, {name}")
                busy_cores_at_rest.append(busy_cores(PAUSE_S))
                _attempt(name, running, outcomes, settings.window_s)
        progress(f"{row.name}: closing")
    return RowResult(row, outcomes, busy_cores_at_rest)


def _attempt(name: str, running: dict[str, Running], outcomes: dict[str, Outcome], window_s: float) -> None:
    """Measure one window. A contender that fails is left out of the rounds that follow."""
    try:
        outcomes[name].windows.append(running[name].run_window(window_s))
    except (ContenderFailed, TimeoutError, OSError) as error:
        outcomes[name].fail(error)
        del running[name]


def parse_args() -> argparse.Namespace:
    """The command line, checked."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    names = [*(row.name for row in ROWS), FLEET_ROW]
    parser.add_argument("--rows", nargs="+", choices=names, default=names, metavar="NAME", help=f"of {names}")
    parser.add_argument("--peers-python", default=sys.executable, help="interpreter that has RLlib and TorchRL")
    parser.add_argument("--window-s", type=float, default=3.0, help="length of a window (%(default)s)")
    parser.add_argument("--rounds", type=int, default=9, help="windows of each contender (%(default)s)")
    parser.add_argument("--quick", action="store_true", help="2 rounds of 1 s: does it run?")
    parser.add_argument("--results-dir", type=Path, default=Path(__file__).parent / "results")
    args = parser.parse_args()
    if args.window_s <= 0 or args.rounds < 1:
        parser.error(f"--window-s must be above 0 and --rounds at least 1, got {args}")
    return args


def main() -> int:
    """Run the rows asked for; 1 if a contender failed, which a missing package does not count as."""
    args = parse_args()
    settings = Settings(window_s=args.window_s, rounds=args.rounds, warmup_s=min(args.window_s, 2.0))
    if args.quick:
        settings = Settings(window_s=1.0, rounds=2, warmup_s=0.5)
    args.results_dir.mkdir(parents=True, exist_ok=True)
    json_path, markdown_path = args.results_dir / "cluster-partial.json", args.results_dir / "cluster-partial.md"

    progress("looking at the machine")
    machine = {**describe_machine(), "packages": {package: version_of(package) for package in PACKAGES}}
    results: list[RowResult] = []
    curve: dict[str, Any] | None = None

    def write() -> None:
        # After each row, so that a run that is interrupted leaves what it had.
        report = {
            "machine": machine,
            "settings": dataclasses.asdict(settings),
            "rows": [to_json(result) for result in results],
            "fleet": curve,
        }
        json_path.write_text(json.dumps(report, indent=1) + "\n")
        markdown_path.write_text(to_markdown(results, curve, machine, settings))

    for row in ROWS:
        if row.name in args.rows:
            results.append(measure(row, settings, args.peers_python))
            write()
    if FLEET_ROW in args.rows:
        curve = fleet_curve(settings.window_s, lambda text: progress(f"{FLEET_ROW}: {text}"))
        write()
    if len(results) == len(ROWS) and curve is not None and not args.quick:
        # Only now: some rows, or a trial, must not replace the record of a whole run.
        json_path = json_path.replace(args.results_dir / "cluster.json")
        markdown_path = markdown_path.replace(args.results_dir / "cluster.md")
        update_readme("cluster.py", markdown_path.read_text())
    progress(f"written: {json_path} and {markdown_path}\n")
    print(markdown_path.read_text(), end="")
    return int(any(outcome.has_failed for result in results for outcome in result.outcomes.values()))


if __name__ == "__main__":
    sys.exit(main())
