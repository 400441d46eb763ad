"""How each library is built and stepped, through its own native API, for a window of time.

Peers are imported inside their builders: a machine without one of them still measures the others, and a child
process that only needs an environment never loads torch.
"""

from __future__ import annotations

import contextlib
import importlib
import multiprocessing
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import gymnasium as gym
import numpy as np

EnvFn = Callable[[], gym.Env[Any, Any]]
Actions = np.ndarray  # [num_batches, num_envs, *action.shape], sampled before any clock runs


@contextlib.contextmanager
def deadline(timeout_s: float, what: str) -> Iterator[None]:
    """Raise TimeoutError in the main thread: a contender that hangs must not take the run with it."""

    def expire(signum: int, frame: object) -> None:
        raise TimeoutError(f"{what} took longer than {timeout_s:g} s")

    previous = signal.signal(signal.SIGALRM, expire)
    signal.setitimer(signal.ITIMER_REAL, timeout_s)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, previous)


@dataclass(frozen=True, slots=True)
class Window:
    """What one contender did in one window."""

    num_steps: int
    duration_s: float
    steps_by_env: list[int] | None = None  # None: every env was stepped equally often

    @property
    def steps_per_s(self) -> float:
        """Env steps a second."""
        return self.num_steps / self.duration_s


@dataclass(frozen=True, slots=True)
class Running:
    """A contender that is built and reset. Between windows its processes sleep."""

    run_window: Callable[[float], Window]
    close: Callable[[], object]


@dataclass(frozen=True, slots=True)
class Contender:
    """One way to step a list of environments."""

    name: str
    package: str  # the distribution that a reader must install
    module: str  # what is imported to see whether it is there
    build: Callable[[Sequence[EnvFn], Actions], Running]

    def is_installed(self) -> bool:
        """Whether the package is there. One that is there and broken raises: it must not pass for absent."""
        try:
            importlib.import_module(self.module)
        except ModuleNotFoundError as error:
            if error.name != self.module:
                raise
            return False
        return True


def run_sync_window(step: Callable[[np.ndarray], object], actions: Actions, window_s: float) -> Window:
    """Step all envs together until the window is over; the step that crosses its end is counted and timed."""
    num_batches, num_envs = actions.shape[:2]
    num_calls = 0
    start_s = time.perf_counter()
    end_s = start_s + window_s
    while (now_s := time.perf_counter()) < end_s:
        step(actions[num_calls % num_batches])
        num_calls += 1
    return Window(num_calls * num_envs, now_s - start_s)


def _running(step: Callable[[np.ndarray], object], close: Callable[[], object], actions: Actions) -> Running:
    return Running(lambda window_s: run_sync_window(step, actions, window_s), close)


def _gymnasium_sync(env_fns: Sequence[EnvFn], actions: Actions) -> Running:
    envs = gym.vector.SyncVectorEnv(env_fns)
    envs.reset(seed=0)
    return _running(envs.step, envs.close, actions)


def _gymnasium_async(env_fns: Sequence[EnvFn], actions: Actions) -> Running:
    envs = gym.vector.AsyncVectorEnv(env_fns)
    envs.reset(seed=0)
    return _running(envs.step, envs.close, actions)


def _sb3_subproc(env_fns: Sequence[EnvFn], actions: Actions) -> Running:
    from stable_baselines3.common.vec_env import SubprocVecEnv

    # SB3 starts its children from a fork server, where each would import torch by itself. Loaded once in the
    # server it is shared by all of them, which changes the start and not the stepping.
    multiprocessing.set_forkserver_preload(["stable_baselines3"])
    envs = SubprocVecEnv(list(env_fns))
    envs.seed(0)
    envs.reset()
    return _running(envs.step, envs.close, actions)


def _tianshou_shmem(env_fns: Sequence[EnvFn], actions: Actions) -> Running:
    from tianshou.env import ShmemVectorEnv

    envs = ShmemVectorEnv(env_fns)
    envs.reset()
    return _running(envs.step, envs.close, actions)


GYMNASIUM_SYNC = Contender("Gymnasium sync", "gymnasium", "gymnasium", _gymnasium_sync)
GYMNASIUM_ASYNC = Contender("Gymnasium async", "gymnasium", "gymnasium", _gymnasium_async)
SB3_SUBPROC = Contender("SB3 SubprocVecEnv", "stable-baselines3", "stable_baselines3", _sb3_subproc)
# Tianshou leaves resets to its caller, so it belongs only in rows whose envs never end.
TIANSHOU_SHMEM = Contender("Tianshou ShmemVectorEnv", "tianshou", "tianshou", _tianshou_shmem)


def envfleet_sync(num_workers: int | None = None) -> Contender:
    """An envfleet pool that waits for every env; `num_workers=None` leaves the choice to the pool."""

    def build(env_fns: Sequence[EnvFn], actions: Actions) -> Running:
        import envfleet

        # The process backend by name: LunarLander must not turn into a C++ env once there is one.
        envs = envfleet.make(list(env_fns), len(env_fns), backend="process", num_workers=num_workers, seed=0)
        envs.reset(seed=0)
        return _running(envs.step, envs.close, actions)

    return Contender(_pool_name("envfleet", num_workers), "envfleet", "envfleet", build)


def envfleet_async(batch_size: int, num_workers: int | None = None) -> Contender:
    """An envfleet pool driven by `recv` and `send`, `batch_size` envs at a time."""

    def build(env_fns: Sequence[EnvFn], actions: Actions) -> Running:
        import envfleet

        if len(env_fns) % batch_size:
            # Otherwise the last recv of a window would wait for a batch that can never fill.
            raise ValueError(f"batch_size={batch_size} must divide num_envs={len(env_fns)}")
        envs = envfleet.make(
            list(env_fns),
            len(env_fns),
            batch_size=batch_size,
            backend="process",
            num_workers=num_workers,
            seed=0,
        )
        envs.async_reset()
        driver = _SendRecv(envs, actions, batch_size)
        driver.collect_idle()
        return Running(driver.run_window, envs.close)

    name = _pool_name(f"envfleet async, batch {batch_size}", num_workers)
    return Contender(name, "envfleet", "envfleet", build)


def _pool_name(name: str, num_workers: int | None) -> str:
    return name if num_workers is None else f"{name}, {num_workers} workers"


class _SendRecv:
    """Keeps all envs of an asynchronous pool busy in a window, and none of them between windows."""

    def __init__(self, envs: Any, actions: Actions, batch_size: int) -> None:
        self._envs = envs
        self._actions = actions[:, :batch_size]  # [num_batches, batch_size, *action.shape]
        self._num_batches_of_envs = actions.shape[1] // batch_size
        self._idle_env_ids: list[np.ndarray] = []  # each [batch_size]; envs that wait for an action

    def collect_idle(self) -> None:
        """Receive until no env is stepping."""
        while len(self._idle_env_ids) < self._num_batches_of_envs:
            # A copy, because the batch belongs to the pool, which may write the next one into it.
            self._idle_env_ids.append(np.array(self._envs.recv()[4]["env_id"]))

    def run_window(self, window_s: float) -> Window:
        """Step until the window is over. Steps begun and not received by then are not counted."""
        envs, actions = self._envs, self._actions
        num_batches, batch_size = actions.shape[:2]
        steps_by_env = np.zeros(self._num_batches_of_envs * batch_size, dtype=np.int64)
        num_calls = 0
        start_s = time.perf_counter()
        end_s = start_s + window_s
        for env_ids in self._idle_env_ids:
            envs.send(actions[0], env_ids)
        self._idle_env_ids.clear()
        while True:
            env_ids = envs.recv()[4]["env_id"]
            steps_by_env[env_ids] += 1
            num_calls += 1
            if (now_s := time.perf_counter()) >= end_s:
                break
            envs.send(actions[num_calls % num_batches], env_ids)
        self._idle_env_ids.append(np.array(env_ids))
        self.collect_idle()
        return Window(num_calls * batch_size, now_s - start_s, steps_by_env.tolist())
