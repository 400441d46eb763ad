"""Envs that the cluster's tests hand to workers by import."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

ACTION_SPACES = {
    "discrete": spaces.Discrete(4, start=2),
    "box": spaces.Box(-1, 1, (2, 3), np.float64),
    "multi_discrete": spaces.MultiDiscrete([3, 4, 2]),
    "multi_binary": spaces.MultiBinary(5),
    "dict": spaces.Dict({"move": spaces.Box(-1, 1, (2,), np.float32), "jump": spaces.Discrete(2)}),
    "tuple": spaces.Tuple((spaces.MultiBinary(2), spaces.Box(0, 1, (), np.float32), spaces.Discrete(3))),
}


class EveryKindEnv(gymnasium.Env[Any, Any]):
    """Nested observations that depend on the actions bit by bit, and infos of every kind; episodes end at random."""

    metadata = {"render_modes": ["rgb_array"], "render_fps": 7}  # noqa: RUF012 - as Gymnasium declares it

    def __init__(self, actions: str = "discrete", level: int = 1, ends: float = 0.1, render_mode: str | None = None):
        self.action_space = ACTION_SPACES[actions]
        self.observation_space = spaces.Dict(
            {
                "place": spaces.Box(-np.inf, np.inf, (2,), np.float32),
                "mode": spaces.Discrete(3),
                "bits": spaces.MultiBinary([2, 2]),
                "image": spaces.Box(0, 255, (3, 4, 2), np.uint8),
                "pair": spaces.Tuple((spaces.Box(-np.inf, np.inf, (), np.float64), spaces.MultiDiscrete([3, 9]))),
            }
        )
        self.level = level
        self.ends = ends
        self.render_mode = render_mode
        self._sum = 0.0
        self._num_steps = 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self._num_steps = 0
        self._sum = float((options or {}).get("start", self.level))
        info = {"first": True, "options": dict(options)} if options else {"first": True}
        return self._obs(), {**info, "name": f"level {self.level}"}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self._num_steps += 1
        self._sum = float(np.sin(self._sum + summed(self.action_space, action)))
        draw = self.np_random.random()
        terminated, truncated = draw < self.ends, self.ends <= draw < 2 * self.ends
        info: dict[str, Any] = {
            "sum": self._sum,
            "steps": self._num_steps,
            "even": self._num_steps % 2 == 0,
            "place": np.array([self._sum, draw], np.float32),
            "sim": {"clock": np.float64(draw), "deep": {"count": self._num_steps}},
            "word": "a" * self._num_steps,
            "list": [self._num_steps, "b"],
        }
        if draw > 0.5:
            info["sometimes"] = np.int64(self._num_steps)
        if draw > 0.7:
            info["nothing"] = None
        return self._obs(), self._sum + draw, bool(terminated), bool(truncated), info

    def render(self) -> Any:
        return np.full((3, 5, 3), self._num_steps, np.uint8)

    def scaled(self, number: float, *, by: Any = 1) -> Any:
        return {"scaled": number * by, "level": self.level}

    def _obs(self) -> Any:
        random = self.np_random
        return {
            "place": np.array([self._sum, self._num_steps], np.float32),
            "mode": np.int64(self._num_steps % 3),
            "bits": random.integers(0, 2, (2, 2)).astype(np.int8),
            "image": random.integers(0, 256, (3, 4, 2)).astype(np.uint8),
            "pair": (np.array(self._sum), np.array([self._num_steps % 3, int(random.integers(9))])),
        }


def summed(space: spaces.Space[Any], action: Any) -> float:
    """A number that changes with any bit of the action."""
    if isinstance(space, spaces.Dict):
        return sum((index + 1) * summed(space[key], action[key]) for index, key in enumerate(space))
    if isinstance(space, spaces.Tuple):
        return sum((index + 1) * summed(each, action[index]) for index, each in enumerate(space))
    values = np.asarray(action, np.float64).reshape(-1)
    return float(values @ np.arange(1, len(values) + 1))


class StackEnv(gymnasium.Env[Any, Any]):
    """Stacked frames, as Atari's wrappers give them: an episode begins with one frame, repeated."""

    def __init__(self, num_frames: int = 4, size: int = 84, length: int = 11) -> None:
        self.action_space = spaces.Discrete(3)
        self.observation_space = spaces.Box(0, 255, (num_frames, size, size), np.uint8)
        self._size = size
        self._length = length
        self._stack = np.zeros(self.observation_space.shape, np.uint8)
        self._num_steps = 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self._num_steps = 0
        self._stack[:] = self._frame()
        return self._stack.copy(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self._num_steps += 1
        self._stack[:-1] = self._stack[1:]
        self._stack[-1] = self._frame()
        is_over = bool(self.np_random.random() * self._length < 1)
        return self._stack.copy(), float(action), is_over, False, {}

    def _frame(self) -> Any:
        return self.np_random.integers(0, 256, (self._size, self._size)).astype(np.uint8)


class BigEnv(gymnasium.Env[Any, Any]):
    """One observation has 3 MB, and is no stack."""

    def __init__(self) -> None:
        self.action_space = spaces.Discrete(2)
        self.observation_space = spaces.Box(-np.inf, np.inf, (1024 * 1024 * 3 // 4,), np.float32)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        return self._obs(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        return self._obs(), 1.0, bool(action), False, {}

    def _obs(self) -> Any:
        return self.np_random.random(self.observation_space.shape, np.float32)
