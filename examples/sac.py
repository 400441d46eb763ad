"""SAC on a cluster: workers sample actions with their own copy of the actor.

    python examples/sac.py
    python examples/sac.py --sync every_update --num-workers 4
    python examples/sac.py --env-id MountainCarContinuous-v0 --tensorboard runs/sac
    python examples/sac.py --checkpoint sac.ckpt --resume auto --device cuda

The actor is published after each gradient step. It changes little each time, so with --sync aps workers pull only
a small part of the versions.
"""

import math
import sys
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from gymnasium.spaces import Box
from torch import Tensor, nn

import envfleet
from checkpoints import Checkpoints, SavedRows
from command_line import RunSettings, require_steps, setting, settings_from_command_line, sync_rule
from display import ProgressDisplay, TrainingRun, summary_of


@dataclass(frozen=True, kw_only=True)
class Settings(RunSettings):
    """Everything that can be chosen, besides where it runs; each field is a command-line flag."""

    env_id: str = setting("Pendulum-v1", "a Gymnasium id, with Box observations and bounded Box actions")
    num_workers: int = setting(2, "worker processes")
    num_envs_per_worker: int = setting(2, "environments of each worker")
    seed: int = setting(1, "of the environments, the first weights, the actions and the minibatches")
    total_steps: int = setting(12_000, "stop after the first rollout that has made this many env steps")
    num_mean_episodes: int = setting(10, "the mean return is taken over this many last episodes")
    tensorboard: str = setting("", "write TensorBoard logs into this folder; empty: none")

    sync: str = setting("aps", "when workers pull new weights: aps, every_update, every:K or never")
    threshold: float = setting(0.6, "with aps: pull when the worker's policy is further than this from the newest")
    max_lag: int = setting(2000, "with aps: pull when the worker is more versions behind than this")

    num_rollout_steps: int = setting(1, "steps of each environment between two rounds of gradient steps")
    num_gradient_steps: int = setting(2, "after each rollout")
    learning_starts: int = setting(800, "env steps before the first gradient step")
    buffer_size: int = setting(100_000, "transitions that the replay buffer holds")
    batch_size: int = setting(128, "transitions in a gradient step")
    learning_rate: float = setting(1e-3, "of the three Adams")
    discount: float = setting(0.99, "gamma")
    target_rate: float = setting(0.005, "how far the target networks move to the Q networks in a gradient step")
    num_hidden: int = setting(128, "units in each of the two hidden layers")
    checkpoint_buffer: bool = setting(True, "save the replay buffer, too; without it --learning-starts counts anew")

    def __post_init__(self) -> None:
        super().__post_init__()
        require_steps(self.total_steps)
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
            sync=sync_rule(settings, measure_every=8),
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
    if not (isinstance(obs_space, Box) and isinstance(action_space, Box) and action_space.is_bounded()):
        raise TypeError(f"expected Box observations and bounded Box actions, got {obs_space}, {action_space}")
    shape = obs_space.shape, action_space, settings.num_hidden
    actor = Actor(*shape).to(settings.device)
    twin_q, target_q = TwinQ(*shape).to(settings.device), TwinQ(*shape).to(settings.device)
    target_q.load_state_dict(twin_q.state_dict())
    temperatures = nn.ParameterDict({"log": torch.zeros((), device=settings.device)})
    log_temperature = temperatures["log"]
    target_entropy = -float(np.prod(action_space.shape))
    actor_optimizer, q_optimizer, temperature_optimizer = (
        torch.optim.Adam(weights, lr=settings.learning_rate, fused=True)
        for weights in (actor.parameters(), twin_q.parameters(), [log_temperature])
    )
    policy = envfleet.SquashedGaussian(actor)
    buffer = ReplayBuffer(settings.buffer_size, obs_space, action_space)

    q_loss = torch.zeros(())
    run = TrainingRun(num_mean_episodes=settings.num_mean_episodes)
    checkpoints = Checkpoints(
        cluster,
        settings,
        actor=actor,
        twin_q=twin_q,
        target_q=target_q,
        temperatures=temperatures,
        actor_optimizer=actor_optimizer,
        q_optimizer=q_optimizer,
        temperature_optimizer=temperature_optimizer,
        run=run,
        **({"buffer": buffer} if settings.checkpoint_buffer else {}),
    )

    while run.num_steps < settings.total_steps and not stop.is_set:
        with run.collecting():
            rollout = cluster.rollout(policy, settings.num_rollout_steps)
        run.add(rollout)
        buffer.add(rollout)

        for _ in range(settings.num_gradient_steps if buffer.num_added >= settings.learning_starts else 0):
            sample = buffer.sample(settings.batch_size)
            obs, actions, rewards, next_obs, terminated = (each.to(settings.device) for each in sample)
            temperature = log_temperature.detach().exp()

            with torch.no_grad():
                next_actions, next_log_probs = actor.sample(next_obs)
                next_values = torch.minimum(*target_q(next_obs, next_actions)) - temperature * next_log_probs
                targets = rewards + settings.discount * (1 - terminated) * next_values
            first, second = twin_q(obs, actions)
            q_loss = (first - targets).square().mean() + (second - targets).square().mean()
            q_optimizer.zero_grad()
            q_loss.backward()
            q_optimizer.step()

            new_actions, log_probs = actor.sample(obs)
            twin_q.requires_grad_(False)  # here they only judge the actions
            actor_loss = (temperature * log_probs - torch.minimum(*twin_q(obs, new_actions))).mean()
            twin_q.requires_grad_(True)
            actor_optimizer.zero_grad()
            actor_loss.backward()
            actor_optimizer.step()

            temperature_loss = -log_temperature.exp() * (log_probs.detach().mean() + target_entropy)
            temperature_optimizer.zero_grad()
            temperature_loss.backward()
            temperature_optimizer.step()

            with torch.no_grad():
                for target, weight in zip(target_q.parameters(), twin_q.parameters(), strict=True):
                    target.lerp_(weight, settings.target_rate)
            cluster.publish(policy)

        if display is not None:
            display.update(
                run, {"temperature": log_temperature.exp().item(), "Q loss": q_loss.item(), "lag": rollout.lag}
            )
        checkpoints.save_when_due()

    checkpoints.save()
    run.exit_code = stop.exit_code
    return run.finish(cluster.stats())


class Actor(nn.Module):
    """A Gaussian, squashed by tanh to the bounds of the actions."""

    MIN_LOG_STD, MAX_LOG_STD = -5.0, 2.0

    def __init__(self, obs_shape: tuple[int, ...], action_space: Box, num_hidden: int) -> None:
        super().__init__()
        num_actions = int(np.prod(action_space.shape))
        self.body = mlp(int(np.prod(obs_shape)), num_hidden, 2 * num_actions)
        low, high = torch.tensor(action_space.low).flatten(), torch.tensor(action_space.high).flatten()
        self.register_buffer("action_scale", (high - low) / 2)
        self.register_buffer("action_bias", (high + low) / 2)

    def forward(self, obs: Tensor) -> tuple[Tensor, Tensor]:
        """Of the Gaussian: mean and log_std, [B, D] each."""
        mean, log_std = self.body(obs.flatten(1)).chunk(2, dim=-1)
        # A smooth limit, under which an untrained network has a standard deviation near 1.
        middle, reach = (self.MAX_LOG_STD + self.MIN_LOG_STD) / 2, (self.MAX_LOG_STD - self.MIN_LOG_STD) / 2
        return mean, middle + reach * torch.tanh(log_std - math.atanh(middle / reach))

    def sample(self, obs: Tensor) -> tuple[Tensor, Tensor]:
        """Actions [B, D] and their log-probs [B], both with gradients."""
        mean, log_std = self(obs)
        noise = torch.randn_like(mean)
        unsquashed = mean + log_std.exp() * noise
        log_probs = -0.5 * noise.square() - log_std - 0.5 * math.log(2 * math.pi)
        # log(1 - tanh(u)^2), in a form that does not round to log(0).
        log_slope = 2 * (math.log(2) - unsquashed - nn.functional.softplus(-2 * unsquashed))
        log_probs = (log_probs - log_slope - self.action_scale.log()).sum(-1)
        return torch.tanh(unsquashed) * self.action_scale + self.action_bias, log_probs


class TwinQ(nn.Module):
    """Two Q functions; the smaller of them errs less on the high side."""

    def __init__(self, obs_shape: tuple[int, ...], action_space: Box, num_hidden: int) -> None:
        super().__init__()
        num_inputs = int(np.prod(obs_shape)) + int(np.prod(action_space.shape))
        self.first, self.second = mlp(num_inputs, num_hidden, 1), mlp(num_inputs, num_hidden, 1)

    def forward(self, obs: Tensor, actions: Tensor) -> tuple[Tensor, Tensor]:
        """[B] each."""
        inputs = torch.cat([obs.flatten(1), actions], dim=-1)
        return self.first(inputs).squeeze(-1), self.second(inputs).squeeze(-1)


def mlp(num_inputs: int, num_hidden: int, num_outputs: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(num_inputs, num_hidden),
        nn.ReLU(),
        nn.Linear(num_hidden, num_hidden),
        nn.ReLU(),
        nn.Linear(num_hidden, num_outputs),
    )


class ReplayBuffer(SavedRows):
    """The last `size` transitions; the oldest are overwritten."""

    def __init__(self, size: int, obs_space: Box, action_space: Box) -> None:
        self.obs = torch.zeros(size, *obs_space.shape)
        self.next_obs = torch.zeros(size, *obs_space.shape)
        self.actions = torch.zeros(size, int(np.prod(action_space.shape)))
        self.rewards = torch.zeros(size)
        self.terminated = torch.zeros(size)  # 1: nothing follows. After a truncation something would have.
        self.num_added = 0

    def __len__(self) -> int:
        return min(self.num_added, len(self.rewards))

    def add(self, rollout: envfleet.Rollout) -> None:
        """Keep all transitions of a rollout."""
        # Envs reset in the step that ends an episode: the row after it is of the next one already.
        next_obs = np.concatenate([rollout.obs[1:], rollout.next_obs[None]])
        next_obs[rollout.final_steps, rollout.final_envs] = rollout.final_obs
        num_rows = rollout.rewards.size
        rows = torch.arange(self.num_added, self.num_added + num_rows) % len(self.rewards)
        for kept, came in (
            (self.obs, rollout.obs),
            (self.next_obs, next_obs),
            (self.actions, rollout.actions),
            (self.rewards, rollout.rewards),
            (self.terminated, rollout.terminations),
        ):
            kept[rows] = torch.tensor(came.reshape(num_rows, *kept.shape[1:])).to(kept.dtype)
        self.num_added += num_rows

    def sample(self, num_rows: int) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """obs, actions, rewards, next_obs, terminated: [num_rows, ...] each."""
        rows = torch.randint(len(self), (num_rows,))
        return self.obs[rows], self.actions[rows], self.rewards[rows], self.next_obs[rows], self.terminated[rows]


def main() -> int:
    settings = settings_from_command_line(Settings(), __doc__)
    with ProgressDisplay(settings) as display:
        run = train(settings, display)
    print(summary_of(run, settings))
    return run.exit_code


if __name__ == "__main__":
    sys.exit(main())
