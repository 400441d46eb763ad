"""How fast are loops that are one compiled program of JAX: envfleet's xla() against EnvPool's?

    PYTHONPATH=examples python -m benchmarks.xla             every row, about five minutes
    PYTHONPATH=examples python -m benchmarks.xla --rows ppo-cartpole-16
    PYTHONPATH=examples python -m benchmarks.xla --quick     does it run? Its numbers are not to be quoted

"ppo" rows are the training of examples/ppo_jax.py, learning included; "loop" rows only act, with its policy of 2x64;
"bare" rows step with fixed actions. All contenders of a row run the same program of JAX around their own `step`, in a
lax.scan on the CPU, which uses all cores. "Python loop": the same policy, jitted, and `pool.step()` called from Python.
Windows are measured as in benchmarks/pool.py; compiling is not counted.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import gymnasium as gym
import numpy as np

from benchmarks.harness.command import Benchmark
from benchmarks.harness.machine import PACKAGES
from benchmarks.harness.rows import Window
from benchmarks.rows.contenders import Actions, Contender, EnvFn, Running
from benchmarks.rows.pool_row import Peer, PoolRow, pool_row, start_pools

WINDOW_S, ROUNDS = 0.6, 11
ENVPOOL_THREADS = (1, 2)
TARGET = 1.0  # never behind
NUM_SCANNED = 256  # steps in one call of a "loop" or "bare" program

Program = Callable[[Any], Any]  # what the scan carries: before -> afterwards
Envs = tuple[Any, Any, Any, int, Callable[[], object]]  # handle, step, first obs, number of actions, close


def _envfleet(env_id: str, num_envs: int) -> Envs:
    import envfleet

    pool = envfleet.make(env_id, num_envs, backend="native", seed=0)
    obs, _ = pool.reset()
    handle, _, _, step = pool.xla()
    return handle, step, obs, int(pool.single_action_space.n), pool.close


def _envpool(env_id: str, num_envs: int, num_threads: int) -> Envs:
    import envpool

    envs = envpool.make_gymnasium(env_id, num_envs=num_envs, num_threads=num_threads, seed=0)
    obs, _ = envs.reset()
    handle, _, _, step = envs.xla()
    return handle, step, obs, int(envs.action_space.n), envs.close


def _ppo(handle: Any, step: Any, obs: Any, num_actions: int, actions: Actions) -> tuple[Program, Any, int]:
    """The program, its first carry, and the steps of all envs in one call."""
    import ppo_jax

    settings = ppo_jax.Settings(num_envs=len(obs), total_steps=1)
    learner = ppo_jax.new_learner(settings, handle, obs, num_actions)
    program = ppo_jax.train.lower(step, settings, learner).compile()
    return lambda learner: program(learner)[0], learner, settings.num_rollout_steps * settings.num_envs


def _loop(handle: Any, step: Any, obs: Any, num_actions: int, actions: Actions) -> tuple[Program, Any, int]:
    import jax

    import ppo_jax

    settings = ppo_jax.Settings(num_envs=len(obs), num_rollout_steps=NUM_SCANNED)
    learner = ppo_jax.new_learner(settings, handle, obs, num_actions)

    @jax.jit
    def act(learner: Any) -> Any:
        return ppo_jax.collect(step, settings, learner)[0]

    return act, learner, NUM_SCANNED * settings.num_envs


def _bare(handle: Any, step: Any, obs: Any, num_actions: int, actions: Actions) -> tuple[Program, Any, int]:
    import jax
    import jax.numpy as jnp
    from jax import lax

    batches = jnp.asarray(np.resize(actions, (NUM_SCANNED, *actions.shape[1:])), jnp.int32)

    @jax.jit
    def steps(carry: Any) -> Any:
        def one_step(carry: Any, actions: Any) -> tuple[Any, None]:
            handle, total = carry
            handle, (_, rewards, *_) = step(handle, actions)
            return (handle, total + rewards.sum()), None

        return lax.scan(one_step, carry, batches)[0]

    return steps, (jnp.asarray(handle), jnp.float32(0)), NUM_SCANNED * len(obs)


PROGRAMS = {"ppo": _ppo, "loop": _loop, "bare": _bare}


def _running(kind: str, envs: Envs, actions: Actions) -> Running:
    import jax

    *pool, close = envs
    program, carry, num_steps = PROGRAMS[kind](*pool, actions)

    def run_window(window_s: float) -> Window:
        nonlocal carry
        num_calls = 0
        now_s = start_s = time.perf_counter()
        while now_s - start_s < window_s:
            carry = jax.block_until_ready(program(carry))
            num_calls += 1
            now_s = time.perf_counter()
        return Window(num_calls * num_steps, now_s - start_s)

    return Running(run_window, close)


def _subject(kind: str, env_id: str) -> Contender:
    def build(env_fns: Sequence[EnvFn], actions: Actions) -> Running:
        return _running(kind, _envfleet(env_id, len(env_fns)), actions)

    return Contender("envfleet xla()", "envfleet", "envfleet", build)


def _peer(kind: str, env_id: str, num_threads: int) -> Contender:
    def build(env_fns: Sequence[EnvFn], actions: Actions) -> Running:
        return _running(kind, _envpool(env_id, len(env_fns), num_threads), actions)

    name = f"EnvPool xla(), {num_threads} thread{'s' if num_threads > 1 else ''}"
    return Contender(name, "envpool", "envpool", build)


def _python_loop(env_id: str) -> Contender:
    """Act by a jitted policy, and step the pool from Python."""

    def build(env_fns: Sequence[EnvFn], actions: Actions) -> Running:
        import jax

        import envfleet
        import ppo_jax

        pool = envfleet.make(env_id, len(env_fns), backend="native", seed=0)
        obs, _ = pool.reset()
        settings = ppo_jax.Settings(num_envs=len(env_fns))
        learner = ppo_jax.new_learner(settings, np.zeros(8, np.uint8), obs, int(pool.single_action_space.n))

        @jax.jit
        def act(params: Any, key: Any, obs: Any) -> Any:
            key, draw = jax.random.split(key)
            return key, jax.random.categorical(draw, ppo_jax.mlp(params["policy"], obs))

        key = learner.key

        def run_window(window_s: float) -> Window:
            nonlocal key, obs
            num_calls = 0
            now_s = start_s = time.perf_counter()
            while now_s - start_s < window_s:
                key, chosen = act(learner.params, key, obs)
                obs = pool.step(np.asarray(chosen))[0]
                num_calls += 1
                now_s = time.perf_counter()
            return Window(num_calls * len(env_fns), now_s - start_s)

        return Running(run_window, pool.close)

    return Contender("envfleet, Python loop", "envfleet", "envfleet", build)


def _row(kind: str, family: str, env_id: str, num_envs: int) -> PoolRow:
    peers = tuple(Peer(_peer(kind, env_id, num_threads), TARGET) for num_threads in ENVPOOL_THREADS)
    if kind == "loop":
        peers += (Peer(_python_loop(env_id)),)
    titles = {"ppo": "whole PPO", "loop": "2x64 MLP", "bare": "fixed actions"}
    return pool_row(
        name=f"{kind}-{family}-{num_envs}",
        title=f"{env_id}, {titles[kind]}",
        num_envs=num_envs,
        env_fn=lambda env_index, iterations_per_s: partial(gym.make, env_id),
        subject=_subject(kind, env_id),
        peers=peers,
        requires=("jax", "ppo_jax"),
        is_native=True,
    )


ROWS = tuple(
    _row(kind, family, env_id, num_envs)
    for kind, family, env_id, num_envs in (
        ("ppo", "cartpole", "CartPole-v1", 16),
        ("ppo", "cartpole", "CartPole-v1", 128),
        ("loop", "cartpole", "CartPole-v1", 16),
        ("loop", "cartpole", "CartPole-v1", 128),
        ("bare", "cartpole", "CartPole-v1", 16),
        ("bare", "cartpole", "CartPole-v1", 128),
    )
)

XLA = Benchmark(
    table="xla",
    rows=ROWS,
    start_for=start_pools,
    window_s=WINDOW_S,
    rounds=ROUNDS,
    packages=(*PACKAGES, "jax", "jaxlib"),
)

if __name__ == "__main__":
    sys.exit(XLA.run(XLA.parser(__doc__).parse_args()))
