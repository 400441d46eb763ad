"""How fast does Stable-Baselines3 train with a pool of envfleet's, against its own DummyVecEnv and SubprocVecEnv?

    python -m benchmarks.sb3                        every row, about five minutes
    python -m benchmarks.sb3 --rows cartpole --windows 3
    python -m benchmarks.sb3 --quick                does it run? Its numbers are not to be quoted

The whole of training is timed: `PPO.learn()` with VecMonitor, rollouts and updates (8 envs, 256 steps, 10 epochs in
batches of 256, two layers of 64, torch on one thread). A window is as many calls of learn(), of one rollout and its
update each, as begin in it. All contenders have the same settings; below the table stands how much of the time was not
spent in the envs' step(): the policy and the updates, which no vector env makes faster. Windows are measured as in
benchmarks/pool.py.
"""

from __future__ import annotations

import multiprocessing
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import gymnasium as gym

from benchmarks.harness.command import Benchmark
from benchmarks.harness.rows import Window
from benchmarks.rows.contenders import Actions, Contender, EnvFn, Running
from benchmarks.rows.pool_row import Peer, PoolRow, pool_row, start_pools
from benchmarks.rows.python_rows import CostEnv

NUM_ENVS, NUM_STEPS = 8, 256
WINDOW_S, ROUNDS, QUICK_WINDOW_S = 6.0, 5, 0.5
PYTHON_ENV_S = 200e-6  # of CPU for each step
MakeVecEnv = Callable[[Sequence[EnvFn]], Any]


class Training:
    """PPO on a vec env. Between windows nothing is at work."""

    def __init__(self, vec_env: Any) -> None:
        """Build the learner; its first window is for warming up."""
        import torch
        from stable_baselines3 import PPO
        from stable_baselines3.common.vec_env import VecMonitor

        torch.set_num_threads(1)
        self._vec_env = _timed(vec_env)
        self._ppo = PPO(
            "MlpPolicy", VecMonitor(self._vec_env), n_steps=NUM_STEPS, batch_size=256, n_epochs=10, seed=0, device="cpu"
        )

    def run_window(self, window_s: float) -> Window:
        """Learn until the window is over."""
        num_before, self._vec_env.step_s = self._ppo.num_timesteps, 0.0
        now_s = start_s = time.perf_counter()
        while now_s - start_s < window_s:
            self._ppo.learn(NUM_STEPS * NUM_ENVS, reset_num_timesteps=False)
            now_s = time.perf_counter()
        duration_s = now_s - start_s
        count = self._ppo.num_timesteps - num_before
        return Window(count, duration_s, policy_s=duration_s - self._vec_env.step_s)

    def close(self) -> None:
        self._vec_env.close()


def _timed(vec_env: Any) -> Any:
    """The same vec env, which adds up the time from each step_async() to the end of its step_wait()."""
    from stable_baselines3.common.vec_env import VecEnvWrapper

    class Timed(VecEnvWrapper):
        step_s = 0.0

        def reset(self) -> Any:
            return self.venv.reset()

        def step_async(self, actions: Any) -> None:
            self._begun_s = time.perf_counter()
            self.venv.step_async(actions)

        def step_wait(self) -> Any:
            result = self.venv.step_wait()
            self.step_s += time.perf_counter() - self._begun_s
            return result

    return Timed(vec_env)


def _envfleet(env: str | None) -> Contender:
    """By the id, if there is one: native envs have no functions that make them."""

    def make(env_fns: Sequence[EnvFn]) -> Any:
        import envfleet
        from envfleet.adapters.sb3 import SB3VecEnv

        envs: Any = list(env_fns) if env is None else env
        return SB3VecEnv(envfleet.make(envs, len(env_fns), autoreset_mode="same_step"))

    return _contender("envfleet SB3VecEnv", "envfleet", make)


def _dummy(env_fns: Sequence[EnvFn]) -> Any:
    from stable_baselines3.common.vec_env import DummyVecEnv

    return DummyVecEnv(list(env_fns))


def _subproc(env_fns: Sequence[EnvFn]) -> Any:
    from stable_baselines3.common.vec_env import SubprocVecEnv

    # As in benchmarks/rows/contenders.py: torch is imported once for all children, which changes the start alone.
    multiprocessing.set_forkserver_preload(["stable_baselines3"])
    return SubprocVecEnv(list(env_fns))


def _contender(name: str, package: str, make: MakeVecEnv) -> Contender:
    def build(env_fns: Sequence[EnvFn], actions: Actions) -> Running:
        training = Training(make(env_fns))
        return Running(training.run_window, training.close)

    return Contender(name, package, "stable_baselines3", build)


DUMMY = _contender("SB3 DummyVecEnv", "stable-baselines3", _dummy)
SUBPROC = _contender("SB3 SubprocVecEnv", "stable-baselines3", _subproc)


def _row(name: str, title: str, env: str | None, env_fn: Any, *requires: str) -> PoolRow:
    return pool_row(
        name=name,
        title=f"PPO on {title}",
        num_envs=NUM_ENVS,
        env_fn=env_fn,
        subject=_envfleet(env),
        peers=(Peer(DUMMY, 1.0), Peer(SUBPROC, 1.0)),
        requires=("stable_baselines3", *requires),
        is_native=env is not None,
    )


def _registered(env_id: str) -> Callable[[int, float], EnvFn]:
    return lambda env_index, iterations_per_s: partial(gym.make, env_id)


def _python_env(env_index: int, iterations_per_s: float) -> EnvFn:
    return partial(CostEnv, num_burn_iterations=round(PYTHON_ENV_S * iterations_per_s))


ROWS = (
    _row("cartpole", "CartPole-v1", "CartPole-v1", _registered("CartPole-v1")),
    _row("halfcheetah", "HalfCheetah-v5", "HalfCheetah-v5", _registered("HalfCheetah-v5"), "mujoco"),
    _row("python", "a Python env, 200 us of CPU", None, _python_env),
)

SB3 = Benchmark(
    table="sb3",
    rows=ROWS,
    start_for=start_pools,
    window_s=WINDOW_S,
    rounds=ROUNDS,
    quick_window_s=QUICK_WINDOW_S,
)

if __name__ == "__main__":
    sys.exit(SB3.run(SB3.parser(__doc__).parse_args()))
