"""The environment variables of worker processes: each name, what it means, and how its value is written.

Launchers set them; workers, and the pools inside workers, read them. No other file spells their names.
"""

from __future__ import annotations

import os
from collections.abc import Iterable

# The run's CURVE keys: three keys of 40 characters with spaces between them. A secret: it must not stand on a command
# line or in a log, and the worker erases it from its environment as soon as it has read it.
KEYS_VARIABLE = "ENVFLEET_KEYS"

# Indices of the CPUs that the worker binds itself to, as `cpu_list` writes them. Set by Local(pin=True).
CPUS_VARIABLE = "ENVFLEET_CPUS"

# The number of CPUs that the launcher reserved for the worker, on engines that do not enforce it.
NUM_CPUS_VARIABLE = "ENVFLEET_NUM_CPUS"

# The identity of the spawner that a process descends from: 32 hexadecimal digits. A second variable, named by
# `spawner_child_variable`, has the number of the spawner's child that the process descends from.
SPAWNER_VARIABLE = "ENVFLEET_SPAWNER"

# How many threads numerical libraries start. By default they count the machine's CPUs, not those of the process.
THREAD_COUNT_VARIABLES = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")

# Variables of the Python interpreter itself.
MODULE_PATH_VARIABLE = "PYTHONPATH"  # folders to import modules from, as `module_path` writes them
UNBUFFERED_VARIABLE = "PYTHONUNBUFFERED"  # "1": what a worker prints reaches its log at once
BREAKPOINT_VARIABLE = "PYTHONBREAKPOINT"  # the debugger that breakpoint() starts; Ray sets it for its own actors


def cpu_list(cpus: Iterable[int]) -> str:
    """Write CPU indices as the value of `CPUS_VARIABLE`: (0, 1, 5) is "0,1,5"."""
    return ",".join(map(str, cpus))


def cpus_in(text: str) -> set[int]:
    """Read the value of `CPUS_VARIABLE`. Raises ValueError if it is not a list of whole numbers."""
    return {int(cpu) for cpu in text.split(",")}


def cpu_counts(num_cpus: int) -> dict[str, str]:
    """Return the variables that limit a worker, and its numerical libraries, to `num_cpus` CPUs."""
    return dict.fromkeys((NUM_CPUS_VARIABLE, *THREAD_COUNT_VARIABLES), str(num_cpus))


def module_path(entries: Iterable[str]) -> str:
    """Write folders, such as `sys.path`, as the value of `MODULE_PATH_VARIABLE`, each as an absolute path."""
    return os.pathsep.join(map(os.path.abspath, entries))


def spawner_child_variable(spawner: str) -> str:
    """Return the name of the variable with the child's number. Each spawner has its own: spawners can be nested."""
    return f"{SPAWNER_VARIABLE}_{spawner}"
