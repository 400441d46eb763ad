"""LauncherCase and Fleet: what the checks of launchers run and look at."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from envfleet.cluster.cluster_env import ClusterEnv
from envfleet.contract.arrays import Array
from envfleet.contract.stats import WorkerStats
from envfleet.launchers.launcher import Job, Launcher, WorkerJob, WorkerStatus
from envfleet.policies.functions import FunctionPolicy
from envfleet.testing.cluster_arguments import cluster_arguments

NUM_WORKERS = 2
NUM_ENVS_PER_WORKER = 2
NUM_STEPS = 8
LOOK_S = 0.05  # seconds between two looks while a check waits


def kill_on_this_host(worker: WorkerStats) -> None:
    """Kill the process of a worker of this machine with SIGKILL."""
    assert worker.host == socket.gethostname(), f"worker {worker.worker} runs on {worker.host}: pass kill="
    assert worker.pid is not None
    os.kill(worker.pid, signal.SIGKILL)


def runs_on_this_host(worker: WorkerStats) -> bool:
    """Return whether the process of a worker runs on this machine.

    False for workers of other machines: pass your own `is_running=` if you can ask them.
    """
    if worker.pid is None or worker.host != socket.gethostname():
        return False
    try:
        stat = Path(f"/proc/{worker.pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return stat.rpartition(")")[2].split()[0] not in "ZX"


@dataclass(frozen=True, slots=True)
class LauncherCase:
    """A launcher, and what the suite must know of its engine. For the fields see `check_launcher`."""

    launcher: Launcher
    impossible: Launcher | None = None
    impossible_says: str = ""
    kill: Callable[[WorkerStats], None] = kill_on_this_host
    is_running: Callable[[WorkerStats], bool] = runs_on_this_host
    has_logs: bool = True
    timeout_s: float = 60.0
    settings: Mapping[str, Any] = field(default_factory=dict)


class _RecordingLauncher:
    """A launcher that keeps its WorkerJob and its Job, so that the suite can call the Job itself."""

    def __init__(self, launcher: Launcher, timeout_s: float) -> None:
        self.launcher = launcher
        self.timeout_s = timeout_s
        self.worker_job: WorkerJob | None = None
        self.job: Job | None = None

    @property
    def is_on_this_host(self) -> bool:
        return self.launcher.is_on_this_host

    @property
    def head_address(self) -> str | None:
        return self.launcher.head_address

    @property
    def queue_timeout_s(self) -> float | None:
        """Limit the wait for resources, also of a launcher that has no limit."""
        own_s = self.launcher.queue_timeout_s
        return self.timeout_s if own_s is None else min(own_s, self.timeout_s)

    def host_of_workers(self) -> str | None:
        return self.launcher.host_of_workers()

    def launch(self, job: WorkerJob) -> Job:
        self.worker_job = job
        self.job = _LockedJob(self.launcher.launch(job))
        return self.job


class _LockedJob:
    """A job whose methods are called one at a time, as Job promises, though the run and the suite both call them."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._lock = threading.Lock()

    @property
    def revives(self) -> bool:
        return self._job.revives

    def status(self, worker: int) -> WorkerStatus:
        with self._lock:
            return self._job.status(worker)

    def log(self, worker: int, max_bytes: int = 4000) -> str:
        with self._lock:
            return self._job.log(worker, max_bytes)

    def log_place(self, worker: int) -> str:
        with self._lock:
            return self._job.log_place(worker)

    def restart(self, worker: int) -> None:
        with self._lock:
            self._job.restart(worker)

    def resize(self, num_workers: int) -> None:
        with self._lock:
            self._job.resize(num_workers)

    def cancel(self, grace_s: float) -> None:
        with self._lock:
            self._job.cancel(grace_s)


@dataclass(frozen=True, slots=True)
class Fleet:
    """A running cluster and the job of its workers."""

    case: LauncherCase
    cluster: ClusterEnv
    job: Job
    worker_job: WorkerJob

    def workers(self) -> tuple[WorkerStats, ...]:
        """Return the workers as the head knows them now."""
        return self.cluster.stats().workers

    def has_all(self) -> bool:
        """Return whether all workers have joined."""
        return all(worker.stage == "present" for worker in self.workers())

    def wait_for_another(self, old: WorkerStats) -> None:
        """Wait until another process has replaced the worker `old`."""

        def has_come() -> bool:
            worker = self.workers()[old.worker]
            return worker.stage == "present" and (worker.host, worker.pid) != (old.host, old.pid)

        wait_until(has_come, f"worker {old.worker} has come back as another process", self.case)

    def require_rollout(self, num_workers: int) -> None:
        """Collect a rollout, and assert that it has rows of `num_workers` workers."""
        rollout = self.cluster.rollout(AGENT, NUM_STEPS)
        shape = np.shape(rollout.rewards)
        assert shape == (NUM_STEPS, num_workers * NUM_ENVS_PER_WORKER), f"the rollout has shape {shape}"


@contextlib.contextmanager
def running_fleet(case: LauncherCase, num_workers: int = NUM_WORKERS) -> Iterator[Fleet]:
    """Start a cluster, and yield it when all its workers have joined."""
    recorder = _RecordingLauncher(case.launcher, case.timeout_s)
    settings: dict[str, Any] = {
        "backend": "serial",  # workers with this backend start fastest
        "start_timeout_s": case.timeout_s,
        "timeout_s": case.timeout_s,
        # tcp also on one machine: without a network a run has no keys.
        "address": "tcp://127.0.0.1:0" if case.launcher.is_on_this_host else None,
        **case.settings,
    }
    arguments = cluster_arguments(settings)
    with ClusterEnv("CartPole-v1", num_workers, NUM_ENVS_PER_WORKER, launcher=recorder, **arguments) as cluster:
        assert recorder.job is not None and recorder.worker_job is not None
        fleet = Fleet(case, cluster, recorder.job, recorder.worker_job)
        assert fleet.has_all() and len(fleet.workers()) == num_workers
        yield fleet


def _push_right(weights: Mapping[str, Array], obs: Array) -> tuple[Array, Array]:
    right = (obs @ weights["w"] > 0).astype(np.int64)
    return right, np.zeros(len(obs), np.float32)


AGENT = FunctionPolicy(_push_right, weights={"w": np.ones(4, np.float32)})


class DeafHead:
    """A head that accepts connections, but never answers."""

    def __init__(self) -> None:
        self._server = socket.create_server(("127.0.0.1", 0))
        self._server.setblocking(False)
        self._connections: list[socket.socket] = []
        self.address = f"tcp://127.0.0.1:{self._server.getsockname()[1]}"

    def num_connections(self) -> int:
        """Return the number of connections so far."""
        with contextlib.suppress(BlockingIOError):
            while True:
                self._connections.append(self._server.accept()[0])
        return len(self._connections)

    def __enter__(self) -> DeafHead:
        """Return this head, which the end of the block closes."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close all connections."""
        for each in (self._server, *self._connections):
            each.close()


@contextlib.contextmanager
def all_command_lines() -> Iterator[set[str]]:
    """Yield the set of all command lines that this machine shows while the body runs; it fills meanwhile."""
    seen: set[str] = set()
    is_over = threading.Event()

    def look() -> None:
        while not is_over.wait(LOOK_S):
            seen.update(_command_lines().values())

    thread = threading.Thread(target=look, daemon=True)
    thread.start()
    try:
        yield seen
    finally:
        is_over.set()
        thread.join()


def _command_lines() -> dict[int, str]:
    found = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                found[int(entry.name)] = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    return found


def marked(mark: str) -> list[int]:
    """Return the pids of all processes of this machine with `mark` on their command line."""
    return [pid for pid, line in _command_lines().items() if mark in line]


def wait_until(condition: Callable[[], bool], what: str, case: LauncherCase) -> None:
    """Wait until a condition holds; raise AssertionError after the case's `timeout_s`."""
    deadline_s = time.monotonic() + case.timeout_s
    while not condition():
        assert time.monotonic() < deadline_s, f"after {case.timeout_s:g} s still not true: {what}"
        time.sleep(LOOK_S)
