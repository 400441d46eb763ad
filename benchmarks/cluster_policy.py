"""Agent: what all contenders of benchmarks/cluster.py act with: two MLPs of 2x64 tanh units, in CleanRL's form."""

from __future__ import annotations

from typing import Any

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
