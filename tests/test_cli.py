"""The command `envfleet`: what it prints is what the launchers submit, and it submits nothing."""

import contextlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

from envfleet import Kubernetes, Slurm, __version__
from envfleet.cli import SOME_HEAD, main
from envfleet.contract.worker_environment import KEYS_VARIABLE
from envfleet.launchers.kubernetes.manifest import manifest_yaml
from envfleet.launchers.launcher import WorkerJob
from envfleet.launchers.slurm.script import head_script, sbatch_script


def job(num_workers, head=SOME_HEAD):
    argv = ("-m", "envfleet.cluster.worker", "--head", head)
    return WorkerJob(num_workers=num_workers, argv=argv, environment={KEYS_VARIABLE: ""}, run_dir=Path())


def printed(capsys, *arguments):
    assert main(arguments) == 0
    return capsys.readouterr().out


def test_the_script_of_slurm(capsys):
    options = ["--partition", "cpu,long", "--time-limit", "2:00:00", "--cpus-per-worker", "8", "--mem-per-worker", "4G"]
    options += ["--gpus-per-worker", "a100:1", "--exclusive", "--setup", "module load cuda", "--setup", "cd there"]
    options += ["--extra-sbatch", "exclude=node7", "--extra-sbatch", "contiguous", "--log-dir", "/logs"]
    options += ["--job-name", "walker"]
    settings = Slurm(
        partition="cpu,long",
        time_limit="2:00:00",
        cpus_per_worker=8,
        mem_per_worker="4G",
        gpus_per_worker="a100:1",
        exclusive=True,
        setup=["module load cuda", "cd there"],
        extra_sbatch={"exclude": "node7", "contiguous": None},
        log_dir="/logs",
        job_name="walker",
    )
    assert printed(capsys, "slurm-script", "--num-workers", "3", *options) == sbatch_script(settings, job(3))
    assert printed(capsys, "slurm-script", "--head", "tcp://a:1") == sbatch_script(Slurm(), job(4, "tcp://a:1"))


def test_one_script_for_learner_and_workers(capsys):
    learner = ["python", "train.py", "--num-workers", "7", "--", "--head", "x"]
    script = printed(capsys, "slurm-script", "--num-workers", "2", "--", *learner)
    assert script == head_script(Slurm(), 2, learner)


def test_the_manifest_of_kubernetes(capsys):
    options = ["--image", "there/envfleet:1", "--namespace", "rl", "--cpus-per-worker", "1.5", "--env", "A=b=c"]
    options += ["--tolerations", '{"key": "gpu"}', "--node-selector", "disk=ssd", "--image-pull-secrets", "mine"]
    settings = Kubernetes(
        "there/envfleet:1",
        namespace="rl",
        cpus_per_worker=1.5,
        env={"A": "b=c"},
        tolerations=[{"key": "gpu"}],
        node_selector={"disk": "ssd"},
        image_pull_secrets=["mine"],
    )
    assert printed(capsys, "kubernetes-manifest", *options) == manifest_yaml(settings, job(4))


def test_settings_that_are_wrong_are_named(capsys):
    assert main(["slurm-script", "--partition", "a b"]) == 2
    assert "partition must be" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["slurm-script", "python", "train.py", "--head", "3"],
        ["kubernetes-manifest", "--image", "a", "--", "b"],
        ["slurm-script", "--part", "cpu"],
        ["no-such-command"],
        ["kubernetes-manifest"],
        ["slurm-script", "--num-workers", "0"],
        ["slurm-script", "-x"],
    ],
)
def test_usage_is_explained(capsys, arguments):
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    assert "usage: envfleet" in capsys.readouterr().err


def test_the_command_is_installed():
    command = os.path.join(os.path.dirname(sys.executable), "envfleet")
    said = subprocess.run([command, "--version"], capture_output=True, text=True, timeout=60.0, check=True).stdout
    assert said == f"envfleet {__version__}\n"


def test_what_cannot_be_written_is_said(monkeypatch, capsys):
    with open("/dev/full", "w") as full, monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", full)
        assert main(["slurm-script"]) == 2
        patch.undo()
        with contextlib.suppress(OSError):
            full.close()
    assert "No space left" in capsys.readouterr().err
