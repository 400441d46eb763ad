"""IMPALA in one file on a cluster: workers never wait for the learner, V-trace corrects for what they missed.

    python examples/impala.py
    python examples/impala.py --sync every_update --num-workers 4
    python examples/impala.py --env-id Acrobot-v1 --tensorboard runs/impala

Each rollout comes from one worker, and may be older than the learner's newest policy by some versions: its lag.
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
from torch.distributions import Categorical

import envfleet


def setting(default: Any, meaning: str) -> Any:
    """Declare a setting together with the help text of its command-line flag."""
    return field(default=default, metadata={"help": meaning})


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Everything that can be chosen; each field is a command-line flag."""

    env_id: str = setting("CartPole-v1", "a Gymnasium id, with Box observations and Discrete actions")
    num_workers: int = setting(2, "worker processes")
    num_envs_per_worker: int = setting(16, "environments of each worker")
    seed: int = setting(1, "of the environments, the first weights and the actions")
    total_steps: int = setting(400_000, "stop after the first rollout that has made this many env steps")
    num_mean_episodes: int = setting(100, "the mean return is taken over this many last episodes")
    tensorboard: str = setting("", "write TensorBoard logs into this folder; empty: none")

    sync: str = setting("aps", "when workers pull new weights: aps, every_update, every:K or never")
    threshold: float = setting(0.005, "with aps: pull when the worker's policy is further than this from the newest")
    max_lag: int = setting(16, "with aps: pull when the worker is more versions behind than this")

    num_rollout_steps: int = setting(20, "steps of each environment in a rollout")
    learning_rate: float = setting(1e-3, "of Adam at the start; falls to 0 in a line over --total-steps")
    discount: float = setting(0.99, "gamma")
    trace_lambda: float = setting(0.95, "of V-trace: how far it trusts rewards rather than values; 1: IMPALA's own")
    value_weight: float = setting(0.5, "of the value loss")
    entropy_weight: float = setting(0.01, "of the entropy bonus")
    max_grad_norm: float = setting(0.5, "longer gradients are scaled down to this length")
    num_hidden: int = setting(64, "units in each of the two hidden layers")

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
        # An update takes a few milliseconds: measuring after each would take more than its share.
        return envfleet.APS(settings.threshold, settings.max_lag, measure_every=2)
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


class Agent(nn.Module):
    """The policy and the value function; they share no weights. In CleanRL's form."""

    def __init__(self, obs_shape: tuple[int, ...], num_actions: int, num_hidden: int) -> None:
        super().__init__()
        # A last layer near zero: at first every action is about equally likely.
        self.actor = mlp(obs_shape, num_hidden, num_actions, last_gain=0.01)
        self.critic = mlp(obs_shape, num_hidden, 1, last_gain=1.0)

    def get_value(self, obs: Tensor) -> Tensor:
        """[B, *obs_shape] -> [B]."""
        return self.critic(obs).squeeze(-1)

    def get_distribution(self, obs: Tensor) -> Categorical:
        """Of the actions. EnvFleet measures the divergence exactly, and more cheaply, where it finds this method."""
        return Categorical(logits=self.actor(obs), validate_args=False)

    def get_action_and_value(self, obs: Tensor, action: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """action, log_prob, entropy, value: [B] each."""
        choice = self.get_distribution(obs)
        action = choice.sample() if action is None else action
        return action, choice.log_prob(action), choice.entropy(), self.get_value(obs)


def mlp(obs_shape: tuple[int, ...], num_hidden: int, num_outputs: int, *, last_gain: float) -> nn.Sequential:
    layers: list[nn.Module] = [nn.Flatten()]
    sizes = [int(np.prod(obs_shape)), num_hidden, num_hidden, num_outputs]
    for num_in, num_out, gain in zip(sizes[:-1], sizes[1:], (2**0.5, 2**0.5, last_gain), strict=True):
        linear = nn.Linear(num_in, num_out)
        nn.init.orthogonal_(linear.weight, gain)
        nn.init.zeros_(linear.bias)
        layers += [linear, nn.Tanh()]
    return nn.Sequential(*layers[:-1])


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
    agent = Agent(obs_space.shape, int(action_space.n), settings.num_hidden)
    optimizer = torch.optim.Adam(agent.parameters(), lr=settings.learning_rate, eps=1e-5, fused=True)

    num_steps = 0
    episodes: list[tuple[int, float]] = []
    lags: list[int] = []
    last_returns: deque[float] = deque(maxlen=settings.num_mean_episodes)
    started_s = time.perf_counter()

    for rollout in cluster.stream(agent, settings.num_rollout_steps):
        num_steps += rollout.rewards.size
        lags.append(rollout.lag)
        last_returns.extend(rollout.episode_returns.tolist())
        episodes += [(num_steps, episode_return) for episode_return in rollout.episode_returns.tolist()]
        for group in optimizer.param_groups:
            group["lr"] = settings.learning_rate * max(0.0, 1 - num_steps / settings.total_steps)

        batch = rollout.to_torch()
        shape = batch.rewards.shape  # [T, N]
        _, log_probs, entropies, values = agent.get_action_and_value(batch.obs.flatten(0, 1), batch.actions.flatten())
        log_probs, values = log_probs.view(shape), values.view(shape)
        with torch.no_grad():
            final_values = torch.zeros(shape)
            final_values[batch.final_steps, batch.final_envs] = agent.get_value(batch.final_obs)
            next_values = agent.get_value(batch.next_obs)
        targets = envfleet.vtrace(
            rollout.log_probs,
            log_probs.detach().numpy(),
            rollout.rewards,
            values.detach().numpy(),
            next_values.numpy(),
            rollout.terminations,
            rollout.truncations,
            final_values.numpy(),
            gamma=settings.discount,
            lam=settings.trace_lambda,
        )
        advantages = torch.tensor(targets.advantages, dtype=torch.float32)
        # Scaled, not centred: under another policy's actions the gradient of what was subtracted would not vanish.
        advantages /= advantages.square().mean().sqrt() + 1e-8
        value_targets = torch.tensor(targets.value_targets, dtype=torch.float32)
        policy_loss = -(advantages * log_probs).mean()
        value_loss = (values - value_targets).square().mean()
        entropy = entropies.mean()
        loss = policy_loss + settings.value_weight * value_loss - settings.entropy_weight * entropy

        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(agent.parameters(), settings.max_grad_norm)
        optimizer.step()
        cluster.publish(agent)

        if display is not None:
            numbers = {"mean return": float(np.mean(last_returns))} if last_returns else {}
            numbers |= {"value loss": value_loss.item(), "entropy": entropy.item(), "lag": rollout.lag}
            display.update(num_steps, time.perf_counter() - started_s, numbers)
        if num_steps >= settings.total_steps:
            break

    stats = cluster.stats()
    return TrainingRun(
        num_steps=num_steps,
        duration_s=time.perf_counter() - started_s,
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
