"""What do infos in rollouts cost? CPU of head and workers for each env step, with ten numbers in each info and without.

    python -m benchmarks.infos              both backends, about two minutes
    python -m benchmarks.infos --quick      does it run? Its numbers are not to be quoted

Three contenders take turns in short windows: all infos (`rollout(agent, T)`), the same envs without them
(`infos=()`), and envs that say nothing in their infos. The policy is the NumPy MLP of benchmarks/cluster.py. The
target: at most 1.1 times the CPU of `infos=()`.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import envfleet
from benchmarks.harness.cpu_time import tree_cpu_s
from benchmarks.harness.machine import describe_machine
from benchmarks.harness.results import RESULTS_DIR, save_json
from benchmarks.rows.cluster_policy import Agent, act, log_prob, values
from benchmarks.rows.informed_env import InformedEnv

HEADER = Path(__file__).parent / "rows" / "informed.h"
NUM_STEPS = 128
NUM_ENVS = {"native": 64, "process": 16}
TARGET = 1.1


def contender(backend: str, silent: bool, infos: tuple[str, ...] | None) -> tuple[Any, Callable[[], int]]:
    """A cluster of one worker, and what collects a rollout and returns its number of env steps."""
    env = "Informed-v0" if backend == "native" else InformedEnv
    cluster = envfleet.ClusterEnv(
        env,
        1,
        NUM_ENVS[backend],
        backend=backend,
        env_kwargs={"silent": int(silent)},
        seed=0,  # type: ignore[arg-type]
    )
    weights = {name: tensor.numpy() for name, tensor in Agent().state_dict().items()}
    agent = envfleet.FunctionPolicy(act, log_prob, weights, values)
    return cluster, lambda: int(cluster.rollout(agent, NUM_STEPS, infos=infos).rewards.size)


def measured(backend: str, window_s: float, rounds: int) -> tuple[dict[str, float], dict[str, float]]:
    """Microseconds of CPU for each env step, the median of all windows: of all processes, and of the head alone."""
    names = {"all infos": (False, None), "infos=()": (False, ()), "silent envs": (True, None)}
    clusters = {name: contender(backend, *each) for name, each in names.items()}
    costs: dict[str, list[float]] = {name: [] for name in names}
    at_head: dict[str, list[float]] = {name: [] for name in names}
    try:
        for number in range(rounds + 1):
            for name, (_, collect) in clusters.items():
                num_steps, before_s, start_s = 0, tree_cpu_s(os.getpid()), time.perf_counter()
                head_before_s = time.process_time()
                while time.perf_counter() - start_s < window_s:
                    num_steps += collect()
                head_s = time.process_time() - head_before_s
                if number:  # the first round warms up
                    at_head[name].append(head_s / num_steps * 1e6)
                    costs[name].append((tree_cpu_s(os.getpid()) - before_s) / num_steps * 1e6)
    finally:
        for cluster, _ in clusters.values():
            cluster.close()
    medians = [{name: median(each) for name, each in which.items()} for which in (costs, at_head)]
    return medians[0], medians[1]


def main() -> int:
    """Measure, print and save."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="short windows: does it run?")
    parser.add_argument("--backends", nargs="+", default=list(NUM_ENVS), choices=list(NUM_ENVS))
    arguments = parser.parse_args()
    envfleet.load_native(str(HEADER))
    window_s, rounds = (0.5, 1) if arguments.quick else (2.0, 7)
    report: dict[str, Any] = {
        "machine": describe_machine(),
        "us_of_cpu_for_each_env_step": {},
        "of_these_at_the_head": {},
    }
    for backend in arguments.backends:
        costs, at_head = measured(backend, window_s, rounds)
        report["us_of_cpu_for_each_env_step"][backend] = costs
        report["of_these_at_the_head"][backend] = at_head
        ratio = costs["all infos"] / costs["infos=()"]
        verdict = "reached" if ratio <= TARGET else "MISSED"
        listed = ", ".join(f"{name} {cost:.2f} us (head {at_head[name]:.2f})" for name, cost in costs.items())
        print(f"{backend}, {NUM_ENVS[backend]} envs: {listed}; ratio {ratio:.3f}, at most {TARGET}: {verdict}")
    if not arguments.quick:
        save_json(RESULTS_DIR, "infos", report)
    return 0


if __name__ == "__main__":
    sys.exit(main())
