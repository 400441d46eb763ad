"""What is measured: Python environments, and the rows of benchmarks/pool.py that run them.

A new row is one `Workload` in `PYTHON_WORKLOADS`; rows of native envs are in native_workloads.py. Child processes
import this file to build their environments, so it imports nothing heavy.
"""

from __future__ import annotations

import multiprocessing
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

import gymnasium as gym
import numpy as np

from contenders import (
    GYMNASIUM_ASYNC,
    GYMNASIUM_SYNC,
    SB3_SUBPROC,
    TIANSHOU_SHMEM,
    Contender,
    EnvFn,
    envfleet_async,
    envfleet_sync,
)


def burn(num_iterations: int) -> int:
    """Use CPU, the same amount whoever calls: a chain of integer steps, none of which can be skipped."""
    state = 1
    for _ in range(num_iterations):
        state = (state * 1103515245 + 12345) & 0x7FFFFFFF
    return state


def burn_iterations_per_s() -> float:
    """How many iterations of `burn` one undisturbed core does in a second of CPU time.

    CPU time, and the best of many short trials: neighbours on a shared machine only ever make it slower.
    """
    num_iterations = 20_000
    best_s = min(_cpu_s_of_burn(num_iterations) for _ in range(100))
    return num_iterations / best_s


def _cpu_s_of_burn(num_iterations: int) -> float:
    start_s = time.thread_time()
    burn(num_iterations)
    return time.thread_time() - start_s


class ParallelSpeedup:
    """How much more all cores burn than one, at this moment: the ceiling of any ratio to a loop in one process.

    On a shared machine it changes from minute to minute, so it is measured again between the windows.
    """

    def __init__(self, num_cores: int) -> None:
        """Start a process for each core; they sleep while nobody measures."""
        self._num_cores = num_cores
        self._executor = ProcessPoolExecutor(num_cores, mp_context=multiprocessing.get_context("spawn"))
        self._duration_s(num_cores)

    def measure(self) -> float:
        """Takes about a third of a second."""
        return statistics.median(
            self._num_cores * self._duration_s(1) / self._duration_s(self._num_cores) for _ in "123"
        )

    def close(self) -> None:
        """End the processes."""
        self._executor.shutdown()

    def _duration_s(self, num_tasks: int) -> float:
        start_s = time.perf_counter()
        list(self._executor.map(burn, [500_000] * num_tasks))
        return time.perf_counter() - start_s


class CostEnv(gym.Env[np.ndarray, np.int64]):
    """An env of known cost and no content. It never ends, so that no contender's reset rule is measured."""

    def __init__(self, num_burn_iterations: int = 0, sleep_s: float = 0.0) -> None:
        """What each step costs; nothing by default."""
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


@dataclass(frozen=True, slots=True)
class Peer:
    """A contender to be compared with, and the ratio to reach."""

    contender: Contender
    target_ratio: float | None = None  # None: for reference


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """One row: environments, the contender in question, and those it is compared with."""

    name: str  # for --rows
    title: str
    num_envs: int
    # (env_id, burn iterations a second) -> how to build that env. The second argument is measured once in a
    # run, so that a microsecond of CPU is the same amount of work for every contender.
    env_fn: Callable[[int, float], EnvFn]
    subject: Contender
    peers: tuple[Peer, ...]
    requires: tuple[str, ...] = ()  # modules that the environment itself needs
    is_native: bool = False  # the subject's envs are C++: it wins by more than the number of cores


def _burns(cpu_s: float) -> Callable[[int, float], EnvFn]:
    return lambda env_id, iterations_per_s: partial(CostEnv, num_burn_iterations=round(cpu_s * iterations_per_s))


FAST_BURN_S = 100e-6
FAST_WAIT_S = 1e-3
SLOWER = 20  # one env in eight takes so many times longer


def _one_in_eight_burns(env_id: int, iterations_per_s: float) -> EnvFn:
    return _burns(FAST_BURN_S * SLOWER if env_id % 8 == 0 else FAST_BURN_S)(env_id, iterations_per_s)


def _one_in_eight_waits(env_id: int, iterations_per_s: float) -> EnvFn:
    return partial(CostEnv, sleep_s=FAST_WAIT_S * SLOWER if env_id % 8 == 0 else FAST_WAIT_S)


PYTHON_WORKLOADS = (
    Workload(
        name="cpu",
        title="Python env, 40 us of CPU",
        num_envs=8,
        env_fn=_burns(40e-6),
        subject=envfleet_sync(),
        peers=(Peer(GYMNASIUM_SYNC, 1.6), Peer(GYMNASIUM_ASYNC, 4.0), Peer(SB3_SUBPROC, 4.0)),
    ),
    Workload(
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
    Workload(
        name="sleep",
        title="Python env, sleeps 1 ms",
        num_envs=64,
        env_fn=lambda env_id, iterations_per_s: partial(CostEnv, sleep_s=1e-3),
        subject=envfleet_sync(num_workers=64),
        peers=(Peer(GYMNASIUM_ASYNC, 4.0),),
    ),
    Workload(
        name="lunarlander",
        title="LunarLander-v3 (Python Box2D)",
        num_envs=64,
        env_fn=lambda env_id, iterations_per_s: partial(gym.make, "LunarLander-v3"),
        subject=envfleet_sync(),
        peers=(Peer(GYMNASIUM_SYNC, 1.7), Peer(GYMNASIUM_ASYNC, 6.0)),
        requires=("Box2D",),
    ),
    Workload(
        name="mixed-burn",
        title="envs of different speed: 0.1 ms of CPU, one in eight 2 ms",
        num_envs=32,
        env_fn=_one_in_eight_burns,
        subject=envfleet_async(batch_size=16),
        peers=(Peer(envfleet_sync(), 2.0),),
    ),
    Workload(
        name="mixed-wait",
        title="envs of different speed: they sleep 1 ms, one in eight 20 ms",
        num_envs=32,
        env_fn=_one_in_eight_waits,
        subject=envfleet_async(batch_size=16, num_workers=32),
        peers=(Peer(envfleet_sync(num_workers=32), 2.0),),
    ),
)
