"""rl_games' PPO on a pool, or on a cluster: trains InvertedDoublePendulum-v5.

    python examples/rl_games_ppo.py
    python examples/rl_games_ppo.py --num-workers 2 --env-id HalfCheetah-v5 --max-epochs 50

Needs rl_games (docs/rl_games.md says how to install it) and `pip install "envfleet[mujoco]"`. Writes weights and
TensorBoard logs into --output-dir.
"""

import sys
from dataclasses import dataclass
from typing import Any

from rl_games.torch_runner import Runner

import envfleet
from command_line import setting, settings_from_command_line
from envfleet.adapters import rl_games


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Everything that can be chosen; each field is a command-line flag."""

    env_id: str = setting("InvertedDoublePendulum-v5", "a Gymnasium id, with Box observations and Box actions")
    num_envs: int = setting(16, "environments")
    num_workers: int = setting(0, "workers of a cluster, which share the environments; 0: a pool in this process")
    seed: int = setting(1, "of the environments, the first weights and the actions")
    max_epochs: int = setting(120, "stop after this number of updates")
    num_rollout_steps: int = setting(128, "steps of each environment between two updates")
    minibatch_size: int = setting(512, "transitions in a gradient step")
    num_epochs: int = setting(5, "passes over each rollout")
    learning_rate: float = setting(5e-4, "of Adam at the start; rl_games adapts it")
    output_dir: str = setting("runs/rl_games", "where weights and logs go")


def make_envs(num_envs: int, *, env_id: str, num_workers: int, seed: int) -> Any:
    """A pool, or a cluster: the only lines that differ."""
    options: dict[str, Any] = {"autoreset_mode": "same_step", "seed": seed}
    if num_workers == 0:
        return envfleet.make(env_id, num_envs, **options)
    return envfleet.ClusterEnv(env_id, num_workers, num_envs // num_workers, **options)


def configuration(settings: Settings) -> dict[str, Any]:
    """What rl_games reads from a YAML file elsewhere."""
    network = {
        "name": "actor_critic",
        "separate": False,
        "space": {
            "continuous": {
                "mu_activation": "None",
                "sigma_activation": "None",
                "mu_init": {"name": "default"},
                "sigma_init": {"name": "const_initializer", "val": 0},
                "fixed_sigma": True,
            }
        },
        "mlp": {"units": [128, 64, 32], "activation": "elu", "initializer": {"name": "default"}},
    }
    config = {
        "name": settings.env_id,
        "env_name": "envfleet",
        "env_config": {"env_id": settings.env_id, "num_workers": settings.num_workers},
        "device": "cpu",
        "device_name": "cpu",
        "torch_compile": False,  # it takes minutes on two cores
        "train_dir": settings.output_dir,
        "num_actors": settings.num_envs,
        "max_epochs": settings.max_epochs,
        "horizon_length": settings.num_rollout_steps,
        "minibatch_size": settings.minibatch_size,
        "mini_epochs": settings.num_epochs,
        "normalize_input": True,
        "normalize_value": True,
        "normalize_advantage": True,
        "value_bootstrap": True,
        "reward_shaper": {"scale_value": 1},
        "gamma": 0.99,
        "tau": 0.95,
        "learning_rate": settings.learning_rate,
        "lr_schedule": "adaptive",
        "kl_threshold": 0.008,
        "grad_norm": 1.0,
        "truncate_grads": True,
        "entropy_coef": 0.0,
        "critic_coef": 4,
        "bounds_loss_coef": 0.0,
        "e_clip": 0.2,
        "clip_value": False,
        "use_smooth_clamp": True,
        "print_stats": True,
    }
    return {
        "params": {
            "seed": settings.seed,
            "torch_threads": 1,  # the nets are too small to share out
            "algo": {"name": "a2c_continuous"},
            "model": {"name": "continuous_a2c_logstd"},
            "network": network,
            "config": config,
        }
    }


def main() -> int:
    """Train with the settings of the command line."""
    settings = settings_from_command_line(Settings(), __doc__)
    rl_games.register("envfleet", make_envs)
    runner = Runner()
    runner.load(configuration(settings))
    runner.run({"train": True, "play": False})
    return 0


if __name__ == "__main__":
    sys.exit(main())
