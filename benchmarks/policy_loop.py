"""How fast is the whole loop, with a policy that chooses the actions: envfleet's pools against EnvPool's?

    python -m benchmarks.policy_loop                        every row, about five minutes
    python -m benchmarks.policy_loop --rows ant-64 --windows 5
    python -m benchmarks.policy_loop --quick                does it run? Its numbers are not to be quoted

A policy in torch, on one thread of the CPU and without gradients, sees each batch of observations and draws actions:
two layers of 64 for vectors, the Nature CNN for images. It is the same for all contenders of a row, with the same
weights. In the async rows a batch has half of the envs: the other half is stepped while the policy works. How much of
the time is the policy's is noted below the table. Windows are measured as in benchmarks/pool.py.
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
from benchmarks.harness.rows import Window
from benchmarks.rows.contenders import Actions, Contender, EnvFn, Running
from benchmarks.rows.pool_row import Peer, PoolRow, pool_row, start_pools

Array = np.ndarray
Act = Callable[[Array], Array]  # observations -> actions

WINDOW_S, ROUNDS = 0.6, 7  # so that a whole run takes about five minutes
ENVPOOL_THREADS = (1, 2)
PROCESSES = ((1, None), (2, True))  # num_workers and pin_workers of envfleet beside its own choice, for reference
TARGET = 1.0  # never behind
NUM_TORCH_THREADS = 1  # the other cores are for envs; and threads that wait for each other suffer from any other work


def policy(obs_shape: tuple[int, ...], action_space: gym.Space[Any], action_dtype: Any) -> Act:
    """A network with fixed weights that draws actions for a batch of observations."""
    import torch
    from torch import nn

    torch.set_num_threads(NUM_TORCH_THREADS)
    torch.manual_seed(0)
    is_image = len(obs_shape) == 3
    is_discrete = isinstance(action_space, gym.spaces.Discrete)
    num_outputs = int(action_space.n) if is_discrete else int(np.prod(action_space.shape))
    if is_image:
        num_channels = obs_shape[0]
        network = nn.Sequential(
            *(nn.Conv2d(num_channels, 32, 8, stride=4), nn.ReLU(), nn.Conv2d(32, 64, 4, stride=2), nn.ReLU()),
            *(nn.Conv2d(64, 64, 3), nn.ReLU(), nn.Flatten(), nn.Linear(64 * 7 * 7, 512), nn.ReLU()),
            nn.Linear(512, num_outputs),
        )
    else:
        num_inputs = int(np.prod(obs_shape))
        network = nn.Sequential(
            *(nn.Linear(num_inputs, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, num_outputs))
        )
    scale = 1 / 255 if is_image else 1.0
    dtype = torch.from_numpy(np.zeros(1, action_dtype)).dtype
    low, high = (None, None) if is_discrete else (float(action_space.low.min()), float(action_space.high.max()))

    @torch.inference_mode()
    def act(obs: Array) -> Array:
        inputs = torch.from_numpy(obs).float()
        outputs = network(inputs * scale if is_image else inputs)
        if is_discrete:
            actions = torch.multinomial(outputs.softmax(-1), 1).squeeze(-1)
        else:
            actions = (outputs + 0.5 * torch.randn_like(outputs)).clamp(low, high)
        return actions.to(dtype).numpy()

    return act


class Loop:
    """A pool and the policy that steps it. Between windows no env is at work."""

    def __init__(self, envs: Any, act: Act, num_envs: int, batch_size: int | None) -> None:
        """Reset the envs."""
        self._envs, self._act = envs, act
        self._num_envs, self._batch_size = num_envs, batch_size
        self._idle: list[tuple[Array, Array]] = []  # observations and ids of envs that wait for actions
        if batch_size is None:
            self._obs = envs.reset()[0]
        else:
            envs.async_reset()
            self._collect_idle()

    def run_window(self, window_s: float) -> Window:
        """Act and step until the window is over."""
        return self._run_sync(window_s) if self._batch_size is None else self._run_async(window_s, self._batch_size)

    def _run_sync(self, window_s: float) -> Window:
        step, act, clock = self._envs.step, self._act, time.perf_counter
        obs, num_calls, policy_s = self._obs, 0, 0.0
        now_s = start_s = clock()
        while now_s - start_s < window_s:
            actions = act(obs)
            acted_s = clock()
            policy_s += acted_s - now_s
            obs = step(actions)[0]
            num_calls += 1
            now_s = clock()
        self._obs = obs
        return Window(num_calls * self._num_envs, now_s - start_s, policy_s=policy_s)

    def _run_async(self, window_s: float, batch_size: int) -> Window:
        send, recv, act, clock = self._envs.send, self._envs.recv, self._act, time.perf_counter
        num_calls, policy_s = 0, 0.0
        start_s = clock()
        for obs, env_ids in self._idle:
            asked_s = clock()
            actions = act(obs)
            policy_s += clock() - asked_s
            send(actions, env_ids)
        self._idle.clear()
        while True:
            obs, _, _, _, info = recv()
            env_ids = info["env_id"]
            num_calls += 1
            now_s = clock()
            if now_s - start_s >= window_s:
                break
            actions = act(obs)
            policy_s += clock() - now_s
            send(actions, env_ids)
        self._idle.append((np.array(obs), np.array(env_ids)))
        self._collect_idle()
        return Window(num_calls * batch_size, now_s - start_s, policy_s=policy_s)

    def _collect_idle(self) -> None:
        while len(self._idle) < self._num_envs // (self._batch_size or self._num_envs):
            obs, _, _, _, info = self._envs.recv()
            self._idle.append((np.array(obs), np.array(info["env_id"])))  # copies: the pools' memory is theirs


def _envfleet(
    env_id: str, batch_size: int | None, num_workers: int | None = None, pins: bool | None = None
) -> Contender:
    """With the backend that the pool itself chooses for this env; what is None it chooses, too."""

    def build(env_fns: Sequence[EnvFn], actions: Actions) -> Running:
        import envfleet

        envs = envfleet.make(
            env_id, len(env_fns), batch_size=batch_size, num_workers=num_workers, pin_workers=pins, seed=0
        )
        space = envs.single_action_space
        act = policy(envs.single_observation_space.shape, space, space.dtype)
        return Running(Loop(envs, act, len(env_fns), batch_size).run_window, envs.close)

    workers = "" if num_workers is None else f", {num_workers} process{'es' if num_workers > 1 else ''}"
    workers += " pinned" if pins else ""
    return Contender("envfleet" + _batch(batch_size) + workers, "envfleet", "envfleet", build)


def _envpool(env_id: str, batch_size: int | None, num_threads: int) -> Contender:
    def build(env_fns: Sequence[EnvFn], actions: Actions) -> Running:
        import envpool

        sizes = {} if batch_size is None else {"batch_size": batch_size}
        envs = envpool.make_gymnasium(env_id, num_envs=len(env_fns), num_threads=num_threads, seed=0, **sizes)
        act = policy(envs.observation_space.shape, envs.action_space, envs.spec.action_array_spec["action"].dtype)
        return Running(Loop(envs, act, len(env_fns), batch_size).run_window, envs.close)

    mode = " sync" if batch_size is None else _batch(batch_size)
    name = f"EnvPool{mode}, {num_threads} thread{'s' if num_threads > 1 else ''}"
    return Contender(name, "envpool", "envpool", build)


def _batch(batch_size: int | None) -> str:
    return "" if batch_size is None else f" async, batch {batch_size}"


def _env_fn(env_id: str) -> Callable[[int, float], EnvFn]:
    """Only to know its actions."""
    if env_id == "Pong-v5":
        from envfleet.pool.simulators.atari import AtariEnv

        return lambda env_index, iterations_per_s: partial(AtariEnv, "pong")
    return lambda env_index, iterations_per_s: partial(gym.make, env_id)


def _row(family: str, env_id: str, num_envs: int, requires: tuple[str, ...], *, is_async: bool) -> PoolRow:
    batch_size = num_envs // 2 if is_async else None
    network = "Nature CNN" if env_id == "Pong-v5" else "2x64 MLP"
    peers = [Peer(_envpool(env_id, batch_size, num_threads), TARGET) for num_threads in ENVPOOL_THREADS]
    if env_id == "Pong-v5" and is_async:  # the emulators run in processes, which leave the policy a core or do not
        peers += [Peer(_envfleet(env_id, batch_size, *processes)) for processes in PROCESSES]
    return pool_row(
        name=f"{family}-{num_envs}" + ("-async" if is_async else ""),
        title=f"{env_id}, {network}" + (", async" if is_async else ""),
        num_envs=num_envs,
        env_fn=_env_fn(env_id),
        subject=_envfleet(env_id, batch_size),
        peers=tuple(peers),
        requires=("torch", *requires),
        is_native=True,
    )


ROWS = tuple(
    _row(family, env_id, num_envs, requires, is_async=is_async)
    for family, env_id, num_envs, requires in (
        ("pong", "Pong-v5", 16, ("ale_py",)),
        ("lunarlander", "LunarLander-v3", 64, ("Box2D",)),
        ("cartpole", "CartPole-v1", 64, ()),
        ("ant", "Ant-v5", 64, ("mujoco",)),
        ("halfcheetah", "HalfCheetah-v5", 64, ("mujoco",)),
        ("humanoid", "Humanoid-v5", 64, ("mujoco",)),
    )
    for is_async in (False, True)
)

POLICY_LOOP = Benchmark(table="policy_loop", rows=ROWS, start_for=start_pools, window_s=WINDOW_S, rounds=ROUNDS)

if __name__ == "__main__":
    sys.exit(POLICY_LOOP.run(POLICY_LOOP.parser(__doc__).parse_args()))
