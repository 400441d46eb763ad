"""Recurrent agents that tests hand to workers by import."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch  # noqa: TID253 - agents of torch are what this is about
from torch import nn  # noqa: TID253
from torch.distributions import Categorical  # noqa: TID253

from envfleet import Acted
from envfleet.contract import distributions
from tests.support.agents.aps_agents import NUM_ACTIONS, NUM_INPUTS, log_softmax


class LstmAgent(nn.Module):
    """As CleanRL's ppo_atari_lstm.py has it, without its convolutions."""

    def __init__(self, seed: int = 0, num_hidden: int = 6, num_layers: int = 1) -> None:
        super().__init__()
        self.lstm = nn.LSTM(NUM_INPUTS, num_hidden, num_layers)
        self.actor = nn.Linear(num_hidden, NUM_ACTIONS)
        self.critic = nn.Linear(num_hidden, 1)
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(2 * torch.rand(parameter.shape, generator=generator) - 1)

    def get_states(self, x: Any, lstm_state: Any, done: Any) -> Any:
        batch_size = lstm_state[0].shape[1]
        hidden = x.reshape((-1, batch_size, self.lstm.input_size))
        done = done.reshape((-1, batch_size))
        new_hidden = []
        for h, d in zip(hidden, done, strict=True):
            h, lstm_state = self.lstm(
                h.unsqueeze(0),
                ((1.0 - d).view(1, -1, 1) * lstm_state[0], (1.0 - d).view(1, -1, 1) * lstm_state[1]),
            )
            new_hidden += [h]
        return torch.flatten(torch.cat(new_hidden), 0, 1), lstm_state

    def get_value(self, x: Any, lstm_state: Any, done: Any) -> Any:
        return self.critic(self.get_states(x, lstm_state, done)[0])

    def get_action_and_value(self, x: Any, lstm_state: Any, done: Any, action: Any = None) -> Any:
        hidden, lstm_state = self.get_states(x, lstm_state, done)
        probs = Categorical(logits=self.actor(hidden))
        if action is None:
            action = probs.sample()
        return action, probs.log_prob(action), probs.entropy(), self.critic(hidden), lstm_state


class ShownLstmAgent(LstmAgent):
    """Shows its distribution as well."""

    def get_distribution(self, x: Any, lstm_state: Any, done: Any) -> Any:
        return Categorical(logits=self.actor(self.get_states(x, lstm_state, done)[0]))


class MemoryPolicy:
    """NumPy: remembers a fading sum of what it saw, and how many steps; an episode does not begin with zeros."""

    def __init__(self, seed: int = 0) -> None:
        random = np.random.default_rng(seed)
        self.weights = {
            "actor": random.standard_normal((NUM_INPUTS, NUM_ACTIONS)).astype(np.float32),
            "critic": random.standard_normal(NUM_INPUTS).astype(np.float32),
            "fading": np.full(1, 0.8, np.float32),
        }

    def initial_state(self, num_rows: int) -> Any:
        return {"sum": np.full((num_rows, NUM_INPUTS), 0.5, np.float32), "count": np.full(num_rows, 10, np.int64)}

    def after(self, obs: Any, state: Any) -> Any:
        return {"sum": self.weights["fading"] * state["sum"] + obs, "count": state["count"] + 1}

    def logits(self, obs: Any, state: Any) -> Any:
        after = self.after(obs, state)
        return after["sum"] @ self.weights["actor"] / np.sqrt(after["count"])[:, None].astype(np.float32)

    def act(self, obs: Any, state: Any) -> Any:
        logits = self.logits(obs, state)
        actions = (logits + np.random.gumbel(size=logits.shape)).argmax(-1)
        values = self.values(obs, state)
        return Acted(actions, self.log_prob(obs, actions, state), {"values": values}, self.after(obs, state))

    def log_prob(self, obs: Any, actions: Any, state: Any) -> Any:
        return np.take_along_axis(log_softmax(self.logits(obs, state)), actions[:, None], -1)[:, 0].astype(np.float32)

    def values(self, obs: Any, state: Any) -> Any:
        after = self.after(obs, state)
        return after["sum"] @ self.weights["critic"] + 0.1 * after["count"].astype(np.float32)

    def get_weights(self) -> Any:
        return dict(self.weights)

    def set_weights(self, weights: Any) -> None:
        self.weights = {name: np.array(weight) for name, weight in weights.items()}


class ShownMemoryPolicy(MemoryPolicy):
    """Shows its distribution as well."""

    def distribution(self, obs: Any, state: Any) -> Any:
        return distributions.Categorical(self.logits(obs, state))


class OverwritingPolicy(MemoryPolicy):
    """Returns the same arrays in each step, with other numbers in them."""

    def act(self, obs: Any, state: Any) -> Any:
        acted = super().act(obs, state)
        if not hasattr(self, "_kept"):
            self._kept = {name: array.copy() for name, array in acted.state.items()}
        for name, array in acted.state.items():
            self._kept[name][...] = array
        return acted._replace(state=self._kept)


class LearnedStartPolicy(MemoryPolicy):
    """What it remembers at an episode's beginning is learned."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__(seed)
        self.weights["start"] = np.full(NUM_INPUTS, 0.5, np.float32)

    def initial_state(self, num_rows: int) -> Any:
        return {**super().initial_state(num_rows), "sum": np.tile(self.weights["start"], (num_rows, 1))}


class WrongPolicy(MemoryPolicy):
    """Something is wrong with its state."""

    def __init__(self, mistake: str) -> None:
        super().__init__()
        self.mistake = mistake

    def initial_state(self, num_rows: int) -> Any:
        state = super().initial_state(num_rows)
        if self.mistake == "initial raises":
            raise ValueError("no state today")
        if self.mistake == "initial rows":
            state["sum"] = state["sum"][:1]
        if self.mistake == "initial scalar":
            state["count"] = np.int64(0)
        return state

    def act(self, obs: Any, state: Any) -> Any:
        acted = super().act(obs, state)
        after = dict(acted.state)
        if self.mistake == "shape":
            after["sum"] = after["sum"][:, :2]
        if self.mistake == "name":
            after["other"] = after.pop("sum")
        if self.mistake == "missing":
            del after["sum"]
        return acted._replace(state=None if self.mistake == "none" else after)
