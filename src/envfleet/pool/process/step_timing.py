"""How envs spend their time: the first steps that the caller takes are timed, and the log says what follows from it."""

from __future__ import annotations

import math
import resource
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

ENOUGH_STEPS = 64
FEWEST_STEPS = 8  # the first ones may do what no later one does, such as connect
ENOUGH_SECONDS = 1.0
MOST_WORKERS_PER_CPU = 64  # a process takes memory, also while it waits

T = TypeVar("T")


@dataclass(slots=True)
class StepTimes:
    """How envs spent their first steps."""

    num_steps: int = 0
    wall_s: float = 0.0
    cpu_s: float = 0.0
    num_waits: int = 0  # how often the process gave its CPU up to wait for something

    def timed(self, step: Callable[[], T]) -> T:
        """Call `step`, and count what it took."""
        waits_before = resource.getrusage(resource.RUSAGE_SELF).ru_nvcsw
        wall_before, cpu_before = time.perf_counter(), time.process_time()
        result = step()
        self.cpu_s += time.process_time() - cpu_before
        self.wall_s += time.perf_counter() - wall_before
        self.num_waits += resource.getrusage(resource.RUSAGE_SELF).ru_nvcsw - waits_before
        self.num_steps += 1
        return result

    @property
    def are_enough(self) -> bool:
        """Were there enough steps to judge by?"""
        return self.num_steps >= ENOUGH_STEPS or (self.num_steps >= FEWEST_STEPS and self.wall_s >= ENOUGH_SECONDS)

    @property
    def cpu_share(self) -> float:
        """CPU time for each second of wall time."""
        return self.cpu_s / self.wall_s if self.wall_s > 0 else 1.0

    @property
    def mostly_wait(self) -> bool:
        """Does a step wait (sleep, network, a simulator elsewhere) more than it computes?

        Less CPU than wall time alone does not say so: on a busy machine others may have had the CPU. So
        the process must also have gone to sleep by itself.
        """
        return self.num_steps > 0 and self.cpu_share < 0.5 and self.num_waits >= self.num_steps / 4

    def __str__(self) -> str:
        """In words, for the log."""
        each_us = self.wall_s / max(self.num_steps, 1) * 1e6
        return f"{self.num_steps} steps took {each_us:.0f} us each, {self.cpu_share:.0%} of it on the CPU"


def fitting_num_workers(times: StepTimes, num_envs: int, num_cpus: int) -> int:
    """The number of processes for envs that spend their time like this."""
    if not times.mostly_wait:
        return min(num_envs, num_cpus)
    # `num_cpus / cpu_share` would keep the CPUs busy if envs took turns; those of one batch all start together.
    enough = math.ceil(4 * num_cpus / max(times.cpu_share, 1e-3))
    return min(num_envs, enough, MOST_WORKERS_PER_CPU * num_cpus)


def advice(times: StepTimes, num_workers: int, num_envs: int, num_cpus: int) -> str | None:
    """What to tell the user of a pool with `num_workers` processes; None if they fit."""
    fitting = fitting_num_workers(times, num_envs, num_cpus)
    if fitting <= num_workers:
        return None
    return (
        f"the envs mostly wait ({times}), and each of {num_workers} processes steps its envs one after the other: "
        f"num_workers={fitting} (in a cluster: pool_workers={fitting}) would let the {num_envs} envs wait side by side"
    )
