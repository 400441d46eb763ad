"""Namespaces whose PodSecurity level is "restricted": workers and deploy/head.yaml are admitted there."""

from pathlib import Path

import pytest
import yaml

from envfleet.contract.errors import UsageError
from envfleet.launchers.kubernetes.manifest import fleet_manifest
from envfleet.launchers.kubernetes.settings import Kubernetes
from envfleet.launchers.launcher import WorkerJob
from tests.support.kubernetes.admission_stand_in import security_refusal
from tests.support.kubernetes.tiny_jobs import PENDING, RUNNING, running, wait_for, wait_for_words
from tests.support.scripts import ROOT

pytestmark = pytest.mark.usefixtures("looks_often")

DEPLOY = ROOT / "deploy"
RESTRICTED = {"metadata": {"labels": {"pod-security.kubernetes.io/enforce": "restricted"}}}


def pod_security(**settings):
    job = WorkerJob(num_workers=1, argv=(), environment={}, run_dir=Path())
    return fleet_manifest(Kubernetes("x", **settings), job, "a", "a")["spec"]["template"]["spec"]["securityContext"]


@pytest.mark.parametrize("more", [{"run_as_user": 1000}, {"run_as_non_root": True}])
def test_workers_are_admitted(kube, tmp_path, more):
    """(The node stand-in runs them as its own user.)"""
    kube.admin.merge(f"/api/v1/namespaces/{kube.namespace}", RESTRICTED)
    with running(kube, tmp_path, num_workers=1, **more) as job:
        wait_for(job, 0, RUNNING)


def test_the_words_of_a_namespace_that_refuses_them(kube, tmp_path):
    kube.admin.merge(f"/api/v1/namespaces/{kube.namespace}", RESTRICTED)
    with running(kube, tmp_path, num_workers=1) as job:
        status = wait_for_words(job, 0, 'violates PodSecurity "restricted', "runAsNonRoot != true", "run_as_user=")
        assert status.state is PENDING


def test_what_the_settings_say():
    profile = {"seccompProfile": {"type": "RuntimeDefault"}}
    assert pod_security() == profile
    assert pod_security(run_as_user=1000) == profile | {"runAsUser": 1000, "runAsNonRoot": True}
    assert pod_security(run_as_user=0) == profile | {"runAsUser": 0}
    assert pod_security(run_as_non_root=True) == profile | {"runAsNonRoot": True}
    assert pod_security(run_as_user=1000, run_as_non_root=False) == profile | {"runAsUser": 1000}


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"run_as_user": "me"}, "run_as_user must be a numeric"),
        ({"run_as_user": -1}, "run_as_user must be a numeric"),
        ({"run_as_user": True}, "run_as_user must be a numeric"),
        ({"run_as_non_root": "yes"}, "run_as_non_root must be"),
        ({"run_as_user": 0, "run_as_non_root": True}, "run_as_user=0 is root"),
        ({"head_timeout_s": 0}, "head_timeout_s must be"),
        ({"service_account": "a..b"}, "service_account must be"),
        ({"service_account": "a." * 130 + "a"}, "service_account must be"),
        ({"namespace": "a.b"}, "namespace must be"),
    ],
)
def test_wrong_settings_are_refused(settings, words):
    with pytest.raises(UsageError, match=words):
        Kubernetes("x", **settings)


def test_a_service_account_may_have_dots():
    assert Kubernetes("x", service_account="puller.rl-team.example").service_account == "puller.rl-team.example"


def test_the_head_of_deploy_is_admitted():
    documents = list(yaml.safe_load_all((DEPLOY / "head.yaml").read_text()))
    (pod,) = [each["spec"]["template"]["spec"] for each in documents if each["kind"] == "Job"]
    assert security_refusal("head", pod, RESTRICTED) is None
    (dockerfile,) = [line for line in (DEPLOY / "Dockerfile").read_text().splitlines() if line.startswith("USER")]
    assert dockerfile.split()[1].partition(":")[0] == "1000"  # a number other than 0, as runAsNonRoot demands
