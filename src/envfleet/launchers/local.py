"""Local: workers are processes on this machine."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from envfleet.contract.worker_environment import (
    CPUS_VARIABLE,
    MODULE_PATH_VARIABLE,
    THREAD_COUNT_VARIABLES,
    cpu_list,
    module_path,
)
from envfleet.launchers.launcher import WorkerJob
from envfleet.launchers.owned_job import OwnedJob
from envfleet.launchers.processes import Command, Processes


@dataclass(frozen=True, slots=True, kw_only=True)
class Local:
    """Start workers as processes of this machine.

    Args:
        python: The Python interpreter of the workers, such as "/opt/venv/bin/python". None: the interpreter of this
            process, and workers import modules from where this process does.
        log_dir: The folder for the files `worker-0.log`, `worker-1.log`, ... None: a temporary folder that is removed
            when the run ends.
        pin: Bind each worker to its own share of this machine's CPUs. With more workers than CPUs, several workers
            share a CPU.
    """

    python: str | None = None
    log_dir: str | os.PathLike[str] | None = None
    pin: bool = True

    is_on_this_host = True
    head_address = None
    queue_timeout_s = None

    def host_of_workers(self) -> str:
        """Return the loopback address: all workers are on this machine.

        Returns:
            127.0.0.1
        """
        return "127.0.0.1"

    def launch(self, job: WorkerJob) -> OwnedJob:
        """Start all workers.

        Args:
            job: What to start.

        Returns:
            The running workers.

        Raises:
            UsageError: The interpreter cannot be started, or log_dir cannot be created.
        """
        log_dir = job.run_dir if self.log_dir is None else Path(self.log_dir)
        shares = _shares(job.num_workers)

        def command_of(worker: int) -> Command:
            # Workers that scale() adds share the CPUs of the first ones.
            cpus = shares[worker % len(shares)] if self.pin else None
            argv = (self.python or sys.executable, *job.arguments(worker))
            return Command(argv, _environment(job, self.python, cpus))

        return OwnedJob(Processes(job.num_workers, log_dir, command_of, f"Local(python={self.python!r})"))


def _environment(job: WorkerJob, python: str | None, cpus: Sequence[int] | None) -> dict[str, str]:
    environment = {**os.environ, **job.environment}
    if python is None:
        # Workers import policies and envs by name, from where this process does.
        environment[MODULE_PATH_VARIABLE] = module_path(sys.path)
    if cpus is not None:
        environment[CPUS_VARIABLE] = cpu_list(cpus)
        for name in THREAD_COUNT_VARIABLES:
            environment.setdefault(name, str(len(cpus)))
    return environment


def _shares(num_workers: int) -> list[list[int]]:
    """Return the CPUs of each worker: blocks of nearly equal size, or one CPU each, in turn, if there are too few."""
    cpus = sorted(os.sched_getaffinity(0))
    if num_workers > len(cpus):
        return [[cpus[worker % len(cpus)]] for worker in range(num_workers)]
    return [
        cpus[worker * len(cpus) // num_workers : (worker + 1) * len(cpus) // num_workers]
        for worker in range(num_workers)
    ]
