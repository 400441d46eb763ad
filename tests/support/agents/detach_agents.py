"""Agents that the cluster's tests hand to workers by import."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch  # noqa: TID253 - agents of torch are what this is about
from torch import nn  # noqa: TID253
from torch.distributions import Categorical, Normal  # noqa: TID253


def linear(num_inputs: int, num_outputs: int, seed: int) -> nn.Linear:
    """With weights that do not depend on anybody's random numbers."""
    layer = nn.Linear(num_inputs, num_outputs)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(torch.rand(parameter.shape, generator=generator) - 0.5)
    return layer


class DiscreteAgent(nn.Module):
    """As CleanRL's ppo.py has it."""

    def __init__(self, num_inputs: int = 4, num_actions: int = 2, seed: int = 0) -> None:
        super().__init__()
        self.actor = linear(num_inputs, num_actions, seed)
        self.critic = linear(num_inputs, 1, seed + 1)

    def get_value(self, obs: Any) -> Any:
        return self.critic(obs.float().flatten(1) / 255 if obs.dtype is torch.uint8 else obs)

    def get_action_and_value(self, obs: Any, action: Any = None) -> Any:
        inputs = obs.float().flatten(1) / 255 if obs.dtype is torch.uint8 else obs
        distribution = Categorical(logits=self.actor(inputs))
        action = distribution.sample() if action is None else action
        return action, distribution.log_prob(action), distribution.entropy(), self.critic(inputs)


class GaussianAgent(nn.Module):
    """As CleanRL's ppo_continuous_action.py has it."""

    def __init__(self, num_inputs: int = 3, num_actions: int = 1) -> None:
        super().__init__()
        self.mean = linear(num_inputs, num_actions, 3)
        self.critic = linear(num_inputs, 1, 4)
        self.log_std = nn.Parameter(torch.full((1, num_actions), -1.0))

    def get_value(self, obs: Any) -> Any:
        return self.critic(obs)

    def get_action_and_value(self, obs: Any, action: Any = None) -> Any:
        mean = self.mean(obs)
        distribution = Normal(mean, self.log_std.expand_as(mean).exp())
        action = distribution.sample() if action is None else action
        return action, distribution.log_prob(action).sum(1), distribution.entropy().sum(1), self.critic(obs)


class DictAgent(nn.Module):
    """Dictionaries in, MultiDiscrete actions out."""

    def __init__(self) -> None:
        super().__init__()
        self.actors = nn.ModuleList([linear(2, num, num) for num in (3, 4, 2)])
        self.critic = linear(2, 1, 9)

    def get_value(self, obs: Any) -> Any:
        return self.critic(obs["place"])

    def get_action_and_value(self, obs: Any, action: Any = None) -> Any:
        distributions = [Categorical(logits=actor(obs["place"])) for actor in self.actors]
        if action is None:
            action = torch.stack([each.sample() for each in distributions], dim=1)
        log_probs = torch.stack([each.log_prob(action[:, i]) for i, each in enumerate(distributions)])
        return action, log_probs.sum(0), log_probs.sum(0), self.critic(obs["place"])


class CountingPolicy:
    """A NumPy policy by its import path: the action is a threshold of a weight; extras of several shapes."""

    def __init__(self, scale: float = 1.0, names: tuple[str, ...] = ("a",)) -> None:
        self.scale = scale
        self.names = names
        self.weights = {"threshold": np.zeros(1, np.float32)}

    def act(self, obs: Any) -> Any:
        from envfleet import Acted

        actions = (obs[:, 0] * self.scale > self.weights["threshold"]).astype(np.int64)
        hidden = np.stack([obs[:, 1], obs[:, 2]], axis=1).astype(np.float16)
        return Acted(actions, self.log_prob(obs, actions), {"hidden": hidden, "values": self.values(obs)})

    def log_prob(self, obs: Any, actions: Any) -> Any:
        return np.full(len(obs), -1.0 - self.weights["threshold"][0], np.float32)

    def values(self, obs: Any) -> Any:
        return (obs[:, 3] + self.weights["threshold"]).astype(np.float32)

    def get_weights(self) -> Any:
        return dict(self.weights)

    def set_weights(self, weights: Any) -> None:
        self.weights = {name: np.array(weight) for name, weight in weights.items()}
