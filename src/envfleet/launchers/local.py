"""Local: workers are processes on this machine."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from envfleet.contract.errors import UsageError
from envfleet.launchers.launcher import WorkerJob, WorkerState, WorkerStatus

KILL_WAIT_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Local:
    """Start workers as processes of this machine, each on its share of the CPUs."""

    python: str | None = None  # the interpreter; None: this one
    log_dir: str | os.PathLike[str] | None = None  # None: a temporary folder that goes with the run
    pin: bool = True  # keep each worker to its share of the CPUs, if there are enough

    @property
    def is_on_this_host(self) -> bool:
        """See Launcher."""
        return True

    def launch(self, job: WorkerJob) -> LocalJob:
        """Start all workers."""
        log_dir = job.run_dir if self.log_dir is None else Path(self.log_dir)
        try:
            log_dir.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UsageError(f"log_dir {str(log_dir)!r} cannot be made: {error}") from error
        return LocalJob(job, self.python, log_dir, self.pin)


class LocalJob:
    """The processes. In a fork of their owner nothing is done to them."""

    def __init__(self, job: WorkerJob, python: str | None, log_dir: Path, pin: bool) -> None:
        """Start them."""
        self._job = job
        self._python = python
        self._log_dir = log_dir
        self._cpus = _shares(job.num_workers) if pin else [None] * job.num_workers
        self._owner_pid = os.getpid()
        self._is_cancelled = False
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        try:
            for worker in range(job.num_workers):
                self._processes[worker] = self._start(worker)
        except BaseException:
            self.cancel(0.0)
            raise

    def status(self, worker: int) -> WorkerStatus:
        """See Job."""
        if not _has_ended(self._processes[worker]):
            return WorkerStatus(WorkerState.RUNNING)
        code = self._processes[worker].returncode
        if code >= 0:
            return WorkerStatus(WorkerState.ENDED, f"its process ended with exit code {code}")
        return WorkerStatus(WorkerState.ENDED, f"its process was killed by {_signal_name(-code)}")

    def log(self, worker: int, max_bytes: int = 4000) -> str:
        """See Job."""
        try:
            path = self._log_path(worker)
            if not path.is_file():
                return ""
            with path.open("rb") as file:
                file.seek(max(0, path.stat().st_size - max_bytes))
                return file.read(max_bytes).decode(errors="replace")
        except OSError as error:
            return f"(its log cannot be read: {error})"

    def log_place(self, worker: int) -> str:
        """See Job."""
        return str(self._log_path(worker))

    def restart(self, worker: int) -> None:
        """See Job."""
        if self._is_cancelled or os.getpid() != self._owner_pid:
            return
        _end(self._processes[worker])
        self._processes[worker] = self._start(worker)

    def cancel(self, grace_s: float) -> None:
        """See Job."""
        if self._is_cancelled or os.getpid() != self._owner_pid:
            return
        self._is_cancelled = True
        processes = list(self._processes.values())
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
        environment = {**os.environ, **self._job.environment}
        if self._python is None:
            # The workers find the modules that this process finds: policies and envs given by their import path.
            environment["PYTHONPATH"] = os.pathsep.join(os.path.abspath(entry) for entry in sys.path)
        cpus = self._cpus[worker]
        if cpus is not None:
            environment["ENVFLEET_CPUS"] = ",".join(map(str, cpus))
            for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
                environment.setdefault(name, str(len(cpus)))
        try:
            log = open(self._log_path(worker), "ab")  # noqa: SIM115 - closed below, when the process has it
        except OSError:
            log = open(os.devnull, "ab")  # noqa: SIM115 - a full or read-only disk is no reason not to run
        python = self._python or sys.executable
        with log:
            try:
                return subprocess.Popen(
                    [python, *self._job.arguments(worker)],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    env=environment,
                    start_new_session=True,  # Ctrl-C is the head's affair; and what a worker starts is ended with it
                )
            except OSError as error:
                raise UsageError(f"Local(python={python!r}) cannot be started: {error}") from error


def _shares(num_workers: int) -> list[list[int] | None]:
    """The CPUs of each worker: blocks of nearly equal size; one CPU each, in turn, if there are too few to divide."""
    cpus = sorted(os.sched_getaffinity(0))
    if num_workers > len(cpus):
        return [[cpus[worker % len(cpus)]] for worker in range(num_workers)]
    return [
        cpus[worker * len(cpus) // num_workers : (worker + 1) * len(cpus) // num_workers]
        for worker in range(num_workers)
    ]


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
    _kill_group(process.pid)
    process.poll()
    return True


def _end(process: subprocess.Popen[bytes]) -> None:
    """Kill a process and everything in its group, and reap it."""
    if not _has_ended(process):
        _kill_group(process.pid)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(KILL_WAIT_S)


def _kill_group(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
