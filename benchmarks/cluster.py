"""What does the cluster cost, and how fast is it compared with its peers, on the same machine and in the same run?

    python -m benchmarks.cluster --peers-python PATH     every row, about a quarter of an hour
    python -m benchmarks.cluster --rows rollout step     some rows
    python -m benchmarks.cluster --quick                 does it run? Its numbers are not to be quoted

All contenders of a row are built, warmed up, and measured in turn (A, B, A, B, ...) in short windows, so that a
disturbance of the machine meets all of them. Only ratios within a run mean anything.

The peers, RLlib and TorchRL, want another Gymnasium than we do: `--peers-python` names an interpreter that has them
(pip install torch==2.13.0, then 'ray[rllib]==2.60.0' torchrl==0.14.1). One that is missing is reported as such.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

from benchmarks.harness.command import Benchmark
from benchmarks.harness.rows import Comparison, Row, Start, Target
from benchmarks.rows.cluster_contenders import (
    LOCAL_STEP,
    RLLIB,
    ZEROMQ_ECHO,
    Running,
    cluster_rollout,
    cluster_step,
    cluster_stream,
    one_process,
    torchrl,
    zeromq,
)
from benchmarks.rows.cluster_envs import OBS_BYTES
from benchmarks.rows.cluster_fleet import FLEET

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


def start_processes(row: Row, machine: dict[str, Any], arguments: argparse.Namespace) -> Start:
    return lambda contender: Running(contender, arguments.peers_python)


CLUSTER = Benchmark(
    table="cluster",
    rows=ROWS,
    start_for=start_processes,
    window_s=3.0,
    rounds=9,
    quick_window_s=1.0,
    packages=PACKAGES,
    curve=FLEET,
)


def main() -> int:
    parser = CLUSTER.parser(__doc__)
    parser.add_argument("--peers-python", default=sys.executable, help="interpreter that has RLlib and TorchRL")
    return CLUSTER.run(parser.parse_args())


if __name__ == "__main__":
    sys.exit(main())
