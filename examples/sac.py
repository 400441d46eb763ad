"""SAC in one file on a cluster: workers sample actions with their own copy of the actor.

    python examples/sac.py
    python examples/sac.py --sync every_update --num-workers 4
    python examples/sac.py --env-id MountainCarContinuous-v0 --tensorboard runs/sac

The actor is published after each gradient step. It changes little each time, so with --sync aps workers pull only
a small part of the versions.
"""

import argparse
import dataclasses
import math
import sys
import time
from collections import deque
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from gymnasium.spaces import Box
from rich.console import Console
from rich.progress import BarColumn, Progress, TimeRemainingColumn
from torch import Tensor, nn

import envfleet


def setting(default: Any, meaning: str) -> Any:
    """Declare a setting together with the help text of its command-line flag."""
    return field(default=default, metadata={"help": meaning})


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Everything that can be chosen; each field is a command-line flag."""

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

    def __post_init__(self) -> None:
        if self.total_steps < 1:
            raise ValueError(f"total_steps must be at least 1, got {self.total_steps}")
        sync_rule(self)


def sync_rule(settings: Settings) -> Any:
    """The rule that --sync names; ValueError if there is none."""
    name, _, period = settings.sync.partition(":")
    if name == "every" and period.isdecimal():
        return envfleet.Every(int(period))
    if settings.sync == "aps":
        # A gradient step takes about a millisecond: measuring after each would take more than its share.
        return envfleet.APS(settings.threshold, settings.max_lag, measure_every=8)
    if settings.sync == "every_update":
        return envfleet.EveryUpdate()
    if settings.sync == "never":
        return envfleet.Never()
    raise ValueError(f"sync must be aps, every_update, every:K (K a whole number) or never, got {settings.sync!r}")


def settings_from_command_line() -> Settings:
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").partition("\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    for f in dataclasses.fields(Settings):
        parser.add_argument(
            "--" + f.name.replace("_", "-"), default=f.default, type=type(f.default), help=f.metadata["help"]
        )
    try:
        return Settings(**vars(parser.parse_args()))
    except ValueError as error:
        parser.error(str(error))


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


class ReplayBuffer:
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


class ProgressDisplay:
    """A live bar where stderr is a terminal, a plain line every few seconds elsewhere; TensorBoard if asked for."""

    def __init__(self, settings: Settings, line_every_s: float = 5.0) -> None:
        self._total_steps = settings.total_steps
        self._line_every_s = self._next_line_s = line_every_s
        columns = "{task.description}", BarColumn(None), TimeRemainingColumn(compact=True), "left"
        is_live = sys.stderr.isatty()
        self.bar = Progress(*columns, console=Console(stderr=True), expand=True, disable=not is_live)
        self._task = self.bar.add_task(f"{settings.env_id}: first rollout", total=settings.total_steps)
        self._writer = tensorboard_writer(settings.tensorboard) if settings.tensorboard else None

    def update(self, num_steps: int, elapsed_s: float, numbers: dict[str, float]) -> None:
        text = f"{num_steps:,} steps, {num_steps / elapsed_s:,.0f} steps/s"
        text += "".join(f", {name} {number:.4g}" for name, number in numbers.items())
        self.bar.update(self._task, completed=num_steps, description=text)
        if self.bar.disable and elapsed_s >= self._next_line_s:
            self._next_line_s = elapsed_s + self._line_every_s
            print(text, file=sys.stderr, flush=True)
        if self._writer is not None:
            for name, number in numbers.items():
                self._writer.add_scalar(name.replace(" ", "_"), number, num_steps)

    def __enter__(self) -> "ProgressDisplay":
        self.bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.bar.stop()
        if self._writer is not None:
            self._writer.close()


def tensorboard_writer(log_dir: str) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise SystemExit("--tensorboard needs the package tensorboard: pip install tensorboard") from error
    return SummaryWriter(log_dir)


@dataclass(frozen=True, kw_only=True)
class TrainingRun:
    """What a training left behind. Points are (env steps so far, return)."""

    num_steps: int
    duration_s: float
    collect_s: float  # of it: waiting for rollouts
    episodes: list[tuple[int, float]]  # each finished episode
    mean_return: float | None  # of the last episodes; None: none has ended
    num_versions: int  # published
    num_pulls: list[int]  # by each worker
    weight_bytes: int
    announcement_bytes: int
    lags: list[int]  # of each rollout, in versions
    stats: Any  # envfleet's RunStats at the end


def train(settings: Settings, display: ProgressDisplay | None = None) -> TrainingRun:
    torch.manual_seed(settings.seed)
    # The nets are too small to share out: a second torch thread makes training slower (measured).
    torch.set_num_threads(1)
    with envfleet.ClusterEnv(
        settings.env_id,
        settings.num_workers,
        settings.num_envs_per_worker,
        sync=sync_rule(settings),
        seed=settings.seed,
    ) as cluster:
        return train_on(cluster, settings, display)


def train_on(cluster: Any, settings: Settings, display: ProgressDisplay | None) -> TrainingRun:
    obs_space, action_space = cluster.single_observation_space, cluster.single_action_space
    if not (isinstance(obs_space, Box) and isinstance(action_space, Box) and action_space.is_bounded()):
        raise TypeError(f"expected Box observations and bounded Box actions, got {obs_space}, {action_space}")
    actor = Actor(obs_space.shape, action_space, settings.num_hidden)
    twin_q = TwinQ(obs_space.shape, action_space, settings.num_hidden)
    target_q = TwinQ(obs_space.shape, action_space, settings.num_hidden)
    target_q.load_state_dict(twin_q.state_dict())
    log_temperature = torch.zeros((), requires_grad=True)
    target_entropy = -float(np.prod(action_space.shape))
    actor_optimizer, q_optimizer, temperature_optimizer = (
        torch.optim.Adam(weights, lr=settings.learning_rate, fused=True)
        for weights in (actor.parameters(), twin_q.parameters(), [log_temperature])
    )
    policy = envfleet.SquashedGaussian(actor)
    buffer = ReplayBuffer(settings.buffer_size, obs_space, action_space)

    num_steps, q_loss = 0, torch.zeros(())
    episodes: list[tuple[int, float]] = []
    lags: list[int] = []
    last_returns: deque[float] = deque(maxlen=settings.num_mean_episodes)
    started_s, collect_s = time.perf_counter(), 0.0

    while num_steps < settings.total_steps:
        waiting_since_s = time.perf_counter()
        rollout = cluster.rollout(policy, settings.num_rollout_steps)
        collect_s += time.perf_counter() - waiting_since_s
        buffer.add(rollout)
        num_steps += rollout.rewards.size
        lags.append(rollout.lag)
        last_returns.extend(rollout.episode_returns.tolist())
        episodes += [(num_steps, episode_return) for episode_return in rollout.episode_returns.tolist()]

        for _ in range(settings.num_gradient_steps if num_steps >= settings.learning_starts else 0):
            obs, actions, rewards, next_obs, terminated = buffer.sample(settings.batch_size)
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
            numbers = {"mean return": float(np.mean(last_returns))} if last_returns else {}
            numbers |= {"temperature": log_temperature.exp().item(), "Q loss": q_loss.item(), "lag": rollout.lag}
            display.update(num_steps, time.perf_counter() - started_s, numbers)

    stats = cluster.stats()
    return TrainingRun(
        num_steps=num_steps,
        duration_s=time.perf_counter() - started_s,
        collect_s=collect_s,
        episodes=episodes,
        mean_return=float(np.mean(last_returns)) if last_returns else None,
        num_versions=stats.version,
        num_pulls=[worker.num_pulls for worker in stats.workers],
        weight_bytes=sum(worker.weight_bytes for worker in stats.workers),
        announcement_bytes=sum(worker.announcement_bytes for worker in stats.workers),
        lags=lags,
        stats=stats,
    )


def summary_of(run: TrainingRun, settings: Settings) -> str:
    num_mean = min(len(run.episodes), settings.num_mean_episodes)
    returns = f"mean return of the last {num_mean} episodes {run.mean_return:.1f}" if num_mean else "no episode ended"
    num_pulls = sum(run.num_pulls) / len(run.num_pulls)
    return (
        f"{settings.env_id}: {returns}, after {run.num_steps:,} steps in {run.duration_s:.1f} s.\n"
        f"{run.num_versions:,} versions published; each worker pulled {num_pulls:,.0f} on average, "
        f"1 in {run.num_versions / max(1.0, num_pulls):,.0f} ({settings.sync}).\n{run.stats}"
    )


def main() -> None:
    settings = settings_from_command_line()
    with ProgressDisplay(settings) as display:
        run = train(settings, display)
    print(summary_of(run, settings))


if __name__ == "__main__":
    main()
