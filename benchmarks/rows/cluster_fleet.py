"""The row `fleet` of benchmarks/cluster.py: one head against 1 to 256 simulated workers; a curve, no comparison."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

from benchmarks.harness.command import Curve
from benchmarks.rows.cluster_contenders import Contender, Running

NUM_WORKERS = (1, 4, 16, 64, 256)
NUM_ENVS, NUM_STEPS = 8, 64
NUM_WINDOWS = 3


def fleet_curve(window_s: float, progress: Callable[[str], None]) -> dict[str, Any]:
    """For each size of the fleet: rollouts accepted in a second, and the CPU of the head's process."""
    points = []
    for num_workers in NUM_WORKERS:
        progress(f"{num_workers} workers")
        settings = {"num_workers": num_workers, "num_envs_per_worker": NUM_ENVS, "num_steps": NUM_STEPS}
        with Running(Contender("fleet", "envfleet_fleet", settings), peers_python="") as fleet:
            fleet.run_window(window_s / 2)
            windows = [fleet.run_window(window_s) for _ in range(NUM_WINDOWS)]
        points.append(
            {
                "num_workers": num_workers,
                "rollouts_per_s": statistics.median(window.rate for window in windows),
                "head_us_per_rollout": statistics.median(
                    window.more["head_cpu_s"] / window.count * 1e6 for window in windows
                ),
                "head_cores": statistics.median(window.more["head_cpu_s"] / window.duration_s for window in windows),
            }
        )
    return {"title": f"rollouts of {NUM_ENVS} CartPole envs x {NUM_STEPS} steps", "points": points}


def _curve_lines(curve: dict[str, Any]) -> list[str]:
    return [
        f"One head and simulated workers, {curve['title']}; no target:",
        "",
        "| workers | rollouts/s | head: CPU us a rollout | head: cores busy |",
        "| --- | --- | --- | --- |",
        *(
            f"| {point['num_workers']} | {point['rollouts_per_s']:,.0f} | {point['head_us_per_rollout']:,.0f} |"
            f" {point['head_cores']:.2f} |"
            for point in curve["points"]
        ),
    ]


FLEET = Curve("fleet", fleet_curve, _curve_lines)
