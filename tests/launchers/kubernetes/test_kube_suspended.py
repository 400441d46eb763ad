"""A suspended Job, as Kueue makes them: its workers wait in a queue, and nobody gets round it."""

import pytest

from envfleet.launchers.kubernetes import job as kubernetes_job
from envfleet.launchers.kubernetes import status as kubernetes_status
from tests.support.kubernetes.tiny_jobs import (
    PENDING,
    RUNNING,
    pids,
    running,
    say_exit,
    wait_for,
    wait_for_another,
    wait_for_words,
)
from tests.support.waiting import wait_until

pytestmark = pytest.mark.usefixtures("looks_often")

LONG_S = 120.0


@pytest.fixture
def suspended_at_first(monkeypatch):
    """As an admission webhook of Kueue does it."""
    real = kubernetes_job.fleet_manifest

    def suspended(*arguments):
        manifest = real(*arguments)
        manifest["spec"]["suspend"] = True
        return manifest

    monkeypatch.setattr(kubernetes_job, "fleet_manifest", suspended)


def suspend(kube, is_suspended):
    (name,) = kube.names("jobs")
    path = f"/apis/batch/v1/namespaces/{kube.namespace}/jobs/{name}"
    kube.admin.merge(path, {"spec": {"suspend": is_suspended}})


def test_it_waits_until_it_is_admitted(kube, tmp_path, monkeypatch, suspended_at_first):
    monkeypatch.setattr(kubernetes_status, "REVIVAL_S", 0.1)
    with running(kube, tmp_path) as job:
        status = wait_for_words(job, 0, "is suspended", "Kueue")
        assert status.state is PENDING and status.num_failures == 0
        for worker in range(2):
            job.restart(worker)  # the head asks for it if it has waited too long
            assert job.status(worker).state is PENDING
        assert len(kube.names("jobs")) == 1 and kube.names("pods") == []
        suspend(kube, False)
        for worker in range(2):
            wait_for(job, worker, RUNNING)
        assert len(kube.names("jobs")) == 1


def test_it_is_preempted_and_admitted_again(kube, tmp_path, monkeypatch):
    monkeypatch.setattr(kubernetes_status, "REVIVAL_S", 0.1)
    with running(kube, tmp_path) as job:
        wait_for(job, 0, RUNNING)
        before = {wait_for_another(tmp_path, 0, set())}
        suspend(kube, True)
        wait_for_words(job, 0, "is suspended")
        job.restart(0)
        wait_until(lambda: kube.names("pods") == [], "its pods are gone", LONG_S)
        job.restart(0)
        assert wait_for_words(job, 0, "is suspended").state is PENDING
        assert len(kube.names("jobs")) == 1 and pids(tmp_path, 0) == before
        suspend(kube, False)
        wait_for_another(tmp_path, 0, before)
        wait_for(job, 0, RUNNING)
        assert len(kube.names("jobs")) == 1 and job.status(0).num_failures == 0


def test_a_worker_that_has_ended_waits_too(kube, tmp_path):
    with running(kube, tmp_path) as job:
        for worker in range(2):
            wait_for(job, worker, RUNNING)
        suspend(kube, True)
        say_exit(tmp_path, 0, 0)  # it may end in time, or be ended
        wait_for_words(job, 0, "is suspended")
        job.restart(0)
        assert len(kube.names("jobs")) == 1
