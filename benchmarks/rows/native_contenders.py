"""How the libraries with C++ environments are built and stepped: envfleet's native backend, EnvPool, and between them
Gymnasium's CartPole in NumPy.

Each builds its envs from the id. Actions are converted to the library's own dtype before any clock runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import gymnasium as gym

from benchmarks.rows.contenders import Actions, Contender, EnvFn, Running, SendRecv, running


def envfleet_native(env_id: str) -> Contender:
    """An envfleet pool that waits for every env, with as many threads as it likes."""

    def build(env_fns: Sequence[EnvFn], actions: Actions) -> Running:
        import envfleet

        envs = envfleet.make(env_id, len(env_fns), backend="native", seed=0)
        envs.reset(seed=0)
        return running(envs.step, envs.close, actions)

    return Contender("envfleet native", "envfleet", "envfleet", build)


def envfleet_native_async(env_id: str, batch_size: int) -> Contender:
    """An envfleet pool driven by `recv` and `send`, `batch_size` envs at a time."""

    def build(env_fns: Sequence[EnvFn], actions: Actions) -> Running:
        import envfleet

        envs = envfleet.make(env_id, len(env_fns), batch_size=batch_size, backend="native", seed=0)
        return running_async(envs, envs.close, actions, batch_size)

    return Contender(f"envfleet native async, batch {batch_size}", "envfleet", "envfleet", build)


def envpool_sync(env_id: str, num_threads: int) -> Contender:
    """EnvPool, waiting for every env."""

    def build(env_fns: Sequence[EnvFn], actions: Actions) -> Running:
        envs = _make_envpool(env_id, num_envs=len(env_fns), num_threads=num_threads)
        envs.reset()
        return running(envs.step, envs.close, _as_envpool(envs, actions))

    return Contender(f"EnvPool sync, {_threads(num_threads)}", "envpool", "envpool", build)


def envpool_async(env_id: str, batch_size: int, num_threads: int) -> Contender:
    """EnvPool, `batch_size` envs at a time."""

    def build(env_fns: Sequence[EnvFn], actions: Actions) -> Running:
        envs = _make_envpool(env_id, num_envs=len(env_fns), batch_size=batch_size, num_threads=num_threads)
        return running_async(envs, envs.close, _as_envpool(envs, actions), batch_size)

    return Contender(f"EnvPool async, batch {batch_size}, {_threads(num_threads)}", "envpool", "envpool", build)


def _gymnasium_numpy(env_fns: Sequence[EnvFn], actions: Actions) -> Running:
    envs = gym.make_vec("CartPole-v1", len(env_fns), vectorization_mode="vector_entry_point")
    envs.reset(seed=0)
    return running(envs.step, envs.close, actions)


GYMNASIUM_NUMPY_CARTPOLE = Contender("Gymnasium NumPy", "gymnasium", "gymnasium", _gymnasium_numpy)


def _make_envpool(env_id: str, **settings: int) -> Any:
    import envpool

    return envpool.make_gymnasium(env_id, seed=0, **settings)


def _as_envpool(envs: Any, actions: Actions) -> Actions:
    """Its discrete actions are int32; those of MuJoCo are float64."""
    return actions.astype(envs.spec.action_array_spec["action"].dtype)


def running_async(envs: Any, close: Any, actions: Actions, batch_size: int) -> Running:
    """Driven by `recv` and `send`, `batch_size` envs at a time."""
    envs.async_reset()
    # Envs of one kind take equally long: there is none to starve, and the steps of each need not be counted.
    driver = SendRecv(envs, actions, batch_size, counts_envs=False)
    driver.collect_idle()
    return Running(driver.run_window, close)


def _threads(num_threads: int) -> str:
    return f"{num_threads} thread{'s' if num_threads > 1 else ''}"
