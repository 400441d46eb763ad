"""Where the time of a synchronous batch goes: the parent's own work, and waiting for the slower child.

python -m benchmarks.batch_cost
"""

import time
from collections.abc import Callable

import gymnasium as gym
import numpy as np

import envfleet
from benchmarks.rows.python_rows import CostEnv
from envfleet.contract.pool_config import Line

NUM_ENVS, NUM_WORKERS, NUM_BATCHES = 64, 2, 5000


def parent_costs() -> dict[str, float]:
    """Microseconds of each part of a step of 8 no-op envs, in the order in which they happen."""
    with envfleet.make(CostEnv, 8, backend="process", num_workers=NUM_WORKERS) as pool:
        pool.reset(seed=0)
        backend, task_queues = pool._backend, pool._backend._task_queues
        actions = np.zeros(8, dtype=np.int64)
        parts: dict[str, Callable[[], object]] = {
            "check the actions": lambda: pool._actions.require_batch(actions, 8, "actions"),
            "send": lambda: backend.send(None, [actions]),
            "wait for the children": lambda: task_queues.wait_full(Line.FULL, 1.0),
            "take the arrays": lambda: task_queues.take(Line.FULL),
        }
        spent_s = dict.fromkeys(parts, 0.0)
        for _ in range(NUM_BATCHES):
            for name, part in parts.items():
                start_s = time.perf_counter()
                part()
                spent_s[name] += time.perf_counter() - start_s
        start_s = time.perf_counter()
        for _ in range(NUM_BATCHES):
            pool.step(actions)
        spent_s["a whole step()"] = time.perf_counter() - start_s
    return {name: seconds / NUM_BATCHES * 1e6 for name, seconds in spent_s.items()}


def barrier_efficiency() -> tuple[float, float, float]:
    """LunarLander-v3: microseconds of a step and of a reset, and how busy two workers are that wait for each other."""
    env = gym.make("LunarLander-v3")
    env.reset(seed=0)
    env.action_space.seed(0)
    steps_us, resets_us = [], []
    for _ in range(10_000):
        start_s = time.perf_counter()
        _, _, terminated, truncated, _ = env.step(env.action_space.sample())
        steps_us.append((time.perf_counter() - start_s) * 1e6)
        if terminated or truncated:
            start_s = time.perf_counter()
            env.reset()
            resets_us.append((time.perf_counter() - start_s) * 1e6)
    generator = np.random.default_rng(0)
    shape = (NUM_BATCHES, NUM_WORKERS, NUM_ENVS // NUM_WORKERS)
    is_reset = generator.random(shape) < len(resets_us) / len(steps_us)
    costs_us = np.where(is_reset, generator.choice(resets_us, shape), generator.choice(steps_us, shape)).sum(axis=2)
    return float(np.mean(steps_us)), float(np.mean(resets_us)), float(costs_us.mean() / costs_us.max(axis=1).mean())


if __name__ == "__main__":
    for name, microseconds in parent_costs().items():
        print(f"{name:25} {microseconds:6.1f} us")
    step_us, reset_us, efficiency = barrier_efficiency()
    print(f"LunarLander-v3: a step takes {step_us:.0f} us, a reset {reset_us:.0f} us; two workers with 32 envs each")
    print(f"that wait for each other are busy {efficiency:.0%} of the time, before any cost of ours.")
