"""Fields that Kubernetes does not know are refused, by the client, the API server or offline: none is dropped."""

import sys

import pytest

from envfleet.cli import main
from envfleet.contract.errors import UsageError
from envfleet.launchers.kubernetes import job as kubernetes_job
from envfleet.launchers.kubernetes.api import KubernetesApi
from envfleet.launchers.kubernetes.settings import Kubernetes
from tests.support.kubernetes.rest import Refused
from tests.support.kubernetes.tiny_jobs import RUNNING, running, wait_for

pytestmark = pytest.mark.usefixtures("looks_often")

MISSPELT = {"name": "data", "mountPath": "/data", "persistentVolumeclaim": {"claimName": "data"}}


@pytest.mark.parametrize(
    ("more", "field"),
    [
        ({"volumes": [MISSPELT]}, "persistentVolumeclaim"),
        ({"volumes": [{"name": "a", "mountPath": "/a", "emptyDir": {"sizelimit": "1Gi"}}]}, "sizelimit"),
        ({"tolerations": [{"kee": "spot"}]}, "kee"),
    ],
)
def test_a_misspelt_field_is_refused(kube, tmp_path, more, field):
    with pytest.raises(UsageError, match=field), running(kube, tmp_path, **more):
        pass
    assert kube.leftovers() == []


def test_the_server_refuses_what_the_client_lets_through(kube, tmp_path):
    """Clients of other versions do not look at what they send, and none looks at patches."""
    with running(kube, tmp_path, num_workers=1) as job:
        wait_for(job, 0, RUNNING)
        (name,) = kube.names("jobs")
        api = KubernetesApi(kube.namespace, None)
        try:
            with pytest.raises(UsageError, match=r'strict decoding error: unknown field "spec\.paralelism"'):
                api.patch_job(name, {"paralelism": 3})
        finally:
            api.close()


def test_all_that_is_sent_is_checked(kube, tmp_path):
    if kube.api is None:
        pytest.skip("a real server does not tell what it was asked for")
    with running(kube, tmp_path, num_workers=1) as job:
        wait_for(job, 0, RUNNING)
        job.resize(2)
        wait_for(job, 1, RUNNING)
    modes = kube.api.field_validations["head"]
    assert len(modes) >= 4 and set(modes) == {"Strict"}  # a Secret, its owner, a Job, its size


def test_a_server_that_is_not_asked_drops_fields(kube):
    """What 0.6.0 met: the volume without a source becomes an empty one."""
    container = {"name": "worker", "image": "x", "command": ["true"]}
    volume = {key: value for key, value in MISSPELT.items() if key != "mountPath"}
    template = {"spec": {"restartPolicy": "Never", "containers": [container], "volumes": [volume]}}
    job = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "one"}, "spec": {"template": template}}
    job["spec"] |= {"completions": 1, "parallelism": 1, "suspend": True}
    path = f"/apis/batch/v1/namespaces/{kube.namespace}/jobs"
    with pytest.raises(Refused, match=r"400: .*strict decoding error: unknown field .*volumes\[0\]"):
        kube.admin.post(f"{path}?fieldValidation=Strict", job)
    created = kube.admin.post(path, job)
    assert created["spec"]["template"]["spec"]["volumes"] == [{"name": "data", "emptyDir": {}}]
    kube.admin.delete(f"{path}/one?propagationPolicy=Background")


def test_a_duplicate_field_is_refused(kube):
    text = b'{"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "a"}, "type": "Opaque", "type": "Opaque"}'
    path = f"/api/v1/namespaces/{kube.namespace}/secrets?fieldValidation=Strict"
    with pytest.raises(Refused, match=r'400: .*strict decoding error: duplicate field \\"type\\"'):
        kube.admin.send("POST", path, text)


@pytest.mark.parametrize(
    ("option", "value", "path"),
    [
        (
            "--volumes",
            '{"name": "a", "mountPath": "/a", "persistentVolumeclaim": {}}',
            "volumes[1].persistentVolumeclaim",
        ),
        ("--tolerations", '{"kee": "spot"}', "tolerations[0].kee"),
    ],
)
def test_the_command_refuses_it_offline(capsys, option, value, path):
    assert main(["kubernetes-manifest", "--image", "a", option, value]) == 2
    said = capsys.readouterr()
    assert f'unknown field "spec.template.spec.{path}"' in said.err and said.out == ""


def test_the_command_without_the_client(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "kubernetes.client", None)
    assert main(["kubernetes-manifest", "--image", "a"]) == 0
    said = capsys.readouterr()
    assert "were not checked" in said.err and "kind: Job" in said.out


def test_a_value_error_of_the_client_is_the_callers(kube, tmp_path, monkeypatch):
    def refuse(**_):
        raise ValueError("Invalid value for `name`, must not be `None`")

    class Api(KubernetesApi):
        def __init__(self, *arguments):
            super().__init__(*arguments)
            monkeypatch.setattr(self._batch, "create_namespaced_job", refuse)

    monkeypatch.setattr(kubernetes_job, "KubernetesApi", Api)
    words = r"the Kubernetes client refuses it .*must not be `None`"
    with pytest.raises(UsageError, match=words), running(kube, tmp_path):
        pass
    assert kube.leftovers() == []


@pytest.mark.parametrize("value", [{1, 2}, float("nan"), object()])
def test_values_without_a_form_in_json_are_refused(value):
    with pytest.raises(UsageError, match="tolerations must be of plain dicts"):
        Kubernetes("x", tolerations=[{"key": value}])
    with pytest.raises(UsageError, match="volumes must be of plain dicts"):
        Kubernetes("x", volumes=[{"name": "a", "mountPath": "/a", "emptyDir": {"sizeLimit": value}}])
