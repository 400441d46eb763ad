"""A curriculum on a cluster: the goal moves further away whenever the agent reaches it often, while a stream runs.

    python examples/curriculum.py
    python examples/curriculum.py --checkpoint curriculum.ckpt --resume auto

The env has a reward only at the goal. Far away from it nobody gets there by chance, and nothing is learned; so the
first goals are near. `cluster.broadcast("distance", ...)` moves them: each env hears of it in its next reset. The
stream does not pause, so rollouts have episodes of both kinds for a while; `rollout.changes` says which row is which.
"""

import sys
from collections import deque
from dataclasses import dataclass, field
from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium.spaces import Box, Discrete
from torch import nn

import envfleet
from checkpoints import Checkpoints
from command_line import RunSettings, require_steps, setting, settings_from_command_line
from ppo import Agent


@dataclass(frozen=True, kw_only=True)
class Settings(RunSettings):
    """Everything that can be chosen, besides where it runs; each field is a command-line flag."""

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
        super().__post_init__()
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


@dataclass
class Progress:
    """How far the curriculum has come."""

    distance: float  # of the goals that envs begin with now
    num_steps: int = 0
    moved: list[tuple[int, float]] = field(default_factory=list)  # after how many steps goals were moved, how far
    exit_code: int = 0

    def state_dict(self) -> dict[str, Any]:
        return {"distance": self.distance, "num_steps": self.num_steps, "moved": np.reshape(self.moved, (-1, 2))}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.distance, self.num_steps = state["distance"], state["num_steps"]
        self.moved = [(int(num_steps), distance) for num_steps, distance in state["moved"].tolist()]


def train(settings: Settings) -> Progress:
    torch.manual_seed(settings.seed)
    torch.set_num_threads(1)
    progress = Progress(settings.first_distance)
    successes: deque[bool] = deque(maxlen=settings.num_mean_episodes)  # of goals that are where they are now

    with (
        envfleet.ClusterEnv(
            Goal,
            num_workers=settings.num_workers,
            num_envs_per_worker=settings.num_envs_per_worker,
            env_kwargs={"distance": progress.distance},
            seed=settings.seed,
            **settings.where,
        ) as cluster,
        envfleet.StopSignal(settings.checkpoint) as stop,
    ):
        agent = Agent(cluster.single_observation_space, cluster.single_action_space, 64).to(settings.device)
        optimizer = torch.optim.Adam(agent.parameters(), lr=settings.learning_rate, eps=1e-5)
        checkpoints = Checkpoints(cluster, settings, agent=agent, optimizer=optimizer, progress=progress)
        change = cluster.broadcast("distance", progress.distance)  # after a resume not that of env_kwargs

        for rollout in cluster.stream(agent, settings.num_rollout_steps):
            progress.num_steps += rollout.rewards.size

            # Count only episodes that were begun with the goals where they are now.
            ends = rollout.final_steps, rollout.final_envs
            successes.extend(rollout.terminations[ends][rollout.changes[ends] == change].tolist())
            if len(successes) == successes.maxlen and np.mean(successes) >= settings.success_rate:
                rate, distance = np.mean(successes), progress.distance
                print(f"{progress.num_steps:>8,} steps: {rate:4.0%} of goals at distance {distance:.1f} reached")
                if distance >= settings.last_distance:
                    break
                progress.distance = min(distance * settings.growth, settings.last_distance)
                progress.moved.append((progress.num_steps, progress.distance))
                change = cluster.broadcast("distance", progress.distance)
                successes.clear()
            if progress.num_steps >= settings.total_steps or stop.is_set:
                break

            learn(agent, optimizer, rollout, settings)
            cluster.publish(agent)
            checkpoints.save_when_due()
        checkpoints.save()
        progress.exit_code = stop.exit_code
    return progress


def learn(agent: Agent, optimizer: torch.optim.Optimizer, rollout: Any, settings: Settings) -> None:
    """One update of PPO."""
    estimates = envfleet.gae_of(rollout, gamma=settings.discount, lam=settings.gae_lambda)
    advantages = torch.from_numpy(estimates.advantages).float().flatten().to(settings.device)
    advantages = (advantages - advantages.mean()) / (advantages.std(correction=0) + 1e-8)
    value_targets = torch.from_numpy(estimates.returns).float().flatten().to(settings.device)
    rows_of = rollout.to_torch(settings.device)
    obs, actions, old_log_probs = rows_of.obs.flatten(0, 1), rows_of.actions.flatten(), rows_of.log_probs.flatten()
    for _ in range(settings.num_epochs):
        for rows in torch.randperm(len(obs)).to(settings.device).chunk(settings.num_minibatches):
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
    progress = train(settings)
    num_steps = progress.moved[-1][0] if progress.moved else 0
    print(f"Goals came to a distance of {progress.distance:.1f}, after {num_steps:,} steps.")
    return progress.exit_code


if __name__ == "__main__":
    sys.exit(main())
