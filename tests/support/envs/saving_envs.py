"""Envs whose states can be saved, in several ways, or not. Workers and children import this module by its name."""

from __future__ import annotations

import os
import threading
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces
from gymnasium.wrappers import FrameStackObservation, NormalizeReward, TimeLimit

UNPICKLED_HERE: list[int] = []  # pids of processes that have unpickled a Marked, one each time


class WalkEnv(gymnasium.Env[Any, Any]):
    """A random walk that ends beyond a limit, drawn anew in each episode. Nothing but a pickle can save it."""

    def __init__(self, limit: float = 6.0, ballast_bytes: int = 0) -> None:
        self.observation_space = spaces.Box(-1e9, 1e9, (3,), np.float64)
        self.action_space = spaces.Discrete(4)
        self.limit = limit
        self.ballast = np.random.default_rng(0).bytes(ballast_bytes)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed)
        self.place, self.num_steps = float(self.np_random.random()), 0
        self.goal = self.limit * float(self.np_random.random())
        return self._obs(), self._info()

    def step(self, action: Any) -> Any:
        self.num_steps += 1
        self.place += float(action) * float(self.np_random.normal())
        return self._obs(), self.place, abs(self.place) > self.goal, False, self._info()

    def pid(self) -> int:
        return os.getpid()

    def _obs(self) -> Any:
        return np.array([self.place, self.num_steps, self.goal])

    def _info(self) -> dict[str, Any]:
        allowed = np.arange(4) != self.num_steps % 4
        return {"place": self.place, "text": f"at {self.num_steps}", "action_mask": allowed.astype(np.int8)}


class SavingEnv(WalkEnv):
    """Saves the walk alone: the random generator is its pool's business."""

    def get_state(self) -> Any:
        return self.place, self.num_steps, self.goal, self.ballast

    def set_state(self, state: Any) -> None:
        self.np_random.random()  # what set_state() draws must not matter
        self.place, self.num_steps, self.goal, self.ballast = state


class Marked:
    """Tells where it was unpickled."""

    def __reduce__(self) -> Any:
        return _mark, ()


def _mark() -> Marked:
    UNPICKLED_HERE.append(os.getpid())
    return Marked()


class MarkingEnv(SavingEnv):
    """Its states have a Marked; `call("marks")` has the processes that have unpickled one."""

    def get_state(self) -> Any:
        return Marked(), super().get_state()

    def set_state(self, state: Any) -> None:
        super().set_state(state[1])

    def marks(self) -> list[int]:
        return list(UNPICKLED_HERE)


class RefusingEnv(SavingEnv):
    """Does not take states that were saved after three steps."""

    def set_state(self, state: Any) -> None:
        if state[1] == 3:
            raise ValueError("no state after three steps, please")
        super().set_state(state)


class OtherSignature(WalkEnv):
    """As Gymnasium's MuJoCo envs have it."""

    def set_state(self, qpos: Any, qvel: Any) -> None:
        """Not a hook."""


class Odd(gymnasium.Wrapper[Any, Any, Any, Any]):
    """A wrapper with state, and with references to what it wraps; each second action is 0."""

    def __init__(self, env: Any) -> None:
        super().__init__(env)
        self.count = 0
        self.inner = env.unwrapped
        self.func = lambda action: action if self.count % 2 else 0

    def reset(self, **kwargs: Any) -> Any:
        obs, info = super().reset(**kwargs)
        self.generator = self.inner.np_random
        return obs, info

    def step(self, action: Any) -> Any:
        self.count += 1 + int(self.generator.integers(2))
        return super().step(self.func(action))


class Locked(gymnasium.Wrapper[Any, Any, Any, Any]):
    """A wrapper with an attribute that cannot be pickled."""

    def __init__(self, env: Any, state_attributes: tuple[str, ...] | None = None) -> None:
        super().__init__(env)
        self.count = 0
        self.lock = threading.Lock()
        if state_attributes is not None:
            self.state_attributes = state_attributes

    def step(self, action: Any) -> Any:
        self.count += 1
        obs, reward, *rest = super().step(action)
        return obs, reward + self.count, *rest


class Covering(Locked):
    """Its own hook covers all that is below it."""

    def get_state(self) -> Any:
        walk = self.unwrapped
        return self.count, walk.place, walk.num_steps, walk.goal

    def set_state(self, state: Any) -> None:
        walk = self.unwrapped
        self.count, walk.place, walk.num_steps, walk.goal = state


def saving_env(**kwargs: Any) -> Any:
    return TimeLimit(SavingEnv(**kwargs), 9)


def wrapped_env() -> Any:
    return TimeLimit(FrameStackObservation(NormalizeReward(Odd(SavingEnv()), epsilon=1e-3), 3), 7)


def pickled_env() -> Any:
    return TimeLimit(Odd(WalkEnv()), 9)


def covered_env() -> Any:
    return TimeLimit(Covering(WalkEnv()), 9)


def locked_env() -> Any:
    return Locked(SavingEnv())


def half_locked_env() -> Any:
    return Locked(SavingEnv(), state_attributes=("count",))
