"""A curriculum on a cluster: the goal moves further away whenever the agent reaches it often, while a stream runs.

    python examples/curriculum.py

The env has a reward only at the goal. Far away from it nobody gets there by chance, and nothing is learned; so the
first goals are near. `cluster.broadcast("distance", ...)` moves them: each env hears of it in its next reset. The
stream does not pause, so rollouts have episodes of both kinds for a while; `rollout.changes` says which row is which.
"""

import sys
from collections import deque
from dataclasses import dataclass
from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium.spaces import Box, Discrete
from torch import nn

import envfleet
from command_line import require_steps, setting, settings_from_command_line
from ppo import Agent


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Everything that can be chosen; each field is a command-line flag."""

    num_workers: int = setting(2, "processes that collect")
    num_envs_per_worker: int = setting(8, "environments of each")
    seed: int = setting(1, "of the environments, the first weights and the minibatches")
    total_steps: int = setting(300_000, "stop after the first update that has seen this many env steps")
    first_distance: float = setting(1.0, "of the goal from the start, at first")
    last_distance: float = setting(12.0, "stop once goals this far away are reached often")
    growth: float = setting(1.5, "goals move this much further away at once")
    success_rate: float = setting(0.8, "what is often: this share of the last --num-mean-episodes")
    num_mean_episodes: int = setting(100, "the success rate is taken over this many last episodes")
    num_rollout_steps: int = setting(64, "steps of each environment in a rollout")
    num_epochs: int = setting(4, "passes over each rollout")
    num_minibatches: int = setting(4, "gradient steps in one pass")
    learning_rate: float = setting(1e-3, "of Adam")
    discount: float = setting(0.97, "gamma")
    gae_lambda: float = setting(0.95, "0: one-step advantages, least variance; 1: whole returns, least bias")
    clip_range: float = setting(0.2, "how far a probability ratio may leave 1 before its gradient stops")
    entropy_weight: float = setting(0.01, "of the entropy bonus")

    def __post_init__(self) -> None:
        require_steps(self.total_steps)


class Goal(gymnasium.Env[Any, Any]):
    """Walk on a plane, one unit in each step, to a goal that is `distance` away in any direction."""

    moves = np.array([(1, 0), (-1, 0), (0, 1), (0, -1)], np.float32)
    most_steps = 40

    def __init__(self, distance: float) -> None:
        self.observation_space = Box(-np.inf, np.inf, (2,), np.float32)  # from here to the goal
        self.action_space = Discrete(4)
        self.distance = distance

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed)
        angle = self.np_random.uniform(0, 2 * np.pi)
        self.to_goal = np.array([np.cos(angle), np.sin(angle)], np.float32) * np.float32(self.distance)
        self.num_steps = 0
        return self.to_goal.copy(), {}

    def step(self, action: Any) -> Any:
        self.to_goal -= self.moves[action]
        self.num_steps += 1
        is_there = bool(np.linalg.norm(self.to_goal) < 0.8)
        return self.to_goal.copy(), float(is_there), is_there, self.num_steps >= self.most_steps, {}


def train(settings: Settings) -> list[tuple[int, float]]:
    """Returns the steps after which goals were moved, and how far away they were then."""
    torch.manual_seed(settings.seed)
    torch.set_num_threads(1)
    distance, change, num_steps = settings.first_distance, 0, 0
    moved = [(0, distance)]
    successes: deque[bool] = deque(maxlen=settings.num_mean_episodes)

    with envfleet.ClusterEnv(
        Goal,
        num_workers=settings.num_workers,
        num_envs_per_worker=settings.num_envs_per_worker,
        env_kwargs={"distance": distance},
        seed=settings.seed,
    ) as cluster:
        agent = Agent(cluster.single_observation_space, cluster.single_action_space, 64)
        optimizer = torch.optim.Adam(agent.parameters(), lr=settings.learning_rate, eps=1e-5)

        for rollout in cluster.stream(agent, settings.num_rollout_steps):
            num_steps += rollout.rewards.size

            # Count only episodes that were begun with the goals where they are now.
            ends = rollout.final_steps, rollout.final_envs
            begun_with = np.zeros(len(ends[0])) if rollout.changes is None else rollout.changes[ends]
            successes.extend(rollout.terminations[ends][begun_with == change].tolist())
            if len(successes) == successes.maxlen and np.mean(successes) >= settings.success_rate:
                print(f"{num_steps:>8,} steps: {np.mean(successes):4.0%} of goals at distance {distance:.1f} reached")
                if distance >= settings.last_distance:
                    break
                distance = min(distance * settings.growth, settings.last_distance)
                change = cluster.broadcast("distance", distance)
                moved.append((num_steps, distance))
                successes.clear()
            if num_steps >= settings.total_steps:
                break

            learn(agent, optimizer, rollout, settings)
            cluster.publish(agent)
    return moved


def learn(agent: Agent, optimizer: torch.optim.Optimizer, rollout: Any, settings: Settings) -> None:
    """One update of PPO."""
    estimates = envfleet.gae_of(rollout, gamma=settings.discount, lam=settings.gae_lambda)
    advantages = torch.from_numpy(estimates.advantages).float().flatten()
    advantages = (advantages - advantages.mean()) / (advantages.std(correction=0) + 1e-8)
    value_targets = torch.from_numpy(estimates.returns).float().flatten()
    rows_of = rollout.to_torch()
    obs, actions, old_log_probs = rows_of.obs.flatten(0, 1), rows_of.actions.flatten(), rows_of.log_probs.flatten()
    for _ in range(settings.num_epochs):
        for rows in torch.randperm(len(obs)).chunk(settings.num_minibatches):
            _, log_probs, entropy, values = agent.get_action_and_value(obs[rows], actions[rows])
            ratio = (log_probs - old_log_probs[rows]).exp()
            clipped_ratio = ratio.clamp(1 - settings.clip_range, 1 + settings.clip_range)
            policy_loss = -torch.minimum(ratio * advantages[rows], clipped_ratio * advantages[rows]).mean()
            value_loss = (values - value_targets[rows]).square().mean()
            loss = policy_loss + 0.5 * value_loss - settings.entropy_weight * entropy.mean()
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(agent.parameters(), 0.5)
            optimizer.step()


def main() -> int:
    settings = settings_from_command_line(Settings(), __doc__)
    num_steps, distance = train(settings)[-1]
    print(f"Goals came to a distance of {distance:.1f}, after {num_steps:,} steps.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
