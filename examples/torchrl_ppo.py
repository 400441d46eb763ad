"""TorchRL's PPO on a pool, or on a cluster: trains CartPole-v1 until its last 100 episodes return 475 on average.

    python examples/torchrl_ppo.py
    python examples/torchrl_ppo.py --num-workers 2 --launcher slurm --launcher-setting partition=cpu
    python examples/torchrl_ppo.py --checkpoint torchrl.ckpt --resume auto

Needs `pip install "envfleet[torchrl]"`. With --num-workers the envs are those of a cluster.
"""

import sys
from collections import deque
from contextlib import closing
from dataclasses import dataclass

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
from checkpoints import Counters, LearnerCheckpoints
from command_line import VectorSettings, require_steps, setting, settings_from_command_line
from envfleet.adapters.torchrl import TorchRLEnv


@dataclass(frozen=True, kw_only=True)
class Settings(VectorSettings):
    """Everything that can be chosen, besides where it runs; each field is a command-line flag."""

    env_id: str = setting("CartPole-v1", "a Gymnasium id, with Box observations and Discrete actions")
    num_envs: int = setting(16, "environments; workers share them")
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
        super().__post_init__()
        require_steps(self.total_steps)


def network(num_inputs: int, num_outputs: int, num_hidden: int) -> nn.Module:
    return nn.Sequential(
        nn.Linear(num_inputs, num_hidden),
        nn.Tanh(),
        nn.Linear(num_hidden, num_hidden),
        nn.Tanh(),
        nn.Linear(num_hidden, num_outputs),
    )


def train(settings: Settings) -> tuple[int, float, int]:
    """Train, and return the number of env steps, the mean return of the last episodes and the exit code."""
    torch.manual_seed(settings.seed)
    torch.set_num_threads(1)  # the nets are too small to share out
    envs = settings.make_envs(settings.env_id, settings.num_envs, autoreset_mode="same_step", seed=settings.seed)
    num_inputs, num_actions = envs.single_observation_space.shape[0], int(envs.single_action_space.n)
    env = TransformedEnv(TorchRLEnv(envs, categorical_action_encoding=True, device=settings.device), RewardSum())

    logits = TensorDictModule(network(num_inputs, num_actions, settings.num_hidden), ["observation"], ["logits"])
    actor = ProbabilisticActor(logits, in_keys=["logits"], distribution_class=Categorical, return_log_prob=True)
    critic = ValueOperator(network(num_inputs, 1, settings.num_hidden), in_keys=["observation"])
    advantage = GAE(gamma=settings.discount, lmbda=settings.gae_lambda, value_network=critic)
    ppo = ClipPPOLoss(actor, critic, clip_epsilon=settings.clip_range, entropy_bonus=False, normalize_advantage=True)
    ppo.to(settings.device)
    optimizer = torch.optim.Adam(ppo.parameters(), lr=settings.learning_rate)

    num_batch_steps = settings.num_rollout_steps * envs.num_envs
    collector = Collector(
        env,
        actor,
        frames_per_batch=num_batch_steps,
        total_frames=-1,
        auto_register_policy_transforms=False,  # the policy remembers nothing, so none are needed
    )
    done, returns = Counters(num_steps=0), deque[float](maxlen=settings.num_mean_episodes)
    checkpoints = LearnerCheckpoints(settings, ppo=ppo, optimizer=optimizer, done=done)
    with closing(env), envfleet.StopSignal(settings.checkpoint) as stop:
        for data in collector:  # [N, T]
            done.num_steps += num_batch_steps
            returns.extend(data["next", "episode_reward"][data["next", "done"]].tolist())
            for _ in range(settings.num_epochs):
                with torch.no_grad():
                    advantage(data)
                rows = data.reshape(-1)
                for chosen in torch.randperm(len(rows)).to(settings.device).chunk(settings.num_minibatches):
                    losses = ppo(rows[chosen])
                    loss = losses["loss_objective"] + losses["loss_critic"]
                    optimizer.zero_grad()
                    loss.backward()
                    nn.utils.clip_grad_norm_(ppo.parameters(), settings.max_grad_norm)
                    optimizer.step()
            mean_return = sum(returns) / max(1, len(returns))
            is_trained = len(returns) == settings.num_mean_episodes and mean_return >= settings.target
            checkpoints.save_when_due()
            if is_trained or done.num_steps >= settings.total_steps or stop.is_set:
                break
        checkpoints.save()
        collector.shutdown()
    return done.num_steps, mean_return, stop.exit_code


def main() -> int:
    """Train with the settings of the command line."""
    settings = settings_from_command_line(Settings(), __doc__)
    num_steps, mean_return, exit_code = train(settings)
    print(f"{settings.env_id}: mean return {mean_return:.1f} after {num_steps} env steps")
    return exit_code


if __name__ == "__main__":
    sys.exit(main())
