"""An env and an agent with large payloads that show whether they came whole. Workers import this module by its name."""

import numpy as np
from gymnasium import spaces

from tests.support.envs.cluster_envs import Agent, CountingEnv


class BulkyEnv(CountingEnv):
    """Its observations are `obs_bytes` large: what follows name and number repeats the number."""

    def __init__(self, obs_bytes, **settings):
        super().__init__(**settings)
        self.observation_space = spaces.Box(0.0, 2.0**53, (obs_bytes // 8,), np.float64)

    def _obs(self):
        name, number = super()._obs()
        obs = np.full(self.observation_space.shape, number)
        obs[0] = name
        return obs


class BulkyAgent(Agent):
    """Has `weight_bytes` of weights, each of which repeats the action."""

    def __init__(self, weight_bytes):
        super().__init__()
        self.weights["ballast"] = np.zeros(weight_bytes // 8, np.int64)

    def set_weights(self, weights):
        super().set_weights(weights)
        if not (self.weights["ballast"] == self.weights["action"]).all():
            raise AssertionError("weights were damaged on the way")
