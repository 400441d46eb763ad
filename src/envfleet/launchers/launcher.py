"""Launcher: starts one command many times, somewhere, and reports on it. Knows no environment, policy or message."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerJob:
    """What is to be started: a Python interpreter with `arguments(worker)`, for each of `num_workers`."""

    num_workers: int
    argv: tuple[str, ...]  # without the program that runs it; the number of the worker follows
    environment: Mapping[str, str] = field(repr=False)  # the run's secrets: never on a command line, nor in a log
    run_dir: Path  # of this run, closed to others; logs go there unless the launcher was told otherwise

    def arguments(self, worker: int | str) -> tuple[str, ...]:
        """The arguments of one worker's command, after the Python interpreter."""
        return (*self.argv, "--worker", str(worker))


class WorkerState(enum.Enum):
    """What the launcher's engine says of a worker's process."""

    PENDING = "pending"  # waits for resources, or to be started again by the engine
    RUNNING = "running"
    ENDED = "ended"  # or out of the engine's reach; the head keeps a worker whose connection is open
    REFUSED = "refused"  # the engine will not run it; to wait, or to ask again, is no use


@dataclass(frozen=True, slots=True)
class WorkerStatus:
    """State and, in the engine's own words, the reason: which job, which state, which node."""

    state: WorkerState
    detail: str = ""
    num_failures: int = 0  # processes of this worker that failed, and that the engine has replaced by itself
    is_unreachable: bool = False  # in state ENDED: its host could not be reached, so no process was started there


class Job(Protocol):
    """Processes that were started. All methods may be called from any thread, one at a time.

    All but launch, resize and restart are asked for often: they answer from memory, and ask the engine now and then.
    """

    @property
    def revives(self) -> bool:
        """The engine itself starts a worker again that has failed: restart() is for one that does not come back."""
        ...

    def status(self, worker: int) -> WorkerStatus:
        """How it is with one worker. While the engine does not answer: how it was."""
        ...

    def log(self, worker: int, max_bytes: int = 4000) -> str:
        """The end of what a worker has printed; a line in brackets if it cannot be read."""
        ...

    def log_place(self, worker: int) -> str:
        """Where all of it is: a file, or the command that shows it."""
        ...

    def restart(self, worker: int) -> None:
        """End what is left of a worker, and start it anew. Raises ClusterError if the engine refuses now."""
        ...

    def resize(self, num_workers: int) -> None:
        """Start workers up to this number, or end those from this number on. Raises ClusterError if refused."""
        ...

    def cancel(self, grace_s: float) -> None:
        """End all. Workers were told to leave and have `grace_s` for it. A second call does nothing."""
        ...


class Launcher(Protocol):
    """Starts workers. A frozen set of settings, which checks itself: it can be used for many runs."""

    @property
    def is_on_this_host(self) -> bool:
        """All workers run here, so that they can be talked to without a network."""
        ...

    @property
    def head_address(self) -> str | None:
        """Where workers find the head, "host", "host:port" or "tcp://host:port", if the user has said so."""
        ...

    @property
    def queue_timeout_s(self) -> float | None:
        """How long workers may wait for resources; None: without end."""
        ...

    def host_of_workers(self) -> str | None:
        """A host where workers are, or one in their network: the head listens on the address that is nearest to it.

        None: there is no telling; the head listens on the address of the default route.
        """
        ...

    def launch(self, job: WorkerJob) -> Job:
        """Start all workers of a job. Raises UsageError or ClusterError, in the engine's words, if that is refused."""
        ...
