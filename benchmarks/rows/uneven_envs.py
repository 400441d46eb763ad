"""Envs of very different speed, one in eight 20 times as slow as the others, and a small policy for them."""

from __future__ import annotations

import time
from typing import Any

import gymnasium as gym
import numpy as np

Array = np.ndarray
SLOW_EVERY, SLOWER = 8, 20
NUM_INPUTS, NUM_HIDDEN, NUM_ACTIONS = 16, 64, 4


class UnevenEnv(gym.Env[Any, Any]):
    """A step takes `step_s`, asleep or at work. Episodes do not end."""

    def __init__(self, step_s: float, is_asleep: bool) -> None:
        self.observation_space = gym.spaces.Box(-np.inf, np.inf, (NUM_INPUTS,), np.float32)
        self.action_space = gym.spaces.Discrete(NUM_ACTIONS)
        self._step_s, self._is_asleep = step_s, is_asleep
        self._obs = np.zeros(NUM_INPUTS, np.float32)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        return self._obs, {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        if self._is_asleep:
            time.sleep(self._step_s)
        else:
            end_s = time.thread_time() + self._step_s  # of CPU: others may have the core meanwhile
            while time.thread_time() < end_s:
                pass
        return self._obs, 1.0, False, False, {}


def env_kwargs(num_envs: int, step_s: float, *, is_asleep: bool) -> list[dict[str, Any]]:
    """The arguments of each env."""
    return [
        {"step_s": step_s * (SLOWER if env_id % SLOW_EVERY == 0 else 1), "is_asleep": is_asleep}
        for env_id in range(num_envs)
    ]


def act(weights: dict[str, Array], obs: Array) -> tuple[Array, Array]:
    """Draw actions from a network with two layers of 64."""
    hidden = np.tanh(np.tanh(obs @ weights["first"]) @ weights["second"])
    logits = hidden @ weights["last"]
    actions = np.argmax(logits + np.random.gumbel(size=logits.shape), -1)
    log_probs = logits - np.logaddexp.reduce(logits, -1, keepdims=True)
    return actions, np.take_along_axis(log_probs, actions[:, None], -1)[:, 0]


def weights() -> dict[str, Array]:
    """The network's."""
    random = np.random.default_rng(0)
    shapes = {"first": (NUM_INPUTS, NUM_HIDDEN), "second": (NUM_HIDDEN, NUM_HIDDEN), "last": (NUM_HIDDEN, NUM_ACTIONS)}
    return {name: random.normal(size=shape).astype(np.float32) / 8 for name, shape in shapes.items()}
