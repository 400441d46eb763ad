"""skrl's PPO on a pool, or on a cluster: trains CartPole-v1, then plays 20 episodes.

    python examples/skrl_ppo.py
    python examples/skrl_ppo.py --num-workers 2 --launcher slurm --launcher-setting partition=cpu
    python examples/skrl_ppo.py --checkpoint skrl.pt --resume auto

Needs `pip install "envfleet[skrl]"`. With --num-workers the envs are those of a cluster. Checkpoints are skrl's own, of
its models and optimizer: a training that goes on makes --total-steps more.
"""

import sys
from dataclasses import dataclass
from typing import Any

import torch
from skrl.agents.torch.ppo import PPO, PPO_CFG
from skrl.memories.torch import RandomMemory
from skrl.models.torch import CategoricalMixin, DeterministicMixin, Model
from skrl.trainers.torch import SequentialTrainer
from torch import nn

import envfleet
from command_line import VectorSettings, require_steps, setting, settings_from_command_line
from envfleet.adapters.skrl import SkrlEnv


@dataclass(frozen=True, kw_only=True)
class Settings(VectorSettings):
    """Everything that can be chosen, besides where it runs; each field is a command-line flag."""

    env_id: str = setting("CartPole-v1", "a Gymnasium id, with Box observations and Discrete actions")
    num_envs: int = setting(16, "environments; workers share them")
    seed: int = setting(1, "of the environments, the first weights and the actions")
    total_steps: int = setting(250_000, "stop after this number of env steps")
    num_rollout_steps: int = setting(128, "steps of each environment between two updates")
    num_epochs: int = setting(10, "passes over each rollout")
    num_minibatches: int = setting(4, "gradient steps in one pass")
    learning_rate: float = setting(1e-3, "of Adam")
    discount: float = setting(0.99, "gamma")
    gae_lambda: float = setting(0.95, "0: one-step advantages, least variance; 1: whole returns, least bias")
    num_hidden: int = setting(64, "units in each of the two hidden layers")

    def __post_init__(self) -> None:
        super().__post_init__()
        require_steps(self.total_steps)


class Policy(CategoricalMixin, Model):
    """Chooses among actions."""

    def __init__(self, env: SkrlEnv, net: nn.Module) -> None:
        Model.__init__(self, observation_space=env.observation_space, action_space=env.action_space, device=env.device)
        CategoricalMixin.__init__(self)
        self.net = net

    def compute(self, inputs: dict[str, Any], role: str) -> tuple[torch.Tensor, dict[str, Any]]:
        return self.net(inputs["observations"]), {}


class Value(DeterministicMixin, Model):
    """Says what an observation is worth."""

    def __init__(self, env: SkrlEnv, net: nn.Module) -> None:
        Model.__init__(self, observation_space=env.observation_space, action_space=env.action_space, device=env.device)
        DeterministicMixin.__init__(self)
        self.net = net

    def compute(self, inputs: dict[str, Any], role: str) -> tuple[torch.Tensor, dict[str, Any]]:
        return self.net(inputs["observations"]), {}


def network(num_inputs: int, num_outputs: int, num_hidden: int) -> nn.Module:
    return nn.Sequential(
        nn.Linear(num_inputs, num_hidden),
        nn.Tanh(),
        nn.Linear(num_hidden, num_hidden),
        nn.Tanh(),
        nn.Linear(num_hidden, num_outputs),
    )


def train(settings: Settings) -> float:
    """Train, and return the mean return of 20 episodes that the trained policy plays without chance."""
    torch.manual_seed(settings.seed)
    torch.set_num_threads(1)  # the nets are too small to share out
    options: dict[str, Any] = {"autoreset_mode": "same_step", "seed": settings.seed}
    env = SkrlEnv(settings.make_envs(settings.env_id, settings.num_envs, **options))
    try:
        num_inputs, num_actions = env.observation_space.shape[0], int(env.action_space.n)
        models = {
            "policy": Policy(env, network(num_inputs, num_actions, settings.num_hidden)),
            "value": Value(env, network(num_inputs, 1, settings.num_hidden)),
        }
        agent = PPO(
            models=models,
            memory=RandomMemory(memory_size=settings.num_rollout_steps, num_envs=env.num_envs, device=env.device),
            cfg=PPO_CFG(
                rollouts=settings.num_rollout_steps,
                learning_epochs=settings.num_epochs,
                mini_batches=settings.num_minibatches,
                discount_factor=settings.discount,
                gae_lambda=settings.gae_lambda,
                learning_rate=settings.learning_rate,
                time_limit_bootstrap=True,  # else GAE goes on over the end of truncated episodes
                experiment={"write_interval": 0, "checkpoint_interval": 0},
            ),
            observation_space=env.observation_space,
            action_space=env.action_space,
            device=env.device,
        )
        env.give_final_observations_to(agent)
        if settings.resume_path is not None:
            agent.load(settings.resume_path)
        cfg = {
            "timesteps": -(-settings.total_steps // env.num_envs),
            "headless": True,
            "disable_progressbar": True,
            "close_environment_at_exit": False,
        }
        SequentialTrainer(env=env, agents=agent, cfg=cfg).train()
        if settings.checkpoint is not None:
            agent.save(settings.checkpoint)
    finally:
        env.close()

    def act(obs: Any) -> Any:
        with torch.no_grad():
            return models["policy"].net(torch.as_tensor(obs)).argmax(-1).numpy()

    with envfleet.make(settings.env_id, 10, autoreset_mode="disabled") as pool:
        policy = envfleet.FunctionPolicy(act, act_deterministically=act)
        return float(envfleet.evaluate(pool, policy, 20, seed=settings.seed).returns.mean())


def main() -> int:
    """Train with the settings of the command line."""
    settings = settings_from_command_line(Settings(), __doc__)
    print(f"{settings.env_id}: mean return {train(settings):.1f} of 20 episodes after {settings.total_steps} env steps")
    return 0


if __name__ == "__main__":
    sys.exit(main())
