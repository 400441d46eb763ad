"""Weights that change with every rollout of one step: how many bytes of weights the workers pull in a second."""

from __future__ import annotations

from typing import Any

import numpy as np

from benchmarks.rows.cluster_peers.serve import Served, count_for, serve


def build(settings: dict[str, Any]) -> Served:
    import envfleet
    from benchmarks.rows.cluster_envs import no_action_with_weights

    num_workers, num_bytes = settings["num_workers"], settings["num_bytes"]
    cluster = envfleet.ClusterEnv("CartPole-v1", num_workers, 8, seed=0)
    policy = envfleet.FunctionPolicy(no_action_with_weights, weights={"layer": np.zeros(num_bytes // 4, np.float32)})
    num_versions = 0

    def pull() -> int:
        nonlocal num_versions
        num_versions += 1
        policy.set_weights({"layer": np.full(num_bytes // 4, num_versions, np.float32)})
        cluster.rollout(policy, 1)
        return num_workers * num_bytes

    return Served(lambda window_s: count_for(window_s, pull), cluster.close)


if __name__ == "__main__":
    serve(build)
