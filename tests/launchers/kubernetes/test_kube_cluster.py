"""Clusters whose workers are pods: real workers, with the Jobs of a stand-in (or of real servers, see conftest.py)."""

import signal
import subprocess
import sys
import threading

import pytest

import envfleet
from envfleet.contract.errors import ClusterError, JoinTimeout, WorkerLost
from envfleet.launchers.kubernetes import job as kubernetes_job
from envfleet.launchers.kubernetes import status as kubernetes_status
from envfleet.launchers.kubernetes.settings import Kubernetes
from envfleet.testing.cluster_arguments import cluster_arguments
from envfleet.testing.launcher_conformance import LAUNCHER_CHECKS, LauncherCase
from tests.support.envs.cluster_envs import Agent
from tests.support.waiting import is_running, wait_until

AGENT = Agent()
LONG_S = 180.0


def launcher(kube, image="test/worker", **settings):
    return Kubernetes(image, namespace=kube.namespace, **{"python": sys.executable, "cpus_per_worker": 0.5, **settings})


def cluster(kube, num_workers=2, settings=None, **options):
    options = {"backend": "serial", "address": "tcp://127.0.0.1:0", "timeout_s": LONG_S, **options}
    return envfleet.ClusterEnv(
        "CartPole-v1", num_workers, 2, launcher=launcher(kube, **(settings or {})), **cluster_arguments(options)
    )


def stats(envs, worker):
    return envs.stats().workers[worker]


def wait_for_another(envs, worker, pid):
    def has_come():
        now = stats(envs, worker)
        return now.stage == "present" and now.pid != pid

    wait_until(has_come, f"worker {worker} has come back", LONG_S)


@pytest.mark.parametrize("check", LAUNCHER_CHECKS, ids=lambda check: check.__name__)
def test_conformance(kube, check):
    case = LauncherCase(
        launcher(kube),
        impossible=launcher(kube, cpus_per_worker=640, queue_timeout_s=3.0),
        impossible_says="Insufficient cpu",
        timeout_s=LONG_S,
        settings={"address": "tcp://127.0.0.1:0"},
    )
    check(case)
    assert kube.leftovers() == []
    assert kube.node.pids() == []


def test_an_evicted_worker_comes_back(kube):
    with cluster(kube) as envs:
        envs.rollout(AGENT, 4)
        (of_worker_1,) = [
            pod["metadata"]["name"]
            for pod in kube.objects("pods")
            if pod["metadata"]["annotations"]["batch.kubernetes.io/job-completion-index"] == "1"
        ]
        before = stats(envs, 1).pid
        eviction = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": of_worker_1}}
        kube.admin.post(f"{kube.path('pods', of_worker_1)}/eviction", eviction)
        wait_for_another(envs, 1, before)
        assert envs.rollout(AGENT, 4).rewards.shape == (4, 4)
        (job,) = kube.objects("jobs")
        assert job["status"].get("failed", 0) == 0
    assert kube.leftovers() == []


def test_scaling_while_a_stream_runs(kube):
    with cluster(kube, num_workers=1) as envs:
        stream = envs.stream(AGENT, 4)
        next(stream)
        envs.scale(3)
        wait_until(lambda: next(stream) is not None and len(envs.stats().workers) == 3, "three workers", LONG_S)
        wait_until(
            lambda: next(stream) is not None and all(each.num_rollouts for each in envs.stats().workers),
            "all of them have brought something",
            LONG_S,
        )
        gone = stats(envs, 2).pid
        envs.scale(1)
        wait_until(lambda: not is_running(gone), "worker 2 has left", LONG_S)
        for _ in range(3):
            next(stream)
        stream.close()
        assert len(kube.names("jobs")) == 1
    assert kube.leftovers() == []


def test_image_cannot_be_pulled(kube, monkeypatch):
    monkeypatch.setattr(kubernetes_status, "IMAGE_PATIENCE_S", 1.0)
    with pytest.raises(ClusterError) as caught:
        cluster(kube, settings={"image": "nowhere/envs:1"})
    for part in ("worker 0 does not start", "ImagePullBackOff", "'nowhere/envs:1'", "image_pull_secrets="):
        assert part in str(caught.value)
    assert kube.leftovers() == []


def test_unschedulable(kube):
    with pytest.raises(JoinTimeout) as caught:
        cluster(kube, num_workers=1, settings={"node_selector": {"disk": "fast"}, "queue_timeout_s": 3.0})
    for part in ("queue_timeout_s", "Unschedulable", "didn't match", "kubectl -n"):
        assert part in str(caught.value)
    assert kube.leftovers() == []


def test_crash_loop_shows_the_log(kube, tmp_path):
    script = tmp_path / "python"
    script.write_text("#!/bin/sh\necho starting\necho 'ModuleNotFoundError: my_envs' >&2\nexit 1\n")
    script.chmod(0o755)
    with pytest.raises(WorkerLost) as caught:
        cluster(kube, num_workers=1, settings={"python": str(script)})
    for part in ("worker 0 does not start", "exit code 1", "its last lines:", "ModuleNotFoundError: my_envs"):
        assert part in str(caught.value)
    assert kube.leftovers() == []


def test_forbidden(kube, caplog):
    kube.allow([])
    with pytest.raises(ClusterError, match=f"head may not create secrets in namespace {kube.namespace}"):
        cluster(kube)
    assert kube.leftovers() == []
    assert caplog.records == []  # there is nothing that may be left


HEAD = """
import sys
import envfleet
from tests.support.envs.cluster_envs import Agent
from envfleet.launchers.kubernetes.settings import Kubernetes

launcher = Kubernetes("test/worker", namespace=sys.argv[1], python=sys.executable, cpus_per_worker=0.5)
envs = envfleet.ClusterEnv("CartPole-v1", 2, 2, launcher=launcher, backend="serial", network=dict(address="tcp://127.0.0.1:0"))
envs.rollout(Agent(), 4)
print(*(worker.pid for worker in envs.stats().workers), flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_the_head_is_killed(kube, head_environment, number):
    """SIGTERM: it clears up. SIGKILL: its workers leave, and to delete the Job deletes all."""
    head = subprocess.Popen(
        [sys.executable, "-c", HEAD, kube.namespace],
        env=head_environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    watchdog = threading.Timer(LONG_S, head.kill)
    watchdog.start()
    try:
        workers = [int(pid) for pid in head.stdout.readline().split()]
        assert len(workers) == 2
        head.send_signal(number)
        head.wait(LONG_S)
        wait_until(lambda: not any(map(is_running, workers)), "its workers have left", LONG_S)
    finally:
        watchdog.cancel()
        head.kill()
        head.communicate()
    if number is signal.SIGTERM:
        assert kube.leftovers() == []
        return

    def exit_codes():
        return {
            container["state"]["terminated"]["exitCode"]
            for pod in kube.objects("pods")
            for container in pod["status"].get("containerStatuses", ())
            if "terminated" in container["state"]
        }

    wait_until(lambda: exit_codes() == {3}, "Kubernetes knows that they have lost their head", LONG_S)
    (job,) = kube.names("jobs")
    kube.admin.delete(f"/apis/batch/v1/namespaces/{kube.namespace}/jobs/{job}?propagationPolicy=Background")
    wait_until(lambda: kube.leftovers() == [] and kube.node.pids() == [], "nothing is left", LONG_S)


def test_api_server_away_does_not_stop_the_run(kube, monkeypatch):
    if kube.api is None:
        pytest.skip("a real server is not taken down for this")
    monkeypatch.setattr(kubernetes_job, "LOOK_EVERY_S", 0.1)
    with cluster(kube, num_workers=1) as envs:
        kube.api.is_down = True
        for _ in range(20):
            envs.rollout(AGENT, 4)
        kube.api.is_down = False
    assert kube.leftovers() == []
