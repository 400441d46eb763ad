"""Environments that do what their actions tell them, for tests."""

from __future__ import annotations

import enum
import os
import signal
import time
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces


class Act(enum.IntEnum):
    """Actions of ScriptedEnv."""

    GO_ON = 0
    TERMINATE = 1
    TRUNCATE = 2
    END_BOTH = 3
    RAISE = 4
    EXIT = 5  # os._exit
    KILL = 6  # SIGKILL to its own process
    SEGFAULT = 7  # SIGSEGV likewise
    SLEEP = 8  # for `sleep_s`
    WRONG_SHAPE = 9  # an observation that its space cannot hold
    FAIL_NEXT_RESET = 10


class ScriptedEnv(gymnasium.Env[Any, Any]):
    """Each action says what happens. Observations tell everything that a test wants to know:

    [a number drawn at the reset, steps in this episode, episodes since the last seeded reset, last action]

    `name` can be read with get_attr.
    """

    metadata = {"render_modes": ["rgb_array"], "render_fps": 1}  # noqa: RUF012 - as Gymnasium declares it

    def __init__(self, name: str = "env", sleep_s: float = 0.2, render_mode: str | None = None) -> None:
        self.observation_space = spaces.Box(-np.inf, np.inf, (4,), np.float64)
        self.action_space = spaces.Discrete(len(Act))
        self.render_mode = render_mode
        self.name = name
        self.sleep_s = sleep_s
        self._state = np.zeros(4)  # reused for every observation, as many envs do
        self._fails_at_reset = False
        self.num_closed = 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Start an episode; `options["fail"]` makes it raise."""
        super().reset(seed=seed)
        if self._fails_at_reset or (options and options.get("fail")):
            self._fails_at_reset = False
            raise RuntimeError("told to fail in reset")
        episode = 0.0 if seed is not None else self._state[2] + 1
        self._state[:] = (self.np_random.random(), 0.0, episode, -1.0)
        info: dict[str, Any] = {"first": True, "options": dict(options)} if options else {"first": True}
        return self._state, info

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Take one step: `action` is an Act, which says what happens."""
        act = Act(int(action))
        if act is Act.RAISE:
            raise ValueError("told to fail in step")
        if act is Act.EXIT:
            os._exit(3)
        if act in (Act.KILL, Act.SEGFAULT):
            os.kill(os.getpid(), signal.SIGKILL if act is Act.KILL else signal.SIGSEGV)
            time.sleep(60)
        if act is Act.SLEEP:
            time.sleep(self.sleep_s)
        self._fails_at_reset = act is Act.FAIL_NEXT_RESET
        self._state[1] += 1
        self._state[3] = act
        terminated = act in (Act.TERMINATE, Act.END_BOTH, Act.FAIL_NEXT_RESET)
        truncated = act in (Act.TRUNCATE, Act.END_BOTH)
        obs = np.zeros(7) if act is Act.WRONG_SHAPE else self._state
        info: dict[str, Any] = {"step": int(self._state[1])}
        if terminated or truncated:
            info["episode"] = {"l": int(self._state[1]), "r": float(self._state[1])}
        return obs, float(self._state[1]) + 0.1, terminated, truncated, info

    def render(self) -> Any:
        """Return a frame whose pixels are the number of the step."""
        return np.full((2, 2, 3), int(self._state[1]), dtype=np.uint8)

    def double(self, number: int) -> int:
        """Return twice the number, for tests of call()."""
        return 2 * number

    def close(self) -> None:
        """Count the calls in `num_closed`."""
        self.num_closed += 1


class BoxActionEnv(gymnasium.Env[Any, Any]):
    """Continuous actions, which it keeps and gives back one step later."""

    def __init__(self, dtype: str = "float32") -> None:
        self.action_space = spaces.Box(-1, 1, (3,), np.dtype(dtype).type)
        self.observation_space = spaces.Box(-10, 10, (3,), np.dtype(dtype).type)
        self._kept = np.zeros(3, dtype)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Start an episode with zeros."""
        super().reset(seed=seed)
        self._kept = np.zeros(3, self.action_space.dtype)
        return self._kept.copy(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Return the action of the step before: it must not have changed since."""
        obs, self._kept = self._kept, action
        return obs, float(np.sum(obs)), False, False, {}


class TreeEnv(gymnasium.Env[Any, Any]):
    """Nested observations and actions of every kind; it returns the action it got as part of the observation."""

    def __init__(self) -> None:
        self.action_space = spaces.Dict(
            {
                "move": spaces.Box(-1, 1, (2,), np.float32),
                "word": spaces.Text(8),
                "pair": spaces.Tuple((spaces.Discrete(5), spaces.MultiDiscrete([3, 4]))),
            }
        )
        self.observation_space = spaces.Dict(
            {
                "echo": self.action_space,
                "image": spaces.Box(0, 255, (4, 5, 3), np.uint8),
                "half": spaces.Box(-1, 1, (), np.float16),
                "bits": spaces.MultiBinary([2, 3]),
                "list": spaces.Sequence(spaces.Discrete(9)),
                "graph": spaces.Graph(spaces.Box(-1, 1, (2,)), None),
                "stack": spaces.Tuple((spaces.Box(-1, 1, (2, 2), np.float64), spaces.Text(4))),
            }
        )

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Start with a random observation."""
        super().reset(seed=seed)
        if seed is not None:
            self.observation_space.seed(seed)
            self.action_space.seed(seed)
        return self.observation_space.sample(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """A random observation with the action in it."""
        obs = self.observation_space.sample()
        obs["echo"] = action
        return obs, 1.0, bool(action["pair"][0] == 4), False, {}
