"""The scout: one env, built in a process of its own, to learn its spaces and how it spends its time."""

from __future__ import annotations

import math
import resource
import time
from dataclasses import dataclass
from typing import Any

import gymnasium

from envfleet.contract.spec import EnvTraits

MOST_STEPS = 64
MOST_SECONDS = 0.2
MOST_WORKERS_PER_CPU = 64  # a process takes memory, also while it waits


@dataclass(frozen=True, slots=True)
class Timing:
    """How an env spent its first steps."""

    num_steps: int
    wall_s: float
    cpu_s: float
    num_waits: int  # how often the process gave its CPU up to wait for something

    @property
    def cpu_share(self) -> float:
        """CPU time for each second of wall time."""
        return self.cpu_s / self.wall_s if self.wall_s > 0 else 1.0

    @property
    def mostly_waits(self) -> bool:
        """Does a step wait (sleep, network, a simulator elsewhere) more than it computes?

        Less CPU than wall time alone does not say so: on a busy machine others may have had the CPU. So
        the process must also have gone to sleep by itself.
        """
        return self.num_steps > 0 and self.cpu_share < 0.5 and self.num_waits >= self.num_steps / 4


@dataclass(frozen=True, slots=True)
class Findings:
    """What the scout found."""

    traits: EnvTraits
    timing: Timing | None  # None: not measured, or the env did not run


def choose_num_workers(findings: Findings, num_envs: int, num_cpus: int) -> tuple[int, str]:
    """How many processes, and why, in words for the log."""
    timing = findings.timing
    if timing is None:
        return min(num_envs, num_cpus), f"one for each of {num_cpus} CPUs (the env was not measured)"
    measured = (
        f"{timing.num_steps} steps took {timing.wall_s / timing.num_steps * 1e6:.0f} us each, "
        f"{timing.cpu_share:.0%} of it on the CPU"
    )
    if not timing.mostly_waits:
        return min(num_envs, num_cpus), f"one for each of {num_cpus} CPUs, since the env computes: {measured}"
    # `num_cpus / cpu_share` would keep the CPUs busy if envs took turns; those of one batch all start together.
    enough = math.ceil(4 * num_cpus / max(timing.cpu_share, 1e-3))
    num_workers = min(num_envs, enough, MOST_WORKERS_PER_CPU * num_cpus)
    return num_workers, f"more than the {num_cpus} CPUs, since the env mostly waits: {measured}"


def time_steps(env: gymnasium.Env[Any, Any]) -> Timing | None:
    """Take the first steps, with random actions; None if the env does not like them."""
    try:
        env.reset(seed=0)
        env.action_space.seed(0)
        actions = [env.action_space.sample() for _ in range(MOST_STEPS)]
        num_steps, wall_s, cpu_s, num_waits = 0, 0.0, 0.0, 0
        while num_steps < MOST_STEPS and wall_s < MOST_SECONDS:
            waits_before = resource.getrusage(resource.RUSAGE_SELF).ru_nvcsw
            wall_before, cpu_before = time.perf_counter(), time.process_time()
            _, _, terminated, truncated, _ = env.step(actions[num_steps])
            cpu_s += time.process_time() - cpu_before
            wall_s += time.perf_counter() - wall_before
            num_waits += resource.getrusage(resource.RUSAGE_SELF).ru_nvcsw - waits_before
            num_steps += 1
            if terminated or truncated:
                env.reset()
    except Exception:
        return None  # random actions are not for every env; its own steps will show what is wrong, if anything
    return Timing(num_steps, wall_s, cpu_s, num_waits)
