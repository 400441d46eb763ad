"""The conformance suite of launchers: what every launcher must do, whatever engine starts its workers.

Each check takes a LauncherCase and starts one to three real workers with it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import secrets
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from envfleet.cluster.wire.sockets import RunKeys
from envfleet.contract.errors import EnvFleetError
from envfleet.contract.stats import WorkerStats
from envfleet.contract.worker_environment import KEYS_VARIABLE
from envfleet.launchers.launcher import Job, Launcher, WorkerJob, WorkerState
from envfleet.testing.launcher_fleet import (
    AGENT,
    NUM_ENVS_PER_WORKER,
    NUM_WORKERS,
    DeafHead,
    LauncherCase,
    all_command_lines,
    kill_on_this_host,
    marked,
    running_fleet,
    runs_on_this_host,
    wait_until,
)

__all__ = ["AGENT", "LAUNCHER_CHECKS", "LauncherCase", "check_launcher", "kill_on_this_host", "runs_on_this_host"]

LEFT_IN_RUN_DIR = "worker-*.log"  # the run removes these with its folder; the launcher must remove all else
SHORTEST_SECRET = 16  # characters of a word of the environment that counts as a key


def check_launcher(
    launcher: Launcher,
    *,
    impossible: Launcher | None = None,
    impossible_says: str = "",
    kill: Callable[[WorkerStats], None] = kill_on_this_host,
    is_running: Callable[[WorkerStats], bool] = runs_on_this_host,
    has_logs: bool = True,
    timeout_s: float = 60.0,
    settings: Mapping[str, Any] | None = None,
) -> None:
    """Run all checks on a launcher.

    Args:
        launcher: The launcher to check.
        impossible: The same kind of launcher, asking for resources that its engine does not have. None: not checked.
        impossible_says: Text that the error of `impossible` must contain, such as the user's setting.
        kill: Kills the process of a worker, as a crash would.
        is_running: Returns whether the process of a worker runs.
        has_logs: Whether the launcher can read what workers print.
        timeout_s: The most seconds that each wait may take.
        settings: Further arguments of ClusterEnv.

    Raises:
        AssertionError: The launcher breaks a rule; the message says which.
        EnvFleetError: A cluster with this launcher failed.
    """
    case = LauncherCase(
        launcher, impossible, impossible_says, kill, is_running, has_logs, timeout_s, dict(settings or {})
    )
    for check in LAUNCHER_CHECKS:
        check(case)


def is_a_set_of_settings(case: LauncherCase) -> None:
    """The launcher is a frozen dataclass, and answers the run's questions before anything is started."""
    launcher = case.launcher
    assert dataclasses.is_dataclass(launcher) and not isinstance(launcher, type), "a launcher is a frozen dataclass"
    for each in dataclasses.fields(launcher):
        with contextlib.suppress(dataclasses.FrozenInstanceError):
            setattr(launcher, each.name, getattr(launcher, each.name))
            raise AssertionError(f"{each.name} can be changed: a launcher is a frozen dataclass")
    assert isinstance(launcher.is_on_this_host, bool)
    assert launcher.head_address is None or isinstance(launcher.head_address, str)
    queue_timeout_s = launcher.queue_timeout_s
    assert queue_timeout_s is None or queue_timeout_s > 0, f"queue_timeout_s is {queue_timeout_s!r}"
    host = launcher.host_of_workers()
    assert host is None or (isinstance(host, str) and host), f"host_of_workers() gave {host!r}"


def workers_join_and_work(case: LauncherCase) -> None:
    """All workers join, envs step and the policy acts; states and logs of workers can be read meanwhile."""
    with running_fleet(case) as fleet:
        cluster, job = fleet.cluster, fleet.job
        obs, _ = cluster.reset(seed=0)
        assert len(obs) == NUM_WORKERS * NUM_ENVS_PER_WORKER
        cluster.step(cluster.action_space.sample())
        fleet.require_rollout(NUM_WORKERS)
        assert isinstance(job.revives, bool)
        for worker in range(NUM_WORKERS):
            status = job.status(worker)
            assert status.state in (WorkerState.RUNNING, WorkerState.PENDING), f"worker {worker} works, but is {status}"
            assert isinstance(status.detail, str)
            assert job.log_place(worker), f"log_place({worker}) is empty"
        if case.has_logs:
            workers = range(NUM_WORKERS)
            wait_until(lambda: all(job.log(worker).strip() for worker in workers), "log(worker) is not empty", case)
            assert all(len(job.log(worker, 10)) <= 10 for worker in workers), "log(worker, 10) is longer than that"


def secrets_stay_secret(case: LauncherCase) -> None:
    """The run's keys are on no command line, in no log or status, and in no file that others can read."""
    with all_command_lines() as seen, running_fleet(case, num_workers=1) as fleet:
        fleet.require_rollout(1)
        job, worker_job = fleet.job, fleet.worker_job
        words = {
            word for value in worker_job.environment.values() for word in value.split() if len(word) >= SHORTEST_SECRET
        }
        assert words, "the suite needs a run with keys: let settings= have a tcp address"
        texts = {
            "its log": job.log(0, 1_000_000),
            "its log_place()": job.log_place(0),
            "its status": str(job.status(0)),
            "the launcher's repr": repr(case.launcher),
            "the arguments of its command": " ".join(worker_job.arguments(0)),
        }
        for place, text in texts.items():
            assert not any(word in text for word in words), f"{place} has the keys of the run"
        for path in worker_job.run_dir.rglob("*"):
            if path.is_file() and path.stat().st_mode & 0o077:
                assert not any(word.encode() in path.read_bytes() for word in words), f"others can read keys in {path}"
    for line in seen:
        assert not any(word in line for word in words), f"the keys of the run are on a command line: {line[:200]}"


def a_killed_worker_comes_back(case: LauncherCase) -> None:
    """Another process replaces a killed worker, and the other workers keep theirs."""
    with running_fleet(case) as fleet:
        before = fleet.workers()
        case.kill(before[1])
        fleet.wait_for_another(before[1])
        fleet.require_rollout(NUM_WORKERS)
        assert fleet.workers()[0].pid == before[0].pid, "worker 0 was not killed, but is another process now"
        # An engine that revives workers may be quicker than the head's next look at it.
        assert fleet.job.revives or fleet.workers()[1].problem, "the reason why worker 1 was lost is not reported"


def restart_replaces_a_worker(case: LauncherCase) -> None:
    """Job.restart(worker) replaces a working worker by another process and ends the old one."""
    with running_fleet(case) as fleet:
        before = fleet.workers()
        fleet.job.restart(0)
        fleet.wait_for_another(before[0])
        wait_until(lambda: not case.is_running(before[0]), "restart(0) has ended the old process", case)
        fleet.require_rollout(NUM_WORKERS)
        assert fleet.workers()[1].pid == before[1].pid, "restart(0) was for worker 0, but worker 1 is another process"


def the_fleet_grows_and_shrinks(case: LauncherCase) -> None:
    """scale() adds and removes workers, and the others keep their processes."""
    with running_fleet(case, num_workers=1) as fleet:
        first = fleet.workers()[0]
        fleet.require_rollout(1)
        fleet.cluster.scale(3)
        wait_until(fleet.has_all, "3 workers are there after scale(3)", case)
        fleet.require_rollout(3)
        leaving = fleet.workers()[1:]
        fleet.cluster.scale(1)
        wait_until(lambda: not any(map(case.is_running, leaving)), "workers 1 and 2 are gone after scale(1)", case)
        fleet.require_rollout(1)
        assert fleet.workers()[0].pid == first.pid, "worker 0 is another process after scale()"


def runs_do_not_disturb_each_other(case: LauncherCase) -> None:
    """One launcher serves two runs at a time; when one of them ends, the other goes on."""
    with running_fleet(case, num_workers=1) as lasting:
        before = lasting.workers()
        with running_fleet(case, num_workers=1) as passing:
            passing.require_rollout(1)
        lasting.require_rollout(1)
        assert lasting.workers()[0].pid == before[0].pid, "the end of one run has ended a worker of another"


def cancel_leaves_nothing(case: LauncherCase) -> None:
    """cancel() ends workers that no head has told to leave, and removes what the launcher has created."""
    mark = f"30.{secrets.randbelow(10**9):09d}"  # on the command line of these workers, and of no others
    workers = range(NUM_WORKERS)
    with tempfile.TemporaryDirectory(prefix="envfleet-") as folder, DeafHead() as head:
        worker_job = WorkerJob(
            num_workers=NUM_WORKERS,
            argv=("-m", "envfleet.cluster.worker", "--head", head.address, "--silence-s", mark),
            environment={KEYS_VARIABLE: RunKeys.make().for_workers()},
            run_dir=Path(folder),
        )
        job = case.launcher.launch(worker_job)
        try:
            # Workers in another network cannot reach this head: it must be enough that they run.
            seen_s = time.monotonic() + min(5.0, case.timeout_s / 2)
            wait_until(
                lambda: head.num_connections() >= NUM_WORKERS or (time.monotonic() > seen_s and _all_run(job)),
                "workers whose head does not answer run",
                case,
            )
        finally:
            job.cancel(0.2)
        wait_until(
            lambda: all(job.status(worker).state is WorkerState.ENDED for worker in workers),
            "all workers are ENDED after cancel()",
            case,
        )
        wait_until(lambda: not marked(mark), "no process is left after cancel()", case)
        job.cancel(0.2)
        job.restart(0)
        job.resize(NUM_WORKERS + 1)
        assert not marked(mark), "restart() and resize() start workers after cancel()"
        assert isinstance(job.log(0), str) and job.log_place(0), "the log cannot be asked for after cancel()"
        left = [path.name for path in Path(folder).iterdir() if not path.match(LEFT_IN_RUN_DIR)]
        assert not left, f"the launcher has left {sorted(left)} in the run's folder"


def impossible_resources_are_refused(case: LauncherCase) -> None:
    """A request that the engine can never fulfil raises an error that says what is wrong."""
    if case.impossible is None:
        return
    begun_s = time.monotonic()
    try:
        with running_fleet(dataclasses.replace(case, launcher=case.impossible)):
            pass
    except EnvFleetError as error:
        is_late = time.monotonic() - begun_s > case.timeout_s
        assert not is_late, f"the launcher has not refused within {case.timeout_s:g} s: {error}"
        assert case.impossible_says in str(error), f"{case.impossible_says!r} is not in the error: {error}"
    else:
        raise AssertionError(f"{case.impossible} must be refused, but its workers have joined")


LauncherCheck = Callable[[LauncherCase], None]

LAUNCHER_CHECKS: tuple[LauncherCheck, ...] = (
    is_a_set_of_settings,
    workers_join_and_work,
    secrets_stay_secret,
    a_killed_worker_comes_back,
    restart_replaces_a_worker,
    the_fleet_grows_and_shrinks,
    runs_do_not_disturb_each_other,
    cancel_leaves_nothing,
    impossible_resources_are_refused,
)


def _all_run(job: Job) -> bool:
    return all(job.status(worker).state is WorkerState.RUNNING for worker in range(NUM_WORKERS))
