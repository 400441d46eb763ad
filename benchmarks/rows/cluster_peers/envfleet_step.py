"""The latency of step(actions) of CartPole envs: on workers (`num_workers` above 0), or in a pool of this process."""

from __future__ import annotations

import itertools
import time
from typing import Any

import numpy as np

from benchmarks.rows.cluster_peers.serve import Served, serve


def build(settings: dict[str, Any]) -> Served:
    import envfleet

    num_envs, num_workers = settings["num_envs"], settings["num_workers"]
    if num_workers:
        # Said only where it differs from the default: earlier versions had another argument for it.
        network = {} if settings["address"] is None else {"network": {"address": settings["address"]}}
        envs: Any = envfleet.ClusterEnv("CartPole-v1", num_workers, num_envs // num_workers, seed=0, **network)
    else:
        envs = envfleet.make("CartPole-v1", num_envs, seed=0)
    envs.reset()
    actions = itertools.cycle(list(np.random.default_rng(0).integers(0, 2, (16, num_envs))))

    def run_window(window_s: float) -> dict[str, Any]:
        durations_s = []
        now_s = start_s = time.perf_counter()
        while now_s - start_s < window_s:
            batch = next(actions)
            before_s = time.perf_counter()
            envs.step(batch)
            now_s = time.perf_counter()
            durations_s.append(now_s - before_s)
        median_s, tail_s = np.percentile(durations_s, [50, 95])
        return {
            "count": len(durations_s),
            "duration_s": now_s - start_s,
            "median_us": median_s * 1e6,
            "p95_us": tail_s * 1e6,
        }

    return Served(run_window, envs.close)


if __name__ == "__main__":
    serve(build)
