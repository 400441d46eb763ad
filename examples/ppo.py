"""PPO in one file on a cluster: workers act with their copy of the policy, and pull new weights when a rule says so.

    python examples/ppo.py
    python examples/ppo.py --sync every:4
    python examples/ppo.py --env-id Pendulum-v1 --target -200 --discount 0.95 --reward-scale 0.1

Workers whose weights are old send stale rollouts. The default is therefore decoupled PPO: the clip is around the
learner's own policy at the start of the update, and each row counts by how much more likely that policy takes its
action than the worker's did. Plain PPO (--plain) clips around the worker's policy, and so holds the learner near it:
the divergence that APS waits for may never come about.
"""

import argparse
import dataclasses
import re
import sys
import time
import warnings
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
import torch
from gymnasium.spaces import Box, Discrete
from rich.console import Console
from rich.progress import BarColumn, Progress, TimeRemainingColumn
from torch import Tensor, nn
from torch.distributions import Categorical, Distribution, Independent, Normal

import envfleet
from envfleet.contract.stats import RunStats


def setting(default: Any, meaning: str, kind: type | None = None) -> Any:
    """Declare a setting with the help text of its command-line flag; `kind` is that of its values, not of None."""
    return field(default=default, metadata={"help": meaning, "kind": kind or type(default)})


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Everything that can be chosen; each field is a command-line flag."""

    env_id: str = setting("CartPole-v1", "a Gymnasium id, with Box observations and Discrete or Box actions")
    num_workers: int = setting(2, "processes that collect")
    num_envs_per_worker: int = setting(8, "environments of each")
    seed: int = setting(1, "of the environments, the first weights, the actions and the minibatches")
    total_steps: int = setting(500_000, "stop after the first update that has seen this many env steps")
    target: float | None = setting(None, "stop once the mean return is this high", float)
    num_mean_episodes: int = setting(100, "the mean return is taken over this many last episodes")
    require_target: bool = setting(False, "exit with 1 if the target was not reached")
    tensorboard: str | None = setting(None, "log to this directory for TensorBoard", str)

    sync: str = setting("aps", "when workers pull new weights: aps, every_update, every:K (updates) or never")
    threshold: float = setting(0.05, "aps: pull if the policies are further apart than this (KL, mean over states)")
    max_lag: int = setting(16, "aps: pull if more versions behind than this, whatever the divergence")
    plain: bool = setting(False, "plain PPO: clip around the policy that acted, even if it is an old one")
    max_weight: float = setting(2.0, "decoupled PPO: no row counts more than this")

    num_rollout_steps: int = setting(128, "steps of each environment between two updates")
    num_epochs: int = setting(10, "passes over each rollout")
    num_minibatches: int = setting(4, "gradient steps in one pass")
    learning_rate: float = setting(1e-3, "of Adam at the start; falls to 0 in a line over --total-steps")
    discount: float = setting(0.99, "gamma")
    gae_lambda: float = setting(0.95, "0: one-step advantages, least variance; 1: whole returns, least bias")
    reward_scale: float = setting(1.0, "rewards are multiplied by this, for learning only")
    clip_range: float = setting(0.2, "how far a probability ratio may leave 1 before its gradient stops")
    value_weight: float = setting(0.5, "of the value loss")
    entropy_weight: float = setting(0.0, "of the entropy bonus")
    max_grad_norm: float = setting(0.5, "longer gradients are scaled down to this length")
    num_hidden: int = setting(64, "units in each of the two hidden layers")
    num_threads: int = setting(1, "of torch, for learning; a second one gains little, and costs much on a busy machine")

    def __post_init__(self) -> None:
        if self.total_steps < 1:
            raise ValueError(f"total_steps must be at least 1, got {self.total_steps}")
        if not re.fullmatch(r"aps|every_update|every:[1-9]\d*|never", self.sync):
            raise ValueError(f"sync must be aps, every_update, every:K with K at least 1, or never; got {self.sync!r}")

    @property
    def sync_rule(self) -> Any:
        name, _, period = self.sync.partition(":")
        if name == "aps":
            return envfleet.APS(threshold=self.threshold, max_lag=self.max_lag)
        if name == "every":
            return envfleet.Every(int(period))
        return envfleet.EveryUpdate() if name == "every_update" else envfleet.Never()


AnySettings = TypeVar("AnySettings", bound=Settings)


def settings_from_command_line(defaults: AnySettings, description: str) -> AnySettings:
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.ArgumentDefaultsHelpFormatter, allow_abbrev=False
    )
    for f in dataclasses.fields(defaults):
        as_flag: dict[str, Any] = {"default": getattr(defaults, f.name), "help": f.metadata["help"]}
        is_switch = f.metadata["kind"] is bool
        as_flag |= {"action": argparse.BooleanOptionalAction} if is_switch else {"type": f.metadata["kind"]}
        parser.add_argument("--" + f.name.replace("_", "-"), **as_flag)
    try:
        return dataclasses.replace(defaults, **vars(parser.parse_args()))
    except ValueError as error:
        parser.error(str(error))


class Agent(nn.Module):
    """The policy and the value function; they share no weights."""

    def __init__(self, obs_space: Any, action_space: Any, num_hidden: int) -> None:
        super().__init__()
        if not isinstance(obs_space, Box):
            raise TypeError(f"expected Box observations, got {obs_space}")
        if isinstance(action_space, Discrete) and action_space.start == 0:
            num_outputs = int(action_space.n)
            self.log_std = None
        elif isinstance(action_space, Box) and len(action_space.shape) == 1:
            num_outputs = action_space.shape[0]
            self.log_std = nn.Parameter(torch.zeros(num_outputs))
        else:
            raise TypeError(f"expected Discrete actions from 0 or a Box of one dimension, got {action_space}")
        # A last layer near zero: at first every action is about equally likely.
        self.policy = mlp(obs_space.shape, num_hidden, num_outputs, last_gain=0.01)
        self.value_function = mlp(obs_space.shape, num_hidden, 1, last_gain=1.0)

    def get_distribution(self, obs: Tensor) -> Distribution:
        """Of the actions. EnvFleet measures the divergence exactly where it finds this method."""
        if self.log_std is None:
            return Categorical(logits=self.policy(obs), validate_args=False)
        mean = self.policy(obs)
        return Independent(Normal(mean, self.log_std.exp().expand_as(mean), validate_args=False), 1)

    def get_value(self, obs: Tensor) -> Tensor:
        """[..., *obs_shape] -> [...]."""
        return torch.squeeze(self.value_function(obs), dim=-1)

    def get_action_and_value(self, obs: Tensor, action: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The action, its log-prob, the entropy and the value. What workers call: they take the module as it is."""
        distribution = self.get_distribution(obs)
        if action is None:
            action = distribution.sample()
        return action, distribution.log_prob(action), distribution.entropy(), self.get_value(obs)


def mlp(obs_shape: tuple[int, ...], num_hidden: int, num_outputs: int, *, last_gain: float) -> nn.Sequential:
    layers: list[nn.Module] = [nn.Flatten(start_dim=-len(obs_shape))]
    sizes = [int(np.prod(obs_shape)), num_hidden, num_hidden, num_outputs]
    for num_in, num_out, gain in zip(sizes[:-1], sizes[1:], (2**0.5, 2**0.5, last_gain), strict=True):
        linear = nn.Linear(num_in, num_out)
        nn.init.orthogonal_(linear.weight, gain)
        nn.init.zeros_(linear.bias)
        layers += [linear, nn.Tanh()]
    return nn.Sequential(*layers[:-1])


@dataclass(frozen=True, kw_only=True)
class Update:
    """Where a training stands after an update."""

    num_steps: int  # env steps so far
    num_updates: int
    elapsed_s: float  # since train() was called: starting the workers counts
    mean_return: float | None  # None: no episode has ended
    lag: int  # of the rollout: by how many versions its oldest policy was behind
    losses: dict[str, float]  # of the last minibatch
    stats: RunStats  # when the rollout had come


@dataclass(frozen=True, kw_only=True)
class TrainingRun:
    """What a training left behind. Points are (env steps so far, return)."""

    target_reached: bool
    num_steps: int
    num_updates: int
    duration_s: float
    collect_s: float  # of it: starting the workers, and waiting for rollouts
    mean_return: float | None  # None: no episode has ended
    episodes: list[tuple[int, float]]  # each finished episode
    curve: list[tuple[int, float]]  # the mean return at each update
    pulls: list[tuple[int, ...]]  # of each worker, up to each update
    divergences: list[float | None]  # the largest of any worker, at each update
    stats: RunStats


def train(
    settings: Settings,
    on_update: Callable[[Update], None] | None = None,
    *,
    env: Any = None,
    agent_class: Callable[[Any, Any, int], nn.Module] = Agent,
) -> TrainingRun:
    """Train an agent; `on_update` is called after each update. `env`: any that a cluster takes, in place of the id."""
    torch.manual_seed(settings.seed)
    torch.set_num_threads(settings.num_threads)
    started_s = time.perf_counter()
    num_steps, num_updates, collect_s, target_reached, has_warned = 0, 0, 0.0, False, False
    mean_return: float | None = None
    episodes: list[tuple[int, float]] = []
    curve: list[tuple[int, float]] = []
    pulls: list[tuple[int, ...]] = []
    divergences: list[float | None] = []
    last_returns: deque[float] = deque(maxlen=settings.num_mean_episodes)

    with envfleet.ClusterEnv(
        settings.env_id if env is None else env,
        num_workers=settings.num_workers,
        num_envs_per_worker=settings.num_envs_per_worker,
        sync=settings.sync_rule,
        seed=settings.seed,
    ) as cluster:
        agent = agent_class(cluster.single_observation_space, cluster.single_action_space, settings.num_hidden)
        collect_s = time.perf_counter() - started_s
        optimizer = torch.optim.Adam(agent.parameters(), lr=settings.learning_rate, eps=1e-5, fused=True)

        while num_steps < settings.total_steps and not target_reached:
            for group in optimizer.param_groups:
                group["lr"] = settings.learning_rate * (1 - num_steps / settings.total_steps)

            # The workers collect; before, those whom the rule tells to pull this agent's weights do so.
            waiting_since_s = time.perf_counter()
            rollout = cluster.rollout(agent, settings.num_rollout_steps).to_torch()
            collect_s += time.perf_counter() - waiting_since_s
            stats = cluster.stats()
            num_steps += rollout.rewards.numel()
            returns = rollout.episode_returns.tolist()
            last_returns.extend(returns)
            episodes += [(num_steps, episode_return) for episode_return in returns]
            if settings.plain and rollout.lag > 0 and not has_warned:
                has_warned = True
                warnings.warn(
                    f"plain PPO met data of a policy {rollout.lag} versions old: its clip holds the learner near that "
                    f"policy, so learning may slow down or stop. Leave out --plain, or use --sync every_update",
                    stacklevel=2,
                )

            # What the present weights say of these rows. Of stale data the log-probs and values that came with the
            # rollout say something else.
            obs, actions = rollout.obs.flatten(0, 1), rollout.actions.flatten(0, 1)
            worker_log_probs = rollout.log_probs.flatten()
            with torch.no_grad():
                _, start_log_probs, _, values = agent.get_action_and_value(obs, actions)
                final_values = torch.zeros_like(rollout.rewards)
                final_values[rollout.final_steps, rollout.final_envs] = agent.get_value(rollout.final_obs)
                next_values = agent.get_value(rollout.next_obs)
            estimates = envfleet.gae(
                (rollout.rewards * settings.reward_scale).numpy(),
                values.view_as(rollout.rewards).numpy(),
                next_values.numpy(),
                rollout.terminations.numpy(),
                rollout.truncations.numpy(),
                final_values.numpy(),
                gamma=settings.discount,
                lam=settings.gae_lambda,
            )
            advantages = torch.from_numpy(estimates.advantages).float().flatten()
            value_targets = torch.from_numpy(estimates.returns).float().flatten()
            advantages = (advantages - advantages.mean()) / (advantages.std(correction=0) + 1e-8)
            if settings.plain:
                clip_log_probs = worker_log_probs
            else:
                clip_log_probs = start_log_probs
                advantages *= (start_log_probs - worker_log_probs).exp().clamp(max=settings.max_weight)

            for _ in range(settings.num_epochs):
                for rows in torch.randperm(len(obs)).chunk(settings.num_minibatches):
                    _, log_probs, entropy, values = agent.get_action_and_value(obs[rows], actions[rows])
                    ratio = (log_probs - clip_log_probs[rows]).exp()
                    clipped_ratio = ratio.clamp(1 - settings.clip_range, 1 + settings.clip_range)
                    advantage = advantages[rows]
                    policy_loss = -torch.minimum(ratio * advantage, clipped_ratio * advantage).mean()
                    value_loss = (values - value_targets[rows]).square().mean()
                    bonus = settings.entropy_weight * entropy.mean()
                    loss = policy_loss + settings.value_weight * value_loss - bonus

                    optimizer.zero_grad()
                    loss.backward()
                    nn.utils.clip_grad_norm_(agent.parameters(), settings.max_grad_norm)
                    optimizer.step()

            num_updates += 1
            pulls.append(tuple(each.num_pulls for each in stats.workers))
            measured = [each.divergence for each in stats.workers if each.divergence is not None]
            divergences.append(max(measured, default=None))
            if last_returns:
                mean_return = float(np.mean(last_returns))
                curve.append((num_steps, mean_return))
                # A few lucky episodes prove nothing: the mean counts once it is over as many as it says.
                is_full = len(last_returns) == last_returns.maxlen
                target_reached = settings.target is not None and is_full and mean_return >= settings.target
            if on_update is not None:
                losses = {"policy": policy_loss.item(), "value": value_loss.item(), "entropy": entropy.mean().item()}
                on_update(
                    Update(
                        num_steps=num_steps,
                        num_updates=num_updates,
                        elapsed_s=time.perf_counter() - started_s,
                        mean_return=mean_return,
                        lag=rollout.lag,
                        losses=losses,
                        stats=stats,
                    )
                )
        duration_s = time.perf_counter() - started_s

    return TrainingRun(
        target_reached=target_reached,
        num_steps=num_steps,
        num_updates=num_updates,
        duration_s=duration_s,
        collect_s=collect_s,
        mean_return=mean_return,
        episodes=episodes,
        curve=curve,
        pulls=pulls,
        divergences=divergences,
        stats=stats,
    )


class ProgressDisplay:
    """A live bar where stderr is a terminal, a plain line every few seconds elsewhere."""

    def __init__(self, settings: Settings, line_every_s: float = 5.0) -> None:
        self._total_steps = settings.total_steps
        self._line_every_s = self._next_line_s = line_every_s
        columns = "{task.description}", BarColumn(None), "at most", TimeRemainingColumn(compact=True), "left"
        is_live = sys.stderr.isatty()
        self.bar = Progress(*columns, console=Console(stderr=True), expand=True, disable=not is_live)
        self._task = self.bar.add_task(f"{settings.env_id}: workers start", total=settings.total_steps)

    def update(self, update: Update) -> None:
        steps_per_s = update.num_steps / update.elapsed_s
        text = (
            f"{update.num_steps:,} steps, {steps_per_s:,.0f} steps/s, mean return {in_words(update.mean_return)}, "
            f"lag {update.lag}, {num_pulls(update.stats)} pulls in {update.num_updates} updates"
        )
        self.bar.update(self._task, completed=update.num_steps, description=text)
        if self.bar.disable and update.elapsed_s >= self._next_line_s:
            self._next_line_s = update.elapsed_s + self._line_every_s
            left_s = max(0, self._total_steps - update.num_steps) / steps_per_s
            print(f"{text}, at most {left_s:.0f} s left", file=sys.stderr, flush=True)


def in_words(mean_return: float | None) -> str:
    return "unknown (no episode has ended)" if mean_return is None else f"{mean_return:.1f}"


def num_pulls(stats: RunStats) -> float:
    """For each worker, on average."""
    return round(sum(each.num_pulls for each in stats.workers) / len(stats.workers), 1)


def tensorboard_log(directory: str) -> Callable[[Update], None]:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise SystemExit(f"--tensorboard needs TensorBoard: pip install tensorboard ({error})") from error
    writer = SummaryWriter(directory)

    def log(update: Update) -> None:
        divergences = [each.divergence for each in update.stats.workers if each.divergence is not None]
        scalars = {
            "return": update.mean_return,
            "lag": update.lag,
            "pulls": num_pulls(update.stats),
            "divergence": max(divergences, default=None),
            "steps_per_s": update.num_steps / update.elapsed_s,
            **{f"loss/{name}": loss for name, loss in update.losses.items()},
        }
        for name, value in scalars.items():
            if value is not None:
                writer.add_scalar(name, value, update.num_steps)
        writer.flush()

    return log


def main() -> int:
    settings = settings_from_command_line(Settings(), (__doc__ or "").partition("\n")[0])
    display = ProgressDisplay(settings)
    watchers = [display.update]
    if settings.tensorboard is not None:
        watchers.append(tensorboard_log(settings.tensorboard))
    with display.bar:
        run = train(settings, on_update=lambda update: [watch(update) for watch in watchers])
    if settings.target is not None:
        print(f"{settings.env_id}: target of {settings.target:g} {'' if run.target_reached else 'not '}reached.")
    print(
        f"Mean return of the last {min(len(run.episodes), settings.num_mean_episodes)} episodes: "
        f"{in_words(run.mean_return)}, after {run.num_steps:,} steps in {run.duration_s:.1f} s.\n"
        f"{num_pulls(run.stats):g} pulls for each worker in {run.num_updates} updates ({settings.sync})."
    )
    return 1 if settings.require_target and not run.target_reached else 0


if __name__ == "__main__":
    sys.exit(main())
