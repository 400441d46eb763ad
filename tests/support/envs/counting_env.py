"""CountingEnv: its observation is [episode, step], it keeps its last action, and it can be told to fail."""

import gymnasium
import numpy as np
from gymnasium import spaces


class CountingEnv(gymnasium.Env):
    def __init__(self, num_steps=3, fail_at=None, fails_to_reset=False, action_space=None, info=None):
        self.observation_space = spaces.Box(-100, 100, (2,), np.float32)
        self.action_space = action_space or spaces.Discrete(2)
        self.last_action = None
        self._num_steps, self._fail_at, self._fails_to_reset = num_steps, fail_at, fails_to_reset
        self._info = info or {}
        self._episode = self._step = self._total = 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        if self._fails_to_reset and (self._episode or not self._fail_at):
            raise RuntimeError("no more episodes")
        self._episode, self._step = self._episode + 1, 0
        return self._obs(), {"scores": 0.0}

    def step(self, action):
        self.last_action = action
        self._step += 1
        self._total += 1
        if self._total == self._fail_at:
            raise RuntimeError("told to fail")
        return (
            self._obs(),
            float(self._step),
            self._step >= self._num_steps,
            False,
            {"scores": 10.0 * self._step, **self._info},
        )

    def _obs(self):
        return np.array([self._episode, self._step], np.float32)
