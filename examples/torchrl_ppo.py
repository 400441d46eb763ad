"""TorchRL's PPO on a pool, or on a cluster: trains CartPole-v1 until its last 100 episodes return 475 on average.

    python examples/torchrl_ppo.py
    python examples/torchrl_ppo.py --num-workers 2

Needs `pip install "envfleet[torchrl]"`. With --num-workers the envs are those of a cluster of this machine.
"""

import sys
from collections import deque
from dataclasses import dataclass
from typing import Any

import torch
from tensordict.nn import TensorDictModule
from torch import nn
from torch.distributions import Categorical
from torchrl.collectors import Collector
from torchrl.envs import RewardSum, TransformedEnv
from torchrl.modules import ProbabilisticActor, ValueOperator
from torchrl.objectives import ClipPPOLoss
from torchrl.objectives.value import GAE

import envfleet
from command_line import require_steps, setting, settings_from_command_line
from envfleet.adapters.torchrl import TorchRLEnv


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Everything that can be chosen; each field is a command-line flag."""

    env_id: str = setting("CartPole-v1", "a Gymnasium id, with Box observations and Discrete actions")
    num_envs: int = setting(16, "environments; of each worker, if there are workers")
    num_workers: int = setting(0, "workers of a cluster; 0: a pool in this process")
    seed: int = setting(1, "of the environments, the first weights and the actions")
    total_steps: int = setting(200_000, "stop after this number of env steps")
    target: float = setting(475.0, "stop once the mean return is this high")
    num_mean_episodes: int = setting(100, "the mean return is taken over this many last episodes")
    num_rollout_steps: int = setting(128, "steps of each environment between two updates")
    num_epochs: int = setting(10, "passes over each rollout")
    num_minibatches: int = setting(4, "gradient steps in one pass")
    learning_rate: float = setting(1e-3, "of Adam")
    discount: float = setting(0.99, "gamma")
    gae_lambda: float = setting(0.95, "0: one-step advantages, least variance; 1: whole returns, least bias")
    clip_range: float = setting(0.2, "how far a probability ratio may leave 1 before its gradient stops")
    max_grad_norm: float = setting(0.5, "longer gradients are scaled down to this length")
    num_hidden: int = setting(64, "units in each of the two hidden layers")

    def __post_init__(self) -> None:
        require_steps(self.total_steps)


def envs_of(settings: Settings) -> Any:
    """A pool, or a cluster: the only lines that differ."""
    options = {"autoreset_mode": "same_step", "seed": settings.seed}
    if settings.num_workers == 0:
        return envfleet.make(settings.env_id, settings.num_envs, **options)
    return envfleet.ClusterEnv(settings.env_id, settings.num_workers, settings.num_envs, **options)


def network(num_inputs: int, num_outputs: int, num_hidden: int) -> nn.Module:
    return nn.Sequential(
        nn.Linear(num_inputs, num_hidden),
        nn.Tanh(),
        nn.Linear(num_hidden, num_hidden),
        nn.Tanh(),
        nn.Linear(num_hidden, num_outputs),
    )


def train(settings: Settings) -> tuple[int, float]:
    """Train, and return the number of env steps and the mean return of the last episodes."""
    torch.manual_seed(settings.seed)
    torch.set_num_threads(1)  # the nets are too small to share out
    envs = envs_of(settings)
    num_inputs, num_actions = envs.single_observation_space.shape[0], int(envs.single_action_space.n)
    env = TransformedEnv(TorchRLEnv(envs, categorical_action_encoding=True), RewardSum())

    logits = TensorDictModule(network(num_inputs, num_actions, settings.num_hidden), ["observation"], ["logits"])
    actor = ProbabilisticActor(logits, in_keys=["logits"], distribution_class=Categorical, return_log_prob=True)
    critic = ValueOperator(network(num_inputs, 1, settings.num_hidden), in_keys=["observation"])
    advantage = GAE(gamma=settings.discount, lmbda=settings.gae_lambda, value_network=critic)
    ppo = ClipPPOLoss(actor, critic, clip_epsilon=settings.clip_range, entropy_bonus=False, normalize_advantage=True)
    optimizer = torch.optim.Adam(ppo.parameters(), lr=settings.learning_rate)

    num_batch_steps = settings.num_rollout_steps * envs.num_envs
    collector = Collector(
        env,
        actor,
        frames_per_batch=num_batch_steps,
        total_frames=-1,
        auto_register_policy_transforms=False,  # the policy remembers nothing, so none are needed
    )
    num_steps, returns = 0, deque[float](maxlen=settings.num_mean_episodes)
    try:
        for data in collector:  # [N, T]
            num_steps += num_batch_steps
            returns.extend(data["next", "episode_reward"][data["next", "done"]].tolist())
            for _ in range(settings.num_epochs):
                with torch.no_grad():
                    advantage(data)
                rows = data.reshape(-1)
                for chosen in torch.randperm(len(rows)).chunk(settings.num_minibatches):
                    losses = ppo(rows[chosen])
                    loss = losses["loss_objective"] + losses["loss_critic"]
                    optimizer.zero_grad()
                    loss.backward()
                    nn.utils.clip_grad_norm_(ppo.parameters(), settings.max_grad_norm)
                    optimizer.step()
            mean_return = sum(returns) / max(1, len(returns))
            is_trained = len(returns) == settings.num_mean_episodes and mean_return >= settings.target
            if is_trained or num_steps >= settings.total_steps:
                break
    finally:
        collector.shutdown()
        env.close()
    return num_steps, mean_return


def main() -> int:
    """Train with the settings of the command line."""
    settings = settings_from_command_line(Settings(), __doc__)
    num_steps, mean_return = train(settings)
    print(f"{settings.env_id}: mean return {mean_return:.1f} after {num_steps} env steps")
    return 0


if __name__ == "__main__":
    sys.exit(main())
