"""PPO on a cluster: workers act with their copy of the policy, and pull new weights when a rule says so.

    python examples/ppo.py
    python examples/ppo.py --sync every:4
    python examples/ppo.py --checkpoint ppo.ckpt --resume auto --launcher slurm --launcher-setting partition=cpu
    python examples/ppo.py --env-id Pendulum-v1 --target -200 --discount 0.95 --reward-scale 0.1

Workers whose weights are old send stale rollouts. The default is therefore decoupled PPO: the clip is around the
learner's own policy at the start of the update, and each row counts by how much more likely that policy takes its
action than the worker's did. Plain PPO (--plain) clips around the worker's policy, and so holds the learner near it:
the divergence that APS waits for may never come about.
"""

import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from gymnasium.spaces import Box, Discrete
from torch import Tensor, nn
from torch.distributions import Categorical, Distribution, Independent, Normal

import envfleet
from checkpoints import Checkpoints
from command_line import RunSettings, require_steps, setting, settings_from_command_line, sync_rule
from display import TrainingRun, Update, UpdateDisplay, in_words, mean_pulls, tensorboard_log
from envfleet import losses


@dataclass(frozen=True, kw_only=True)
class Settings(RunSettings):
    """Everything that can be chosen, besides where it runs; each field is a command-line flag."""

    env_id: str = setting("CartPole-v1", "a Gymnasium id, with Box observations and Discrete or Box actions")
    num_workers: int = setting(2, "processes that collect")
    num_envs_per_worker: int = setting(8, "environments of each")
    seed: int = setting(1, "of the environments, the first weights, the actions and the minibatches")
    total_steps: int = setting(500_000, "stop after the first update that has seen this many env steps")
    target: float | None = setting(None, "stop once the mean return is this high", float)
    num_mean_episodes: int = setting(100, "the mean return is taken over this many last episodes")
    require_target: bool = setting(False, "exit with 1 if the target was not reached")
    num_eval_episodes: int = setting(20, "whole episodes without chance that are played at the end")
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
        super().__post_init__()
        require_steps(self.total_steps)
        sync_rule(self)


def train(
    settings: Settings,
    on_update: Callable[[Update], None] | None = None,
    *,
    env: Any = None,
    agent_class: Callable[[Any, Any, int], nn.Module] | None = None,
) -> TrainingRun:
    """Train an agent.

    `on_update` is called after each update. `env` may be any that a cluster takes, in place of the id; `agent_class`
    is built as Agent is.
    """
    torch.manual_seed(settings.seed)
    torch.set_num_threads(settings.num_threads)
    run = TrainingRun(num_mean_episodes=settings.num_mean_episodes)
    has_warned = False

    with (
        envfleet.ClusterEnv(
            settings.env_id if env is None else env,
            num_workers=settings.num_workers,
            num_envs_per_worker=settings.num_envs_per_worker,
            sync=sync_rule(settings),
            seed=settings.seed,
            **settings.where,
        ) as cluster,
        envfleet.StopSignal(settings.checkpoint) as stop,
    ):
        spaces = cluster.single_observation_space, cluster.single_action_space
        agent = (agent_class or Agent)(*spaces, settings.num_hidden).to(settings.device)
        run.collect_s = run.elapsed_s
        optimizer = torch.optim.Adam(agent.parameters(), lr=settings.learning_rate, eps=1e-5, fused=True)
        checkpoints = Checkpoints(cluster, settings, agent=agent, optimizer=optimizer, run=run)

        while run.num_steps < settings.total_steps and not run.target_reached and not stop.is_set:
            for group in optimizer.param_groups:
                group["lr"] = settings.learning_rate * (1 - run.num_steps / settings.total_steps)

            # The workers collect; before, those whom the rule tells to pull this agent's weights do so.
            with run.collecting():
                rollout = cluster.rollout(agent, settings.num_rollout_steps)
            run.add(rollout)
            run.add_stats(cluster.stats())
            if settings.plain and rollout.lag > 0 and not has_warned:
                has_warned = True
                warnings.warn(
                    f"plain PPO met data of a policy {rollout.lag} versions old: its clip holds the learner near that "
                    f"policy, so learning may slow down or stop. Leave out --plain, or use --sync every_update",
                    stacklevel=2,
                )

            # What the present weights say of these rows. Of stale data the log-probs and values that came with the
            # rollout say something else.
            rollout = rollout.to_torch(settings.device)
            obs, actions = rollout.obs.flatten(0, 1), rollout.actions.flatten(0, 1)
            worker_log_probs = rollout.log_probs.flatten()
            with torch.no_grad():
                _, start_log_probs, _, values = agent.get_action_and_value(obs, actions)
                final_values = torch.zeros_like(rollout.rewards)
                final_values[rollout.final_steps, rollout.final_envs] = agent.get_value(rollout.final_obs)
                next_values = agent.get_value(rollout.next_obs)
            estimates = losses.gae(
                rollout.rewards * settings.reward_scale,
                values.view_as(rollout.rewards),
                next_values,
                rollout.terminations,
                rollout.truncations,
                final_values,
                gamma=settings.discount,
                lam=settings.gae_lambda,
            )
            advantages, value_targets = estimates.advantages.flatten(), estimates.returns.flatten()
            advantages = (advantages - advantages.mean()) / (advantages.std(correction=0) + 1e-8)
            if settings.plain:
                start_log_probs = worker_log_probs

            for _ in range(settings.num_epochs):
                for rows in torch.randperm(len(obs)).to(settings.device).chunk(settings.num_minibatches):
                    _, log_probs, entropy, values = agent.get_action_and_value(obs[rows], actions[rows])
                    policy_loss = losses.ppo_decoupled_loss(
                        log_probs,
                        start_log_probs[rows],
                        worker_log_probs[rows],
                        advantages[rows],
                        clip_range=settings.clip_range,
                        max_weight=settings.max_weight,
                    )
                    value_loss = (values - value_targets[rows]).square().mean()
                    bonus = settings.entropy_weight * entropy.mean()
                    loss = policy_loss + settings.value_weight * value_loss - bonus

                    optimizer.zero_grad()
                    loss.backward()
                    nn.utils.clip_grad_norm_(agent.parameters(), settings.max_grad_norm)
                    optimizer.step()

            run.add_update(settings.target)
            if on_update is not None:
                numbers = {"policy": policy_loss.item(), "value": value_loss.item(), "entropy": entropy.mean().item()}
                on_update(run.update(numbers))
            checkpoints.save_when_due()

        checkpoints.save()
        if run.stats is None:  # no update: it was told to stop at once, or has gone on from its end
            run.finish(cluster.stats())
        run.exit_code = stop.exit_code
        if settings.num_eval_episodes and not stop.is_set:
            run.evaluation = cluster.evaluate(agent, settings.num_eval_episodes, seed=settings.seed)
    return run


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


def main() -> int:
    settings = settings_from_command_line(Settings(), __doc__)
    display = UpdateDisplay(settings)
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
        f"{mean_pulls(run.stats):g} pulls for each worker in {run.num_updates} updates ({settings.sync})."
    )
    if run.evaluation is not None:
        print(f"Evaluation without chance: {run.evaluation}.")
    return run.exit_code or int(settings.require_target and not run.target_reached)


if __name__ == "__main__":
    sys.exit(main())
