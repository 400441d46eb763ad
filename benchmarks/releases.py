"""Is this version as fast as an earlier one? Every row of pool.py, simulators.py and cluster.py with both, in turn.

    python -m benchmarks.releases --before PYTHON                        every row, about a quarter of an hour
    python -m benchmarks.releases --before PYTHON --rows cartpole-64     some rows

`--before` names an interpreter that has the earlier version installed, and the same other packages. Each contender has
its own process: the earlier version runs in that interpreter, this one in the interpreter that runs this script.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from typing import Any

from benchmarks.harness.command import Benchmark
from benchmarks.harness.rows import Comparison, Row, Start, Target
from benchmarks.pool import POOL
from benchmarks.rows.cluster_contenders import Contender, Running, cluster_rollout, cluster_step, cluster_stream
from benchmarks.simulators import SIMULATORS

LOWEST_RATIO = 0.97


def _row(name: str, title: str, contender: Contender, requires: tuple[str, ...] = ()) -> Row:
    before = replace(contender, name="before", is_peer=True)
    return Row(
        name=name,
        title=title,
        unit="per second",
        number=lambda window: 1e6 / window.more["median_us"] if "median_us" in window.more else window.rate,
        comparisons=(Comparison(replace(contender, name="now"), before, Target.RATIO_AT_LEAST, LOWEST_RATIO),),
        requires=requires,
    )


def _pull(num_bytes: int) -> Contender:
    return Contender("", "envfleet_pull", {"num_workers": 1, "num_bytes": num_bytes})


POOL_ROWS = tuple(
    _row(row.name, row.title, Contender("", "pool_subject", {"row": row.name}), row.requires)
    for row in (*POOL.rows, *SIMULATORS.rows)
)
CLUSTER_ROWS = (
    *(
        _row(f"rollout-{num_envs}", f"rollouts, 2 workers x {num_envs} CartPole, MLP 2x64", cluster_rollout(num_envs))
        for num_envs in (8, 64)
    ),
    _row("rollout-numpy", "rollouts, 2 workers x 64 CartPole, policy in NumPy", cluster_rollout(64, "numpy")),
    _row("step", "step(actions), 2 workers x 64 CartPole, ipc", cluster_step(None)),
    _row("images-stacked", "stream, 2 workers x 64 envs x 64 steps, one new frame", cluster_stream(True, 64, 64)),
    _row("images-fresh", "stream, 2 workers x 64 envs x 64 steps, all frames new", cluster_stream(False, 64, 64)),
    _row("pull-7", "weights of 6.8 MB, pulled by one worker", _pull(6_800_000)),
    _row("pull-60", "weights of 60 MB, pulled by one worker", _pull(60_000_000)),
)


def start_processes(row: Row, machine: dict[str, Any], arguments: argparse.Namespace) -> Start:
    def start(contender: Contender) -> Running:
        settings = {**contender.settings, "machine": {"burn_iterations_per_s": machine["burn_iterations_per_s"]}}
        return Running(replace(contender, settings=settings), arguments.before)

    return start


RELEASES = Benchmark(
    table="releases", rows=(*POOL_ROWS, *CLUSTER_ROWS), start_for=start_processes, packages=("envfleet", "numpy")
)

if __name__ == "__main__":
    parser = RELEASES.parser(__doc__)
    parser.add_argument("--before", required=True, help="an interpreter with the earlier version")
    sys.exit(RELEASES.run(parser.parse_args()))
