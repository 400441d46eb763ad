"""Processes and the steps of a Slurm job: nothing is started after cancel(). Slurm's programs are scripts here."""

import importlib
import threading

import pytest

import envfleet
from envfleet.launchers.launcher import WorkerJob
from envfleet.launchers.owned_job import OwnedJob
from envfleet.launchers.processes import Command, Processes
from envfleet.launchers.slurm.job import StepsJob
from envfleet.launchers.slurm.settings import Slurm
from tests.support.waiting import wait_until

PROGRAMS = {
    "srun": 'echo "$$" >> {folder}/started; exec sleep 600',
    "squeue": 'echo "7.0|run-0"',  # the step of worker 0, so that restart() cancels it first
    "scancel": "touch {folder}/asked; while [ ! -e {folder}/answer ]; do sleep 0.05; done",
}


def has_text(path):
    return path.exists() and path.read_text() != ""


@pytest.fixture
def slurm_scripts(tmp_path, monkeypatch):
    programs = tmp_path / "bin"
    programs.mkdir()
    for name, text in PROGRAMS.items():
        (programs / name).write_text("#!/bin/sh\n" + text.format(folder=tmp_path) + "\n")
        (programs / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}:/usr/bin:/bin")
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    return tmp_path


def test_a_step_is_not_started_by_a_restart_that_cancel_overtakes(slurm_scripts):
    worker_job = WorkerJob(num_workers=1, argv=("-c", "pass"), environment={}, run_dir=slurm_scripts)
    job = OwnedJob(StepsJob(Slurm(log_dir=slurm_scripts / "logs"), worker_job, "run"))
    started = slurm_scripts / "started"
    wait_until(lambda: has_text(started), "the first srun runs")
    thread = threading.Thread(target=job.restart, args=(0,))
    thread.start()
    try:
        wait_until((slurm_scripts / "asked").exists, "scancel runs")  # the restart waits for scancel
        job.cancel(0.0)
    finally:
        (slurm_scripts / "answer").touch()
        thread.join(30.0)
    assert not thread.is_alive()
    assert len(started.read_text().split()) == 1


def test_a_process_is_not_started_by_a_restart_that_cancel_overtakes(tmp_path):
    asked, answer = threading.Event(), threading.Event()

    def command_of(worker):
        if asked.is_set():
            answer.wait(30.0)
        return Command(["sh", "-c", f"echo x >> {tmp_path}/started; exec sleep 600"], {})

    processes = Processes(1, tmp_path, command_of, "test")
    wait_until(lambda: has_text(tmp_path / "started"), "the first process runs")
    asked.set()
    thread = threading.Thread(target=processes.restart, args=(0,))
    thread.start()
    processes.cancel(0.0)
    answer.set()
    thread.join(30.0)
    assert not thread.is_alive()
    assert (tmp_path / "started").read_text() == "x\n"


@pytest.mark.parametrize("name", ["Kubernetes", "Ray", "Slurm"])
def test_a_package_of_an_engine_has_its_settings(name):
    assert getattr(importlib.import_module(f"envfleet.launchers.{name.lower()}"), name) is getattr(envfleet, name)
