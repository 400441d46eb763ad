"""Where do the microseconds of a native step go? CartPole-v1 with 1, 8 and 64 envs, and EnvPool beside it.

    python -m benchmarks.facade_cost

Each layer is called on its own, in turn with the others, in short bursts; what a layer adds is the difference of two
medians. That does not hold for EnvPool, whose threads take longer to answer when Python runs between the calls (with
one env they sleep three times a step, and hardly ever when its C++ is called back to back). So its Python is timed by
itself, with C++ calls that return at once, and the rest of a step is not divided further.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

import envfleet
from benchmarks.harness.machine import describe_machine
from benchmarks.harness.results import RESULTS_DIR, save_json

ENV_ID = "CartPole-v1"
NUM_ENVS = (1, 8, 64)
NUM_ACTION_BATCHES = 16
BURST_S = 5e-3

StepFn = Callable[[Any], object]


@dataclass(frozen=True, slots=True)
class StepCost:
    """Microseconds of a batch, layer by layer; each but the engine includes those below it."""

    num_envs: int
    loop_us: float  # calling a function of C that does nothing; every figure but the engine's includes it
    envfleet_step_us: float  # pool.step(actions)
    envfleet_cpp_us: float  # NativePool.step(actions): checks, queue, GIL, engine, arrays
    envfleet_engine_us: float  # the envs alone, as the engine itself measures them
    envpool_step_us: float | None = None  # envs.step(actions); None here and below: not installed
    envpool_python_us: float | None = None  # the same, with C++ calls that return at once
    envpool_cpp_us: float | None = None  # its C++ calls, back to back: copies, queue, threads, envs, arrays


def envpool_steps(num_envs: int, num_threads: int) -> dict[str, StepFn]:
    """EnvPool's step, its Python alone, and its C++ alone; nothing where it is not installed."""
    try:
        import envpool
    except ModuleNotFoundError:
        return {}
    envs, hollow_envs = (
        envpool.make_gymnasium(ENV_ID, num_envs=num_envs, num_threads=min(num_threads, num_envs), seed=0)
        for _ in range(2)
    )
    envs.reset()
    hollow_envs.reset()
    env_ids = np.arange(num_envs, dtype=np.int32)

    def step_cpp(actions: np.ndarray) -> None:
        envs._send([env_ids, env_ids, actions])
        envs._recv()

    hollow_envs.step(np.zeros(num_envs, np.int32))
    hollow_envs._send([env_ids, env_ids, np.zeros(num_envs, np.int32)])
    state = hollow_envs._recv()
    hollow_envs._send = id
    hollow_envs._recv = lambda: state
    return {"envpool_step": envs.step, "envpool_python": hollow_envs.step, "envpool_cpp": step_cpp}


def measure(num_envs: int, num_rounds: int, num_envpool_threads: int) -> StepCost:
    """The medians of `num_rounds` bursts of each."""
    generator = np.random.default_rng(0)
    actions = generator.integers(0, 2, (NUM_ACTION_BATCHES, num_envs))
    costs_us: dict[str, list[float]] = {}
    envpool_fns = envpool_steps(num_envs, num_envpool_threads)
    with envfleet.make(ENV_ID, num_envs, backend="native", seed=0) as pool:
        pool.reset(seed=0)
        native = pool._backend._pool
        fns: dict[str, tuple[StepFn, list[np.ndarray]]] = {
            "loop": (id, list(actions)),
            "envfleet_step": (pool.step, list(actions)),
            "envfleet_cpp": (native.step, list(actions)),
            **{name: (step, list(actions.astype(np.int32))) for name, step in envpool_fns.items()},
        }
        for _ in range(num_rounds):
            for name, (step, batches) in fns.items():
                costs_us.setdefault(name, []).append(burst_us(step, batches))
                if name == "envfleet_cpp":
                    costs_us.setdefault("envfleet_engine", []).append(native.step_cost_ns * num_envs / 1e3)
    medians_us = {f"{name}_us": statistics.median(costs) for name, costs in costs_us.items()}
    return StepCost(num_envs, **medians_us)


def burst_us(step: StepFn, batches: list[np.ndarray]) -> float:
    """Microseconds of one call, in a burst of about BURST_S."""
    cycle = itertools.cycle(batches)
    num_calls, num_at_once, duration_s = 0, 1, 0.0
    start_s = time.perf_counter()
    while duration_s < BURST_S:
        for batch in itertools.islice(cycle, num_at_once):
            step(batch)
        num_calls += num_at_once
        num_at_once = min(2 * num_at_once, 256)
        duration_s = time.perf_counter() - start_s
    return duration_s / num_calls * 1e6


def to_markdown(costs: list[StepCost], num_envpool_threads: int) -> str:
    """A column for each number of envs."""
    rows: dict[str, Callable[[StepCost], float]] = {
        "**envfleet: pool.step()**": lambda cost: cost.envfleet_step_us,
        "- Python around the C++ call": lambda cost: cost.envfleet_step_us - cost.envfleet_cpp_us,
        "- C++ around the envs: checks, queue, GIL, arrays": lambda cost: (
            cost.envfleet_cpp_us - cost.envfleet_engine_us - cost.loop_us
        ),
        "- the envs": lambda cost: cost.envfleet_engine_us,
        "- the loop that calls": lambda cost: cost.loop_us,
    }
    if costs[0].envpool_step_us is not None:
        rows |= {
            f"**EnvPool, up to {num_envpool_threads} threads: step()**": lambda cost: cost.envpool_step_us,
            "- its Python": lambda cost: cost.envpool_python_us,
            "- C++, and waking its threads": lambda cost: cost.envpool_step_us - cost.envpool_python_us,
            "(its C++ calls back to back, with no Python in between)": lambda cost: cost.envpool_cpp_us,
        }
    lines = [
        f"| microseconds of a batch | {' | '.join(_num_envs(cost.num_envs) for cost in costs)} |",
        "| --- |" + " --- |" * len(costs),
    ]
    for name, cost_us in rows.items():
        lines.append(f"| {name} | {' | '.join(f'{cost_us(cost):.2f}' for cost in costs)} |")
    return "\n".join(lines)


def _num_envs(num_envs: int) -> str:
    return f"{num_envs} env{'s' if num_envs > 1 else ''}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=301, help="bursts of 5 ms of each layer (%(default)s)")
    parser.add_argument("--envpool-threads", type=int, default=2, help="at most (%(default)s)")
    parser.add_argument("--results-dir", type=Path, default=RESULTS_DIR)
    args = parser.parse_args()
    if args.rounds < 1:
        parser.error(f"--rounds must be at least 1, got {args.rounds}")
    warnings.filterwarnings("ignore", message=".*precision lowered.*")  # EnvPool's spaces
    costs = [measure(num_envs, args.rounds, args.envpool_threads) for num_envs in NUM_ENVS]
    report = {
        "machine": describe_machine(),
        "env_id": ENV_ID,
        "num_rounds": args.rounds,
        "envpool_threads": args.envpool_threads,
        "costs": [asdict(cost) for cost in costs],
    }
    path = save_json(args.results_dir, "facade_cost", report)
    print(to_markdown(costs, args.envpool_threads))
    print(f"written: {path}", file=sys.stderr)


if __name__ == "__main__":
    main()
