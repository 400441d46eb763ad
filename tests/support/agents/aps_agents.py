"""Envs and NumPy policies that tests of synchronisation hand to workers by import."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

from envfleet import Acted
from envfleet.contract.distributions import Categorical, Gaussian

NUM_INPUTS, NUM_ACTIONS = 3, 4


class NoiseEnv(gymnasium.Env[Any, Any]):
    """Random observations of a given size; an episode ends at random, and not because of the actions."""

    def __init__(self, scale: float = 1.0, length: float = 7.0) -> None:
        self.action_space = spaces.Discrete(NUM_ACTIONS)
        self.observation_space = spaces.Box(-np.inf, np.inf, (NUM_INPUTS,), np.float32)
        self._scale = scale
        self._length = length

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        return self._obs(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        draw = self.np_random.random() * self._length
        return self._obs(), float(action), bool(draw < 0.5), bool(0.5 <= draw < 1.0), {}

    def _obs(self) -> Any:
        return (self._scale * self.np_random.standard_normal(NUM_INPUTS)).astype(np.float32)


def log_softmax(logits: Any) -> Any:
    logits = np.asarray(logits, np.float64)
    with np.errstate(invalid="ignore"):  # of infinite weights
        shifted = logits - logits.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


class SampledPolicy:
    """One hidden layer, one of four actions. It shows log-probs, and not its distribution."""

    def __init__(self, num_hidden: int = 8, seed: int = 0) -> None:
        random = np.random.default_rng(seed)
        self.weights = {
            "first": random.standard_normal((NUM_INPUTS, num_hidden)).astype(np.float32),
            "bias": random.standard_normal(num_hidden).astype(np.float32),
            "last": (random.standard_normal((num_hidden, NUM_ACTIONS)) / np.sqrt(num_hidden)).astype(np.float32),
        }

    def logits(self, obs: Any) -> Any:
        weights = self.weights
        return np.tanh(obs @ weights["first"] + weights["bias"]) @ weights["last"]

    def uniform(self, shape: Any) -> Any:
        return np.random.random(shape)

    def act(self, obs: Any) -> Acted:
        logits = self.logits(obs)
        actions = (logits - np.log(-np.log(self.uniform(logits.shape)))).argmax(-1)
        return Acted(actions, self.log_prob(obs, actions), {"values": self.values(obs)})

    def log_prob(self, obs: Any, actions: Any) -> Any:
        return np.take_along_axis(log_softmax(self.logits(obs)), actions[:, None], -1)[:, 0].astype(np.float32)

    def values(self, obs: Any) -> Any:
        return (obs @ self.weights["first"]).sum(-1)

    def get_weights(self) -> Any:
        return dict(self.weights)

    def set_weights(self, weights: Any) -> None:
        self.weights = {name: np.array(weight) for name, weight in weights.items()}


class ShownPolicy(SampledPolicy):
    """Shows its distribution as well."""

    def distribution(self, obs: Any) -> Any:
        return Categorical(self.logits(obs))


class ModestPolicy(SampledPolicy):
    """Has the method, and shows nothing after all."""

    def distribution(self, obs: Any) -> Any:
        return None


class GaussianPolicy:
    """Two numbers. Only for the head."""

    def __init__(self, seed: int = 0) -> None:
        random = np.random.default_rng(seed)
        self.weights = {"mean": random.standard_normal((NUM_INPUTS, 2)), "log_std": 0.3 * random.standard_normal(2)}

    def distribution(self, obs: Any) -> Any:
        mean = obs @ self.weights["mean"]
        return Gaussian(mean, np.broadcast_to(self.weights["log_std"], mean.shape))

    def log_prob(self, obs: Any, actions: Any) -> Any:
        shown = self.distribution(obs)
        distance = (actions - shown.mean) / np.exp(shown.log_std)
        return (-0.5 * distance**2 - shown.log_std - 0.5 * np.log(2 * np.pi)).sum(-1)


class SilentPolicy(SampledPolicy):
    """Gives no probabilities, as TD3's does."""

    def act(self, obs: Any) -> Acted:
        return super().act(obs)._replace(log_probs=None)


class LossyPolicy(SampledPolicy):
    """Keeps one of its arrays with half the bits."""

    def set_weights(self, weights: Any) -> None:
        super().set_weights(weights)
        self.weights["last"] = self.weights["last"].astype(np.float16).astype(np.float32)


class SeedablePolicy(SampledPolicy):
    """With random numbers of its own, the same ones wherever nobody seeds it."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__(seed=seed)
        self._random = np.random.default_rng(0)

    def seed(self, seed: int) -> None:
        self._random = np.random.default_rng(seed)

    def uniform(self, shape: Any) -> Any:
        return self._random.random(shape)

    def __getstate__(self) -> Any:
        return {"weights": self.weights}

    def __setstate__(self, state: Any) -> None:
        self.__init__()  # type: ignore[misc]
        self.weights = state["weights"]
