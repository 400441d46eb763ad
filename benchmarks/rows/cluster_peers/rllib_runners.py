"""RLlib's env runners, sampling only: PPO's new API stack, its own vectorisation, a 2x64 tanh MLP, nothing is learned.

Tried: rollout_fragment_length 64, 200, 512, 1024 (no difference beyond the noise), complete_episodes (slower: envs are
reset for every sample), an EnvRunnerGroup without an Algorithm (no difference). Values are not computed while sampling:
RLlib leaves that to its learner.
"""

from __future__ import annotations

import os
from typing import Any

from benchmarks.rows.cluster_peers.serve import Served, count_for, serve


def build(settings: dict[str, Any]) -> Served:
    os.environ["RAY_AUTH_MODE"] = "disabled"  # a cluster of this process's own
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    import gymnasium
    import ray
    from ray.rllib.algorithms.ppo import PPOConfig
    from ray.rllib.core.rl_module.default_model_config import DefaultModelConfig
    from ray.rllib.execution.rollout_ops import synchronous_parallel_sample

    num_workers, num_envs = settings["num_workers"], settings["num_envs_per_worker"]
    num_steps = settings.get("num_steps", 200)
    batch_mode = settings.get("batch_mode", "truncate_episodes")
    # A CPU for each runner and one for the driver, whatever the machine has: Ray counts them, it does not pin.
    ray.init(num_cpus=num_workers + 1, include_dashboard=False, log_to_driver=False)
    config = (
        PPOConfig()
        .environment("CartPole-v1")
        .env_runners(
            num_env_runners=num_workers,
            num_envs_per_env_runner=num_envs,
            rollout_fragment_length=num_steps,
            batch_mode=batch_mode,
            gym_env_vectorize_mode=gymnasium.VectorizeMode.SYNC,
        )
        # What one round of all runners yields: nothing is trained, but RLlib wants the two to fit.
        .training(train_batch_size_per_learner=num_steps * num_workers * num_envs)
        .rl_module(
            model_config=DefaultModelConfig(fcnet_hiddens=[64, 64], fcnet_activation="tanh", vf_share_layers=False)
        )
    )
    algorithm = config.build_algo()

    def sample() -> int:
        episodes = synchronous_parallel_sample(worker_set=algorithm.env_runner_group, _uses_new_env_runners=True)
        return sum(map(len, episodes))

    def close() -> None:
        algorithm.stop()
        ray.shutdown()

    about = {
        "versions": f"ray {ray.__version__}, gymnasium {gymnasium.__version__}",
        "settings": f"rollout_fragment_length={num_steps}, {batch_mode}, SyncVectorEnv",
    }
    return Served(lambda window_s: count_for(window_s, sample), close, about)


if __name__ == "__main__":
    serve(build)
