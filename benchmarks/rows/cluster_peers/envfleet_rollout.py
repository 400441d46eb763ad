"""envfleet's ClusterEnv.rollout on CartPole-v1: workers on this machine, the policy beside the envs."""

from __future__ import annotations

from typing import Any

from benchmarks.rows.cluster_peers.serve import Served, count_for, serve


def build(settings: dict[str, Any]) -> Served:
    import torch

    import envfleet
    from benchmarks.rows.cluster_policy import Agent, act, log_prob, values

    cluster = envfleet.ClusterEnv(
        "CartPole-v1",
        num_workers=settings["num_workers"],
        num_envs_per_worker=settings["num_envs_per_worker"],
        seed=0,
    )
    agent: Any = Agent()
    if settings["policy"] == "traced":
        agent = envfleet.TorchPolicy(agent, traced=True)
    elif settings["policy"] == "numpy":
        weights = {name: tensor.numpy() for name, tensor in agent.state_dict().items()}
        agent = envfleet.FunctionPolicy(act, log_prob, weights, values)
    num_steps = settings.get("num_steps", 64)

    def collect() -> int:
        return int(cluster.rollout(agent, num_steps).rewards.size)

    about = {
        "versions": f"envfleet {envfleet.__version__}, torch {torch.__version__}",
        "settings": f"{num_steps} steps a rollout",
    }
    return Served(lambda window_s: count_for(window_s, collect), cluster.close, about)


if __name__ == "__main__":
    serve(build)
