"""An env whose episodes end often, and what one sees of it who resets it by hand: the oracle of adapters."""

from typing import Any, NamedTuple

import gymnasium
import numpy as np
from gymnasium import spaces


class OftenEndingEnv(gymnasium.Env[Any, Any]):
    """Episodes of 1 to 5 steps; half of them are truncated. All of it is drawn at the reset."""

    def __init__(self, form: str = "array", level: int = 1) -> None:
        array = spaces.Box(-100, 100, (3,), np.float32)
        forms: dict[str, Any] = {
            "array": array,
            "dict": spaces.Dict(place=array, num_steps=spaces.Discrete(10)),
            "tuple": spaces.Tuple([array, array]),
        }
        self.observation_space = forms[form]
        self.action_space = spaces.Discrete(3)
        self.form = form
        self.level = level

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed)
        self._length, self._is_truncated = int(self.np_random.integers(1, 6)), bool(self.np_random.integers(2))
        self._num_steps, self._place = 0, float(self.np_random.random())
        return self._obs(), {"length": self._length, **(options or {})}

    def step(self, action: Any) -> Any:
        self._num_steps += 1
        self._place += float(action) * float(self.np_random.normal())
        has_ended = self._num_steps == self._length
        terminated, truncated = has_ended and not self._is_truncated, has_ended and self._is_truncated
        return self._obs(), float(action) + 0.25, terminated, truncated, {"num_steps": self._num_steps}

    def _obs(self) -> Any:
        array = np.array([self._place, self._num_steps, self._length], np.float32)
        if self.form == "dict":
            return {"place": array, "num_steps": self._num_steps}
        return (array, array) if self.form == "tuple" else array


class Played(NamedTuple):
    """T steps of N envs, as arrays [T, N, ...]."""

    obs: Any  # what the action was chosen for: the first observation of an episode after the last one of another
    next_obs: Any  # what the step led to: the last observation of an episode, too
    rewards: Any
    terminated: Any
    truncated: Any


def played_by_hand(envs: list[gymnasium.Env[Any, Any]], actions: Any, seed: int, num_resets: int = 1) -> Played:
    """Step each env by itself, and reset it when its episode has ended.

    Env i is seeded with `seed + i` in the first of `num_resets` resets that come first.
    """
    columns = []
    for index, env in enumerate(envs):
        obs, _ = env.reset(seed=seed + index)
        for _ in range(num_resets - 1):
            obs, _ = env.reset()
        column = []
        for action in actions[:, index]:
            next_obs, reward, terminated, truncated, _ = env.step(action)
            column.append((obs, next_obs, reward, terminated, truncated))
            obs = env.reset()[0] if terminated or truncated else next_obs
        columns.append([np.array(each) for each in zip(*column, strict=True)])
    return Played(*(np.stack(each, axis=1) for each in zip(*columns, strict=True)))


def act_by_row(obs: Any) -> Any:
    """A policy without chance: actions 0, 1, 2, 0, ... for the envs of a worker."""
    return np.arange(len(obs)) % 3, np.zeros(len(obs), np.float32), {"values": obs[:, 0] * 2}
