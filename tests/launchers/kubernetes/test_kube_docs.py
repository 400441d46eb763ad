"""What docs/kubernetes.md and deploy/ show is executed, with the addresses of the test instead of the examples'."""

import re
import subprocess
import sys

import yaml

from tests.support.scripts import ROOT

LONG_S = 300.0  # a script that imports, starts workers and scales, beside other tests


def replaced(text, **pairs):
    for old, new in pairs.values():
        assert old in text, f"{old!r} is not in the example any more"
        text = text.replace(old, new)
    return text


def run(script, environment):
    return subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=LONG_S, check=False
    )


def test_the_example_of_the_page(kube, head_environment):
    text = (ROOT / "docs" / "kubernetes.md").read_text()
    (script,) = [block for block in re.findall(r"```python\n(.*?)```", text, re.DOTALL) if "import" in block]
    script = replaced(
        script,
        namespace=('namespace="rl"', f'namespace="{kube.namespace}"'),
        address=('head_address="192.0.2.10"', 'head_address="127.0.0.1"'),
        wait=("launcher=launcher)", 'launcher=launcher, network=dict(address="tcp://127.0.0.1:0"), backend="serial")'),
    )
    done = run(script, head_environment)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[:2] == ["(64, 16)", "(64, 24)"]
    assert kube.leftovers() == []


def test_the_command_of_the_page():
    text = (ROOT / "docs" / "kubernetes.md").read_text()
    (command,) = re.findall(r"^envfleet (kubernetes-manifest .*)$", text, re.MULTILINE)
    done = subprocess.run(
        [sys.executable, "-m", "envfleet.cli", *command.split()], capture_output=True, text=True, timeout=60, check=True
    )
    secret, job = yaml.safe_load_all(done.stdout)
    assert list(secret["stringData"]) == ["ENVFLEET_KEYS"]
    assert job["spec"]["completions"] == 8
    assert job["spec"]["template"]["spec"]["containers"][0]["resources"]["limits"] == {"cpu": "1", "memory": "2Gi"}


def test_the_head_of_deploy(kube, head_environment):
    documents = list(yaml.safe_load_all((ROOT / "deploy" / "head.yaml").read_text()))
    (script,) = [each["data"]["learner.py"] for each in documents if each["kind"] == "ConfigMap"]
    (job,) = [each for each in documents if each["kind"] == "Job"]
    (container,) = job["spec"]["template"]["spec"]["containers"]
    (service,) = [each for each in documents if each["kind"] == "Service"]
    assert service["spec"]["selector"].items() <= job["spec"]["template"]["metadata"]["labels"].items()
    assert f"{service['metadata']['name']}:{service['spec']['ports'][0]['port']}" in script
    script = replaced(
        script,
        listen=("tcp://0.0.0.0:5555", "tcp://127.0.0.1:0"),
        dial=('head_address="envfleet-head:5555"', 'head_address="127.0.0.1"'),
        size=("num_workers=4", "num_workers=2"),
        backend=("num_envs_per_worker=8", 'num_envs_per_worker=8, backend="serial"'),
        length=("range(100)", "range(3)"),
    )
    of_pod = {"ENVFLEET_IMAGE": "test/worker", "NAMESPACE": kube.namespace}
    assert {each["name"] for each in container["env"]} == set(of_pod)
    done = run(script, head_environment | of_pod)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("2/2 workers")
    assert kube.leftovers() == []
