"""DQN in one file on a cluster: workers act epsilon-greedily with their own copy of the Q network.

    python examples/dqn.py
    python examples/dqn.py --sync every_update --num-workers 4
    python examples/dqn.py --env-id Acrobot-v1 --tensorboard runs/dqn

Weights are published after each gradient step. They change little each time, so with --sync aps workers pull
only a small part of the versions.
"""

import argparse
import dataclasses
import sys
import time
from collections import deque
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from gymnasium.spaces import Box, Discrete
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

    def __post_init__(self) -> None:
        if self.total_steps < 1:
            raise ValueError(f"total_steps must be at least 1, got {self.total_steps}")
        # Exploration must not end: what a greedy policy never does is infinitely far from what it does.
        if not 0 < self.last_epsilon <= self.first_epsilon <= 1:
            raise ValueError(
                f"expected 0 < last_epsilon <= first_epsilon <= 1, got {self.last_epsilon} and {self.first_epsilon}"
            )
        sync_rule(self)


def sync_rule(settings: Settings) -> Any:
    """The rule that --sync names; ValueError if there is none."""
    name, _, period = settings.sync.partition(":")
    if name == "every" and period.isdecimal():
        return envfleet.Every(int(period))
    if settings.sync == "aps":
        # A gradient step takes about a millisecond: measuring after each would take more than its share.
        return envfleet.APS(settings.threshold, settings.max_lag, measure_every=16)
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


class ReplayBuffer:
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
    if not (isinstance(obs_space, Box) and isinstance(action_space, Discrete) and action_space.start == 0):
        raise TypeError(f"expected Box observations and Discrete actions from 0, got {obs_space}, {action_space}")
    q_network = QNetwork(obs_space.shape, int(action_space.n), settings.num_hidden)
    target_network = QNetwork(obs_space.shape, int(action_space.n), settings.num_hidden)
    target_network.load_state_dict(q_network.state_dict())
    optimizer = torch.optim.Adam(q_network.parameters(), lr=settings.learning_rate, fused=True)
    policy = envfleet.EpsilonGreedy(q_network, epsilon=settings.first_epsilon)
    buffer = ReplayBuffer(settings.buffer_size, obs_space, settings.discount)

    num_steps, num_updates, loss = 0, 0, torch.zeros(())
    episodes: list[tuple[int, float]] = []
    lags: list[int] = []
    last_returns: deque[float] = deque(maxlen=settings.num_mean_episodes)
    started_s, collect_s = time.perf_counter(), 0.0

    while num_steps < settings.total_steps:
        progress = min(1.0, num_steps / (settings.exploration_fraction * settings.total_steps))
        # Travels with the weights, and counts in the divergence as they do.
        for group in optimizer.param_groups:
            group["lr"] = settings.learning_rate * (1 - num_steps / settings.total_steps)
        policy.epsilon = settings.first_epsilon + progress * (settings.last_epsilon - settings.first_epsilon)

        waiting_since_s = time.perf_counter()
        rollout = cluster.rollout(policy, settings.num_rollout_steps)
        collect_s += time.perf_counter() - waiting_since_s
        buffer.add(rollout)
        num_steps += rollout.rewards.size
        lags.append(rollout.lag)
        last_returns.extend(rollout.episode_returns.tolist())
        episodes += [(num_steps, episode_return) for episode_return in rollout.episode_returns.tolist()]

        for _ in range(settings.num_gradient_steps if num_steps >= settings.learning_starts else 0):
            obs, actions, returns, discounts, next_obs = buffer.sample(settings.batch_size)
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
            num_updates += 1
            if num_updates % settings.target_every == 0:
                target_network.load_state_dict(q_network.state_dict())
            cluster.publish(policy)

        if display is not None:
            numbers = {"mean return": float(np.mean(last_returns))} if last_returns else {}
            numbers |= {"epsilon": policy.epsilon, "loss": loss.item(), "lag": rollout.lag}
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
