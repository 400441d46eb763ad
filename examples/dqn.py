"""DQN on a cluster: workers act epsilon-greedily with their own copy of the Q network.

    python examples/dqn.py
    python examples/dqn.py --sync every_update --num-workers 4
    python examples/dqn.py --env-id Acrobot-v1 --tensorboard runs/dqn
    python examples/dqn.py --checkpoint dqn.ckpt --resume auto --launcher ray

Weights are published after each gradient step. They change little each time, so with --sync aps workers pull
only a small part of the versions.
"""

import sys
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from gymnasium.spaces import Box, Discrete
from torch import Tensor, nn

import envfleet
from checkpoints import Checkpoints, SavedRows
from command_line import RunSettings, require_steps, setting, settings_from_command_line, sync_rule
from display import ProgressDisplay, TrainingRun, summary_of


@dataclass(frozen=True, kw_only=True)
class Settings(RunSettings):
    """Everything that can be chosen, besides where it runs; each field is a command-line flag."""

    env_id: str = setting("CartPole-v1", "a Gymnasium id, with Box observations and Discrete actions")
    num_workers: int = setting(2, "worker processes")
    num_envs_per_worker: int = setting(4, "environments of each worker")
    seed: int = setting(1, "of the environments, the first weights, the actions and the minibatches")
    total_steps: int = setting(40_000, "stop after the first rollout that has made this many env steps")
    num_mean_episodes: int = setting(20, "the mean return is taken over this many last episodes")
    tensorboard: str = setting("", "write TensorBoard logs into this folder; empty: none")

    sync: str = setting("aps", "when workers pull new weights: aps, every_update, every:K or never")
    threshold: float = setting(0.75, "with aps: pull when the worker's policy is further than this from the newest")
    max_lag: int = setting(500, "with aps: pull when the worker is more versions behind than this")

    num_rollout_steps: int = setting(4, "steps of each environment between two rounds of gradient steps")
    num_gradient_steps: int = setting(8, "after each rollout")
    learning_starts: int = setting(1_000, "env steps before the first gradient step")
    buffer_size: int = setting(10_000, "transitions that the replay buffer holds")
    batch_size: int = setting(128, "transitions in a gradient step")
    learning_rate: float = setting(1e-3, "of Adam at the start; falls to 0 in a line over --total-steps")
    discount: float = setting(0.99, "gamma")
    target_every: int = setting(64, "gradient steps between two copies of the Q network to the target network")
    first_epsilon: float = setting(1.0, "how often actions are random at the start")
    last_epsilon: float = setting(0.05, "how often actions are random at the end")
    exploration_fraction: float = setting(0.15, "epsilon falls in a line over this part of --total-steps")
    max_grad_norm: float = setting(10.0, "longer gradients are scaled down to this length")
    num_hidden: int = setting(128, "units in each of the two hidden layers")
    checkpoint_buffer: bool = setting(True, "save the replay buffer, too; without it --learning-starts counts anew")

    def __post_init__(self) -> None:
        super().__post_init__()
        require_steps(self.total_steps)
        # Exploration must not end: what a greedy policy never does is infinitely far from what it does.
        if not 0 < self.last_epsilon <= self.first_epsilon <= 1:
            raise ValueError(
                f"expected 0 < last_epsilon <= first_epsilon <= 1, got {self.last_epsilon} and {self.first_epsilon}"
            )
        sync_rule(self)


def train(settings: Settings, display: ProgressDisplay | None = None) -> TrainingRun:
    torch.manual_seed(settings.seed)
    # The nets are too small to share out: a second torch thread makes training slower (measured).
    torch.set_num_threads(1)
    with (
        envfleet.ClusterEnv(
            settings.env_id,
            settings.num_workers,
            settings.num_envs_per_worker,
            # A gradient step takes about a millisecond: measuring after each would take more than its share.
            sync=sync_rule(settings, measure_every=16),
            seed=settings.seed,
            **settings.where,
        ) as cluster,
        envfleet.StopSignal(settings.checkpoint) as stop,
    ):
        return train_on(cluster, settings, display, stop)


def train_on(
    cluster: Any, settings: Settings, display: ProgressDisplay | None, stop: envfleet.StopSignal
) -> TrainingRun:
    obs_space, action_space = cluster.single_observation_space, cluster.single_action_space
    if not (isinstance(obs_space, Box) and isinstance(action_space, Discrete) and action_space.start == 0):
        raise TypeError(f"expected Box observations and Discrete actions from 0, got {obs_space}, {action_space}")
    shape = obs_space.shape, int(action_space.n), settings.num_hidden
    q_network, target_network = QNetwork(*shape).to(settings.device), QNetwork(*shape).to(settings.device)
    target_network.load_state_dict(q_network.state_dict())
    optimizer = torch.optim.Adam(q_network.parameters(), lr=settings.learning_rate, fused=True)
    policy = envfleet.EpsilonGreedy(q_network, epsilon=settings.first_epsilon)
    buffer = ReplayBuffer(settings.buffer_size, obs_space, settings.discount)

    loss = torch.zeros(())
    run = TrainingRun(num_mean_episodes=settings.num_mean_episodes)
    checkpoints = Checkpoints(
        cluster,
        settings,
        q_network=q_network,
        target_network=target_network,
        optimizer=optimizer,
        run=run,
        **({"buffer": buffer} if settings.checkpoint_buffer else {}),
    )

    while run.num_steps < settings.total_steps and not stop.is_set:
        progress = min(1.0, run.num_steps / (settings.exploration_fraction * settings.total_steps))
        for group in optimizer.param_groups:
            group["lr"] = settings.learning_rate * (1 - run.num_steps / settings.total_steps)
        # Epsilon travels with the weights, and counts in the divergence as they do.
        policy.epsilon = settings.first_epsilon + progress * (settings.last_epsilon - settings.first_epsilon)

        with run.collecting():
            rollout = cluster.rollout(policy, settings.num_rollout_steps)
        run.add(rollout)
        buffer.add(rollout)

        for _ in range(settings.num_gradient_steps if buffer.num_added >= settings.learning_starts else 0):
            sample = buffer.sample(settings.batch_size)
            obs, actions, returns, discounts, next_obs = (each.to(settings.device) for each in sample)
            with torch.no_grad():
                # Double DQN: one network chooses the next action, the other says what it is worth.
                next_actions = q_network(next_obs).argmax(-1, keepdim=True)
                next_values = target_network(next_obs).gather(-1, next_actions).squeeze(-1)
                targets = returns + discounts * next_values
            values = q_network(obs).gather(-1, actions.unsqueeze(-1)).squeeze(-1)
            loss = nn.functional.smooth_l1_loss(values, targets)

            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(q_network.parameters(), settings.max_grad_norm)
            optimizer.step()
            run.num_updates += 1
            if run.num_updates % settings.target_every == 0:
                target_network.load_state_dict(q_network.state_dict())
            cluster.publish(policy)

        if display is not None:
            display.update(run, {"epsilon": policy.epsilon, "loss": loss.item(), "lag": rollout.lag})
        checkpoints.save_when_due()

    checkpoints.save()
    run.exit_code = stop.exit_code
    return run.finish(cluster.stats())


class QNetwork(nn.Sequential):
    """The value of each action: [B, *obs_shape] -> [B, num_actions]."""

    def __init__(self, obs_shape: tuple[int, ...], num_actions: int, num_hidden: int) -> None:
        super().__init__(
            nn.Flatten(),
            nn.Linear(int(np.prod(obs_shape)), num_hidden),
            nn.ReLU(),
            nn.Linear(num_hidden, num_hidden),
            nn.ReLU(),
            nn.Linear(num_hidden, num_actions),
        )


class ReplayBuffer(SavedRows):
    """The last `size` transitions; the oldest are overwritten."""

    def __init__(self, size: int, obs_space: Box, discount: float) -> None:
        self._discount = discount
        dtype = torch.uint8 if obs_space.dtype == np.uint8 else torch.float32
        self.obs = torch.zeros(size, *obs_space.shape, dtype=dtype)
        self.next_obs = torch.zeros(size, *obs_space.shape, dtype=dtype)
        self.actions = torch.zeros(size, dtype=torch.int64)
        self.returns = torch.zeros(size)
        self.discounts = torch.zeros(size)
        self.num_added = 0

    def __len__(self) -> int:
        return min(self.num_added, len(self.returns))

    def add(self, rollout: envfleet.Rollout) -> None:
        """Keep a transition for each row: from its observation to the end of its episode, or of the rollout.

        `returns` has the discounted rewards in between, `discounts` what the value of `next_obs` counts after them:
        0 if the episode was terminated. If it was truncated something would have followed.
        """
        next_obs, returns = np.empty_like(rollout.obs), np.empty_like(rollout.rewards)
        discounts = np.empty_like(rollout.rewards)
        later_obs, later_returns, later_discounts = rollout.next_obs, 0.0, 1.0
        for t in reversed(range(rollout.num_steps)):
            # Envs reset in the step that ends an episode: the row after it is of the next one already.
            ended = rollout.terminations[t] | rollout.truncations[t]
            next_obs[t] = later_obs
            next_obs[t, rollout.final_envs[rollout.final_steps == t]] = rollout.final_obs[rollout.final_steps == t]
            returns[t] = rollout.rewards[t] + self._discount * np.where(ended, 0.0, later_returns)
            discounts[t] = self._discount * np.where(ended, ~rollout.terminations[t], later_discounts)
            later_obs, later_returns, later_discounts = next_obs[t], returns[t], discounts[t]

        num_rows = returns.size
        rows = torch.arange(self.num_added, self.num_added + num_rows) % len(self.returns)
        for kept, came in (
            (self.obs, rollout.obs),
            (self.next_obs, next_obs),
            (self.actions, rollout.actions),
            (self.returns, returns),
            (self.discounts, discounts),
        ):
            kept[rows] = torch.tensor(came.reshape(num_rows, *kept.shape[1:])).to(kept.dtype)
        self.num_added += num_rows

    def sample(self, num_rows: int) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """obs, actions, returns, discounts, next_obs: [num_rows, ...] each."""
        rows = torch.randint(len(self), (num_rows,))
        obs, next_obs = self.obs[rows].float(), self.next_obs[rows].float()
        return obs, self.actions[rows], self.returns[rows], self.discounts[rows], next_obs


def main() -> int:
    settings = settings_from_command_line(Settings(), __doc__)
    with ProgressDisplay(settings) as display:
        run = train(settings, display)
    print(summary_of(run, settings))
    return run.exit_code


if __name__ == "__main__":
    sys.exit(main())
