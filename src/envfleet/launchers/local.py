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
    """Start workers as processes of this machine, each on its share of the CPUs."""

    python: str | None = None  # the interpreter; None: this one
    log_dir: str | os.PathLike[str] | None = None  # None: a temporary folder that goes with the run
    pin: bool = True  # keep each worker to its share of the CPUs, if there are enough

    is_on_this_host = True
    head_address = None
    queue_timeout_s = None

    def host_of_workers(self) -> str:
        """See Launcher."""
        return "127.0.0.1"

    def launch(self, job: WorkerJob) -> OwnedJob:
        """Start all workers."""
        log_dir = job.run_dir if self.log_dir is None else Path(self.log_dir)
        shares = _shares(job.num_workers)

        def command_of(worker: int) -> Command:
            # Workers that come later share the CPUs of those that are there.
            cpus = shares[worker % len(shares)] if self.pin else None
            argv = (self.python or sys.executable, *job.arguments(worker))
            return Command(argv, _environment(job, self.python, cpus))

        return OwnedJob(Processes(job.num_workers, log_dir, command_of, f"Local(python={self.python!r})"))


def _environment(job: WorkerJob, python: str | None, cpus: Sequence[int] | None) -> dict[str, str]:
    environment = {**os.environ, **job.environment}
    if python is None:
        # The workers find the modules that this process finds: policies and envs given by their import path.
        environment[MODULE_PATH_VARIABLE] = module_path(sys.path)
    if cpus is not None:
        environment[CPUS_VARIABLE] = cpu_list(cpus)
        for name in THREAD_COUNT_VARIABLES:
            environment.setdefault(name, str(len(cpus)))
    return environment


def _shares(num_workers: int) -> list[list[int]]:
    """The CPUs of each worker: blocks of nearly equal size; one CPU each, in turn, if there are too few to divide."""
    cpus = sorted(os.sched_getaffinity(0))
    if num_workers > len(cpus):
        return [[cpus[worker % len(cpus)]] for worker in range(num_workers)]
    return [
        cpus[worker * len(cpus) // num_workers : (worker + 1) * len(cpus) // num_workers]
        for worker in range(num_workers)
    ]
