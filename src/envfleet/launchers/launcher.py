"""Launcher, Job and WorkerJob: what the cluster and its launchers agree on.

A launcher starts one command several times, somewhere, and reports on it. It knows no environment, policy or message.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerJob:
    """What a launcher starts: for each worker a Python interpreter with `arguments(worker)`.

    Args:
        num_workers: The number of workers to start.
        argv: Arguments of the Python interpreter, without the number of the worker.
        environment: Variables to add to the workers' environment. They hold the run's secrets, so they must not stand
            on a command line or in a log.
        run_dir: The run's own folder, which other users cannot read. Logs go there unless the launcher has a log_dir.
    """

    num_workers: int
    argv: tuple[str, ...]
    environment: Mapping[str, str] = field(repr=False)
    run_dir: Path

    def arguments(self, worker: int | str) -> tuple[str, ...]:
        """Return the arguments of the Python interpreter for one worker.

        Args:
            worker: The number of the worker, or text that the engine replaces by it.

        Returns:
            `argv`, and the number of the worker.
        """
        return (*self.argv, "--worker", str(worker))


class WorkerState(enum.Enum):
    """What the launcher's engine says of a worker's process."""

    PENDING = "pending"  # it waits for resources, or for the engine to start it again
    RUNNING = "running"
    ENDED = "ended"  # or the engine cannot see it; the head keeps a worker whose connection is open
    REFUSED = "refused"  # the engine will never run it: neither waiting nor another restart() helps


@dataclass(frozen=True, slots=True)
class WorkerStatus:
    """The state of one worker.

    Args:
        state: What its process is doing.
        detail: The reason in the engine's own words: which job, which state, which node.
        num_failures: The number of failed processes that the engine has replaced by itself.
        is_unreachable: Only with state ENDED: its host could not be reached, so no process was started there.
    """

    state: WorkerState
    detail: str = ""
    num_failures: int = 0
    is_unreachable: bool = False


class Job(Protocol):
    """The workers that a launcher has started.

    Its methods are called from any thread, but one at a time. `status()`, `log()` and `log_place()` are called many
    times a second, so they answer from memory and ask the engine only now and then.
    """

    @property
    def revives(self) -> bool:
        """Whether the engine restarts failed workers by itself; then restart() is for those that do not come back."""
        ...

    def status(self, worker: int) -> WorkerStatus:
        """Return the state of one worker.

        Args:
            worker: The number of the worker.

        Returns:
            Its state; while the engine does not answer, the last state that it reported.
        """
        ...

    def log(self, worker: int, max_bytes: int = 4000) -> str:
        """Return the end of what a worker has printed.

        Args:
            worker: The number of the worker.
            max_bytes: The most that is returned.

        Returns:
            The text; if the log cannot be read, the reason in brackets.
        """
        ...

    def log_place(self, worker: int) -> str:
        """Return where the whole log of a worker is.

        Args:
            worker: The number of the worker.

        Returns:
            The path of a file, or the command that shows the log.
        """
        ...

    def restart(self, worker: int) -> None:
        """End what is left of a worker and start it again.

        Args:
            worker: The number of the worker.

        Raises:
            ClusterError: The engine refuses, or does not answer.
        """
        ...

    def resize(self, num_workers: int) -> None:
        """Start workers up to this number, or end those from this number on.

        Args:
            num_workers: The number of workers from now on.

        Raises:
            ClusterError: The engine refuses, or does not answer.
        """
        ...

    def cancel(self, grace_s: float) -> None:
        """End all workers; a second call does nothing.

        Args:
            grace_s: Seconds that workers have to leave by themselves; they have been told to.
        """
        ...


class Launcher(Protocol):
    """Starts workers: a frozen dataclass of settings that checks itself. One launcher can serve several runs."""

    @property
    def is_on_this_host(self) -> bool:
        """Whether all workers run on this machine, so that they need no network to reach the head."""
        ...

    @property
    def head_address(self) -> str | None:
        """Where workers find the head: "host", "host:port" or "tcp://host:port". None: the run chooses an address."""
        ...

    @property
    def queue_timeout_s(self) -> float | None:
        """The most seconds that workers may wait for resources. None: no limit."""
        ...

    def host_of_workers(self) -> str | None:
        """Return a host where workers run, or one in their network; the head listens on the address nearest to it.

        Returns:
            A host name or address. None if there is no such host: the head listens on the address of the default route.
        """
        ...

    def launch(self, job: WorkerJob) -> Job:
        """Start all workers of a job.

        Args:
            job: What to start.

        Returns:
            The workers; they may still be PENDING.

        Raises:
            UsageError: A setting is wrong, in the engine's words.
            ClusterError: The engine refuses, or does not answer.
        """
        ...
