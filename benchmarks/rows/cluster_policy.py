"""Agent: what all contenders of benchmarks/cluster.py act with: two MLPs of 2x64 tanh units, in CleanRL's form.

And the same networks in NumPy, as functions of the agent's weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch  # noqa: TID253 - whoever imports this file needs it
from torch import nn  # noqa: TID253
from torch.distributions import Categorical  # noqa: TID253


def mlp(num_inputs: int, num_outputs: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(num_inputs, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, num_outputs))


class Agent(nn.Module):
    """An actor and a critic beside it."""

    def __init__(self, num_inputs: int = 4, num_actions: int = 2) -> None:
        super().__init__()
        self.actor = mlp(num_inputs, num_actions)
        self.critic = mlp(num_inputs, 1)

    def get_value(self, obs: torch.Tensor) -> torch.Tensor:
        return self.critic(obs)

    def get_action_and_value(self, obs: torch.Tensor, action: torch.Tensor | None = None) -> tuple[Any, ...]:
        distribution = Categorical(logits=self.actor(obs))
        if action is None:
            action = distribution.sample()
        return action, distribution.log_prob(action), distribution.entropy(), self.critic(obs)


Arrays = Mapping[str, np.ndarray]
rng = np.random.default_rng()


def act(weights: Arrays, obs: np.ndarray) -> tuple[np.ndarray, np.ndarray, dict[str, np.ndarray]]:
    """As Agent.get_action_and_value does."""
    log_probs = _log_softmax(_mlp(weights, "actor", obs))
    chosen = (rng.random((len(obs), 1)) > np.cumsum(np.exp(log_probs), axis=1)).sum(axis=1)
    actions = np.minimum(chosen, log_probs.shape[1] - 1)
    return actions, log_probs[np.arange(len(obs)), actions], {"values": values(weights, obs)}


def log_prob(weights: Arrays, obs: np.ndarray, actions: np.ndarray) -> np.ndarray:
    """Of actions that were taken."""
    return _log_softmax(_mlp(weights, "actor", obs))[np.arange(len(obs)), actions]


def values(weights: Arrays, obs: np.ndarray) -> np.ndarray:
    """As Agent.get_value."""
    return _mlp(weights, "critic", obs)[:, 0]


def _mlp(weights: Arrays, name: str, obs: np.ndarray) -> np.ndarray:
    hidden = np.tanh(obs @ weights[f"{name}.0.weight"].T + weights[f"{name}.0.bias"])
    hidden = np.tanh(hidden @ weights[f"{name}.2.weight"].T + weights[f"{name}.2.bias"])
    return hidden @ weights[f"{name}.4.weight"].T + weights[f"{name}.4.bias"]


def _log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = logits - logits.max(axis=1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))
