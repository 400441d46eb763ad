"""How fast is an envfleet pool compared with its peers, on the same machine and in the same run?

    python benchmarks/pool.py                         every row, about fifteen minutes
    python benchmarks/pool.py --rows cpu cartpole-64  some rows
    python benchmarks/pool.py --quick                 does it run? Its numbers are not to be quoted

All contenders of a row are built, warmed up, and measured in turn (A, B, A, B, ...) in short windows, so that
a disturbance of the machine meets all of them. Only ratios within a run mean anything.

The peers are the `bench` extra: envpool; stable-baselines3 and tianshou (both need torch); box2d and pygame for
LunarLander. One that is missing is reported as not installed. The C++ loop needs a compiler (`$CXX`, or c++).

simulators.py measures MuJoCo, Atari and Box2D in the same way.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import gc
import importlib.util
import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from contenders import Actions, Contender, EnvFn, Running, deadline
from native_workloads import NATIVE_WORKLOADS
from report import Outcome, RowResult, Settings, describe_machine, to_json, to_markdown, update_readme
from workloads import PYTHON_WORKLOADS, ParallelSpeedup, Workload

# In this order: processes are forked before any peer has started threads in this one.
WORKLOADS = (*PYTHON_WORKLOADS, *NATIVE_WORKLOADS)

NUM_ACTION_BATCHES = 16
BUILD_TIMEOUT_S = 120.0
STUCK_AFTER_S = 60.0  # beyond the window itself
PAUSE_S = 0.2  # between windows: the last contender's processes fall asleep, and we see who else is awake


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


def parse_args(workloads: Sequence[Workload], window_s: float, rounds: int) -> argparse.Namespace:
    """The command line, checked."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    names = [workload.name for workload in workloads]
    parser.add_argument("--rows", nargs="+", choices=names, default=names, metavar="NAME", help=f"of {names}")
    parser.add_argument("--window-s", type=float, default=window_s, help="length of a window (%(default)s)")
    parser.add_argument(
        "--rounds", "--windows", type=int, default=rounds, help="windows of each contender (%(default)s)"
    )
    parser.add_argument("--quick", action="store_true", help="2 rounds of 0.3 s: does it run?")
    parser.add_argument("--results-dir", type=Path, default=Path(__file__).parent / "results")
    args = parser.parse_args()
    if args.window_s <= 0 or args.rounds < 1:
        parser.error(f"--window-s must be above 0 and --rounds at least 1, got {args}")
    return args


def main(table: str, all_workloads: Sequence[Workload], *, window_s: float = 1.0, rounds: int = 11) -> int:
    """Run the rows asked for; 1 if a contender failed, which a missing package does not count as.

    `table` names the results and the script whose marks the README has.
    """
    args = parse_args(all_workloads, window_s, rounds)
    settings = Settings(window_s=args.window_s, rounds=args.rounds, warmup_s=min(args.window_s, 1.0))
    if args.quick:
        settings = Settings(window_s=0.3, rounds=2, warmup_s=0.1)
    workloads = [workload for workload in all_workloads if workload.name in args.rows]
    args.results_dir.mkdir(parents=True, exist_ok=True)
    json_path, markdown_path = (args.results_dir / f"{table}-partial.{form}" for form in ("json", "md"))

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
    if len(results) == len(all_workloads) and not args.quick:
        # Only now: some rows, or a trial, must not replace the record of a whole run.
        json_path = json_path.replace(args.results_dir / f"{table}.json")
        markdown_path = markdown_path.replace(args.results_dir / f"{table}.md")
        update_readme(f"{table}.py", markdown_path.read_text())
    speedup.close()
    progress(f"written: {json_path} and {markdown_path}\n")
    print(markdown_path.read_text(), end="")
    return int(any(outcome.has_failed for result in results for outcome in result.outcomes.values()))


if __name__ == "__main__":
    sys.exit(main("pool", WORKLOADS))
