"""What does first-ready acting bring where envs differ in speed: streams with worker_batch_size against rollouts?

    python -m benchmarks.first_ready                        every row, about two minutes
    python -m benchmarks.first_ready --rows sleeping
    python -m benchmarks.first_ready --quick                does it run? Its numbers are not to be quoted

One env in eight is 20 times as slow as the others. The policy, two layers of 64 in NumPy, acts on the worker. Each env
has a process of its own. Synchronously all envs of a worker wait for its slowest one in every step.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from benchmarks.harness.command import Benchmark
from benchmarks.harness.rows import Comparison, Row, Start, Target, Window
from benchmarks.rows.contenders import Running
from benchmarks.rows.uneven_envs import UnevenEnv, act, env_kwargs, weights

NUM_ENVS, NUM_STEPS, BATCH_SIZE, CREDIT = 8, 16, 4, 2
STEP_S = 0.001  # of a quick env
SETTLE_S = 0.5
TARGET = 2.5


@dataclass(frozen=True, slots=True)
class Way:
    """One way to collect rollouts of one worker."""

    name: str
    is_asleep: bool
    is_stream: bool
    batch_size: int | None = None

    def start(self) -> Running:
        """Start the worker."""
        import envfleet

        cluster = envfleet.ClusterEnv(
            UnevenEnv,
            1,
            NUM_ENVS,
            env_kwargs=env_kwargs(NUM_ENVS, STEP_S, is_asleep=self.is_asleep),
            worker_batch_size=self.batch_size,
            backend="process",
            pool={"num_workers": NUM_ENVS},
            network={"credit": CREDIT},
        )
        agent = envfleet.FunctionPolicy(act, weights=weights())
        if not self.is_stream:
            return Running(lambda window_s: _counted(lambda: _size(cluster.rollout(agent, NUM_STEPS)), window_s),
                           cluster.close)  # fmt: skip
        stream = cluster.stream(agent, NUM_STEPS)

        def run_window(window_s: float) -> Window:
            for _ in range(CREDIT):  # that the worker collected since the last window
                next(stream)
            window = _counted(lambda: _size(next(stream)), window_s)
            time.sleep(SETTLE_S)  # until the worker has used up its credit
            return window

        return Running(run_window, cluster.close)


def _size(rollout: Any) -> int:
    return int(rollout.rewards.size)


def _counted(take: Callable[[], int], window_s: float) -> Window:
    count, start_s = 0, time.perf_counter()
    while time.perf_counter() - start_s < window_s:
        count += take()
    return Window(count, time.perf_counter() - start_s)


def _row(name: str, *, is_asleep: bool) -> Row:
    subject = Way(f"envfleet stream, worker_batch_size={BATCH_SIZE}", is_asleep, True, BATCH_SIZE)
    rollout = Way("envfleet rollout, all envs at once", is_asleep, False)
    stream = Way("envfleet stream, all envs at once", is_asleep, True)
    kind = "asleep" if is_asleep else "of CPU"
    return Row(
        name=name,
        title=f"1 worker, {NUM_ENVS} envs, steps of {STEP_S * 1e3:g} ms {kind}, one env 20 times as slow",
        unit="env steps/s",
        number=lambda window: window.rate,
        comparisons=(
            Comparison(subject, rollout, Target.RATIO_AT_LEAST, TARGET),
            Comparison(subject, stream, Target.RATIO_AT_LEAST, TARGET),
        ),
    )


ROWS = (_row("sleeping", is_asleep=True), _row("burning", is_asleep=False))


def _start_ways(row: Row, machine: dict[str, Any], arguments: argparse.Namespace) -> Start:
    return lambda way: way.start()


FIRST_READY = Benchmark(
    table="first_ready", rows=ROWS, start_for=_start_ways, window_s=2.0, rounds=7, quick_window_s=1.0
)

if __name__ == "__main__":
    sys.exit(FIRST_READY.run(FIRST_READY.parser(__doc__).parse_args()))
