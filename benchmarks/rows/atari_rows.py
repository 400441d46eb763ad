"""The rows of benchmarks/simulators.py with Atari games: the same preprocessing by everybody, 84x84, four frames."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from benchmarks.rows.contenders import Actions, Contender, EnvFn, Running, running
from benchmarks.rows.native_contenders import envpool_async, envpool_sync, running_async
from benchmarks.rows.native_rows import ENVPOOL_THREADS
from benchmarks.rows.pool_row import Peer, PoolRow, pool_row

GAME = "Pong-v5"


def _atari_env(env_id: int, iterations_per_s: float) -> EnvFn:
    from envfleet.pool.simulators.atari import AtariEnv

    return partial(AtariEnv, "pong")


def _envfleet(backend: str, batch_size: int | None = None) -> Contender:
    def build(env_fns: Sequence[EnvFn], actions: Actions) -> Running:
        import envfleet

        arguments: dict[str, Any] = {"backend": backend, "batch_size": batch_size, "seed": 0}
        envs = envfleet.make(GAME, len(env_fns), **arguments)
        if batch_size is not None:
            return running_async(envs, envs.close, actions, batch_size)
        envs.reset(seed=0)
        return running(envs.step, envs.close, actions)

    name = f"envfleet {backend}" + ("" if batch_size is None else f" async, batch {batch_size}")
    return Contender(name, "envfleet", "envfleet", build)


def _row(num_envs: int, *, is_async: bool) -> PoolRow:
    batch_size = num_envs // 2
    peers = (
        tuple(Peer(envpool_async(GAME, batch_size, num_threads), 1.15) for num_threads in ENVPOOL_THREADS)
        if is_async
        else (
            *(Peer(envpool_sync(GAME, num_threads), 1.2) for num_threads in ENVPOOL_THREADS),
            Peer(_envfleet("vector")),
        )
    )
    return pool_row(
        name=f"pong-{num_envs}" + ("-async" if is_async else ""),
        title=GAME + (", async" if is_async else ""),
        num_envs=num_envs,
        env_fn=_atari_env,
        subject=_envfleet("process", batch_size if is_async else None),
        peers=peers,
        requires=("ale_py",),
    )


ATARI_ROWS = tuple(_row(num_envs, is_async=is_async) for num_envs in (16, 64) for is_async in (False, True))
