"""The machine that measures: what it is, what else it does, and how much its cores do together."""

from __future__ import annotations

import contextlib
import datetime
import importlib.metadata
import multiprocessing
import os
import platform
import statistics
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

PACKAGES = ("envfleet", "gymnasium", "envpool", "stable-baselines3", "tianshou", "numpy", "torch", "box2d")


def describe_machine(packages: Sequence[str] = PACKAGES) -> dict[str, Any]:
    """The machine and the versions: without them a number means nothing."""
    cpu_models = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line]
    return {
        "cpu": cpu_models[0].partition(":")[2].strip() if cpu_models else platform.machine(),
        "num_cores": len(os.sched_getaffinity(0)),
        "burn_iterations_per_s": round(burn_iterations_per_s()),
        "system": platform.platform(),
        "python": platform.python_version(),
        "packages": {package: version_of(package) for package in packages},
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }


def machine_line(machine: dict[str, Any]) -> str:
    """The first line of a table: machine, date and versions."""
    versions = ", ".join(f"{name} {version}" for name, version in machine["packages"].items() if version)
    return (
        f"{machine['cpu']}, {machine['num_cores']} shared cores; {machine['date'][:10]};"
        f" Python {machine['python']}; {versions}."
    )


def version_of(package: str) -> str | None:
    """The version that is installed, if any."""
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version(package)
    return None


def busy_cores(duration_s: float) -> float:
    """How many cores the whole machine keeps busy while we sleep."""
    before_s = _busy_s()
    time.sleep(duration_s)
    return (_busy_s() - before_s) / duration_s


def _busy_s() -> float:
    fields = Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]
    user, nice, system, _idle, _iowait, irq, softirq, steal = map(int, fields)
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")


def burn(num_iterations: int) -> int:
    """Use CPU, the same amount whoever calls: a chain of integer steps, none of which can be skipped."""
    state = 1
    for _ in range(num_iterations):
        state = (state * 1103515245 + 12345) & 0x7FFFFFFF
    return state


def burn_iterations_per_s() -> float:
    """How many iterations of `burn` one undisturbed core does in a second of CPU time.

    CPU time, and the best of many short trials: neighbours on a shared machine only ever make it slower.
    """
    num_iterations = 20_000
    best_s = min(_cpu_s_of_burn(num_iterations) for _ in range(100))
    return num_iterations / best_s


def _cpu_s_of_burn(num_iterations: int) -> float:
    start_s = time.thread_time()
    burn(num_iterations)
    return time.thread_time() - start_s


class ParallelSpeedup:
    """How much more all cores burn than one, at this moment: the limit of any ratio to a loop in one process.

    On a shared machine it changes from minute to minute, so it is measured again between the windows.
    """

    def __init__(self, num_cores: int) -> None:
        self._num_cores = num_cores
        self._executor: ProcessPoolExecutor | None = None  # its processes sleep while nobody measures

    def measure(self) -> float:
        """Takes about a third of a second."""
        if self._executor is None:
            self._executor = ProcessPoolExecutor(self._num_cores, mp_context=multiprocessing.get_context("spawn"))
            self._duration_s(self._num_cores)
        return statistics.median(
            self._num_cores * self._duration_s(1) / self._duration_s(self._num_cores) for _ in "123"
        )

    def close(self) -> None:
        """End the processes."""
        if self._executor is not None:
            self._executor.shutdown()

    def _duration_s(self, num_tasks: int) -> float:
        assert self._executor is not None
        start_s = time.perf_counter()
        list(self._executor.map(burn, [500_000] * num_tasks))
        return time.perf_counter() - start_s
