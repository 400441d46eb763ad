"""When do helper threads pay? Native pools with and without them, with and without a policy's time between the steps.

    python -m benchmarks.help_worth

Two pools of the same envs take turns in short windows: in one the calling thread is alone, in the other it calls for
help as envfleet does. The pause between two steps is spent spinning, as a policy on the same thread would spend it.
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import envfleet
from benchmarks.harness.machine import describe_machine
from benchmarks.harness.results import RESULTS_DIR, save_json

CASES = (
    ("CartPole-v1", 64),
    ("CartPole-v1", 128),
    ("CartPole-v1", 256),
    ("CartPole-v1", 1024),
    ("Pendulum-v1", 64),
    ("Acrobot-v1", 64),
    ("Acrobot-v1", 256),
)
PAUSES_US = (0, 20, 100, 400)
WINDOW_S = 0.1
NUM_ACTION_BATCHES = 16


@dataclass(frozen=True, slots=True)
class Row:
    """Medians. CPUs: how many the process kept busy, the pauses included."""

    env_id: str
    num_envs: int
    pause_us: float
    alone_us: float  # of a batch, without the pause
    helped_us: float
    alone_cpus: float
    helped_cpus: float


def run_window(pool: envfleet.EnvPool, actions: list, pause_us: float) -> tuple[float, float]:
    """Microseconds of a batch, and CPUs."""
    start_s, cpu_start_s, num_batches = time.perf_counter(), time.process_time(), 0
    for batch in itertools.cycle(actions):
        pool.step(batch)
        num_batches += 1
        if pause_us:
            until_s = time.perf_counter() + pause_us * 1e-6
            while time.perf_counter() < until_s:
                pass
        if batch is actions[-1] and (elapsed_s := time.perf_counter() - start_s) > WINDOW_S:
            break
    return elapsed_s / num_batches * 1e6 - pause_us, (time.process_time() - cpu_start_s) / elapsed_s


def measure(env_id: str, num_envs: int, pause_us: float, num_rounds: int) -> Row:
    with (
        envfleet.make(env_id, num_envs, backend="native", num_workers=1) as alone,
        envfleet.make(env_id, num_envs, backend="native") as helped,
    ):
        actions = [alone.action_space.sample() for _ in range(NUM_ACTION_BATCHES)]
        windows: dict[envfleet.EnvPool, list[tuple[float, float]]] = {alone: [], helped: []}
        for pool in windows:
            pool.reset(seed=0)
        for _ in range(num_rounds):
            for pool, results in windows.items():
                results.append(run_window(pool, actions, pause_us))
        alone_us, alone_cpus = map(statistics.median, zip(*windows[alone], strict=True))
        helped_us, helped_cpus = map(statistics.median, zip(*windows[helped], strict=True))
    return Row(env_id, num_envs, pause_us, alone_us, helped_us, alone_cpus, helped_cpus)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--results-dir", type=Path, default=RESULTS_DIR)
    args = parser.parse_args()
    rows = []
    print(f"{len(os.sched_getaffinity(0))} CPUs")
    print("| envs | pause, us | alone, us a batch | with help | ratio | CPUs alone | with help |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for (env_id, num_envs), pause_us in itertools.product(CASES, PAUSES_US):
        row = measure(env_id, num_envs, pause_us, args.rounds)
        rows.append(asdict(row))
        print(
            f"| {num_envs} {env_id} | {pause_us} | {row.alone_us:.1f} | {row.helped_us:.1f} "
            f"| {row.alone_us / row.helped_us:.2f}x | {row.alone_cpus:.2f} | {row.helped_cpus:.2f} |",
            flush=True,
        )
    path = save_json(args.results_dir, "help_worth", {"machine": describe_machine(), "rows": rows})
    print(f"written: {path}")


if __name__ == "__main__":
    main()
