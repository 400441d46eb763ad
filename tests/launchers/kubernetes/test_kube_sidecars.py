"""Pods with containers that a cluster has added, such as a proxy of a service mesh: only `worker` counts."""

import os
import signal

import pytest

import envfleet
from envfleet.launchers.kubernetes import job as kubernetes_job
from envfleet.launchers.kubernetes import status as kubernetes_status
from envfleet.testing.cluster_arguments import cluster_arguments
from tests.support.envs.cluster_envs import Agent
from tests.support.kubernetes.rest import Refused
from tests.support.kubernetes.tiny_jobs import (
    ENDED,
    LONG_S,
    RUNNING,
    pids,
    pod_of,
    running,
    say_exit,
    settings,
    wait_for,
    wait_for_another,
)
from tests.support.waiting import wait_until

pytestmark = pytest.mark.usefixtures("looks_often")


@pytest.fixture
def sidecar(monkeypatch):
    """What a proxy's container runs; a name that comes before "worker" in lists."""
    proxy = {"name": "a-proxy", "image": "test/proxy", "command": ["sh", "-c", "echo proxy; exec sleep 600"]}

    def with_proxy(make):
        def manifest(*arguments):
            made = make(*arguments)
            containers = made["spec"]["template"]["spec"]["containers"]
            made["spec"]["template"]["spec"]["containers"] = [proxy, *containers]
            return made

        return manifest

    for name in ("fleet_manifest", "worker_manifest"):
        monkeypatch.setattr(kubernetes_job, name, with_proxy(getattr(kubernetes_job, name)))
    return proxy


def test_the_log_is_the_workers(kube, tmp_path, sidecar):
    with running(kube, tmp_path, num_workers=1) as job:
        wait_for(job, 0, RUNNING)
        wait_until(lambda: "worker 0 has k3y" in job.log(0), "its log can be read", LONG_S)
        assert "proxy" not in job.log(0)
        assert job.log_place(0).endswith("-c worker")
        with pytest.raises(Refused, match=r"400: .*a container name must be specified"):
            kube.admin.text(f"{kube.path('pods', pod_of(kube, 0))}/log")


def test_a_worker_that_ended_is_replaced_though_its_pod_runs(kube, tmp_path, sidecar):
    with running(kube, tmp_path, num_workers=1) as job:
        wait_for(job, 0, RUNNING)
        before = {wait_for_another(tmp_path, 0, set())}
        pod = pod_of(kube, 0)
        say_exit(tmp_path, 0, 7)
        status = wait_for(job, 0, ENDED)
        assert "exit code 7" in status.detail and "other containers of its pod still run" in status.detail
        assert kube.admin.get(kube.path("pods", pod))["status"]["phase"] == "Running"
        job.restart(0)  # as the head does for one that has ended
        wait_for_another(tmp_path, 0, before)
        wait_for(job, 0, RUNNING)
        assert len(kube.names("jobs")) == 1


def test_a_sidecar_that_ended_is_no_end_of_the_worker(kube, tmp_path, sidecar):
    sidecar["command"] = ["sh", "-c", "exit 1"]
    with running(kube, tmp_path, num_workers=1) as job:
        wait_for(job, 0, RUNNING)
        pid = wait_for_another(tmp_path, 0, set())

        def proxy_has_ended():
            statuses = kube.admin.get(kube.path("pods", pod_of(kube, 0)))["status"]["containerStatuses"]
            return any("terminated" in each["state"] for each in statuses)

        wait_until(proxy_has_ended, "the proxy has ended", LONG_S)
        job.unguarded._look()
        assert job.status(0).state is RUNNING and job.status(0).num_failures == 0
        assert pids(tmp_path, 0) == {pid}


def test_a_sidecar_that_cannot_start_is_not_the_workers_image(kube, tmp_path, sidecar):
    """Its pod is pending all the while, and keeps so when the worker has ended."""
    sidecar["image"] = "nowhere/proxy:1"
    with running(kube, tmp_path, num_workers=1) as job:
        wait_for(job, 0, RUNNING)
        assert {pod["status"]["phase"] for pod in kube.objects("pods")} == {"Pending"}
        before = {wait_for_another(tmp_path, 0, set())}
        say_exit(tmp_path, 0, 7)
        assert "exit code 7" in wait_for(job, 0, ENDED).detail
        job.restart(0)
        wait_for_another(tmp_path, 0, before)


def test_a_run_goes_on_with_another_worker(kube, sidecar, monkeypatch):
    """Not because the Job controller takes too long: it has nothing to do, for the pod runs."""
    monkeypatch.setattr(kubernetes_status, "REVIVAL_S", 1e9)
    options = {"backend": "serial", "address": "tcp://127.0.0.1:0", "timeout_s": 180.0, "join_timeout_s": 600.0}
    with envfleet.ClusterEnv("CartPole-v1", 1, 2, launcher=settings(kube), **cluster_arguments(options)) as envs:
        envs.rollout(Agent(), 4)
        before = envs.stats().workers[0].pid
        os.kill(before, signal.SIGKILL)
        wait_until(
            lambda: envs.stats().workers[0].stage == "present" and envs.stats().workers[0].pid != before,
            "another worker has come",
            180.0,
        )
        assert envs.rollout(Agent(), 4).rewards.shape == (4, 2)
        assert len(kube.names("jobs")) == 1
    assert kube.leftovers() == []
