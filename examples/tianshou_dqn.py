"""Tianshou's DQN on a pool, or on a cluster: trains CartPole-v1 until 20 test episodes return 475 on average.

    python examples/tianshou_dqn.py
    python examples/tianshou_dqn.py --num-workers 2

Needs `pip install "envfleet[tianshou]"`. With --num-workers the training envs are those of a cluster of this machine.
"""

import sys
from dataclasses import dataclass
from typing import Any

import torch
from tianshou.algorithm import DQN
from tianshou.algorithm.modelfree.dqn import DiscreteQLearningPolicy
from tianshou.algorithm.optim import AdamOptimizerFactory
from tianshou.data import Collector, VectorReplayBuffer
from tianshou.trainer import OffPolicyTrainerParams
from tianshou.utils.net.common import Net

import envfleet
from command_line import require_steps, setting, settings_from_command_line
from envfleet.adapters.tianshou import TianshouVectorEnv


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Everything that can be chosen; each field is a command-line flag."""

    env_id: str = setting("CartPole-v1", "a Gymnasium id, with Box observations and Discrete actions")
    num_envs: int = setting(16, "environments to train on; of each worker, if there are workers")
    num_workers: int = setting(0, "workers of a cluster; 0: a pool in this process")
    num_test_envs: int = setting(10, "environments to test on, in this process")
    num_test_episodes: int = setting(20, "episodes of a test, after each epoch")
    seed: int = setting(1, "of the environments, the first weights and the actions")
    total_steps: int = setting(50_000, "stop after this number of env steps")
    num_epoch_steps: int = setting(5_120, "env steps between two tests")
    num_collected_steps: int = setting(256, "env steps between two rounds of gradient steps")
    target: float = setting(475.0, "stop once a test returns this on average")
    learning_rate: float = setting(2.3e-3, "of Adam")
    discount: float = setting(0.99, "gamma")
    num_step_returns: int = setting(1, "rewards that are summed before a value is bootstrapped")
    target_every: int = setting(128, "gradient steps between two copies of the Q network to the target network")
    gradient_steps_per_step: float = setting(0.5, "gradient steps for each env step")
    batch_size: int = setting(64, "transitions in a gradient step")
    buffer_size: int = setting(50_000, "transitions that the replay buffer holds")
    last_epsilon: float = setting(0.04, "how often actions are random, after it has fallen from 1 in a line")
    exploration_steps: int = setting(8_000, "env steps in which it falls")
    num_hidden: int = setting(256, "units in each of the two hidden layers")

    def __post_init__(self) -> None:
        require_steps(self.total_steps)


def training_envs(settings: Settings) -> Any:
    """A pool, or a cluster: the only lines that differ."""
    options = {"autoreset_mode": "same_step", "seed": settings.seed}
    if settings.num_workers == 0:
        return envfleet.make(settings.env_id, settings.num_envs, **options)
    return envfleet.ClusterEnv(settings.env_id, settings.num_workers, settings.num_envs, **options)


def train(settings: Settings) -> Any:
    """Train, and return Tianshou's statistics."""
    torch.manual_seed(settings.seed)
    torch.set_num_threads(1)  # the nets are too small to share out
    train_envs = TianshouVectorEnv(training_envs(settings))
    test_pool = envfleet.make(
        settings.env_id, settings.num_test_envs, autoreset_mode="same_step", seed=settings.seed + 1_000
    )
    test_envs = TianshouVectorEnv(test_pool)
    try:
        obs_space, action_space = test_pool.single_observation_space, test_pool.single_action_space
        net = Net(
            state_shape=obs_space.shape,
            action_shape=action_space.n,
            hidden_sizes=[settings.num_hidden, settings.num_hidden],
        )
        policy = DiscreteQLearningPolicy(model=net, action_space=action_space, observation_space=obs_space)

        def set_epsilon(epoch: int, num_steps: int) -> None:
            progress = min(1.0, num_steps / settings.exploration_steps)
            policy.set_eps_training(1.0 + progress * (settings.last_epsilon - 1.0))

        set_epsilon(0, 0)
        algorithm = DQN(
            policy=policy,
            optim=AdamOptimizerFactory(lr=settings.learning_rate),
            gamma=settings.discount,
            n_step_return_horizon=settings.num_step_returns,
            target_update_freq=settings.target_every,
        )
        buffer = VectorReplayBuffer(settings.buffer_size, len(train_envs))
        training = Collector(algorithm, train_envs, buffer, exploration_noise=True)
        training.reset()
        training.collect(n_step=settings.num_collected_steps)
        return algorithm.run_training(
            OffPolicyTrainerParams(
                training_collector=training,
                test_collector=Collector(algorithm, test_envs),
                max_epochs=max(1, settings.total_steps // settings.num_epoch_steps),
                epoch_num_steps=settings.num_epoch_steps,
                collection_step_num_env_steps=settings.num_collected_steps,
                training_fn=set_epsilon,
                test_step_num_episodes=settings.num_test_episodes,
                update_step_num_gradient_steps_per_sample=settings.gradient_steps_per_step,
                batch_size=settings.batch_size,
                stop_fn=lambda mean_return: mean_return >= settings.target,
                show_progress=False,
                verbose=False,
            )
        )
    finally:
        train_envs.close()
        test_envs.close()


def main() -> int:
    """Train with the settings of the command line."""
    settings = settings_from_command_line(Settings(), __doc__)
    result = train(settings)
    print(
        f"{settings.env_id}: best test return {result.best_reward:.1f} after {result.train_step} env steps, "
        f"{result.update_step} rounds of gradient steps"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
