"""Actors, agents and an env with masks, which the cluster's tests hand to workers by import."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
import torch  # noqa: TID253 - agents of torch are what this is about
from gymnasium import spaces
from torch import nn  # noqa: TID253
from torch.distributions import Bernoulli, Categorical, Independent  # noqa: TID253

from tests.support.agents.detach_agents import linear


class SacActor(nn.Module):
    """As CleanRL's sac_continuous_action.py has it; for Pendulum."""

    def __init__(self) -> None:
        super().__init__()
        self.mean, self.log_std = linear(3, 1, 1), linear(3, 1, 2)
        self.register_buffer("action_scale", torch.tensor([2.0]))
        self.register_buffer("action_bias", torch.tensor([0.0]))

    def forward(self, obs: Any) -> Any:
        return self.mean(obs), torch.tanh(self.log_std(obs))


class Td3Actor(nn.Module):
    """As CleanRL's td3_continuous_action.py has it; for Pendulum."""

    def __init__(self) -> None:
        super().__init__()
        self.body = linear(3, 1, 3)

    def forward(self, obs: Any) -> Any:
        return 2.0 * torch.tanh(self.body(obs))


class MaskedAgent(nn.Module):
    """Never does what the mask in the observation forbids."""

    def __init__(self) -> None:
        super().__init__()
        self.actor, self.critic = linear(2, 4, 5), linear(2, 1, 6)

    def get_distribution(self, obs: Any) -> Any:
        return Categorical(logits=self.actor(obs["place"]).masked_fill(obs["action_mask"] == 0, -1e8))

    def get_value(self, obs: Any) -> Any:
        return self.critic(obs["place"])

    def get_action_and_value(self, obs: Any, action: Any = None) -> Any:
        choice = self.get_distribution(obs)
        action = choice.sample() if action is None else action
        return action, choice.log_prob(action), choice.entropy(), self.get_value(obs)


class SwitchesAgent(nn.Module):
    """Dictionaries in, MultiBinary actions out; for EveryKindEnv."""

    def __init__(self) -> None:
        super().__init__()
        self.actor, self.critic = linear(2, 5, 7), linear(2, 1, 8)

    def get_distribution(self, obs: Any) -> Any:
        return Independent(Bernoulli(logits=0.1 * self.actor(obs["place"])), 1)

    def get_action_and_value(self, obs: Any, action: Any = None) -> Any:
        switches = self.get_distribution(obs)
        action = switches.sample() if action is None else action
        log_probs = switches.log_prob(action.float())
        return action.to(torch.int8), log_probs, switches.entropy(), self.critic(obs["place"])


class MaskedEnv(gymnasium.Env[Any, Any]):
    """Some of four actions are forbidden, others in each step; it raises if one of them is taken."""

    def __init__(self) -> None:
        self.action_space = spaces.Discrete(4)
        self.observation_space = spaces.Dict(
            {"place": spaces.Box(-1, 1, (2,), np.float32), "action_mask": spaces.MultiBinary(4)}
        )

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        return self._obs(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        if not self._mask[action]:
            raise ValueError(f"action {action} is masked out")
        return self._obs(), 1.0, bool(self.np_random.random() < 0.1), False, {}

    def _obs(self) -> Any:
        self._mask = self.np_random.permutation(np.array([1, 1, 0, 0], np.int8))
        return {"place": self.np_random.uniform(-1, 1, 2).astype(np.float32), "action_mask": self._mask}
