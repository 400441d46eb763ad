"""What the checks of launchers look at: a small cluster and the job behind it, and all processes of this machine."""

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
from envfleet.contract.stats import WorkerStats
from envfleet.launchers.launcher import Job, Launcher, WorkerJob, WorkerStatus
from envfleet.policies.functions import FunctionPolicy
from envfleet.testing.cluster_arguments import cluster_arguments

Array = np.ndarray[Any, Any]

NUM_WORKERS = 2
NUM_ENVS_PER_WORKER = 2
NUM_STEPS = 8
LOOK_S = 0.05


def kill_on_this_host(worker: WorkerStats) -> None:
    """SIGKILL, for a worker that runs here."""
    assert worker.host == socket.gethostname(), f"worker {worker.worker} runs on {worker.host}: pass kill="
    assert worker.pid is not None
    os.kill(worker.pid, signal.SIGKILL)


def runs_on_this_host(worker: WorkerStats) -> bool:
    """Whether its process is there; False for one of another host: pass is_running= if you can tell."""
    if worker.pid is None or worker.host != socket.gethostname():
        return False
    try:
        stat = Path(f"/proc/{worker.pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return stat.rpartition(")")[2].split()[0] not in "ZX"


@dataclass(frozen=True, slots=True)
class LauncherCase:
    """A launcher, and what the suite must know of its engine."""

    launcher: Launcher
    impossible: Launcher | None = None  # the same kind, which asks for what the engine does not have; None: unchecked
    impossible_says: str = ""  # what the error of that one must contain: the engine's words, the user's setting
    kill: Callable[[WorkerStats], None] = kill_on_this_host  # ends a worker's process, as a crash would
    is_running: Callable[[WorkerStats], bool] = runs_on_this_host
    has_logs: bool = True  # the launcher can read what workers print
    timeout_s: float = 60.0  # for each wait
    settings: Mapping[str, Any] = field(default_factory=dict)  # of the cluster; as for cluster_arguments()


class _Watched:
    """A launcher that remembers what it was given and what it has started, so that the suite can ask the job itself."""

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
        """Also who would wait for resources without end has one here."""
        own_s = self.launcher.queue_timeout_s
        return self.timeout_s if own_s is None else min(own_s, self.timeout_s)

    def host_of_workers(self) -> str | None:
        return self.launcher.host_of_workers()

    def launch(self, job: WorkerJob) -> Job:
        self.worker_job = job
        self.job = _OneAtATime(self.launcher.launch(job))
        return self.job


class _OneAtATime:
    """A job whose methods are called one at a time, as is promised to it: by the run's keeper, and by the suite."""

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
    """A cluster that runs, and the job behind it."""

    case: LauncherCase
    cluster: ClusterEnv
    job: Job
    worker_job: WorkerJob

    def workers(self) -> tuple[WorkerStats, ...]:
        """As the head knows them now."""
        return self.cluster.stats().workers

    def has_all(self) -> bool:
        """All have joined."""
        return all(worker.stage == "present" for worker in self.workers())

    def wait_for_another(self, old: WorkerStats) -> None:
        """Until another process has the place of `old`."""

        def has_come() -> bool:
            worker = self.workers()[old.worker]
            return worker.stage == "present" and (worker.host, worker.pid) != (old.host, old.pid)

        wait_until(has_come, f"worker {old.worker} has come back as another process", self.case)

    def require_rollout(self, num_workers: int) -> None:
        """So many workers act, and their envs step."""
        rollout = self.cluster.rollout(AGENT, NUM_STEPS)
        shape = np.shape(rollout.rewards)
        assert shape == (NUM_STEPS, num_workers * NUM_ENVS_PER_WORKER), f"the rollout has shape {shape}"


@contextlib.contextmanager
def running_fleet(case: LauncherCase, num_workers: int = NUM_WORKERS) -> Iterator[Fleet]:
    """A cluster whose workers have all joined."""
    watched = _Watched(case.launcher, case.timeout_s)
    settings: dict[str, Any] = {
        "backend": "serial",  # such workers start fastest
        "start_timeout_s": case.timeout_s,
        "timeout_s": case.timeout_s,
        # Without a network a run has no keys.
        "address": "tcp://127.0.0.1:0" if case.launcher.is_on_this_host else None,
        **case.settings,
    }
    with ClusterEnv(
        "CartPole-v1", num_workers, NUM_ENVS_PER_WORKER, launcher=watched, **cluster_arguments(settings)
    ) as cluster:
        assert watched.job is not None and watched.worker_job is not None
        fleet = Fleet(case, cluster, watched.job, watched.worker_job)
        assert fleet.has_all() and len(fleet.workers()) == num_workers
        yield fleet


def _push_right(weights: Mapping[str, Array], obs: Array) -> tuple[Array, Array]:
    right = (obs @ weights["w"] > 0).astype(np.int64)
    return right, np.zeros(len(obs), np.float32)


AGENT = FunctionPolicy(_push_right, weights={"w": np.ones(4, np.float32)})


class DeafHead:
    """Takes connections, and says nothing."""

    def __init__(self) -> None:
        """Listen, at a free port."""
        self._server = socket.create_server(("127.0.0.1", 0))
        self._server.setblocking(False)
        self._connections: list[socket.socket] = []
        self.address = f"tcp://127.0.0.1:{self._server.getsockname()[1]}"

    def num_connections(self) -> int:
        """So many have come so far."""
        with contextlib.suppress(BlockingIOError):
            while True:
                self._connections.append(self._server.accept()[0])
        return len(self._connections)

    def __enter__(self) -> DeafHead:
        """The head itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close all."""
        for each in (self._server, *self._connections):
            each.close()


@contextlib.contextmanager
def all_command_lines() -> Iterator[set[str]]:
    """All command lines that this machine shows while the body runs: a secret on one of them is no secret."""
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
    """Processes of this machine, with the mark on their command line."""
    return [pid for pid, line in _command_lines().items() if mark in line]


def wait_until(condition: Callable[[], bool], what: str, case: LauncherCase) -> None:
    """Look again and again, until the case's time is over."""
    deadline_s = time.monotonic() + case.timeout_s
    while not condition():
        assert time.monotonic() < deadline_s, f"after {case.timeout_s:g} s still not true: {what}"
        time.sleep(LOOK_S)
