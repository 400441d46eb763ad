"""Processes: one process of this machine for each worker, with its log. What Local, SSH and srun have in common."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from envfleet.contract.errors import UsageError
from envfleet.launchers.launcher import WorkerState, WorkerStatus

KILL_WAIT_S = 5.0


@dataclass(frozen=True, slots=True)
class Command:
    """What is run for a worker."""

    argv: Sequence[str]
    environment: Mapping[str, str] = field(repr=False)  # the whole of it, with the run's secrets
    # Written to its standard input, which then stays open as long as this process lives. May have the run's secrets.
    stdin: bytes | None = field(default=None, repr=False)


class Processes:
    """A Job of processes that this one has started."""

    def __init__(self, num_workers: int, log_dir: Path, command_of: Callable[[int], Command], what: str) -> None:
        """Start them. `what` is the user's setting that is wrong if a program cannot be started."""
        self._log_dir = log_dir
        self._command_of = command_of
        self._what = what
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        try:
            log_dir.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UsageError(f"log_dir {str(log_dir)!r} cannot be made: {error}") from error
        try:
            self.resize(num_workers)
        except BaseException:
            self.cancel(0.0)
            raise

    @property
    def revives(self) -> bool:
        """See Job."""
        return False

    def status(self, worker: int) -> WorkerStatus:
        """See Job."""
        if worker not in self._processes:
            return WorkerStatus(WorkerState.ENDED, "it could not be started")
        if not _has_ended(self._processes[worker]):
            return WorkerStatus(WorkerState.RUNNING)
        return WorkerStatus(WorkerState.ENDED, how_it_ended(self._processes[worker].returncode))

    def log(self, worker: int, max_bytes: int = 4000) -> str:
        """See Job."""
        return end_of_file(self._log_path(worker), max_bytes)

    def log_place(self, worker: int) -> str:
        """See Job."""
        return str(self._log_path(worker))

    def restart(self, worker: int) -> None:
        """See Job."""
        if worker in self._processes:
            _end(self._processes.pop(worker))
        self._processes[worker] = self._start(worker)

    def resize(self, num_workers: int) -> None:
        """See Job. Those that go have been told so; they are ended now."""
        self._end_all([self._processes.pop(worker) for worker in sorted(self._processes) if worker >= num_workers], 1.0)
        for worker in range(num_workers):
            if worker not in self._processes:
                self._processes[worker] = self._start(worker)

    def cancel(self, grace_s: float) -> None:
        """See Job."""
        self._end_all(list(self._processes.values()), grace_s)

    def _end_all(self, processes: list[subprocess.Popen[bytes]], grace_s: float) -> None:
        try:
            for process in processes:
                if not _has_ended(process):
                    process.terminate()  # also those that nobody could tell anything
            deadline_s = time.monotonic() + grace_s
            while not all(map(_has_ended, processes)) and time.monotonic() < deadline_s:
                time.sleep(0.01)
        finally:
            for process in processes:
                _end(process)

    def _log_path(self, worker: int) -> Path:
        return self._log_dir / f"worker-{worker}.log"

    def _start(self, worker: int) -> subprocess.Popen[bytes]:
        command = self._command_of(worker)
        try:
            log = open(self._log_path(worker), "ab")  # noqa: SIM115 - closed below, when the process has it
        except OSError:
            log = open(os.devnull, "ab")  # noqa: SIM115 - a full or read-only disk is no reason not to run
        with log:
            try:
                process = subprocess.Popen(
                    command.argv,
                    stdin=subprocess.DEVNULL if command.stdin is None else subprocess.PIPE,
                    stdout=log,
                    stderr=log,
                    env=command.environment,
                    start_new_session=True,  # Ctrl-C is the head's affair; and what a worker starts is ended with it
                )
            except OSError as error:
                raise UsageError(f"{self._what}: {command.argv[0]!r} cannot be started: {error}") from error
        if process.stdin is not None and command.stdin is not None:
            with contextlib.suppress(BrokenPipeError):  # it has ended already: its status says so
                os.write(process.stdin.fileno(), command.stdin)  # a pipe takes 64 kB at once
        return process


def end_of_file(path: Path, max_bytes: int) -> str:
    """The end of a log."""
    try:
        if not path.is_file():
            return ""
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - max_bytes))
            return file.read(max_bytes).decode(errors="replace")
    except OSError as error:
        return f"(its log cannot be read: {error})"


def _has_ended(process: subprocess.Popen[bytes]) -> bool:
    """Whether it has ended; then what is left of its group, which it may have started, is ended too."""
    if process.returncode is not None:
        return True
    try:
        if os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
            return False
    except ChildProcessError:  # somebody else has reaped it
        process.poll()
        return True
    # It is not reaped yet, so its pid, and so the group's, cannot belong to anybody else.
    kill_group(process.pid)
    process.poll()
    if process.stdin is not None:
        process.stdin.close()
    return True


def _end(process: subprocess.Popen[bytes]) -> None:
    """Kill a process and everything in its group, and reap it."""
    if not _has_ended(process):
        kill_group(process.pid)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(KILL_WAIT_S)
    if process.stdin is not None:
        process.stdin.close()


def kill_group(pid: int) -> None:
    """End a process that leads a group, and all that is left of the group."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


def how_it_ended(code: int) -> str:
    """In words: what Popen says of a process that has ended."""
    if code >= 0:
        return f"its process ended with exit code {code}"
    return f"its process was killed by {signal_name(-code)}"


def signal_name(number: int) -> str:
    """SIGKILL, not 9."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
