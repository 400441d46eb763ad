"""What becomes of Jobs whose head is gone: Kubernetes ends them, even if their pods were never started."""

import os
import subprocess
import sys
import threading
import time

import pytest
from kubernetes import config

from envfleet.launchers.kubernetes import api as kubernetes_api
from envfleet.launchers.kubernetes.api import Unreachable
from tests.support.kubernetes.tiny_jobs import (
    ENDED,
    LONG_S,
    PENDING,
    RUNNING,
    running,
    wait_for,
    wait_for_another,
    wait_for_words,
)
from tests.support.waiting import is_running, wait_until

HEAD = """
import sys
import time
from pathlib import Path
from envfleet.launchers.kubernetes import manifest as kubernetes_manifest
from envfleet.launchers.kubernetes.settings import Kubernetes
from envfleet.launchers.launcher import WorkerJob

kubernetes_manifest.KEEP_ENDED_S = 1
settings = Kubernetes("test/worker", namespace=sys.argv[1], cpus_per_worker=640, head_timeout_s=float(sys.argv[2]))
job = settings.launch(WorkerJob(num_workers=2, argv=(), environment={"ENVFLEET_KEYS": "k3y"}, run_dir=Path()))
while "Unschedulable" not in job.status(0).detail:
    time.sleep(0.05)
print("pending", flush=True)
sys.stdin.read()
"""


def test_the_head_is_killed_while_its_pods_are_pending(kube, head_environment):
    head = subprocess.Popen(
        [sys.executable, "-c", HEAD, kube.namespace, "10"],
        env=head_environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    watchdog = threading.Timer(2 * LONG_S, head.kill)  # it imports the client first
    watchdog.start()
    try:
        assert head.stdout.readline() == b"pending\n"
    finally:
        watchdog.cancel()
        head.kill()
        head.communicate()
    assert kube.names("pods") and any("envfleet" in name for name in kube.names("secrets"))
    wait_until(lambda: kube.leftovers() == [], "Job, Secret and pods are gone", LONG_S)


def deadline_of(kube):
    (job,) = kube.objects("jobs")
    return job["spec"]["activeDeadlineSeconds"]


@pytest.mark.usefixtures("looks_often")
def test_a_head_that_lives_moves_the_deadline_on(kube, tmp_path):
    with running(kube, tmp_path, num_workers=1, head_timeout_s=12) as job:
        wait_for(job, 0, RUNNING)
        pid = wait_for_another(tmp_path, 0, set())
        wait_until(lambda: (job.status(0), deadline_of(kube) >= 20)[1], "it was moved on, again and again", LONG_S)
        assert job.status(0).state is RUNNING and is_running(pid)
        assert len(kube.names("jobs")) == 1


@pytest.mark.usefixtures("looks_often")
def test_time_that_the_head_was_suspended_counts(kube, tmp_path, monkeypatch):
    """CLOCK_MONOTONIC stops meanwhile; the cluster's clock, and so a Job's deadline, does not."""
    with running(kube, tmp_path, num_workers=1, head_timeout_s=3600) as job:
        wait_for(job, 0, RUNNING)
        wait_until(lambda: "startTime" in kube.objects("jobs")[0]["status"], "its time runs", LONG_S)
        assert deadline_of(kube) == 3600
        clock = time.clock_gettime
        monkeypatch.setattr(time, "clock_gettime", lambda which: clock(which) + 1800.0 * (which == time.CLOCK_BOOTTIME))
        wait_until(lambda: (job.status(0), deadline_of(kube) >= 5400)[1], "it was moved on", LONG_S)
        assert deadline_of(kube) < 5400 + 2 * LONG_S


@pytest.mark.usefixtures("looks_often")
def test_a_job_whose_creation_was_not_confirmed_has_its_deadline_moved_on(kube, tmp_path, monkeypatch):
    """The API server creates the Job, but its answer is lost: the Job counts as created when it was asked for."""
    with running(kube, tmp_path, num_workers=1, head_timeout_s=12) as job:
        wait_for(job, 0, RUNNING)
        (first,) = kube.names("jobs")
        kube.admin.delete(f"/apis/batch/v1/namespaces/{kube.namespace}/jobs/{first}?propagationPolicy=Foreground")
        wait_for(job, 0, ENDED)
        create = job.unguarded._api.create_job

        def create_and_lose_the_answer(manifest):
            create(manifest)
            raise Unreachable("the answer is lost")

        monkeypatch.setattr(job.unguarded._api, "create_job", create_and_lose_the_answer)
        with pytest.raises(Unreachable, match="the answer is lost"):
            job.restart(0)
        (second,) = kube.names("jobs")
        assert second != first
        wait_for(job, 0, RUNNING)
        wait_until(lambda: (job.status(0), deadline_of(kube) >= 20)[1], "it was moved on, again and again", LONG_S)
        assert job.status(0).state is RUNNING


@pytest.mark.usefixtures("looks_often")
def test_a_head_that_was_stopped_for_too_long_gets_new_workers(kube, tmp_path):
    with running(kube, tmp_path, num_workers=1, head_timeout_s=5) as job:
        wait_until(lambda: "DeadlineExceeded" in str(kube.objects("jobs")[0]["status"]), "the Job has failed", LONG_S)
        assert "DeadlineExceeded" in wait_for(job, 0, ENDED).detail
        before = {int(path.name.split("-")[2]) for path in tmp_path.glob("started-0-*")}
        job.restart(0)
        wait_for_another(tmp_path, 0, before)
        wait_for(job, 0, RUNNING)


@pytest.mark.usefixtures("looks_often")
def test_a_suspended_job_has_no_deadline(kube, tmp_path):
    with running(kube, tmp_path, num_workers=1, head_timeout_s=30) as job:
        wait_for(job, 0, RUNNING)
        (name,) = kube.names("jobs")
        path = f"/apis/batch/v1/namespaces/{kube.namespace}/jobs/{name}"
        kube.admin.merge(path, {"spec": {"suspend": True}})
        wait_for_words(job, 0, "is suspended")
        wait_until(lambda: "startTime" not in kube.objects("jobs")[0]["status"], "its time does not run", LONG_S)
        before = deadline_of(kube)
        for _ in range(20):
            wait_until(lambda: job.status(0).state is PENDING, "it waits")
        assert deadline_of(kube) == before
        kube.admin.merge(path, {"spec": {"suspend": False}})
        wait_for(job, 0, RUNNING)


@pytest.mark.usefixtures("looks_often")
def test_a_deadline_that_cannot_be_moved_is_told_once(kube, tmp_path, caplog):
    if kube.api is None:
        pytest.skip("real servers take a while to notice a change of rights")
    with running(kube, tmp_path, num_workers=1, head_timeout_s=20) as job:
        wait_for(job, 0, RUNNING)
        kube.allow(
            [
                {"apiGroups": ["batch"], "resources": ["jobs"], "verbs": ["list", "delete"]},
                {"apiGroups": [""], "resources": ["pods", "secrets"], "verbs": ["list", "delete"]},
            ]
        )
        wait_until(lambda: (job.status(0), "after its last renewal" in caplog.text)[1], "it is told", LONG_S)
        for _ in range(20):
            job.status(0)
        assert caplog.text.count("after its last renewal") == 1 and "may not patch jobs" in caplog.text
        assert job.status(0).state is RUNNING


def test_without_a_timeout_there_is_no_deadline(kube, tmp_path):
    with running(kube, tmp_path, num_workers=1, head_timeout_s=None):
        (job,) = kube.objects("jobs")
        assert "activeDeadlineSeconds" not in job["spec"]


@pytest.fixture
def in_a_pod(kube, monkeypatch, tmp_path):
    """This process is the container of a pod "learner" of the test's namespace: what it finds there."""
    body = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "learner", "namespace": kube.namespace},
        "spec": {"restartPolicy": "Never", "containers": [{"name": "head", "image": "x", "command": ["sleep", "600"]}]},
    }
    kube.admin.post(f"/api/v1/namespaces/{kube.namespace}/pods", body)
    account = tmp_path / "account"
    account.mkdir()
    (account / "token").write_text("t0ken")
    (account / "namespace").write_text(kube.namespace)
    kubeconfig = os.environ["KUBECONFIG"]

    def load(client_configuration):  # a pod's API server speaks TLS, and the stand-in does not
        config.load_kube_config(config_file=kubeconfig, client_configuration=client_configuration)

    monkeypatch.setattr(config, "load_incluster_config", load)
    monkeypatch.setattr(kubernetes_api, "POD_TOKEN", account / "token")
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "127.0.0.1")
    monkeypatch.setenv("HOSTNAME", "learner")
    monkeypatch.delenv("KUBECONFIG")
    return account


@pytest.mark.usefixtures("looks_often")
def test_jobs_go_with_the_pod_of_their_head(kube, tmp_path, in_a_pod):
    with running(kube, tmp_path) as job:
        wait_for(job, 0, RUNNING)
        (made,) = kube.objects("jobs")
        (owner,) = made["metadata"]["ownerReferences"]
        assert (owner["apiVersion"], owner["kind"], owner["name"]) == ("v1", "Pod", "learner")
        kube.admin.delete(kube.path("pods", "learner"), {"gracePeriodSeconds": 0})
        wait_until(lambda: kube.leftovers() == [], "Job, Secret and pods are gone", LONG_S)
        wait_until(lambda: kube.node.pids() == [], "its processes are gone", LONG_S)


@pytest.mark.parametrize("reason", ["another namespace", "another hostname", "no namespace", "a kubeconfig"])
def test_no_owner_that_is_not_there(kube, tmp_path, in_a_pod, monkeypatch, reason):
    """Kubernetes would delete the Jobs at once: to it an owner elsewhere is one that is gone."""
    if reason == "another namespace":
        (in_a_pod / "namespace").write_text("default")
    elif reason == "another hostname":
        monkeypatch.setenv("HOSTNAME", "node-1")
    elif reason == "no namespace":
        (in_a_pod / "namespace").unlink()
    else:
        monkeypatch.setenv("KUBECONFIG", str(kube.kubeconfig))
    with running(kube, tmp_path, num_workers=1):
        (job,) = kube.objects("jobs")
        assert "ownerReferences" not in job["metadata"]
        kube.admin.delete(kube.path("pods", "learner"), {"gracePeriodSeconds": 0})
        wait_until(
            lambda: "learner" not in kube.names("pods") and len(kube.node.pids()) <= 1, "the learner is gone", LONG_S
        )
        assert len(kube.names("jobs")) == 1
