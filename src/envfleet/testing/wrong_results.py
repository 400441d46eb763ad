"""WrongResultEnv: an env that returns what Gymnasium's API does not allow, and the check of what pools make of it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces
from numpy.testing import assert_array_equal

from envfleet.contract.episode import Autoreset
from envfleet.contract.errors import EnvFailed
from envfleet.testing.expectations import expect

_OBS = np.array([1, 2, 3], np.uint8)
_FLOATS = np.array([0.2, 0.9, 300.0])
_TWO = np.zeros(2)

# What step() returns (or raises), and a part of what the caller is told. Action 0 is a right result.
WRONG_STEPS: tuple[tuple[Any, str], ...] = (
    ((_OBS, 1.0, False, False, None), "info of its step() must be a dict; got None"),
    ((_OBS, 1.0, False, False, [1]), "info of its step() must be a dict; got a list of 1"),
    ((_OBS, 1.0, False, {}), "must return (obs, reward, terminated, truncated, info); got a tuple of 4"),
    (None, "must return (obs, reward, terminated, truncated, info); got None"),
    ((_OBS, None, False, False, {}), "reward of its step() must be a number; got None"),
    ((_OBS, _TWO, False, False, {}), "reward of its step() must be a number; got an array of shape (2,)"),
    ((_OBS, 1j, False, False, {}), "reward of its step() must be a number; got complex 1j"),
    ((_OBS, "1.0", False, False, {}), "reward of its step() must be a number; got str '1.0'"),
    ((_OBS, 1.0, None, False, {}), "terminated of its step() must be True or False; got None"),
    ((_OBS, 1.0, False, _TWO, {}), "truncated of its step() must be True or False; got an array of shape (2,)"),
    ((_FLOATS, 1.0, False, False, {}), "dtype uint8, as its space says; got dtype float64"),
    ((_OBS.astype(np.int64), 1.0, False, False, {}), "dtype uint8, as its space says; got dtype int64"),
    (([1, 2, 300], 1.0, False, False, {}), "dtype uint8, as its space says; got a list of 3"),
    ((_OBS[:2], 1.0, False, False, {}), "shape (3,) and dtype uint8, as its space says; got shape (2,)"),
    ((None, 1.0, False, False, {}), "shape (3,) and dtype uint8, as its space says; got None"),
    (GeneratorExit("told to"), "GeneratorExit: told to"),
    (SystemExit(3), "SystemExit: 3"),
)

# What reset(options={"wrong": index}) returns.
WRONG_RESETS: tuple[tuple[Any, str], ...] = (
    ((_OBS, None), "info of its reset() must be a dict; got None"),
    (_OBS, "its reset() must return (obs, info); got an array of shape (3,)"),
    ((_FLOATS, {}), "dtype uint8, as its space says; got dtype float64"),
)


class WrongResultEnv(gymnasium.Env[Any, Any]):
    """Action k gives the k-th of WRONG_STEPS; observations of right results count the steps."""

    def __init__(self) -> None:
        self.observation_space = spaces.Box(0, 255, (3,), np.uint8)
        self.action_space = spaces.Discrete(len(WRONG_STEPS) + 1)
        self._num_steps = 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        """Start an episode, as Gymnasium envs do."""
        super().reset(seed=seed)
        self._num_steps = 0
        if options:
            return WRONG_RESETS[options["wrong"]][0]
        return np.full(3, 10, np.uint8), {}

    def step(self, action: Any) -> Any:
        """A right result, or a wrong one."""
        if action:
            result = WRONG_STEPS[int(action) - 1][0]
            if isinstance(result, BaseException):
                raise result
            return result
        self._num_steps += 1
        return np.full(3, 10 + self._num_steps, np.uint8), 1.0, False, False, {}


def wrong_results_are_failures_of_the_env(make: Callable[..., Any], mode: Autoreset) -> None:
    """EnvFailed names the env and its action; the row holds the last observation, and is truncated."""
    with make(WrongResultEnv, 2, autoreset_mode=mode) as pool:
        for act, (_, text) in enumerate(WRONG_STEPS, 1):
            pool.reset(seed=5)
            pool.step(np.array([0, 0]))
            error = expect(EnvFailed, partial(pool.step, np.array([0, act])))
            assert isinstance(error, EnvFailed)
            assert error.env_id == 1 and error.seed == 6 and int(error.last_action) == act, repr(error)
            assert text in str(error.args[0]), f"{error.args[0]!r} does not say {text!r}"
            assert "Traceback" in error.child_traceback
            obs, rewards, terminated, truncated, infos = pool.recv()
            assert_array_equal(truncated, [False, True])
            assert_array_equal(rewards, [1.0, 0.0])
            assert not terminated.any() and text in infos["env_error"][1]
            assert_array_equal(obs[0], np.full(3, 12))
            assert_array_equal(infos["final_obs"][1] if mode is Autoreset.SAME_STEP else obs[1], np.full(3, 11))
        for index, (_, text) in enumerate(WRONG_RESETS):
            error = expect(EnvFailed, partial(pool.reset, options={"wrong": index}))
            assert text in str(error.args[0]), f"{error.args[0]!r} does not say {text!r}"
        obs, _ = pool.reset(seed=5)
        assert_array_equal(obs, np.full((2, 3), 10))
