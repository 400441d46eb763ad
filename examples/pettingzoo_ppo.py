"""PPO with one policy for all agents of a PettingZoo game, on a cluster: pursuers of SISL's pursuit learn to catch.

    python examples/pettingzoo_ppo.py
    python examples/pettingzoo_ppo.py --checkpoint pursuit.ckpt --resume auto --launcher slurm

Needs `pip install "envfleet[pettingzoo,torch]" pygame scipy`. Each (env, agent) is a column of the rollout that the
learner sees; rows of agents that are not there do not count. The return is the sum over agents.
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributions import Categorical

import envfleet
from checkpoints import Checkpoints
from command_line import RunSettings, require_steps, setting, settings_from_command_line, sync_rule
from display import TrainingRun, Update, UpdateDisplay, in_words
from envfleet import losses
from envfleet.adapters.agent_rollouts import agent_rows
from envfleet.adapters.pettingzoo import SharedEnv, agents_of


@dataclass(frozen=True, kw_only=True)
class Settings(RunSettings):
    """Everything that can be chosen, besides where it runs; each field is a command-line flag."""

    env_id: ClassVar[str] = "pursuit"  # what the display calls it
    grid_size: int = setting(8, "fields of the map's sides")
    num_pursuers: int = setting(4, "agents")
    num_evaders: int = setting(4, "whom they catch, two agents on one field")
    max_cycles: int = setting(100, "steps of an episode")

    num_workers: int = setting(2, "processes that collect")
    num_envs_per_worker: int = setting(8, "games of each")
    seed: int = setting(1, "of the games, the first weights, the actions and the minibatches")
    total_steps: int = setting(100_000, "stop after the first update that has seen this many steps of games")
    target: float | None = setting(None, "stop once the mean return is this high", float)
    num_mean_episodes: int = setting(100, "the mean return is taken over this many last episodes")
    require_target: bool = setting(False, "exit with 1 if the target was not reached")

    sync: str = setting("every_update", "when workers pull new weights: aps, every_update, every:K (updates) or never")
    threshold: float = setting(0.1, "aps: pull if the policies are further apart than this, summed over agents")
    max_lag: int = setting(16, "aps: pull if more versions behind than this, whatever the divergence")

    num_rollout_steps: int = setting(64, "steps of each game between two updates")
    num_epochs: int = setting(4, "passes over each rollout")
    num_minibatches: int = setting(4, "gradient steps in one pass")
    learning_rate: float = setting(1e-3, "of Adam at the start; falls to 0 in a line over --total-steps")
    discount: float = setting(0.95, "gamma")
    gae_lambda: float = setting(0.95, "0: one-step advantages, least variance; 1: whole returns, least bias")
    clip_range: float = setting(0.2, "how far a probability ratio may leave 1 before its gradient stops")
    entropy_weight: float = setting(0.01, "of the entropy bonus")
    num_hidden: int = setting(128, "units in each of the two hidden layers")

    def __post_init__(self) -> None:
        super().__post_init__()
        require_steps(self.total_steps)
        sync_rule(self)

    def make_game(self) -> Callable[[], SharedEnv]:
        return partial(
            pursuit,
            x_size=self.grid_size,
            y_size=self.grid_size,
            n_pursuers=self.num_pursuers,
            n_evaders=self.num_evaders,
            max_cycles=self.max_cycles,
            surround=False,
        )


def pursuit(**options: Any) -> SharedEnv:
    from pettingzoo.sisl import pursuit_v5  # on the worker, in the process that plays it

    return SharedEnv(pursuit_v5.parallel_env, **options)


def train(settings: Settings, on_update: Callable[[Update], None] | None = None) -> TrainingRun:
    """Train the agents' policy; `on_update` is called after each update."""
    torch.manual_seed(settings.seed)
    torch.set_num_threads(1)
    run = TrainingRun(num_mean_episodes=settings.num_mean_episodes)
    with (
        envfleet.ClusterEnv(
            settings.make_game(),
            num_workers=settings.num_workers,
            num_envs_per_worker=settings.num_envs_per_worker,
            sync=sync_rule(settings),
            seed=settings.seed,
            **settings.where,
        ) as cluster,
        envfleet.StopSignal(settings.checkpoint) as stop,
    ):
        agents, spaces = agents_of(cluster), cluster.single_observation_space
        agent = Agent(spaces["agents"].shape[1:], int(cluster.single_action_space.nvec[0]), settings.num_hidden)
        agent.to(settings.device)
        policies = envfleet.PolicyMapping({"pursuer": agent}, dict.fromkeys(agents, "pursuer"), agents)
        optimizer = torch.optim.Adam(agent.parameters(), lr=settings.learning_rate, eps=1e-5)
        checkpoints = Checkpoints(cluster, settings, agent=agent, optimizer=optimizer, run=run)

        while run.num_steps < settings.total_steps and not run.target_reached and not stop.is_set:
            for group in optimizer.param_groups:
                group["lr"] = settings.learning_rate * (1 - run.num_steps / settings.total_steps)
            with run.collecting():
                rollout = cluster.rollout(policies, settings.num_rollout_steps)
            run.add(rollout)
            run.add_stats(cluster.stats())

            # A column for each (env, agent); what the present weights say of its rows.
            columns = agent_rows(rollout)
            tensor = partial(torch.as_tensor, device=settings.device)
            rewards, is_active = tensor(columns.rewards, dtype=torch.float32), tensor(columns.active).flatten()
            obs, actions = tensor(columns.obs).flatten(0, 1), tensor(columns.actions).flatten()
            worker_log_probs = tensor(columns.log_probs).flatten()
            with torch.no_grad():
                _, start_log_probs, _, values = agent.get_action_and_value(obs, actions)
                final_values = torch.zeros_like(rewards)
                if len(columns.final_obs):
                    ends = tensor(columns.final_steps), tensor(columns.final_rows)
                    final_values[ends] = agent.get_value(tensor(columns.final_obs))
                next_values = agent.get_value(tensor(columns.next_obs))
            estimates = losses.gae(
                rewards,
                values.view_as(rewards),
                next_values,
                tensor(columns.terminations),
                tensor(columns.truncations),
                final_values,
                gamma=settings.discount,
                lam=settings.gae_lambda,
            )
            advantages, value_targets = estimates.advantages.flatten(), estimates.returns.flatten()
            acted = is_active.nonzero().squeeze(-1)
            advantages = (advantages - advantages[acted].mean()) / (advantages[acted].std(correction=0) + 1e-8)

            for _ in range(settings.num_epochs):
                for rows in acted[torch.randperm(len(acted)).to(settings.device)].chunk(settings.num_minibatches):
                    _, log_probs, entropy, values = agent.get_action_and_value(obs[rows], actions[rows])
                    policy_loss = losses.ppo_decoupled_loss(
                        log_probs,
                        start_log_probs[rows],
                        worker_log_probs[rows],
                        advantages[rows],
                        clip_range=settings.clip_range,
                    )
                    value_loss = (values - value_targets[rows]).square().mean()
                    loss = policy_loss + 0.5 * value_loss - settings.entropy_weight * entropy.mean()
                    optimizer.zero_grad()
                    loss.backward()
                    nn.utils.clip_grad_norm_(agent.parameters(), 0.5)
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
    return run


class Agent(nn.Module):
    """The policy and the value function of each pursuer."""

    def __init__(self, obs_shape: tuple[int, ...], num_actions: int, num_hidden: int) -> None:
        super().__init__()
        sizes = int(np.prod(obs_shape)), num_hidden
        self.body = nn.Sequential(
            nn.Flatten(), nn.Linear(*sizes), nn.ReLU(), nn.Linear(num_hidden, num_hidden), nn.ReLU()
        )
        self.policy, self.value_function = nn.Linear(num_hidden, num_actions), nn.Linear(num_hidden, 1)
        nn.init.orthogonal_(self.policy.weight, 0.01)

    def get_value(self, obs: Tensor) -> Tensor:
        return self.value_function(self.body(obs)).squeeze(-1)

    def get_action_and_value(self, obs: Tensor, action: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The action, its log-prob, the entropy and the value."""
        features = self.body(obs)
        distribution = Categorical(logits=self.policy(features), validate_args=False)
        if action is None:
            action = distribution.sample()
        value = self.value_function(features).squeeze(-1)
        return action, distribution.log_prob(action), distribution.entropy(), value


def main() -> int:
    settings = settings_from_command_line(Settings(), __doc__)
    display = UpdateDisplay(settings)
    with display.bar:
        run = train(settings, on_update=display.update)
    first = np.mean([episode_return for _, episode_return in run.episodes[: settings.num_mean_episodes]])
    print(
        f"Mean return of the first {settings.num_mean_episodes} episodes {first:.1f}, of the last "
        f"{in_words(run.mean_return)}, after {run.num_steps:,} steps in {run.duration_s:.1f} s."
    )
    return run.exit_code or int(settings.require_target and not run.target_reached)


if __name__ == "__main__":
    sys.exit(main())
