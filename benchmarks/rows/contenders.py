"""How each library is built and stepped, through its own native API, for a window of time.

Peers are imported inside their builders: a machine without one of them still measures the others, and a child
process that only needs an environment never loads torch.
"""

from __future__ import annotations

import importlib
import itertools
import multiprocessing
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import gymnasium as gym
import numpy as np

from benchmarks.harness.rows import Window

EnvFn = Callable[[], gym.Env[Any, Any]]
Actions = np.ndarray  # [num_batches, num_envs, *action.shape], sampled before any clock runs
LOOK_EVERY_S = 1e-3


@dataclass(frozen=True, slots=True)
class Running:
    """A contender that is built and reset. Between windows its processes sleep."""

    run_window: Callable[[float], Window]
    close: Callable[[], object]
    about: dict[str, str] = field(default_factory=dict)


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
    """Step all envs together until the window is over; the steps that cross its end are counted and timed.

    Where a step takes microseconds, the clock is read only about once a millisecond: it must not be measured too.
    """
    num_envs = actions.shape[1]
    batches = itertools.cycle(list(actions))
    num_calls, num_at_once = 0, 1
    now_s = start_s = time.perf_counter()
    while now_s - start_s < window_s:
        for batch in itertools.islice(batches, num_at_once):
            step(batch)
        num_calls += num_at_once
        last_s, now_s = now_s, time.perf_counter()
        if now_s - last_s < LOOK_EVERY_S:
            num_at_once *= 2
    return Window(num_calls * num_envs, now_s - start_s)


def running(step: Callable[[np.ndarray], object], close: Callable[[], object], actions: Actions) -> Running:
    """A contender whose step() takes the actions of all envs."""
    return Running(lambda window_s: run_sync_window(step, actions, window_s), close)


def _gymnasium_sync(env_fns: Sequence[EnvFn], actions: Actions) -> Running:
    envs = gym.vector.SyncVectorEnv(env_fns)
    envs.reset(seed=0)
    return running(envs.step, envs.close, actions)


def _gymnasium_async(env_fns: Sequence[EnvFn], actions: Actions) -> Running:
    envs = gym.vector.AsyncVectorEnv(env_fns)
    envs.reset(seed=0)
    return running(envs.step, envs.close, actions)


def _sb3_subproc(env_fns: Sequence[EnvFn], actions: Actions) -> Running:
    from stable_baselines3.common.vec_env import SubprocVecEnv

    # SB3 starts its children from a fork server, where each would import torch by itself. Loaded once in the
    # server it is shared by all of them, which changes the start and not the stepping.
    multiprocessing.set_forkserver_preload(["stable_baselines3"])
    envs = SubprocVecEnv(list(env_fns))
    envs.seed(0)
    envs.reset()
    return running(envs.step, envs.close, actions)


def _tianshou_shmem(env_fns: Sequence[EnvFn], actions: Actions) -> Running:
    from tianshou.env import ShmemVectorEnv

    envs = ShmemVectorEnv(env_fns)
    envs.reset()
    return running(envs.step, envs.close, actions)


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
        return running(envs.step, envs.close, actions)

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
        driver = SendRecv(envs, actions, batch_size)
        driver.collect_idle()
        return Running(driver.run_window, envs.close)

    name = _pool_name(f"envfleet async, batch {batch_size}", num_workers)
    return Contender(name, "envfleet", "envfleet", build)


def _pool_name(name: str, num_workers: int | None) -> str:
    return name if num_workers is None else f"{name}, {num_workers} workers"


class SendRecv:
    """Keeps all envs of an asynchronous pool busy in a window, and none of them between windows."""

    def __init__(self, envs: Any, actions: Actions, batch_size: int, counts_envs: bool = True) -> None:
        """To count the steps of each env takes 2 us a batch, which would be seen where a batch takes 10."""
        self._envs = envs
        self._batch_size = batch_size
        self._batches = itertools.cycle(list(np.ascontiguousarray(actions[:, :batch_size])))
        self._num_envs = actions.shape[1]
        self._counts_envs = counts_envs
        self._idle_env_ids: list[np.ndarray] = []  # each [batch_size]; envs that wait for an action

    def collect_idle(self) -> None:
        """Receive until no env is stepping."""
        while len(self._idle_env_ids) < self._num_envs // self._batch_size:
            # A copy, because the batch belongs to the pool, which may write the next one into it.
            self._idle_env_ids.append(np.array(self._envs.recv()[4]["env_id"]))

    def run_window(self, window_s: float) -> Window:
        """Step until the window is over. Steps begun and not received by then are not counted."""
        envs, batches = self._envs, self._batches
        steps_by_env = np.zeros(self._num_envs, dtype=np.int64) if self._counts_envs else None
        num_calls = 0
        start_s = time.perf_counter()
        end_s = start_s + window_s
        for env_ids in self._idle_env_ids:
            envs.send(next(batches), env_ids)
        self._idle_env_ids.clear()
        while True:
            env_ids = envs.recv()[4]["env_id"]
            if steps_by_env is not None:
                steps_by_env[env_ids] += 1
            num_calls += 1
            if (now_s := time.perf_counter()) >= end_s:
                break
            envs.send(next(batches), env_ids)
        self._idle_env_ids.append(np.array(env_ids))
        self.collect_idle()
        counts = None if steps_by_env is None else steps_by_env.tolist()
        return Window(num_calls * self._batch_size, now_s - start_s, steps_by_env=counts)
