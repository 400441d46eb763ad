"""PPO on a local pool: trains CartPole-v1 until its last 100 episodes return 475 on average.

    python examples/ppo_local.py
    python examples/ppo_local.py --env-id Acrobot-v1 --target -100

Writes learning_curve.png and summary.json into --output-dir. Checkpoints are the cluster's: ppo.py has them, also on
one machine.
"""

import dataclasses
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gymnasium.spaces import Box, Discrete
from gymnasium.vector import VectorEnv
from gymnasium.wrappers.vector import RecordEpisodeStatistics
from torch import Tensor, nn

import envfleet
from command_line import require_steps, setting, settings_from_command_line
from display import Bar, TrainingRun, draw_learning_curve, in_words


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Everything that can be chosen; each field is a command-line flag."""

    env_id: str = setting("CartPole-v1", "a Gymnasium id, with Box observations and Discrete actions")
    num_envs: int = setting(16, "environments in the pool")
    seed: int = setting(1, "of the environments, the first weights, the actions and the minibatches")
    total_steps: int = setting(500_000, "stop after the first update that has seen this many env steps")
    target: float = setting(475.0, "stop once the mean return is this high")
    num_mean_episodes: int = setting(100, "the mean return is taken over this many last episodes")
    require_target: bool = setting(False, "exit with 1 if the target was not reached")
    output_dir: str = setting("runs/ppo_local", "where the learning curve and the summary go")
    device: str = setting("cpu", "where the networks and the rollout are, as torch calls it: cpu, cuda, cuda:1")

    num_rollout_steps: int = setting(128, "steps of each environment between two updates")
    num_epochs: int = setting(10, "passes over each rollout")
    num_minibatches: int = setting(4, "gradient steps in one pass")
    learning_rate: float = setting(1e-3, "of Adam at the start; falls to 0 in a line over --total-steps")
    discount: float = setting(0.99, "gamma")
    gae_lambda: float = setting(0.95, "0: one-step advantages, least variance; 1: whole returns, least bias")
    clip_range: float = setting(0.2, "how far a probability ratio may leave 1 before its gradient stops")
    value_weight: float = setting(0.5, "of the value loss")
    entropy_weight: float = setting(0.0, "of the entropy bonus")
    max_grad_norm: float = setting(0.5, "longer gradients are scaled down to this length")
    num_hidden: int = setting(64, "units in each of the two hidden layers")

    def __post_init__(self) -> None:
        require_steps(self.total_steps)
        # Any row may be a reset, but never two that follow each other: of 2, one can be learned from.
        if self.num_rollout_steps < 2:
            raise ValueError(f"num_rollout_steps must be at least 2, got {self.num_rollout_steps}")


def train(settings: Settings, pool: VectorEnv[Any, Any, Any], display: Bar) -> TrainingRun:
    torch.manual_seed(settings.seed)
    # The nets are too small to share out: a second torch thread makes training slower (measured).
    torch.set_num_threads(1)

    envs = RecordEpisodeStatistics(pool)
    obs_space, action_space = envs.single_observation_space, envs.single_action_space
    if not (isinstance(obs_space, Box) and isinstance(action_space, Discrete) and action_space.start == 0):
        raise TypeError(f"expected Box observations and Discrete actions from 0, got {obs_space}, {action_space}")
    agent = Agent(obs_space.shape, int(action_space.n), settings.num_hidden).to(settings.device)
    optimizer = torch.optim.Adam(agent.parameters(), lr=settings.learning_rate, eps=1e-5)

    shape = (settings.num_rollout_steps, settings.num_envs)  # [T, N]
    with torch.device(settings.device):
        obs = torch.zeros(shape[0] + 1, shape[1], *obs_space.shape)  # the extra row is what the last step led to
        actions = torch.zeros(shape, dtype=torch.int64)
        rewards = torch.zeros(shape)
        terminated = torch.zeros(shape, dtype=torch.bool)
        ended = torch.zeros(shape, dtype=torch.bool)  # terminated or truncated
        is_real = torch.zeros(shape, dtype=torch.bool)  # False: this step only reset the env

    run = TrainingRun(num_mean_episodes=settings.num_mean_episodes)
    obs[-1] = torch.tensor(envs.reset(seed=settings.seed)[0])

    while run.num_steps < settings.total_steps and not run.target_reached:
        for group in optimizer.param_groups:
            group["lr"] = settings.learning_rate * (1 - run.num_steps / settings.total_steps)

        # Collect: each rollout goes on where the one before stopped, in the middle of episodes.
        obs[0] = obs[-1]
        for t in range(settings.num_rollout_steps):
            # The step after an episode's last ignores its action and resets the env. Its row holds an old
            # observation, an action without effect and a reward of 0: nothing true can be learned from it.
            is_real[t] = ~ended[t - 1]  # at t = 0, row -1 is the last of the rollout before
            with torch.no_grad():
                actions[t] = torch.multinomial(agent.log_probs(obs[t]).exp(), 1).squeeze(-1)
            next_obs, step_rewards, terminations, truncations, info = envs.step(actions[t].cpu().numpy())
            obs[t + 1] = torch.tensor(next_obs)
            rewards[t] = torch.tensor(step_rewards)
            terminated[t] = torch.tensor(terminations)
            ended[t] = torch.tensor(terminations | truncations)
            returns = info["episode"]["r"][info["_episode"]].tolist() if "episode" in info else []
            run.add_steps(int(is_real[t].sum()), returns)

        # The weights are still those that chose the actions, so one pass here saves one in every step.
        with torch.no_grad():
            values = agent.values(obs)
            log_probs = log_prob_of(actions, agent.log_probs(obs[:-1]))
        advantages = advantages_of(rewards, values, terminated, ended, settings)

        # Drop the reset rows. None has leaked into a real one: `ended` cuts the sum just before each.
        batch_obs, batch_actions, batch_log_probs = obs[:-1][is_real], actions[is_real], log_probs[is_real]
        batch_returns = (advantages + values[:-1])[is_real]
        batch_advantages = advantages[is_real]
        batch_advantages -= batch_advantages.mean()
        batch_advantages /= batch_advantages.std(correction=0) + 1e-8

        for _ in range(settings.num_epochs):
            for rows in torch.randperm(len(batch_obs)).to(settings.device).chunk(settings.num_minibatches):
                new_log_probs = agent.log_probs(batch_obs[rows])
                ratio = (log_prob_of(batch_actions[rows], new_log_probs) - batch_log_probs[rows]).exp()
                clipped_ratio = ratio.clamp(1 - settings.clip_range, 1 + settings.clip_range)
                advantage = batch_advantages[rows]
                policy_loss = -torch.minimum(ratio * advantage, clipped_ratio * advantage).mean()
                value_loss = (agent.values(batch_obs[rows]) - batch_returns[rows]).square().mean()
                entropy = -(new_log_probs.exp() * new_log_probs).sum(-1).mean()
                loss = policy_loss + settings.value_weight * value_loss - settings.entropy_weight * entropy

                optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(agent.parameters(), settings.max_grad_norm)
                optimizer.step()

        run.add_update(settings.target)
        display.show(run.num_steps, run.duration_s, f", mean return {in_words(run.mean_return)}")
    return run


class Agent(nn.Module):
    """The policy and the value function; they share no weights."""

    def __init__(self, obs_shape: tuple[int, ...], num_actions: int, num_hidden: int) -> None:
        super().__init__()
        # A last layer near zero: at first every action is about equally likely.
        self.policy = mlp(obs_shape, num_hidden, num_actions, last_gain=0.01)
        self.value_function = mlp(obs_shape, num_hidden, 1, last_gain=1.0)

    def log_probs(self, obs: Tensor) -> Tensor:
        """Of all actions: [..., *obs_shape] -> [..., num_actions]."""
        return torch.log_softmax(self.policy(obs), dim=-1)

    def values(self, obs: Tensor) -> Tensor:
        """[..., *obs_shape] -> [...]."""
        return torch.squeeze(self.value_function(obs), dim=-1)


def mlp(obs_shape: tuple[int, ...], num_hidden: int, num_outputs: int, *, last_gain: float) -> nn.Sequential:
    layers: list[nn.Module] = [nn.Flatten(start_dim=-len(obs_shape))]
    sizes = [int(np.prod(obs_shape)), num_hidden, num_hidden, num_outputs]
    for num_in, num_out, gain in zip(sizes[:-1], sizes[1:], (2**0.5, 2**0.5, last_gain), strict=True):
        linear = nn.Linear(num_in, num_out)
        nn.init.orthogonal_(linear.weight, gain)
        nn.init.zeros_(linear.bias)
        layers += [linear, nn.Tanh()]
    return nn.Sequential(*layers[:-1])


def log_prob_of(actions: Tensor, log_probs: Tensor) -> Tensor:
    return log_probs.gather(-1, actions.unsqueeze(-1)).squeeze(-1)


def advantages_of(rewards: Tensor, values: Tensor, terminated: Tensor, ended: Tensor, settings: Settings) -> Tensor:
    """Generalized advantage estimates; `values` is [T + 1, N], all else [T, N].

    Two flags, because they stop two things. After a termination nothing follows: the next value counts as 0.
    After a truncation it counts in full, and it is at hand: with next-step autoreset the next row still holds
    the last observation of the old episode. Both stop the sum over time: later rows are another episode's.
    """
    advantages = torch.zeros_like(rewards)
    later = torch.zeros_like(rewards[0])
    for t in reversed(range(len(rewards))):
        next_values = torch.where(terminated[t], 0.0, values[t + 1])
        td_errors = rewards[t] + settings.discount * next_values - values[t]
        later = td_errors + settings.discount * settings.gae_lambda * torch.where(ended[t], 0.0, later)
        advantages[t] = later
    return advantages


def main() -> int:
    settings = settings_from_command_line(Settings(), __doc__)
    display = Bar(settings, "first rollout", at_most=True)
    with envfleet.make(settings.env_id, num_envs=settings.num_envs, seed=settings.seed) as pool, display:
        run = train(settings, pool, display)

    output_dir = Path(settings.output_dir)
    output_dir.mkdir(parents=True, exist_ok=True)
    curve_path, summary_path = output_dir / "learning_curve.png", output_dir / "summary.json"
    draw_learning_curve(run, settings, curve_path)
    summary = {
        "target_reached": run.target_reached,
        "mean_return": run.mean_return,
        "num_episodes": len(run.episodes),
        "num_steps": run.num_steps,
        "duration_s": round(run.duration_s, 3),
        "steps_per_s": round(run.num_steps / run.duration_s, 1),
        "learning_curve": str(curve_path),
        "settings": dataclasses.asdict(settings),
    }
    summary_path.write_text(json.dumps(summary, indent=2) + "\n")
    print(
        f"{settings.env_id}: target of {settings.target:g} {'' if run.target_reached else 'not '}reached.\n"
        f"Mean return of the last {min(len(run.episodes), settings.num_mean_episodes)} episodes: "
        f"{in_words(run.mean_return)}, after {run.num_steps:,} steps in {run.duration_s:.1f} s "
        f"({summary['steps_per_s']:,.0f} steps/s).\n"
        f"Learning curve: {curve_path}\nSummary: {summary_path}"
    )
    return 1 if settings.require_target and not run.target_reached else 0


if __name__ == "__main__":
    sys.exit(main())
