"""Agents of Taxi that keep to action masks, in each form that a policy may have."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch  # noqa: TID253 - agents of torch are what this is about
from torch import nn  # noqa: TID253
from torch.distributions import Categorical  # noqa: TID253

import envfleet
from tests.support.agents.detach_agents import linear

NUM_STATES, NUM_ACTIONS = 500, 6


def masked_logits(logits: Any, action_mask: Any) -> Any:
    return logits if action_mask is None else torch.where(action_mask, logits, -torch.inf)


class MaskedAgent(nn.Module):
    """In CleanRL's form, with an argument more."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        self.actor = linear(NUM_STATES, NUM_ACTIONS, seed)
        self.critic = linear(NUM_STATES, 1, seed + 1)

    def get_value(self, obs: Any) -> Any:
        return self.critic(_one_hot(obs))

    def get_distribution(self, obs: Any, action_mask: Any = None) -> Any:
        return Categorical(logits=masked_logits(10 * self.actor(_one_hot(obs)), action_mask))

    def get_action_and_value(self, obs: Any, action: Any = None, action_mask: Any = None) -> Any:
        distribution = self.get_distribution(obs, action_mask)
        action = distribution.sample() if action is None else action
        return action, distribution.log_prob(action), distribution.entropy(), self.get_value(obs)


class MaskedMemory(nn.Module):
    """With an LSTM, as CleanRL's ppo_atari_lstm.py has it."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(NUM_STATES, 4)
        self.actor = linear(4, NUM_ACTIONS, 0)

    def get_action_and_value(self, obs: Any, lstm_state: Any, done: Any, action: Any = None, action_mask: Any = None):
        hidden, lstm_state = self.lstm(_one_hot(obs)[None], lstm_state)
        distribution = Categorical(logits=masked_logits(self.actor(hidden[0]), action_mask))
        action = distribution.sample() if action is None else action
        return action, distribution.log_prob(action), distribution.entropy(), None, lstm_state


class QNetwork(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = linear(NUM_STATES, NUM_ACTIONS, 0)

    def forward(self, obs: Any) -> Any:
        return self.layer(_one_hot(obs))


def first_allowed(obs: Any, action_mask: Any) -> Any:
    return action_mask.argmax(1), np.zeros(len(obs), np.float32)


def sure(obs: Any, actions: Any, action_mask: Any) -> Any:
    return np.where(actions == action_mask.argmax(1), 0.0, -np.inf)


class OwnPolicy:
    """Any class: the last action that is allowed."""

    def act(self, obs: Any, *, action_mask: Any) -> envfleet.Acted:
        return envfleet.Acted(NUM_ACTIONS - 1 - action_mask[:, ::-1].argmax(1), None, {})

    def log_prob(self, obs: Any, actions: Any, *, action_mask: Any) -> Any:
        raise NotImplementedError

    def values(self, obs: Any) -> Any:
        return None

    def get_weights(self) -> Any:
        return {}

    def set_weights(self, weights: Any) -> None:
        pass


AGENTS = {
    "module": MaskedAgent,
    "traced module": lambda: envfleet.TorchPolicy(MaskedAgent(), traced=True),
    "recurrent module": MaskedMemory,
    "Q network": lambda: envfleet.EpsilonGreedy(QNetwork(), epsilon=0.5),
    "functions": lambda: envfleet.FunctionPolicy(first_allowed, sure),
    "class": OwnPolicy,
}


def _one_hot(obs: Any) -> Any:
    return nn.functional.one_hot(obs.long(), NUM_STATES).float()
