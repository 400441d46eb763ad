"""Learners with torch whose whole course their seed decides: see resumable_learner.py."""

import numpy as np
import torch  # noqa: TID253 - agents of torch are what this is about
from gymnasium import spaces
from torch import nn  # noqa: TID253
from torch.distributions import Categorical  # noqa: TID253

from envfleet import EpsilonGreedy, FunctionPolicy, NormalizedPolicy, PolicySpec, RewardScaler
from tests.support.cluster.resumable_learner import NumpyLearner, act, digest, log_prob

OBS = spaces.Box(-np.inf, np.inf, (4,), np.float32)


class FeedForward(nn.Module):
    """For CartPole."""

    def __init__(self, num_actions=2):
        super().__init__()
        self.actor, self.critic = nn.Linear(4, num_actions), nn.Linear(4, 1)

    def get_value(self, x):
        return self.critic(x)

    def get_distribution(self, x):
        return Categorical(logits=self.actor(x))

    def get_action_and_value(self, x, action=None):
        probs = self.get_distribution(x)
        action = probs.sample() if action is None else action
        return action, probs.log_prob(action), probs.entropy(), self.critic(x)


class Remembering(nn.Module):
    """The same with a GRU."""

    def __init__(self):
        super().__init__()
        self.gru, self.actor, self.critic = nn.GRU(4, 5), nn.Linear(5, 2), nn.Linear(5, 1)

    def _hidden(self, x, state, done):
        hidden, state = self.gru(x.reshape(-1, state.shape[1], 4), state)
        return hidden.flatten(0, 1), state

    def get_value(self, x, state, done):
        return self.critic(self._hidden(x, state, done)[0])

    def get_distribution(self, x, state, done):
        return Categorical(logits=self.actor(self._hidden(x, state, done)[0]))

    def get_action_and_value(self, x, lstm_state, done, action=None):
        hidden, state = self._hidden(x, lstm_state, done)
        probs = Categorical(logits=self.actor(hidden))
        action = probs.sample() if action is None else action
        return action, probs.log_prob(action), probs.entropy(), self.critic(hidden), state


class TorchLearner(NumpyLearner):
    """Moves the module's weights at random, with torch's generator and Adam, as far as its rollouts say."""

    def __init__(self, module=FeedForward):
        super().__init__()
        torch.manual_seed(3)
        self.module = module()
        self.agent = self.module
        self.optimizer = torch.optim.Adam(self.module.parameters(), lr=0.05)

    def learn(self, rollout, signal):
        self.optimizer.zero_grad()
        noise = sum((each * torch.randn_like(each)).sum() for each in self.module.parameters())
        (signal * noise).backward()
        self.optimizer.step()

    def state(self):
        return {
            "module": self.module.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "rng": torch.get_rng_state(),
            "digests": self.digests,
        }

    def restore(self, state):
        self.module.load_state_dict(state["module"])
        self.optimizer.load_state_dict(state["optimizer"])
        torch.set_rng_state(state["rng"])
        self.digests = list(state["digests"])

    def outcome(self):
        return {"digests": self.digests, "weights": digest(self.module.state_dict())}


class RecurrentLearner(TorchLearner):
    def __init__(self):
        super().__init__(Remembering)


class NormalizingLearner(TorchLearner):
    def __init__(self):
        super().__init__()
        self.agent = NormalizedPolicy(self.module, OBS)
        self.scaler = RewardScaler(0.99)

    def learn(self, rollout, signal):
        self.agent.update(rollout)
        self.scaler.update(rollout)
        super().learn(rollout, signal + float(self.scaler.scale(rollout.rewards).mean()))

    def state(self):
        return {**super().state(), "policy": self.agent.get_weights(), "scaler": self.scaler.state_dict()}

    def restore(self, state):
        super().restore(state)
        self.agent.set_weights(state["policy"])
        self.scaler.load_state_dict(state["scaler"])


class ExploringLearner(TorchLearner):
    """Its policy draws from a generator of its own."""

    def __init__(self):
        super().__init__(lambda: nn.Linear(4, 2))
        self.agent = EpsilonGreedy(self.module, 0.4)


class ByPathLearner(TorchLearner):
    """To build its policy draws from torch's generator."""

    def __init__(self):
        super().__init__()
        self.agent = PolicySpec("tests.support.cluster.torch_learners:FeedForward", weights=self.module)


class MaskedLearner(NumpyLearner):
    """Taxi: the mask of allowed actions, and other infos, are in what the env says."""

    def __init__(self):
        super().__init__()
        self.weights["w"] = np.zeros((500, 6), np.float32)
        self.agent = FunctionPolicy(act_on_rows, log_prob_of_rows, weights=self.weights)
        self.asks = {"action_mask": "action_mask", "infos": ("prob", "action_mask")}

    def learn(self, rollout, signal):
        self.weights["w"] += np.float32(signal) * self.random.normal(size=(500, 6)).astype(np.float32)


def act_on_rows(weights, obs, action_mask=None):
    return act(weights, one_hot(obs), action_mask)


def log_prob_of_rows(weights, obs, actions, action_mask=None):
    return log_prob(weights, one_hot(obs), actions)


def one_hot(obs):
    return np.eye(500, dtype=np.float32)[obs]
