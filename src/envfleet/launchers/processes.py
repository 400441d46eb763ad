"""Processes: one process of this machine for each worker, with its log. Local, SSH and Slurm's steps use it."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from envfleet.contract.errors import UsageError
from envfleet.launchers.launcher import WorkerState, WorkerStatus

KILL_WAIT_S = 5.0


@dataclass(frozen=True, slots=True)
class Command:
    """What is run for a worker.

    Args:
        argv: The program and its arguments.
        environment: The whole environment of the process. May hold the run's secrets.
        stdin: Bytes to write to its standard input, which then stays open until this process ends. May hold the run's
            secrets. None: its standard input is empty.
    """

    argv: Sequence[str]
    environment: Mapping[str, str] = field(repr=False)
    stdin: bytes | None = field(default=None, repr=False)


class Processes:
    """A Job of child processes of this one.

    No process is started after cancel(), also not by a restart() or resize() that another thread has begun before.

    Args:
        num_workers: The number of workers to start.
        log_dir: The folder for their logs; it is created.
        command_of: Returns the command of a worker.
        what: The user's setting that errors name if the program cannot be started.

    Raises:
        UsageError: log_dir cannot be created, or the program cannot be started.
    """

    def __init__(self, num_workers: int, log_dir: Path, command_of: Callable[[int], Command], what: str) -> None:
        self._log_dir = log_dir
        self._command_of = command_of
        self._what = what
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        self._starting = threading.Lock()  # held while a process is started; guards _is_cancelled
        self._is_cancelled = False
        try:
            log_dir.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UsageError(f"log_dir {str(log_dir)!r} cannot be created: {error}") from error
        try:
            self.resize(num_workers)
        except BaseException:
            self.cancel(0.0)
            raise

    @property
    def revives(self) -> bool:
        """Whether the engine restarts failed workers by itself."""
        return False

    def status(self, worker: int) -> WorkerStatus:
        """Return the state of one worker."""
        if worker not in self._processes:
            return WorkerStatus(WorkerState.ENDED, "it was not started")
        if not _has_ended(self._processes[worker]):
            return WorkerStatus(WorkerState.RUNNING)
        return WorkerStatus(WorkerState.ENDED, how_it_ended(self._processes[worker].returncode))

    def log(self, worker: int, max_bytes: int = 4000) -> str:
        """Return the end of what a worker has printed."""
        return end_of_file(self._log_path(worker), max_bytes)

    def log_place(self, worker: int) -> str:
        """Return where the whole log of a worker is."""
        return str(self._log_path(worker))

    def restart(self, worker: int) -> None:
        """End what is left of a worker and start it again."""
        if worker in self._processes:
            _end(self._processes.pop(worker))
        self._start_unless_cancelled(worker)

    def resize(self, num_workers: int) -> None:
        """See Job. The head has told surplus workers to leave; they are ended now."""
        self._end_all([self._processes.pop(worker) for worker in sorted(self._processes) if worker >= num_workers], 1.0)
        for worker in range(num_workers):
            if worker not in self._processes:
                self._start_unless_cancelled(worker)

    def cancel(self, grace_s: float) -> None:
        """End all workers; they have `grace_s` seconds to leave by themselves."""
        with self._starting:
            self._is_cancelled = True
        self._end_all(list(self._processes.values()), grace_s)

    def _end_all(self, processes: list[subprocess.Popen[bytes]], grace_s: float) -> None:
        try:
            for process in processes:
                if not _has_ended(process):
                    process.terminate()  # a worker without a connection was not told to leave
            deadline_s = time.monotonic() + grace_s
            while not all(map(_has_ended, processes)) and time.monotonic() < deadline_s:
                time.sleep(0.01)
        finally:
            for process in processes:
                _end(process)

    def _log_path(self, worker: int) -> Path:
        return self._log_dir / f"worker-{worker}.log"

    def _start_unless_cancelled(self, worker: int) -> None:
        command = self._command_of(worker)
        with self._starting:
            if not self._is_cancelled:
                self._processes[worker] = self._start(worker, command)

    def _start(self, worker: int, command: Command) -> subprocess.Popen[bytes]:
        try:
            log = open(self._log_path(worker), "ab")  # noqa: SIM115 - closed below, when the process has its own copy
        except OSError:
            log = open(os.devnull, "ab")  # noqa: SIM115 - a worker can run on a full or read-only disk
        with log:
            try:
                process = subprocess.Popen(
                    command.argv,
                    stdin=subprocess.DEVNULL if command.stdin is None else subprocess.PIPE,
                    stdout=log,
                    stderr=log,
                    env=command.environment,
                    start_new_session=True,  # no Ctrl-C for workers; and a group, to end what a worker started
                )
            except OSError as error:
                raise UsageError(f"{self._what}: {command.argv[0]!r} cannot be started: {error}") from error
        if process.stdin is not None and command.stdin is not None:
            with contextlib.suppress(BrokenPipeError):  # it has ended already, as its status tells
                os.write(process.stdin.fileno(), command.stdin)  # a pipe takes 64 kB at once
        return process


def end_of_file(path: Path, max_bytes: int) -> str:
    """Return the last `max_bytes` of a log; "" if there is no file, the reason in brackets if it cannot be read."""
    try:
        if not path.is_file():
            return ""
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - max_bytes))
            return file.read(max_bytes).decode(errors="replace")
    except OSError as error:
        return f"(its log cannot be read: {error})"


def _has_ended(process: subprocess.Popen[bytes]) -> bool:
    """Return whether a process has ended; if so, also kill the processes that it left behind in its group."""
    if process.returncode is not None:
        return True
    try:
        if os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
            return False
    except ChildProcessError:  # other code of this process has reaped it
        process.poll()
        return True
    # It is not reaped yet, so no other process or group can have its pid.
    kill_group(process.pid)
    process.poll()
    if process.stdin is not None:
        process.stdin.close()
    return True


def _end(process: subprocess.Popen[bytes]) -> None:
    """Kill a process and its group, and reap it."""
    if not _has_ended(process):
        kill_group(process.pid)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(KILL_WAIT_S)
    if process.stdin is not None:
        process.stdin.close()


def kill_group(pid: int) -> None:
    """Kill all processes of the group that process `pid` leads."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


def how_it_ended(code: int) -> str:
    """Describe the return code of a Popen in words."""
    if code >= 0:
        return f"its process ended with exit code {code}"
    return f"its process was killed by {signal_name(-code)}"


def signal_name(number: int) -> str:
    """Return the name of a signal: "SIGKILL" for 9."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
