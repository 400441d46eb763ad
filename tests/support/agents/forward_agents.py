"""Agents that act by forward(obs, action=None), as ClusterEnv's example agent does, and some that only look so."""

from __future__ import annotations

from typing import Any

import torch  # noqa: TID253 - agents of torch are what this is about
from torch import nn  # noqa: TID253
from torch.distributions import Categorical, Normal  # noqa: TID253


class ForwardAgent(nn.Module):
    """Logits from `.actor`, values from `.critic`; forward returns action, log_prob, entropy, value."""

    def __init__(self, num_inputs: int = 4, num_actions: int = 2, num_hidden: int = 32) -> None:
        super().__init__()
        self.actor = nn.Sequential(nn.Linear(num_inputs, num_hidden), nn.Tanh(), nn.Linear(num_hidden, num_actions))
        self.critic = nn.Sequential(nn.Linear(num_inputs, num_hidden), nn.Tanh(), nn.Linear(num_hidden, 1))

    def forward(self, x: Any, action: Any = None) -> Any:
        chances = Categorical(logits=self.actor(x))
        if action is None:
            action = chances.sample()
        return action, chances.log_prob(action), chances.entropy(), self.critic(x)


class WarmAgent(ForwardAgent):
    """Draws from other logits than its actor gives."""

    def forward(self, x: Any, action: Any = None) -> Any:
        chances = Categorical(logits=self.actor(x) / 2)
        action = chances.sample() if action is None else action
        return action, chances.log_prob(action), chances.entropy(), self.critic(x)


class ForwardGaussian(nn.Module):
    """Continuous actions: what `.actor` gives are no logits."""

    def __init__(self) -> None:
        super().__init__()
        self.actor, self.critic = nn.Linear(4, 2), nn.Linear(4, 1)

    def forward(self, x: Any, action: Any = None) -> Any:
        chances = Normal(self.actor(x), 1.0)
        action = chances.sample() if action is None else action
        return action, chances.log_prob(action).sum(1), chances.entropy().sum(1), self.critic(x)


class TellsDevice(ForwardAgent):
    """Its values say on which device it acts: the length of the device's name."""

    def forward(self, x: Any, action: Any = None) -> Any:
        action, log_prob, entropy, _ = super().forward(x, action)
        return action, log_prob, entropy, torch.full_like(log_prob, len(x.device.type))
