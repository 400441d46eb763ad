"""Launcher: starts one command many times, somewhere, and reports on it. Knows no environment, policy or message."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerJob:
    """What is to be started: `command(worker)` for each of `num_workers`."""

    num_workers: int
    argv: tuple[str, ...]  # without the program that runs it; the number of the worker follows
    environment: Mapping[str, str]  # also the run's secrets, which must not stand on a command line
    run_dir: Path  # of this run; logs go there unless the launcher was told otherwise

    def arguments(self, worker: int) -> tuple[str, ...]:
        """The arguments of one worker's command, after the Python interpreter."""
        return (*self.argv, "--worker", str(worker))


class WorkerState(enum.Enum):
    """What the launcher's engine says of a worker's process."""

    PENDING = "pending"  # waits for resources
    RUNNING = "running"
    ENDED = "ended"


@dataclass(frozen=True, slots=True)
class WorkerStatus:
    """State and, in the engine's own words, the reason."""

    state: WorkerState
    detail: str = ""


class Job(Protocol):
    """Processes that were started. All methods may be called from any thread, one at a time."""

    def status(self, worker: int) -> WorkerStatus:
        """How it is with one worker."""
        ...

    def log(self, worker: int, max_bytes: int = 4000) -> str:
        """The end of what a worker has printed."""
        ...

    def log_place(self, worker: int) -> str:
        """Where all of it is."""
        ...

    def restart(self, worker: int) -> None:
        """End what is left of a worker, and start it anew."""
        ...

    def cancel(self, grace_s: float) -> None:
        """End all. Workers were told to leave and have `grace_s` for it. A second call does nothing."""
        ...


class Launcher(Protocol):
    """Starts workers."""

    @property
    def is_on_this_host(self) -> bool:
        """All workers run here, so that they can be talked to without a network."""
        ...

    def launch(self, job: WorkerJob) -> Job:
        """Start all workers of a job."""
        ...
