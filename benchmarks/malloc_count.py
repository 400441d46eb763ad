"""How often does a step allocate memory? Calls of malloc and its kin, of all threads, for each batch and each env step.

    python -m benchmarks.malloc_count

A small library that is preloaded counts them, in a fresh process for each case. Python takes its small objects from
its own arenas, which seldom reach malloc; so there is a second figure with PYTHONMALLOC=malloc, where each of them
does: tuples, dicts and the bodies of arrays then count as well.
"""

from __future__ import annotations

import argparse
import ctypes
import dataclasses
import json
import os
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.harness.machine import describe_machine
from benchmarks.harness.results import RESULTS_DIR, save_json

SOURCE = Path(__file__).with_suffix(".c")
COUNTERS = ("num_mallocs", "num_callocs", "num_reallocs", "num_aligned")
NUM_WARMUP_BATCHES, NUM_BATCHES = 1_000, 5_000
NUM_ACTION_BATCHES = 16
TIMEOUT_S = 120.0
NOTHING = "nothing"  # the counting itself


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """What one process runs."""

    library: str
    env_id: str
    num_envs: int
    batch_size: int | None = None  # None: all envs together
    num_threads: int | None = None  # None: the library's own choice

    @property
    def rows(self) -> int:
        """Env steps of a batch."""
        return self.batch_size or self.num_envs

    def __str__(self) -> str:
        """For the table."""
        batch = f", batch {self.batch_size}" if self.batch_size else ""
        return f"{self.library}: {self.env_id}, {self.num_envs} env{'s' if self.num_envs > 1 else ''}{batch}"


CASES = (
    Case(library="envfleet", env_id="CartPole-v1", num_envs=1),
    Case(library="envfleet", env_id="CartPole-v1", num_envs=64),
    Case(library="envfleet", env_id="CartPole-v1", num_envs=64, batch_size=32),
    Case(library="envfleet", env_id="Taxi-v3", num_envs=64),
    # Long enough to call helper threads.
    Case(library="envfleet", env_id="Acrobot-v1", num_envs=256, num_threads=2),
    Case(library="EnvPool", env_id="CartPole-v1", num_envs=64, num_threads=2),
    Case(library="EnvPool", env_id="CartPole-v1", num_envs=64, batch_size=32, num_threads=2),
    Case(library="EnvPool", env_id="Taxi-v3", num_envs=64, num_threads=2),
    Case(library=NOTHING, env_id="an empty loop", num_envs=1),
)


# -- in the process that is counted --


def stepper(case: Case) -> Callable[[], object]:
    """Build the envs; each call steps one batch."""
    if case.library == NOTHING:
        return lambda: None
    envs = make_envs(case)
    space = envs.single_action_space
    dtype = np.int32 if case.library == "EnvPool" else space.dtype
    batches = [np.array([space.sample() for _ in range(case.rows)], dtype) for _ in range(NUM_ACTION_BATCHES)]
    position = 0

    def next_batch() -> np.ndarray:
        nonlocal position
        position = (position + 1) % NUM_ACTION_BATCHES
        return batches[position]

    if case.batch_size is None:
        envs.reset()
        return lambda: envs.step(next_batch())
    envs.async_reset()

    def recv_and_send() -> None:
        envs.send(next_batch(), envs.recv()[4]["env_id"])

    return recv_and_send


def make_envs(case: Case) -> Any:
    if case.library == "EnvPool":
        import envpool

        return envpool.make_gymnasium(
            case.env_id, num_envs=case.num_envs, batch_size=case.rows, num_threads=case.num_threads or 0, seed=0
        )
    import envfleet

    return envfleet.make(
        case.env_id,
        case.num_envs,
        batch_size=case.batch_size,
        num_workers=case.num_threads,
        backend="native",
        seed=0,
    )


def count_calls(case: Case) -> dict[str, int]:
    """Calls of each function while NUM_BATCHES batches are stepped."""
    step = stepper(case)
    program = ctypes.CDLL(None)
    counters = {name: ctypes.c_ulonglong.in_dll(program, name) for name in COUNTERS}
    for _ in range(NUM_WARMUP_BATCHES):
        step()
    before = {name: counter.value for name, counter in counters.items()}
    for _ in range(NUM_BATCHES):
        step()
    return {name: counter.value - before[name] for name, counter in counters.items()}


# -- in the process that reports --


def count_in_child(case: Case, library: Path, python_malloc: str) -> dict[str, int]:
    """Run one case in a process of its own."""
    child = subprocess.run(
        [sys.executable, "-m", "benchmarks.malloc_count", "--count", json.dumps(dataclasses.asdict(case))],
        env={**os.environ, "LD_PRELOAD": str(library), "PYTHONMALLOC": python_malloc},
        stdout=subprocess.PIPE,
        text=True,
        timeout=TIMEOUT_S,
        check=True,
    )
    counts: dict[str, int] = json.loads(child.stdout)
    return counts


def compile_counter(path: Path) -> None:
    command = [os.environ.get("CC", "cc"), "-O2", "-fno-builtin", "-shared", "-fPIC", str(SOURCE), "-o", str(path)]
    subprocess.run(command, check=True)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--results-dir", type=Path, default=RESULTS_DIR)
    parser.add_argument("--count", metavar="CASE", help="used by the script itself")
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    if args.count:
        warnings.simplefilter("ignore")
        print(json.dumps(count_calls(Case(**json.loads(args.count)))))
        return
    report: dict[str, Any] = {"machine": describe_machine(), "num_batches": NUM_BATCHES, "cases": []}
    print("| case | a batch | an env step | a batch, PYTHONMALLOC=malloc | an env step |")
    print("| --- | --- | --- | --- | --- |")
    with tempfile.TemporaryDirectory() as directory:
        library = Path(directory) / "malloc_count.so"
        compile_counter(library)
        for case in CASES:
            calls = {allocator: count_in_child(case, library, allocator) for allocator in ("pymalloc", "malloc")}
            per_batch = {allocator: sum(counts.values()) / NUM_BATCHES for allocator, counts in calls.items()}
            cells = [f"{each:.3f} | {each / case.rows:.4f}" for each in per_batch.values()]
            print(f"| {case} | {' | '.join(cells)} |", flush=True)
            report["cases"].append({**dataclasses.asdict(case), "calls": calls, "calls_per_batch": per_batch})
    path = save_json(args.results_dir, "malloc_count", report)
    print(f"written: {path}", file=sys.stderr)


if __name__ == "__main__":
    main()
