"""Manifests: golden files, and the schemas of several versions of Kubernetes.

After a change that is meant: ENVFLEET_UPDATE_GOLDEN=1 python -m pytest tests/launchers/kubernetes/test_kube_manifest.py
"""

import os
from pathlib import Path

import kubernetes_validate
import pytest
import yaml

from envfleet.contract.errors import UsageError
from envfleet.launchers.kubernetes.manifest import (
    fleet_manifest,
    manifest_yaml,
    secret_manifest,
    to_yaml,
    worker_manifest,
)
from envfleet.launchers.kubernetes.settings import Kubernetes
from envfleet.launchers.launcher import WorkerJob
from tests.support.scripts import ROOT

GOLDEN = Path(__file__).parent / "golden"
VERSIONS = ("1.29", "1.33", "1.37")
JOB = WorkerJob(
    num_workers=3,
    argv=("-m", "envfleet.cluster.worker", "--head", "tcp://10.0.0.7:5555", "--silence-s", "30.0"),
    environment={"ENVFLEET_KEYS": "secret keys"},
    run_dir=Path(),
)
SETTINGS = {
    "least": Kubernetes("example.org/envs:1"),
    "gpus": Kubernetes("example.org/envs:1", gpus_per_worker=2, cpus_per_worker=0.25, memory_per_worker=2_000_000_000),
    "all": Kubernetes(
        "example.org/envs:1",
        namespace="rl",
        cpus_per_worker=7.5,
        memory_per_worker="2Gi",
        service_account="puller",
        node_selector={"kubernetes.io/arch": "amd64", "pool": "spot"},
        tolerations=[{"key": "spot", "operator": "Equal", "value": "true", "effect": "NoSchedule"}],
        env={"MUJOCO_GL": "egl", "OMP_NUM_THREADS": "1"},
        volumes=[
            {"name": "data", "mountPath": "/data", "readOnly": True, "persistentVolumeClaim": {"claimName": "data"}},
            {"name": "shm", "mountPath": "/dev/shm", "emptyDir": {"medium": "Memory", "sizeLimit": "1Gi"}},
        ],
        python="/opt/$conda/bin/python",
        image_pull_secrets=["registry"],
        labels={"team": "rl"},
    ),
}


def documents(settings):
    return {
        "secret": secret_manifest(settings, JOB, "run", "run"),
        "fleet": fleet_manifest(settings, JOB, "run", "run"),
        "worker": worker_manifest(settings, JOB, "run", "run-w2-1", 2),
    }


@pytest.mark.parametrize("name", SETTINGS)
def test_the_manifest_is_the_golden_one(name):
    text = manifest_yaml(SETTINGS[name], JOB) + "---\n" + to_yaml(documents(SETTINGS[name])["worker"])
    path = GOLDEN / f"{name}.yaml"
    if os.environ.get("ENVFLEET_UPDATE_GOLDEN"):
        path.write_text(text)
    assert text == path.read_text()


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("name", SETTINGS)
def test_the_schemas_of_kubernetes_accept_it(name, version):
    for manifest in documents(SETTINGS[name]).values():
        kubernetes_validate.validate(manifest, version, strict=True)


@pytest.mark.parametrize("name", SETTINGS)
def test_the_yaml_says_what_the_dicts_say(name):
    for manifest in documents(SETTINGS[name]).values():
        assert yaml.safe_load(to_yaml(manifest)) == manifest


ODD_TEXTS = ["yes", "null", "0x10", "1e3", "a: b", "- a", "#", "", " ", "ä\n\"'\\", "2026-01-01", "~", "a\u2028"]
ODD_VALUES = [*ODD_TEXTS, 1, 0.5, True, None, [], {}, [[1, [2]], {"a": []}], [{}, {"b": {"c": [1]}}]]


@pytest.mark.parametrize("value", ODD_VALUES)
def test_yaml_of_odd_values(value):
    assert yaml.safe_load(to_yaml({"key": value, "yes": [value]})) == {"key": value, "yes": [value]}


def test_secrets_are_not_printed():
    text = manifest_yaml(SETTINGS["least"], JOB)
    assert "secret keys" not in text and "ENVFLEET_KEYS" in text
    job = documents(SETTINGS["least"])["fleet"]
    assert "secret keys" not in str(job)


def test_the_worker_number_needs_no_shell():
    container = documents(SETTINGS["least"])["fleet"]["spec"]["template"]["spec"]["containers"][0]
    assert container["args"][-2:] == ["--worker", "$(JOB_COMPLETION_INDEX)"]
    assert container["env"][0]["name"] == "JOB_COMPLETION_INDEX"  # declared before it is used
    assert documents(SETTINGS["least"])["worker"]["spec"]["template"]["spec"]["containers"][0]["args"][-1] == "2"


def test_what_real_servers_demand_of_a_failure_policy():
    """See ADR 20: only with restartPolicy Never, and exit codes in order, without 0."""
    spec = documents(SETTINGS["least"])["fleet"]["spec"]
    assert spec["template"]["spec"]["restartPolicy"] == "Never"
    assert spec["podFailurePolicy"]["rules"][0]["onPodConditions"] == [{"type": "DisruptionTarget", "status": "True"}]
    codes = spec["podFailurePolicy"]["rules"][1]["onExitCodes"]["values"]
    assert codes == sorted(set(codes)) and 0 not in codes and 3 not in codes
    assert spec["completions"] == spec["parallelism"] == 3


@pytest.mark.parametrize("path", ["rbac.yaml", "head.yaml"])
@pytest.mark.parametrize("version", VERSIONS)
def test_the_schemas_of_kubernetes_accept_deploy(path, version):
    manifests = list(yaml.safe_load_all((ROOT / "deploy" / path).read_text()))
    assert manifests
    for manifest in manifests:
        kubernetes_validate.validate(manifest, version, strict=True)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"image": ""}, "image must be"),
        ({"image": "a b"}, "image must be"),
        ({"namespace": "My_Space"}, "namespace must be"),
        ({"service_account": "-x"}, "service_account must be"),
        ({"cpus_per_worker": 0}, "cpus_per_worker must be"),
        ({"cpus_per_worker": "1"}, "cpus_per_worker must be"),
        ({"memory_per_worker": "2 GB"}, "memory_per_worker must be"),
        ({"gpus_per_worker": 0.5}, "gpus_per_worker must be"),
        ({"queue_timeout_s": 0}, "queue_timeout_s must be"),
        ({"env": {"A B": "c"}}, "env must map"),
        ({"env": {"A": 1}}, "env must map"),
        ({"env": {"ENVFLEET_KEYS": "c"}}, "env must map"),
        ({"labels": {"a b": "c"}}, "labels must map .* got 'a b'"),
        ({"labels": {"envfleet-run": "c"}}, "labels must not have envfleet-run"),
        ({"node_selector": {"a": 1}}, "node_selector must map .* got 'a'"),
        ({"tolerations": ["spot"]}, "tolerations must be mappings"),
        ({"image_pull_secrets": "one"}, "image_pull_secrets must be a list"),
        ({"volumes": ["data"]}, "volumes must be mappings"),
        ({"volumes": [{"name": "data", "emptyDir": {}}]}, "a volume must have a name, a mountPath and one source"),
        ({"volumes": [{"name": "data", "mountPath": "/data"}]}, "one source"),
        ({"volumes": [{"name": "a", "mountPath": "/a", "emptyDir": {}}] * 2}, "two volumes are called 'a'"),
    ],
)
def test_wrong_settings_are_refused(settings, words):
    with pytest.raises(UsageError, match=words):
        Kubernetes(**{"image": "x", **settings})
