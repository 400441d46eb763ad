"""The rows of benchmarks/pool.py whose environments are native: envfleet's C++ against EnvPool's, Gymnasium's Python,
and a plain C++ loop.

EnvPool runs with one thread and with two, because which of them is faster depends on the env and on what else the
machine does; the target is to be reached against either.
"""

from __future__ import annotations

from functools import partial

import gymnasium as gym

from benchmarks.rows.ceiling import CPP_LOOP
from benchmarks.rows.contenders import GYMNASIUM_SYNC
from benchmarks.rows.native_contenders import (
    GYMNASIUM_NUMPY_CARTPOLE,
    envfleet_native,
    envfleet_native_async,
    envpool_async,
    envpool_sync,
)
from benchmarks.rows.pool_row import Peer, PoolRow, pool_row

ENVPOOL_THREADS = (1, 2)  # targets are set for 2 cores


def sync_row(
    name: str, env_id: str, num_envs: int, envpool_target: float | None, *others: Peer, gymnasium_id: str | None = None
) -> PoolRow:
    rivals = [
        Peer(envpool_sync(env_id, num_threads), envpool_target)
        for num_threads in ENVPOOL_THREADS
        if num_threads <= num_envs
    ]
    return pool_row(
        name=name,
        title=env_id,
        num_envs=num_envs,
        env_fn=lambda env_index, iterations_per_s: partial(gym.make, gymnasium_id or env_id),
        subject=envfleet_native(env_id),
        peers=(*rivals, *others),
        is_native=True,
    )


def async_row(name: str, env_id: str, num_envs: int, envpool_target: float) -> PoolRow:
    """A batch has half of the envs."""
    batch_size = num_envs // 2
    return pool_row(
        name=name,
        title=f"{env_id}, async",
        num_envs=num_envs,
        env_fn=lambda env_index, iterations_per_s: partial(gym.make, env_id),
        subject=envfleet_native_async(env_id, batch_size),
        peers=tuple(
            Peer(envpool_async(env_id, batch_size, num_threads), envpool_target) for num_threads in ENVPOOL_THREADS
        ),
        is_native=True,
    )


NATIVE_ROWS = (
    sync_row("cartpole-1", "CartPole-v1", 1, 10.0, Peer(GYMNASIUM_SYNC, 4.0)),
    sync_row("cartpole-8", "CartPole-v1", 8, 20.0, Peer(GYMNASIUM_SYNC)),
    sync_row("cartpole-64", "CartPole-v1", 64, 25.0, Peer(GYMNASIUM_SYNC), Peer(GYMNASIUM_NUMPY_CARTPOLE)),
    sync_row("cartpole-256", "CartPole-v1", 256, 25.0, Peer(GYMNASIUM_NUMPY_CARTPOLE), Peer(CPP_LOOP, 0.5)),
    async_row("cartpole-async", "CartPole-v1", 64, 5.0),
    sync_row("pendulum", "Pendulum-v1", 64, 10.0),
    sync_row("acrobot", "Acrobot-v1", 64, 10.0),
    sync_row("mountaincar", "MountainCar-v0", 64, 10.0),
    sync_row("frozenlake", "FrozenLake-v1", 64, 10.0),
    # Gymnasium 1.4 knows Taxi by its new version only; here it serves for its actions.
    sync_row("taxi", "Taxi-v3", 64, 10.0, gymnasium_id="Taxi-v4"),
)
