"""IMPALA on a cluster: workers never wait for the learner, V-trace corrects for what they missed.

    python examples/impala.py
    python examples/impala.py --sync every_update --num-workers 4
    python examples/impala.py --env-id Acrobot-v1 --tensorboard runs/impala
    python examples/impala.py --checkpoint impala.ckpt --resume auto --launcher ssh --launcher-setting hosts=node1

Each rollout comes from one worker, and may be older than the learner's newest policy by some versions: its lag.
"""

import sys
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from gymnasium.spaces import Box, Discrete
from torch import Tensor, nn
from torch.distributions import Categorical

import envfleet
from checkpoints import Checkpoints
from command_line import RunSettings, require_steps, setting, settings_from_command_line, sync_rule
from display import ProgressDisplay, TrainingRun, summary_of
from envfleet import losses


@dataclass(frozen=True, kw_only=True)
class Settings(RunSettings):
    """Everything that can be chosen, besides where it runs; each field is a command-line flag."""

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
            # An update takes a few milliseconds: measuring after each would take more than its share.
            sync=sync_rule(settings, measure_every=2),
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
    agent = Agent(obs_space.shape, int(action_space.n), settings.num_hidden).to(settings.device)
    optimizer = torch.optim.Adam(agent.parameters(), lr=settings.learning_rate, eps=1e-5, fused=True)

    run = TrainingRun(num_mean_episodes=settings.num_mean_episodes)
    checkpoints = Checkpoints(cluster, settings, agent=agent, optimizer=optimizer, run=run)
    if run.num_steps >= settings.total_steps:  # it has gone on from its end
        return run.finish(cluster.stats())

    for rollout in cluster.stream(agent, settings.num_rollout_steps):
        run.add(rollout)
        for group in optimizer.param_groups:
            group["lr"] = settings.learning_rate * max(0.0, 1 - run.num_steps / settings.total_steps)

        batch = rollout.to_torch(settings.device)
        shape = batch.rewards.shape  # [T, N]
        _, log_probs, entropies, values = agent.get_action_and_value(batch.obs.flatten(0, 1), batch.actions.flatten())
        log_probs, values = log_probs.view(shape), values.view(shape)
        with torch.no_grad():
            final_values = torch.zeros_like(batch.rewards)
            final_values[batch.final_steps, batch.final_envs] = agent.get_value(batch.final_obs)
            next_values = agent.get_value(batch.next_obs)
        value_targets, advantages = losses.vtrace(
            batch.log_probs,
            log_probs,
            batch.rewards,
            values,
            next_values,
            batch.terminations,
            batch.truncations,
            final_values,
            gamma=settings.discount,
            lam=settings.trace_lambda,
        )
        # Scaled, not centred: under another policy's actions the gradient of what was subtracted would not vanish.
        advantages /= advantages.square().mean().sqrt() + 1e-8
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
            display.update(run, {"value loss": value_loss.item(), "entropy": entropy.item(), "lag": rollout.lag})
        checkpoints.save_when_due()
        if run.num_steps >= settings.total_steps or stop.is_set:
            break

    checkpoints.save()
    run.exit_code = stop.exit_code
    return run.finish(cluster.stats())


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


def main() -> int:
    settings = settings_from_command_line(Settings(), __doc__)
    with ProgressDisplay(settings) as display:
        run = train(settings, display)
    print(summary_of(run, settings))
    return run.exit_code


if __name__ == "__main__":
    sys.exit(main())
