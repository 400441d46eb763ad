"""What is measured: Python environments, and the rows of benchmarks/pool.py that run them.

A new row is one `pool_row()` in `PYTHON_ROWS`; rows of native envs are in native_rows.py. Child processes
import this file to build their environments, so it imports nothing heavy.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import gymnasium as gym
import numpy as np

from benchmarks.harness.machine import burn
from benchmarks.rows.contenders import (
    GYMNASIUM_ASYNC,
    GYMNASIUM_SYNC,
    SB3_SUBPROC,
    TIANSHOU_SHMEM,
    EnvFn,
    envfleet_async,
    envfleet_sync,
)
from benchmarks.rows.pool_row import Peer, pool_row


class CostEnv(gym.Env[np.ndarray, np.int64]):
    """An env of known cost and no content. It never ends, so that no contender's reset rule is measured."""

    def __init__(self, num_burn_iterations: int = 0, sleep_s: float = 0.0) -> None:
        self.observation_space = gym.spaces.Box(-1.0, 1.0, (4,), np.float32)
        self.action_space = gym.spaces.Discrete(2)
        self._num_burn_iterations = num_burn_iterations
        self._sleep_s = sleep_s
        self._obs = np.zeros(4, np.float32)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[np.ndarray, dict[str, Any]]:
        """Start over; there is nothing to restore."""
        super().reset(seed=seed)
        return self._obs, {}

    def step(self, action: np.int64) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        """Pay the cost, and return the same observation as ever."""
        if self._num_burn_iterations:
            burn(self._num_burn_iterations)
        if self._sleep_s:
            time.sleep(self._sleep_s)
        return self._obs, 0.0, False, False, {}


def _burns(cpu_s: float) -> Callable[[int, float], EnvFn]:
    return lambda env_id, iterations_per_s: partial(CostEnv, num_burn_iterations=round(cpu_s * iterations_per_s))


FAST_BURN_S = 100e-6
FAST_WAIT_S = 1e-3
SLOWER = 20  # one env in eight takes so many times longer


def _one_in_eight_burns(env_id: int, iterations_per_s: float) -> EnvFn:
    return _burns(FAST_BURN_S * SLOWER if env_id % 8 == 0 else FAST_BURN_S)(env_id, iterations_per_s)


def _one_in_eight_waits(env_id: int, iterations_per_s: float) -> EnvFn:
    return partial(CostEnv, sleep_s=FAST_WAIT_S * SLOWER if env_id % 8 == 0 else FAST_WAIT_S)


PYTHON_ROWS = (
    pool_row(
        name="cpu",
        title="Python env, 40 us of CPU",
        num_envs=8,
        env_fn=_burns(40e-6),
        subject=envfleet_sync(),
        peers=(Peer(GYMNASIUM_SYNC, 1.6), Peer(GYMNASIUM_ASYNC, 4.0), Peer(SB3_SUBPROC, 4.0)),
    ),
    pool_row(
        name="noop",
        title="Python env, no-op",
        num_envs=64,
        env_fn=lambda env_id, iterations_per_s: CostEnv,
        subject=envfleet_sync(),
        peers=(
            Peer(GYMNASIUM_ASYNC, 20.0),
            Peer(SB3_SUBPROC, 20.0),
            Peer(TIANSHOU_SHMEM, 20.0),
            Peer(GYMNASIUM_SYNC),
        ),
    ),
    pool_row(
        name="sleep",
        title="Python env, sleeps 1 ms",
        num_envs=64,
        env_fn=lambda env_id, iterations_per_s: partial(CostEnv, sleep_s=1e-3),
        subject=envfleet_sync(num_workers=64),
        peers=(Peer(GYMNASIUM_ASYNC, 4.0),),
    ),
    pool_row(
        name="lunarlander",
        title="LunarLander-v3 (Python Box2D)",
        num_envs=64,
        env_fn=lambda env_id, iterations_per_s: partial(gym.make, "LunarLander-v3"),
        subject=envfleet_sync(),
        peers=(Peer(GYMNASIUM_SYNC, 1.7), Peer(GYMNASIUM_ASYNC, 6.0)),
        requires=("Box2D",),
    ),
    pool_row(
        name="mixed-burn",
        title="envs of different speed: 0.1 ms of CPU, one in eight 2 ms",
        num_envs=32,
        env_fn=_one_in_eight_burns,
        subject=envfleet_async(batch_size=16),
        peers=(Peer(envfleet_sync(), 2.0),),
    ),
    pool_row(
        name="mixed-wait",
        title="envs of different speed: they sleep 1 ms, one in eight 20 ms",
        num_envs=32,
        env_fn=_one_in_eight_waits,
        subject=envfleet_async(batch_size=16, num_workers=32),
        peers=(Peer(envfleet_sync(num_workers=32), 2.0),),
    ),
)
