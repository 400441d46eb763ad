"""Workers on the nodes of a real Ray cluster, and what may happen to them there."""

import contextlib
import os
import signal
import time

import pytest

from envfleet import ClusterEnv
from envfleet.contract.errors import ClusterError, JoinTimeout, UsageError, WorkerLost
from envfleet.launchers.launcher import WorkerState
from envfleet.launchers.ray.settings import Ray
from envfleet.testing import LAUNCHER_CHECKS, LauncherCase
from envfleet.testing.cluster_arguments import cluster_arguments
from tests.launchers.ray.ray_lab import AGENT, command_line, parent, raylet_pid, seconds, watched, worker_processes
from tests.support.short_examples import SHORT_FLAGS, run_example
from tests.support.waiting import is_running, wait_until

START_S = 60.0


def cluster(launcher, num_workers=2, **settings):
    settings = {"backend": "serial", "start_timeout_s": START_S, "timeout_s": START_S, "heartbeat_s": 0.2, **settings}
    return ClusterEnv("CartPole-v1", num_workers, 2, launcher=launcher, **cluster_arguments(settings))


def wait_for_another(envs, before, stream=None):
    """Until another process has the place of a worker; the stream goes on meanwhile."""

    def has_come():
        if stream is not None:
            next(stream)
        worker = envs.stats().workers[before.worker]
        return worker.stage == "present" and worker.pid != before.pid

    wait_until(has_come, f"worker {before.worker} has come back as another process", START_S)


def take_from(stream, wanted):
    """Take rollouts until each of the wanted workers has delivered one."""
    seen, deadline_s = set(), time.monotonic() + START_S
    while not wanted <= seen:
        assert time.monotonic() < deadline_s, f"{wanted} were wanted, {seen} came"
        seen.add(int(next(stream).workers[0]))


def take_while_waiting(stream, condition, what):
    def is_true():
        next(stream)
        return condition()

    wait_until(is_true, what, START_S)


@pytest.mark.parametrize("check", LAUNCHER_CHECKS, ids=lambda check: check.__name__)
def test_conformance(check, ray_nodes):
    impossible = Ray(cpus_per_worker=64, queue_timeout_s=4.0)
    check(LauncherCase(Ray(address=ray_nodes.address), impossible, "64 CPU"))


@pytest.mark.parametrize("name", SHORT_FLAGS)
def test_example(ray_nodes, monkeypatch, tmp_path, name):
    """Every example with `--launcher ray`: the cluster that this process is connected to."""
    from envfleet.launchers.ray import job as ray_job

    launched, begin = [], ray_job.RayJob.__init__
    monkeypatch.setattr(ray_job.RayJob, "__init__", lambda self, *args: (launched.append(self), begin(self, *args))[1])
    monkeypatch.chdir(tmp_path)
    flags = ["--launcher", "ray", "--launcher-setting", "cpus_per_worker=1", "--launcher-setting", "placement=PACK"]
    assert run_example(monkeypatch, name, *flags) == 0
    assert len(launched) == 1


def test_workers_are_spread_over_the_nodes(ray_nodes):
    launcher = watched()
    with cluster(launcher, num_workers=4) as envs:
        assert envs.rollout(AGENT, 8).rewards.shape == (8, 8)
        begun = [launcher.begun(worker) for worker in range(4)]
        assert len({each.node_id for each in begun}) == 2
        for worker, each in enumerate(begun):
            status = launcher.job.status(worker)
            assert status.state is WorkerState.RUNNING and each.node_id[:8] in status.detail
            assert launcher.job.log_place(worker).startswith(each.log_path)
            assert each.pid == envs.stats().workers[worker].pid
            with open(f"/proc/{each.pid}/environ") as file:
                assert "ENVFLEET_NUM_CPUS=1" in file.read().split("\0")


def test_the_process_of_an_actor_is_killed(ray_nodes):
    launcher = watched()
    with cluster(launcher) as envs:
        stream = envs.stream(AGENT, 8)
        take_from(stream, {0, 1})
        before = envs.stats().workers[1]
        actor = parent(before.pid)
        assert "WorkerActor" in command_line(actor)
        os.kill(actor, signal.SIGKILL)
        wait_for_another(envs, before, stream)
        take_from(stream, {0, 1})
        wait_until(lambda: not is_running(before.pid), "the worker has ended with its actor")
        wait_until(lambda: launcher.job.status(1).num_failures == 1, "Ray has replaced one process")
        assert launcher.job.status(0).num_failures == 0


def test_the_fleet_grows_onto_a_new_node_and_outlives_it(ray_nodes, more_nodes):
    more_nodes(num_cpus=1, resources={"lab": 1})
    launcher = watched(resources={"lab": 1})
    with cluster(launcher, num_workers=1) as envs:
        stream = envs.stream(AGENT, 8)
        take_from(stream, {0})
        envs.scale(2)
        take_while_waiting(stream, lambda: "1 lab" in launcher.job.status(1).detail, "Ray says what is short")
        status = launcher.job.status(1)
        assert status.state is WorkerState.PENDING
        assert "1 x (1 CPU, 1 lab) asked for" in status.detail and "0 lab free" in status.detail
        second = more_nodes(num_cpus=1, resources={"lab": 1})
        take_from(stream, {0, 1})
        wait_until(lambda: launcher.begun(1).node_id == second.node_id, "it is on the new node")

        before = envs.stats().workers[1]
        ray_nodes.remove_node(second)
        take_while_waiting(stream, lambda: not is_running(before.pid), "the worker has ended with its node")
        assert envs.stats().workers[0].num_restarts == 0
        third = more_nodes(num_cpus=1, resources={"lab": 1})
        wait_for_another(envs, before, stream)
        take_from(stream, {0, 1})
        wait_until(lambda: launcher.begun(1).node_id == third.node_id, "it is on the newest node")
        stream.close()


def test_a_worker_that_ray_believes_dead_is_fenced(ray_nodes, more_nodes):
    nodes = [more_nodes(num_cpus=1, resources={"lab": 1}) for _ in range(2)]
    launcher = watched(resources={"lab": 1})
    with contextlib.ExitStack() as stack, cluster(launcher) as envs:
        stream = envs.stream(AGENT, 8)
        take_from(stream, {0, 1})
        before = envs.stats().workers[1]
        node = next(node for node in nodes if node.node_id == launcher.begun(1).node_id)
        # They do not notice that their raylet is gone, as on a node that is cut off.
        for pid in (parent(before.pid), before.pid):
            os.kill(pid, signal.SIGSTOP)
            stack.callback(_go_on, pid)
        os.kill(raylet_pid(node), signal.SIGKILL)
        more_nodes(num_cpus=1, resources={"lab": 1})
        wait_for_another(envs, before, stream)
        newer = envs.stats().workers[1]
        assert is_running(before.pid)
        os.kill(before.pid, signal.SIGCONT)
        take_while_waiting(stream, lambda: not is_running(before.pid), "the old process has left")
        take_from(stream, {0, 1})
        assert envs.stats().workers[1].pid == newer.pid
        assert envs.stats().workers[1].num_restarts == newer.num_restarts
        stream.close()


def _go_on(pid):
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGCONT)


@pytest.mark.parametrize(
    ("settings", "asked"),
    [({"cpus_per_worker": 64}, "2 x (64 CPU)"), ({"resources": {"unicorn": 1}}, "2 x (1 CPU, 1 unicorn)")],
)
def test_an_infeasible_request(ray_nodes, settings, asked):
    started_s = time.monotonic()
    with pytest.raises(ClusterError) as caught:
        cluster(Ray(**settings, queue_timeout_s=4.0))
    assert seconds(started_s) < START_S / 2
    for part in (asked, "3 nodes with 4 CPU", "2 CPU", "4 CPU", "free", "This never fits", "ray start --address"):
        assert part in str(caught.value)


def test_more_than_is_free_is_waited_for(ray_nodes):
    with cluster(Ray(cpus_per_worker=2), num_workers=1) as envs:
        with pytest.raises(JoinTimeout, match=r"2 x \(2 CPU\) asked for") as caught:
            cluster(Ray(cpus_per_worker=2, queue_timeout_s=4.0))
        assert "2 CPU free" in str(caught.value) and "never fits" not in str(caught.value)
        assert envs.rollout(AGENT, 8).rewards.shape == (8, 2)


def test_scaling_beyond_what_there_is_and_back(ray_nodes):
    launcher = watched(queue_timeout_s=8.0)  # the start of actors counts, too
    with cluster(launcher) as envs:
        with pytest.raises(ClusterError, match="asked for"):
            envs.scale(6, timeout_s=30.0)
        envs.scale(2)
        assert envs.rollout(AGENT, 8).rewards.shape == (8, 4)


def test_a_command_that_cannot_be_started(ray_nodes):
    with pytest.raises(WorkerLost, match=r"(?s)no-such-python.*No such file|No such file.*no-such-python"):
        cluster(Ray(python="no-such-python"), num_workers=1)


def test_a_command_that_fails_is_not_started_for_ever(ray_nodes, tmp_path):
    program = tmp_path / "failing"
    program.write_text("#!/bin/sh\necho what is wrong with me >&2\nexit 7\n")
    program.chmod(0o755)
    with pytest.raises(WorkerLost, match=r"exit code 7") as caught:
        cluster(Ray(python=str(program)), num_workers=1)
    assert "what is wrong with me" in str(caught.value)


def test_restart_in_a_group_that_somebody_removed(ray_nodes):
    from ray.util.placement_group import remove_placement_group

    launcher = watched()
    with cluster(launcher, num_workers=1) as envs:
        before = envs.stats().workers[0]
        remove_placement_group(launcher.job.unguarded._actors[0].group.placement_group)  # Ray kills what runs there
        wait_for_another(envs, before)
        assert envs.rollout(AGENT, 8).rewards.shape == (8, 2)


def test_runtime_env_brings_variables(ray_nodes):
    launcher = watched(runtime_env={"env_vars": {"OF_THE_LAB": "yes"}})
    with cluster(launcher, num_workers=1), open(f"/proc/{launcher.begun(0).pid}/environ") as file:
        assert "OF_THE_LAB=yes" in file.read().split("\0")


def test_a_runtime_env_that_ray_refuses(ray_nodes, tmp_path):
    with pytest.raises(UsageError, match="only supported at the job level"):
        cluster(Ray(runtime_env={"working_dir": str(tmp_path)}))  # this process is connected already


def test_nothing_is_done_in_a_fork(ray_nodes):
    launcher = watched()
    with cluster(launcher, num_workers=1) as envs:
        with pytest.MonkeyPatch.context() as patch:  # a real fork of a process with Ray's threads may hang
            patch.setattr(os, "getpid", lambda: -1)
            launcher.job.restart(0)
            launcher.job.resize(3)
            launcher.job.cancel(0.0)
        assert len(worker_processes()) == 1
        assert envs.rollout(AGENT, 8).rewards.shape == (8, 2)
