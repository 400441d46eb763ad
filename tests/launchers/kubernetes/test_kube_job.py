"""KubernetesJob with tiny workers: what it asks of the API server, and what it makes of the answers."""

import os
import socket
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from envfleet.contract.errors import ClusterError, MissingExtra, UsageError
from envfleet.launchers.kubernetes import api as kubernetes_api
from envfleet.launchers.kubernetes import job as kubernetes_job
from envfleet.launchers.kubernetes import status as kubernetes_status
from envfleet.launchers.kubernetes.api import Forbidden, Unreachable
from envfleet.launchers.kubernetes.settings import Kubernetes
from envfleet.launchers.launcher import WorkerJob
from tests.support.kubernetes import job_stand_in
from tests.support.kubernetes.kube_namespace import rules_of_deploy
from tests.support.kubernetes.rest import Rest
from tests.support.kubernetes.tiny_jobs import (
    ENDED,
    LONG_S,
    PENDING,
    REFUSED,
    RUNNING,
    TINY_WORKER,
    pids,
    pod_of,
    running,
    say_exit,
    settings,
    wait_for,
    wait_for_another,
    wait_for_words,
)
from tests.support.waiting import is_running, wait_until

pytestmark = pytest.mark.usefixtures("looks_often")


def test_life(kube, tmp_path):
    with running(kube, tmp_path) as job:
        assert job.revives
        for worker in range(2):
            status = wait_for(job, worker, RUNNING)
            assert kube.node.name in status.detail and status.num_failures == 0
            assert job.log_place(worker).startswith(f"kubectl -n {kube.namespace} logs envfleet-")
            wait_until(lambda w=worker: f"worker {w} has k3y" in job.log(w), "its log can be read", LONG_S)
        assert len(job.log(0, 10)) <= 10
        (name,) = kube.names("jobs")
        secret = next(each for each in kube.objects("secrets") if each["metadata"]["name"] == name)
        (owner,) = secret["metadata"]["ownerReferences"]
        assert (owner["kind"], owner["name"]) == ("Job", name)
        assert "k3y" not in str(kube.objects("jobs")) + str(kube.objects("pods"))
    assert job.status(0).state is ENDED
    job.cancel(1.0)
    job.restart(0)
    job.resize(3)
    assert kube.leftovers() == []


def test_deleting_the_job_deletes_all(kube, tmp_path):
    """As `kubectl delete job` does, for a head that is no more."""
    with running(kube, tmp_path) as job:
        wait_for(job, 0, RUNNING)
        (name,) = kube.names("jobs")
        kube.admin.delete(f"/apis/batch/v1/namespaces/{kube.namespace}/jobs/{name}?propagationPolicy=Background")
        wait_until(lambda: kube.leftovers() == [], "Job, Secret and pods are gone", LONG_S)
        wait_until(lambda: kube.node.pids() == [], "its processes are gone", LONG_S)
        assert "deleted" in wait_for(job, 0, ENDED).detail


def test_a_failed_worker_is_replaced_and_counted(kube, tmp_path):
    with running(kube, tmp_path) as job:
        wait_for(job, 0, RUNNING)
        other = wait_for_another(tmp_path, 1, set())
        before = pids(tmp_path, 0)
        say_exit(tmp_path, 0, 7)
        status = wait_for_words(job, 0, "exit code 7", "its last line: worker 0: good bye")
        assert status.state is PENDING and status.num_failures == 1
        job.restart(0)  # it is left to the Job controller
        wait_for_another(tmp_path, 0, before)
        assert "before it pod" in wait_for(job, 0, RUNNING).detail
        assert job.status(0).num_failures == 1
        assert len(kube.names("jobs")) == 1
        assert is_running(other) and job.status(1).num_failures == 0


def test_restart_of_one_that_runs(kube, tmp_path):
    with running(kube, tmp_path, num_workers=1) as job:
        wait_for(job, 0, RUNNING)
        before = wait_for_another(tmp_path, 0, set())
        job.restart(0)
        wait_for_another(tmp_path, 0, {before})
        assert not is_running(before)
        wait_for(job, 0, RUNNING)
        assert job.status(0).num_failures == 0  # it was told to leave
        (of_api,) = kube.objects("jobs")
        assert of_api["status"].get("failed", 0) == 0


def test_an_eviction_is_no_failure(kube, tmp_path):
    with running(kube, tmp_path, num_workers=1) as job:
        wait_for(job, 0, RUNNING)
        wait_until(lambda: pids(tmp_path, 0), "it has started", LONG_S)
        before, name = pids(tmp_path, 0), pod_of(kube, 0)
        eviction = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": name}}
        kube.admin.post(f"{kube.path('pods', name)}/eviction", eviction)
        wait_for_another(tmp_path, 0, before)
        wait_for(job, 0, RUNNING)
        assert job.status(0).num_failures == 0
        (of_api,) = kube.objects("jobs")
        assert of_api["status"].get("failed", 0) == 0


def test_one_that_was_told_to_stop_can_be_restarted(kube, tmp_path):
    """Its index has succeeded: the Job of all makes no other pod of it."""
    with running(kube, tmp_path) as job:
        for worker in range(2):
            wait_for(job, worker, RUNNING)
        before = pids(tmp_path, 0)
        say_exit(tmp_path, 0, 0)
        assert "exit code 0" in wait_for(job, 0, ENDED).detail
        job.restart(0)
        assert job.status(0).state is PENDING
        wait_for_another(tmp_path, 0, before)
        assert "-w0-1-" in wait_for(job, 0, RUNNING).detail
        assert len(kube.names("jobs")) == 2
        # And the replacement again.
        before = pids(tmp_path, 0)
        job.restart(0)
        wait_for_another(tmp_path, 0, before)
        wait_for(job, 0, RUNNING)


def test_one_that_fails_too_often_is_given_another_job(kube, tmp_path):
    if kube.api is None:
        pytest.skip("takes two minutes with the back-off of a real Job controller")
    with running(kube, tmp_path) as job:
        say_exit(tmp_path, 0, 3, "always")
        status = wait_for(job, 0, ENDED)
        assert "failed too often" in status.detail and "exit code 3" in status.detail
        assert "its last lines:" in status.detail and status.num_failures == 4
        assert job.status(1).state is RUNNING  # each fails by itself
        (tmp_path / "exit-always-0").unlink()
        before = pids(tmp_path, 0)
        job.restart(0)
        wait_for_another(tmp_path, 0, before)
        wait_for(job, 0, RUNNING)


def test_a_job_whose_head_is_gone_ends_by_itself(kube, tmp_path):
    if kube.api is None:
        pytest.skip("takes two minutes with the back-off of a real Job controller")
    with running(kube, tmp_path) as job:
        for worker in range(2):
            say_exit(tmp_path, worker, 3, "always")
        for worker in range(2):
            wait_for(job, worker, ENDED)
        wait_until(lambda: "Job has failed indexes" in str(kube.objects("jobs")[0]["status"]), "the Job has failed")


def test_a_job_controller_that_is_slow(kube, tmp_path, monkeypatch):
    """After a while another Job is made; the pod that the first one makes after all takes its place."""
    if kube.api is None:
        pytest.skip("a real Job controller is not so slow")
    monkeypatch.setattr(job_stand_in, "FIRST_BACKOFF_S", 5.0)
    monkeypatch.setattr(kubernetes_status, "REVIVAL_S", 0.1)
    with running(kube, tmp_path, num_workers=1) as job:
        wait_for(job, 0, RUNNING)
        say_exit(tmp_path, 0, 1)
        assert "exit code 1" in wait_for(job, 0, ENDED).detail
        job.restart(0)
        assert len(kube.names("jobs")) == 2
        assert "-w0-1-" in wait_for(job, 0, RUNNING).detail


def test_a_node_that_is_gone(kube, tmp_path):
    """A pod there cannot be ended, and its Job waits for that: the second time it is asked for, nobody does."""
    with running(kube, tmp_path, num_workers=1) as job:
        wait_for(job, 0, RUNNING)
        kube.node.is_away = True
        job.restart(0)
        assert "is being deleted" in wait_for_words(job, 0, "is being deleted").detail
        assert len(kube.names("jobs")) == 1
        job.restart(0)
        assert len(kube.names("jobs")) == 2
        assert job.status(0).state is PENDING
        kube.node.is_away = False
        wait_for(job, 0, RUNNING)


def test_a_job_that_was_deleted_by_others(kube, tmp_path):
    with running(kube, tmp_path) as job:
        wait_for(job, 0, RUNNING)
        (name,) = kube.names("jobs")
        kube.admin.delete(f"/apis/batch/v1/namespaces/{kube.namespace}/jobs/{name}?propagationPolicy=Background")
        wait_for(job, 0, ENDED)
        before = pids(tmp_path, 0)
        job.restart(0)
        wait_for_another(tmp_path, 0, before)
        job.resize(3)  # only one of them is there: the others are restarted when the head asks for it
        wait_for(job, 2, RUNNING)
        job.resize(2)
        wait_until(lambda: not any("-w2-" in name for name in kube.names("jobs")), "worker 2 is gone", LONG_S)


def test_resize(kube, tmp_path):
    with running(kube, tmp_path, num_workers=1) as job:
        wait_for(job, 0, RUNNING)
        first = wait_for_another(tmp_path, 0, set())
        job.resize(3)
        wait_for(job, 2, RUNNING)
        third = wait_for_another(tmp_path, 2, set())
        job.resize(2)
        wait_until(lambda: not is_running(third), "worker 2 is gone", LONG_S)
        assert job.status(1).state is not ENDED
        job.resize(3)
        wait_for_another(tmp_path, 2, {third})
        wait_for(job, 2, RUNNING)
        assert is_running(first)
        assert len(kube.names("jobs")) == 1


def test_image_cannot_be_pulled(kube, tmp_path, monkeypatch):
    monkeypatch.setattr(kubernetes_status, "IMAGE_PATIENCE_S", 0.5)
    with running(kube, tmp_path, num_workers=1, image="nowhere/envs:1") as job:
        status = wait_for(job, 0, REFUSED)
        assert "ImagePullBackOff" in status.detail and "'nowhere/envs:1'" in status.detail
        assert job.log(0) == ""


def test_python_is_not_in_the_image(kube, tmp_path):
    with running(kube, tmp_path, num_workers=1, python="/no/python") as job:
        status = wait_for_words(job, 0, "StartError", "/no/python")
        assert status.num_failures >= 1


def test_unschedulable(kube, tmp_path):
    with running(kube, tmp_path, num_workers=1, cpus_per_worker=640) as job:
        status = wait_for_words(job, 0, "Unschedulable", "Insufficient cpu")
        assert status.state is PENDING


def test_quota(kube, tmp_path):
    body = {"apiVersion": "v1", "kind": "ResourceQuota", "metadata": {"name": "few"}, "spec": {"hard": {"pods": "1"}}}
    kube.admin.post(f"/api/v1/namespaces/{kube.namespace}/resourcequotas", body)
    time.sleep(0.0 if kube.api else 2.0)  # a real controller must have counted first
    with running(kube, tmp_path) as job:
        wait_until(
            lambda: any("exceeded quota: few" in job.status(worker).detail for worker in range(2)),
            "one of them says so",
            LONG_S,
        )
        wait_until(
            lambda: {job.status(worker).state for worker in range(2)} == {PENDING, RUNNING}, "the other runs", LONG_S
        )


def without(kube, verb, resource):
    """All rights of deploy/rbac.yaml but one."""
    rules = [
        rule | {"verbs": [each for each in rule["verbs"] if each != verb]} if resource in rule["resources"] else rule
        for rule in rules_of_deploy()
    ]
    kube.allow([rule for rule in rules if rule["verbs"]])


@pytest.mark.parametrize(
    ("verb", "resource"),
    [("create", "secrets"), ("create", "jobs"), ("patch", "secrets"), ("list", "jobs"), ("list", "pods")],
)
def test_forbidden(kube, tmp_path, verb, resource, caplog):
    without(kube, verb, resource)
    with pytest.raises(Forbidden) as caught, running(kube, tmp_path):
        pass
    assert f"head may not {verb} {resource} in namespace {kube.namespace}" in str(caught.value)
    assert "deploy/rbac.yaml" in str(caught.value)
    wait_until(lambda: kube.leftovers() == [], "nothing is left", LONG_S)


def test_what_is_not_needed_may_be_forbidden(kube, tmp_path):
    without(kube, "list", "events")
    rules = kube.admin.get(f"/apis/rbac.authorization.k8s.io/v1/namespaces/{kube.namespace}/roles/envfleet-head")
    kube.allow([rule for rule in rules["rules"] if "pods/log" not in rule["resources"]])
    with running(kube, tmp_path, num_workers=1) as job:
        wait_for(job, 0, RUNNING)
        assert job.log(0).startswith("(its log cannot be read: forbidden")
        say_exit(tmp_path, 0, 7)
        wait_for_words(job, 0, "exit code 7")


def test_deleting_is_forbidden(kube, tmp_path, caplog):
    without(kube, "delete", "jobs")
    job = settings(kube).launch(WorkerJob(num_workers=1, argv=(TINY_WORKER,), environment={}, run_dir=tmp_path))
    job.cancel(0.0)
    assert "may not delete jobs" in caplog.text and "kubectl -n" in caplog.text
    kube.allow([{"apiGroups": ["batch"], "resources": ["jobs"], "verbs": ["delete"]}])
    (name,) = kube.names("jobs")
    kube.admin.delete(f"/apis/batch/v1/namespaces/{kube.namespace}/jobs/{name}?propagationPolicy=Foreground")
    wait_until(lambda: kube.leftovers() == [], "nothing is left", LONG_S)


def test_no_such_namespace(kube, tmp_path):
    if kube.api is None:
        pytest.skip("a real server says that it is forbidden there")
    admin = kube.api.admin.kubeconfig(tmp_path, "admin", "default")
    os.environ["KUBECONFIG"] = str(admin)  # the fixture's monkeypatch puts it back
    job = WorkerJob(num_workers=1, argv=(), environment={}, run_dir=tmp_path)
    with pytest.raises(ClusterError, match="kubectl create namespace nowhere"):
        Kubernetes("x", namespace="nowhere").launch(job)


def test_what_the_server_refuses_is_told(kube, tmp_path, monkeypatch):
    """For instance the Job that the issue first asked for: see ADR 20."""
    real = kubernetes_job.fleet_manifest

    def on_failure(*arguments):
        manifest = real(*arguments)
        manifest["spec"]["template"]["spec"]["restartPolicy"] = "OnFailure"
        return manifest

    monkeypatch.setattr(kubernetes_job, "fleet_manifest", on_failure)
    words = r'only "Never" is supported when podFailurePolicy is specified'
    with pytest.raises(UsageError, match=words), running(kube, tmp_path):
        pass
    assert kube.leftovers() == []


def test_api_server_away_for_a_while(kube, tmp_path, caplog):
    if kube.api is None:
        pytest.skip("a real server is not taken down for this")
    with running(kube, tmp_path, num_workers=1) as job:
        wait_for(job, 0, RUNNING)
        kube.api.is_down = True
        before = job.status(0)
        wait_until(lambda: (job.status(0), "taken as unchanged" in caplog.text)[1], "the warning is there")
        assert job.status(0) == before
        assert job.log(0).startswith(("(its log cannot be read", "worker 0"))
        with pytest.raises(Unreachable):
            job.restart(0)
        with pytest.raises(Unreachable):
            job.resize(2)
        kube.api.is_down = False
        job.resize(2)
        wait_for(job, 1, RUNNING)
        assert caplog.text.count("taken as unchanged") == 1


def test_api_server_away_at_the_end(kube, tmp_path, caplog, monkeypatch):
    if kube.api is None:
        pytest.skip("a real server is not taken down for this")
    monkeypatch.setattr(kubernetes_job, "LEAVE_S", 0.5)
    with running(kube, tmp_path, num_workers=1) as job:
        wait_for(job, 0, RUNNING)
        kube.api.is_down = True
        begun_s = time.monotonic()
        job.cancel(0.2)
        assert time.monotonic() - begun_s < 20
        assert "may be left" in caplog.text
        kube.api.is_down = False
        (name,) = kube.names("jobs")
        kube.admin.delete(f"/apis/batch/v1/namespaces/{kube.namespace}/jobs/{name}?propagationPolicy=Foreground")
        wait_until(lambda: kube.leftovers() == [], "nothing is left", LONG_S)


def test_api_server_says_nothing_at_the_end(kube, tmp_path, caplog, monkeypatch):
    """However many Jobs there are: it is not asked for each of them, and none of its answers is waited for longer."""
    if kube.api is None:
        pytest.skip("a real server is not silenced for this")
    monkeypatch.setattr(kubernetes_job, "LEAVE_S", 2.0)
    monkeypatch.setattr(kubernetes_api, "LEAST_S", 0.5)
    asked = []
    with running(kube, tmp_path, num_workers=1) as job:
        wait_for(job, 0, RUNNING)
        job.unguarded._created += ["another", "a-third"]
        delete = job.unguarded._api._batch.delete_namespaced_job
        monkeypatch.setattr(
            job.unguarded._api._batch,
            "delete_namespaced_job",
            lambda **about: (asked.append(about), delete(**about))[1],
        )
        monkeypatch.setattr(job.unguarded._api._core, "delete_namespaced_secret", lambda **about: asked.append(about))
        kube.api.speaks.clear()
        job.cancel(0.2)
        kube.api.speaks.set()
        assert "may be left" in caplog.text
        assert {about["name"] for about in asked} == {kube.names("jobs")[0]}
        assert all(answer_s <= 2.2 for about in asked for answer_s in about["_request_timeout"])
        name = kube.names("jobs")[0]
        kube.admin.delete(f"/apis/batch/v1/namespaces/{kube.namespace}/jobs/{name}?propagationPolicy=Foreground")
        wait_until(lambda: kube.leftovers() == [], "nothing is left", LONG_S)


def test_a_fork_of_the_owner_does_nothing(kube, tmp_path):
    with running(kube, tmp_path, num_workers=1) as job:
        wait_for(job, 0, RUNNING)
        pid = os.fork()
        if pid == 0:
            job.cancel(0.0)
            job.restart(0)
            job.resize(2)
            os._exit(0 if job.status(0).state is RUNNING else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        assert len(kube.names("jobs")) == 1 and job.status(0).state is RUNNING


def test_host_of_workers(kube, monkeypatch, tmp_path):
    assert settings(kube).host_of_workers() is None  # on this machine: it says nothing
    text = Path(os.environ["KUBECONFIG"]).read_text()
    path = tmp_path / "other"
    path.write_text(text.replace("127.0.0.1", "10.1.2.3"))
    monkeypatch.setenv("KUBECONFIG", str(path))
    assert settings(kube).host_of_workers() == "10.1.2.3"
    with pytest.raises(UsageError, match="context 'other'"):
        settings(kube, context="other").host_of_workers()


def test_inside_a_cluster(monkeypatch, tmp_path):
    from kubernetes.config import incluster_config

    token = tmp_path / "token"
    token.write_text("t0ken")
    monkeypatch.setattr(incluster_config, "SERVICE_TOKEN_FILENAME", str(token))
    monkeypatch.setattr(incluster_config, "SERVICE_CERT_FILENAME", str(token))
    monkeypatch.setattr(kubernetes_api, "POD_TOKEN", token)
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.96.0.1")
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", "443")
    monkeypatch.delenv("KUBECONFIG", raising=False)
    assert Kubernetes("x").host_of_workers() == "10.96.0.1"


def test_nobody_listens_there(monkeypatch, tmp_path, caplog):
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{closed.getsockname()[1]}"
    monkeypatch.setenv("KUBECONFIG", str(Rest(url, "token").kubeconfig(tmp_path, "nobody", "default")))
    job = WorkerJob(num_workers=1, argv=(), environment={}, run_dir=tmp_path)
    with pytest.raises(Unreachable, match=url):
        Kubernetes("x").launch(job)


def test_something_else_listens_there(monkeypatch, tmp_path):
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            self.rfile.read(int(self.headers.get("Content-Length") or 0))
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b"<html>It works!")

        do_POST = do_DELETE = do_GET

        def log_message(self, *_):
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}"
        monkeypatch.setenv("KUBECONFIG", str(Rest(url, "token").kubeconfig(tmp_path, "nobody", "default")))
        job = WorkerJob(num_workers=1, argv=(), environment={}, run_dir=tmp_path)
        with pytest.raises(Unreachable, match="is no Kubernetes API server"):
            Kubernetes("x").launch(job)
        server.shutdown()


def test_nobody_has_configured_anything(monkeypatch, tmp_path):
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
    with pytest.raises(UsageError, match="no Kubernetes configuration"):
        Kubernetes("x").host_of_workers()


def test_an_unknown_user(kube, monkeypatch, tmp_path):
    other = Rest(kube.admin.server, "wrong", kube.admin.certificate_authority)
    monkeypatch.setenv("KUBECONFIG", str(other.kubeconfig(tmp_path, "nobody", kube.namespace)))
    with pytest.raises(ClusterError, match="does not know you"), running(kube, tmp_path):
        pass


def test_without_the_extra():
    code = (
        "import sys; sys.modules['kubernetes'] = None\n"
        "from envfleet.launchers.kubernetes.settings import Kubernetes\n"
        "try: Kubernetes('x').host_of_workers()\n"
        "except Exception as error: print(type(error).__name__, error)"
    )
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert (
        output.strip() == f'{MissingExtra.__name__} launcher=Kubernetes(...) needs: pip install "envfleet[kubernetes]"'
    )
