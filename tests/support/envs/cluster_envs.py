"""Envs and agents of the cluster's tests. Workers import this module by its name."""

import contextlib
import os
import signal
import time
from pathlib import Path

import gymnasium
import numpy as np
from gymnasium import spaces

from envfleet.contract.policy import Acted

EPISODE_LENGTH = 7


class CountingEnv(gymnasium.Env):
    """Each observation is unlike any other: (random name of this env object, how many observations it made before).

    What it does in step() can be told from outside, by files in `folder`:
      hold    wait until the file is gone; `holding-PID` says that it waits
      raise   raise, once for all envs: who takes the file away does it
      print   print a lot
      exit    end this process
    """

    def __init__(self, folder=None, step_s=0.0):
        self.observation_space = spaces.Box(0.0, 2.0**53, (2,), np.float64)
        self.action_space = spaces.Discrete(3)
        self.name = int.from_bytes(os.urandom(6)) + 1
        self.num_obs = 0
        self.num_steps = 0
        self.folder = None if folder is None else Path(folder)
        self.step_s = step_s

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.num_steps = 0
        return self._obs(), {}

    def step(self, action):
        if self.folder is not None:
            self._obey()
        if self.step_s:
            time.sleep(self.step_s)
        self.num_steps += 1
        return self._obs(), float(action), self.num_steps >= EPISODE_LENGTH, False, {}

    def pid(self):
        return os.getpid()

    def variable(self, name):
        return os.environ.get(name)

    def _obs(self):
        obs = np.array([self.name, self.num_obs], np.float64)
        self.num_obs += 1
        return obs

    def _obey(self):
        if (self.folder / "hold").exists():
            mark = self.folder / f"holding-{os.getpid()}"
            mark.touch()
            while (self.folder / "hold").exists():
                time.sleep(0.01)
            mark.unlink(missing_ok=True)
        with contextlib.suppress(FileNotFoundError):
            (self.folder / "raise").unlink()
            raise RuntimeError("the cart fell off the table")
        if (self.folder / "print").exists():
            print("x" * 20_000, flush=True)
        if (self.folder / "exit").exists():
            os.kill(os.getpid(), signal.SIGKILL)


class WideEnv(CountingEnv):
    """Observations of half a megabyte, and actions of any size; episodes do not end."""

    NUM_NUMBERS = 65_536

    def __init__(self, num_action_numbers=0, ballast=b"", **kwargs):
        super().__init__(**kwargs)
        self.observation_space = spaces.Box(0.0, 2.0**53, (self.NUM_NUMBERS,), np.float64)
        self.ballast = ballast
        if num_action_numbers:
            self.action_space = spaces.Box(-1.0, 1.0, (num_action_numbers,), np.float32)

    def step(self, action):
        if self.folder is not None:
            self._obey()
        time.sleep(self.step_s)
        return self._obs(), float(np.sum(action)), False, False, {}

    def num_ballast_bytes(self):
        return len(self.ballast)

    def _obs(self):
        name, number = super()._obs()
        obs = np.full(self.NUM_NUMBERS, number)
        obs[0] = name
        return obs


class NotHereEnv(CountingEnv):
    """Cannot be built on a worker."""

    def __init__(self):
        raise FileNotFoundError("there is no simulator on this machine")


class DyingEnv(CountingEnv):
    """Ends its process when it is built."""

    def __init__(self):
        print("the simulator has no licence", flush=True)
        os._exit(9)


class Agent:
    """Acts with its only weight."""

    def __init__(self, action=0):
        self.weights = {"action": np.array([action], np.int64)}

    def act(self, obs):
        rows = len(obs)
        return Acted(np.full(rows, self.weights["action"][0]), np.zeros(rows, np.float32), {})

    def log_prob(self, obs, actions):
        return np.zeros(len(obs), np.float32)

    def values(self, obs):
        return None

    def get_weights(self):
        return self.weights

    def set_weights(self, weights):
        self.weights = {name: np.array(array) for name, array in weights.items()}


class HeavyAgent(Agent):
    """Has more weights than it needs."""

    def __init__(self, action=0, num_bytes=0):
        super().__init__(action)
        self.weights["ballast"] = np.random.default_rng(action).integers(0, 256, num_bytes, np.uint8)


class OtherAgent(Agent):
    """Another class: other code."""


class RaisingAgent(Agent):
    """Cannot act."""

    def act(self, obs):
        raise ZeroDivisionError("the network is empty")


class PickyAgent(Agent):
    """Does not take weights."""

    def set_weights(self, weights):
        raise KeyError("layer 7 is missing")


class Accounts:
    """Every row of all rollouts: none twice, none missing within the life of an env object."""

    def __init__(self):
        self.num_rows = 0
        self._next = {}  # name of an env object -> the number of the observation that its next rollout begins with
        self._may_skip = set()  # ids of envs

    @property
    def num_env_objects(self):
        return len(self._next)

    def interrupted(self, num_envs):
        """Orders were given up: each env's next rollout may begin later than its last one ended, the others not."""
        self._may_skip = set(range(num_envs))

    def add(self, rollout):
        obs = np.concatenate([rollout.obs, rollout.next_obs[None]])  # [T + 1, N, 2]
        ended = rollout.terminations | rollout.truncations
        for row, env_id in enumerate(rollout.env_ids.tolist()):
            self._add_env(env_id, obs[:, row], ended[:, row])
        _require(len(rollout.final_steps) == ended.sum(), f"{ended.sum()} ends, last obs {rollout.final_obs}")
        for step, row, last in zip(rollout.final_steps, rollout.final_envs, rollout.final_obs, strict=True):
            _require(ended[step, row], f"step {step} of row {row} has a last observation, but is no end")
            _require(tuple(last) == (obs[step, row, 0], obs[step, row, 1] + 1), f"the episode's last obs is {last}")

    def _add_env(self, env_id, obs, ended):
        names, numbers = obs[:, 0], obs[:, 1].astype(np.int64)
        _require((names == names[0]).all(), f"env {env_id} became another object within a rollout: {names}")
        # The last observation of an episode is in final_obs.
        _require(np.array_equal(np.diff(numbers), np.where(ended, 2, 1)), f"env {env_id}: {numbers}, ends {ended}")
        name, first = int(names[0]), int(numbers[0])
        expected = self._next.get(name, 0)
        _require(first >= expected, f"env {env_id}, object {name}: rows {first} to {expected - 1} came twice")
        if env_id not in self._may_skip:
            _require(first == expected, f"env {env_id}, object {name}: rows {expected} to {first - 1} are missing")
        self._may_skip.discard(env_id)
        self._next[name] = int(numbers[-1])
        self.num_rows += len(ended)


def _require(is_true, problem):
    """Unlike assert it is there in scripts, too, whatever Python's options."""
    if not is_true:
        raise AssertionError(problem)
