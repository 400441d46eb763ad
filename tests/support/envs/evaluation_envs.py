"""Envs and agents of the tests of evaluations. Workers import this module by its name."""

import os
import time
from pathlib import Path

import gymnasium
import numpy as np
from gymnasium import spaces

from envfleet.contract.policy import Acted

LONG = 24  # steps of the longest episode


class LengthEnv(gymnasium.Env):
    """The seed decides the length of an episode, and the longer it is the more it brings. Odd lengths are truncated.

    An observation is (length, step, random number); the reward is the action and, at the end, the length squared.
    """

    metadata = {"render_modes": ["rgb_array"]}  # noqa: RUF012 - as Gymnasium has it

    def __init__(self, render_mode=None, folder=None, fails_at=None):
        self.render_mode = render_mode
        self.observation_space = spaces.Box(-1.0, LONG, (3,), np.float64)
        self.action_space = spaces.Discrete(3)
        self.folder = None if folder is None else Path(folder)
        self.fails_at = fails_at  # raises at the end of episodes of this length
        self.bonus = 0.0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.length = int(self.np_random.integers(1, LONG + 1))
        self.step_number = 0
        return self._obs(), {}

    def step(self, action):
        if self.folder is not None and (self.folder / "hold").exists():
            (self.folder / f"holding-{os.getpid()}").touch()
            while (self.folder / "hold").exists():
                time.sleep(0.01)
        self.step_number += 1
        ended = self.step_number == self.length
        if ended and self.length == self.fails_at:
            raise RuntimeError("the gripper broke")
        reward = float(action) + (self.length**2 if ended else 0.0) + self.bonus
        info = {"distance": self.length / 2, "position": np.arange(2) + self.length}
        if ended and self.length % 3 == 0:
            info |= {"success": True, "by": {"name": f"episode of {self.length}"}}
        is_cut = bool(self.length % 2)
        return self._obs(), reward, ended and not is_cut, ended and is_cut, info

    def render(self):
        return np.full((2, 4, 3), self.step_number, np.uint8)

    def _obs(self):
        return np.array([self.length, self.step_number, self.np_random.random()])


def expected_length(seed):
    """Of the episode with this seed."""
    env = LengthEnv()
    env.reset(seed=int(seed))
    return env.length


class ModalAgent:
    """Draws with equal chances; its deterministic action depends on the observation, and on its weight."""

    def __init__(self, shift=0):
        self.weights = {"shift": np.array([shift], np.int64)}

    def act(self, obs):
        return Acted(np.random.randint(3, size=len(obs)), None, {})

    def act_deterministically(self, obs):
        return Acted(((obs[:, 2] * 1000).astype(np.int64) + self.weights["shift"][0]) % 3, None, {})

    def log_prob(self, obs, actions):
        return np.full(len(obs), -np.log(3), np.float32)

    def values(self, obs):
        return None

    def get_weights(self):
        return self.weights

    def set_weights(self, weights):
        self.weights = {name: np.array(array) for name, array in weights.items()}


class RememberingAgent(ModalAgent):
    """Its action is how often it acted in this episode, modulo 3; so is each reward, but for the last."""

    def initial_state(self, num_rows):
        return {"count": np.zeros((num_rows, 1), np.int64)}

    def act(self, obs, state):
        return self.act_deterministically(obs, state)

    def act_deterministically(self, obs, state):
        return Acted(state["count"][:, 0] % 3, None, {}, {"count": state["count"] + 1})

    def log_prob(self, obs, actions, state):
        return np.zeros(len(obs), np.float32)

    def values(self, obs, state):
        return None


class BareAgent:
    """Has no deterministic mode."""

    act, log_prob, values = ModalAgent.act, ModalAgent.log_prob, ModalAgent.values

    def get_weights(self):
        return {}

    def set_weights(self, weights):
        pass


class RaisingAgent(ModalAgent):
    def act_deterministically(self, obs):
        raise ZeroDivisionError("the network is empty")
