"""Envs of different speed, and agents whose actions are a function of what they see. Workers import this module."""

import time

import gymnasium
import numpy as np
from gymnasium import spaces

from envfleet.contract.policy import Acted


class UnevenEnv(gymnasium.Env):
    """A random walk that its seed and the actions decide; episodes end after random numbers of steps."""

    def __init__(self, step_s=0.0):
        self.observation_space = spaces.Box(-np.inf, np.inf, (2,), np.float32)
        self.action_space = spaces.Discrete(3)
        self.step_s = step_s

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.place, self.num_steps = self.np_random.normal(), 0
        return self._obs(), self._info()

    def step(self, action):
        if self.step_s:
            time.sleep(self.step_s)
        self.place += (int(action) - 1) * self.np_random.random()
        self.num_steps += 1
        has_ended = bool(self.np_random.random() < 0.15)
        return self._obs(), float(self.place), has_ended and self.num_steps % 2 == 0, has_ended, self._info()

    def _info(self):
        """A number in each info, and another one in every third."""
        return {"place": self.place} | ({"third": self.num_steps} if self.num_steps % 3 == 0 else {})

    def _obs(self):
        return np.array([self.place, self.num_steps], np.float32)


class ReflexAgent:
    """What it does is a function of what it sees; its values show which weights it has."""

    def __init__(self):
        self.number = 0

    def act(self, obs):
        return Acted(self._actions(obs), np.zeros(len(obs), np.float32), {"values": self.values(obs)})

    def log_prob(self, obs, actions):
        return np.full(len(obs), -float(self.number) / 8, np.float32)

    def values(self, obs):
        return (self.number + 0.001 * obs[:, 0]).astype(np.float32)

    def get_weights(self):
        return {"number": np.array([self.number])}

    def set_weights(self, weights):
        self.number = int(weights["number"][0])

    @staticmethod
    def _actions(obs):
        return (np.abs(obs[:, 0] * 100).astype(np.int64) + obs[:, -1].astype(np.int64)) % 2


class RememberingAgent:
    """What it does is a function of all that it has seen in an episode."""

    def __init__(self):
        self.number = 0

    def initial_state(self, num_rows):
        return {"sum": np.full((num_rows, 1), 0.5, np.float64)}

    def act(self, obs, state):
        after = {"sum": state["sum"] + obs[:, :1]}
        actions = np.abs(after["sum"][:, 0] * 100).astype(np.int64) % 3
        return Acted(actions, np.zeros(len(obs), np.float32), {"values": self.values(obs, state)}, after)

    def log_prob(self, obs, actions, state):
        return np.full(len(obs), -float(self.number) / 8, np.float32)

    def values(self, obs, state):
        return (self.number + 0.001 * (state["sum"][:, 0] + obs[:, 0])).astype(np.float32)

    def get_weights(self):
        return {"number": np.array([self.number])}

    def set_weights(self, weights):
        self.number = int(weights["number"][0])
