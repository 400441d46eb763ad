"""What does a checkpoint cost: the time of save() and of a resume, and its share at one a minute?

    python -m benchmarks.checkpoint                         every row, about a minute
    python -m benchmarks.checkpoint --rows cart_pole --repeats 3

2 workers with 512 native envs each, and a policy with 6.8 MB of weights, in `extra` as well. Between two saves there is
a rollout and a new version, as in training. The file lies in --folder: its disk counts. The learner waits for save().
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.harness.machine import describe_machine
from benchmarks.harness.results import RESULTS_DIR, save_json

NUM_WORKERS, NUM_ENVS, NUM_STEPS, SEED = 2, 512, 8, 0
SIZES = (1300, 1300)  # hidden layers: 1.7 million numbers, 6.8 MB
MOST_SHARE = 0.01  # of the time, at one checkpoint a minute
ENVS = {"cart_pole": "CartPole-v1", "ant": "Ant-v5"}


def weights_of(num_inputs: int, num_outputs: int) -> dict[str, Any]:
    """Two hidden layers."""
    random, sizes = np.random.default_rng(SEED), (num_inputs, *SIZES, num_outputs)
    return {
        f"layer.{number}": random.normal(0, 0.01, shape).astype(np.float32)
        for number, shape in enumerate(itertools.pairwise(sizes))
    }


def act(weights: dict[str, Any], obs: Any) -> Any:
    """The size of the weights is what is measured, not their use: the first rows of each layer act."""
    values = np.tanh(obs[:, :4] @ weights["layer.0"][:4, :32])
    values = values @ weights["layer.2"][:32]
    return values.argmax(-1) if weights["layer.2"].shape[1] == 2 else np.clip(values, -1, 1).astype(np.float32)


def measured(env: str, repeats: int, folder: Path) -> dict[str, Any]:
    """Seconds of save(), and of a start with and without resume."""
    import envfleet

    path = folder / "run.ckpt"

    def cluster(resume: Path | None) -> Any:
        return envfleet.ClusterEnv(env, NUM_WORKERS, NUM_ENVS, seed=SEED, resume=resume)

    saves_s, starts_s, resumes_s = [], [], []
    started_s = time.perf_counter()
    with cluster(None) as first:
        starts_s.append(time.perf_counter() - started_s)
        space = first.single_action_space
        num_outputs = int(space.n) if hasattr(space, "n") else space.shape[0]
        weights = weights_of(first.single_observation_space.shape[0], num_outputs)
        agent = envfleet.FunctionPolicy(act, weights=weights)
        for number in range(repeats + 1):
            first.rollout(agent, NUM_STEPS)
            weights["layer.1"] += np.float32(1e-3)
            begun_s = time.perf_counter()
            first.save(path, extra={"agent": weights, "number": number})
            saves_s.append(time.perf_counter() - begun_s)
    for _ in range(repeats):
        for resume, times_s in ((None, starts_s), (path, resumes_s)):
            begun_s = time.perf_counter()
            with cluster(resume):
                times_s.append(time.perf_counter() - begun_s)
    save_s = statistics.median(saves_s[1:])
    return {
        "env": env,
        "weight_bytes": sum(each.nbytes for each in weights.values()),
        "file_bytes": path.stat().st_size,
        "save_s": save_s,
        "longest_save_s": max(saves_s[1:]),
        "start_s": statistics.median(starts_s),
        "resume_s": statistics.median(resumes_s),
        "share": save_s / 60,
    }


def table(rows: list[dict[str, Any]]) -> str:
    """As markdown."""
    lines = [
        f"{NUM_WORKERS} workers with {NUM_ENVS} envs each; medians.",
        "",
        "| envs | weights | file | save() | longest | start | start with resume | share at one a minute |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for row in rows:
        lines.append(
            f"| {row['env']} | {row['weight_bytes'] / 1e6:.1f} MB | {row['file_bytes'] / 1e6:.1f} MB | "
            f"{row['save_s'] * 1e3:.0f} ms | {row['longest_save_s'] * 1e3:.0f} ms | {row['start_s']:.2f} s | "
            f"{row['resume_s']:.2f} s | {row['share']:.2%} |"
        )
    return "\n".join(lines) + "\n"


def main() -> int:
    """Measure, print, and write results; 1 if a share is above MOST_SHARE."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rows", nargs="+", choices=list(ENVS), default=list(ENVS))
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--folder", type=Path, help="for the checkpoint; a temporary one if it is not given")
    parser.add_argument("--results-dir", type=Path, default=RESULTS_DIR)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        rows = [measured(ENVS[name], arguments.repeats, Path(folder)) for name in arguments.rows]
    print(table(rows), end="")
    save_json(arguments.results_dir, "checkpoint", {"machine": describe_machine(), "rows": rows})
    (arguments.results_dir / "checkpoint.md").write_text(table(rows))
    return int(any(row["share"] > MOST_SHARE for row in rows))


if __name__ == "__main__":
    sys.exit(main())
