"""Head and workers in one job: srun in an allocation, and the script for all of it."""

import json
import os
import signal
import sys

import pytest

from envfleet.launchers.slurm.script import head_script
from envfleet.launchers.slurm.settings import Slurm
from envfleet.testing import LAUNCHER_CHECKS, LauncherCase
from tests.support.scripts import ROOT
from tests.support.waiting import is_running, wait_until

# Writes what it knows, and goes on until it is told to end.
HEAD = """
import json, os, sys, time
from pathlib import Path

import envfleet
from tests.support.envs.cluster_envs import Agent, CountingEnv
from envfleet.launchers.slurm.settings import Slurm

settings = json.loads(sys.argv[1])
with envfleet.ClusterEnv(
    CountingEnv, int(sys.argv[2]), launcher=Slurm(**settings), backend="serial",
    timing=envfleet.Timing(heartbeat_s=0.2, silence_s=2.0, reconnect_s=1.0),
) as envs:
    agent = Agent()
    while not Path("end").exists():
        envs.rollout(agent, 8)
        stats = envs.stats().workers
        gpus = envs.call("variable", "CUDA_VISIBLE_DEVICES")
        workers = [[each.host, each.pid, each.num_restarts] for each in stats]
        state = {"host": os.uname().nodename, "gpus": gpus, "workers": workers}
        Path("state.new").write_text(json.dumps(state))
        Path("state.new").rename("state")
        if Path("scale").exists():
            num_workers = int(Path("scale").read_text())
            Path("scale").unlink()
            envs.scale(num_workers)
Path("done").touch()
"""


class Inside:
    """A job in which a head and its workers run, in a folder of its own."""

    def __init__(self, slurm, folder, num_workers, script):
        self.slurm = slurm
        self.folder = folder
        (folder / "head.py").write_text(HEAD)
        (folder / "script").write_text(script)
        python_path = os.pathsep.join([str(ROOT), str(folder)])
        options = ["--parsable", f"--output={folder}/out", f"--export=ALL,PYTHONPATH={python_path}"]
        self.job = slurm.run("sbatch", *options, str(folder / "script")).strip()
        self.wait_for(lambda state: len(state["workers"]) == num_workers, "it has begun")

    def state(self):
        file = self.folder / "state"
        return json.loads(file.read_text()) if file.exists() else None

    def wait_for(self, condition, what, timeout_s=60.0):
        def is_so():
            assert any(self.slurm.queue(f"--jobs={self.job}")), f"{what}? It has ended: {self.out()}"
            return self.state() is not None and condition(self.state())

        wait_until(is_so, f"{what}: {self.out()}", timeout_s)

    def end(self):
        (self.folder / "end").touch()
        wait_until(lambda: not self.slurm.queue(), "the job has ended", 30.0)
        assert (self.folder / "done").exists(), self.out()

    def out(self):
        return (self.folder / "out").read_text() if (self.folder / "out").exists() else ""


@pytest.fixture(autouse=True)
def no_gpus_here(monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


def head_command(num_workers, **settings):
    return [sys.executable, "head.py", json.dumps(settings), str(num_workers)]


def test_one_script_for_all(slurm, tmp_path):
    """The learner's share and its workers' are on several nodes; a killed worker comes back; more, and fewer."""
    share = {"cpus_per_worker": 2, "mem_per_worker": "400M", "gpus_per_worker": 1}
    settings = Slurm(**share, extra_sbatch={"ntasks-per-node": 1})
    command = head_command(3, **share)
    run = Inside(slurm, tmp_path, 3, head_script(settings, 3, command))
    state = run.state()
    assert state["host"] == "node1"
    assert len({host for host, _, _ in state["workers"]}) > 1
    assert all(device in ("0", "1") for device in state["gpus"])
    steps = slurm.run("squeue", "-h", "--steps", "--format=%j").split()
    assert sum(name.startswith("envfleet-") for name in steps) == 3
    assert len(list((tmp_path / "envfleet-logs").glob("*/worker-*.log"))) == 3

    os.kill(state["workers"][1][1], signal.SIGKILL)
    run.wait_for(lambda state: state["workers"][1][2] == 1, "the worker is back")
    (tmp_path / "scale").write_text("4")  # into the learner's share
    run.wait_for(lambda state: len(state["workers"]) == 4, "there is one more")
    (tmp_path / "scale").write_text("2")
    run.wait_for(lambda state: len(state["workers"]) == 2, "two are left")

    # A node fails: the job goes on, and its worker runs in what is left of it.
    worker, host = next((w, each[0]) for w, each in enumerate(run.state()["workers"]) if each[0] != "node1")
    slurm.run("scontrol", "update", f"NodeName={host}", "State=DOWN", "Reason=test")
    run.wait_for(lambda state: state["workers"][worker][0] not in ("", host), "the worker is on another node")
    run.end()
    assert not any(is_running(pid) for _, pid, _ in state["workers"])


def test_no_room_in_the_job(slurm, tmp_path):
    """srun waits for CPUs of the job: that is said as long as the user has patience for it."""
    command = head_command(3, cpus_per_worker=2, queue_timeout_s=4.0)
    (tmp_path / "script").write_text(head_script(Slurm(cpus_per_worker=2), 1, command))
    (tmp_path / "head.py").write_text(HEAD)
    python_path = str(ROOT)
    slurm.run("sbatch", "--output=out", f"--export=ALL,PYTHONPATH={python_path}", "script")
    wait_until(lambda: not slurm.queue(), "it has given up", 60.0)
    assert "has no room for this worker now" in (tmp_path / "out").read_text()


@pytest.mark.parametrize("option", [[], ["--signal=TERM", "--full"]], ids=["scancel", "scancel --signal=TERM"])
def test_the_job_is_cancelled(slurm, tmp_path, option):
    run = Inside(slurm, tmp_path, 2, head_script(Slurm(), 2, head_command(2)))
    pids = [pid for _, pid, _ in run.state()["workers"]]
    slurm.run("scancel", *option, run.job)
    wait_until(lambda: not slurm.queue(), "the job has ended", 30.0)
    wait_until(lambda: not any(map(is_running, pids)), "no worker is left")


def test_a_job_of_its_own_from_inside_a_job(slurm, tmp_path):
    """allocation="new": workers wait in the queue as any job does, whatever the job of the head looks like."""
    command = head_command(2, allocation="new", partition="low")
    run = Inside(slurm, tmp_path, 2, head_script(Slurm(), 1, command))
    assert len(slurm.queue("--partition=low")) == 2
    run.end()


def test_salloc(slurm, tmp_path):
    """The user's shell is in an allocation; the head runs where it was called."""
    (tmp_path / "head.py").write_text(HEAD)
    (tmp_path / "end").touch()
    script = f"PYTHONPATH={ROOT} {sys.executable} head.py '{{}}' 2"
    slurm.run("salloc", "--ntasks=2", "bash", "-c", script, timeout_s=60.0)
    assert (tmp_path / "done").exists()


@pytest.fixture
def inside_allocation(plain_slurm, monkeypatch):
    """The tests' own process is in an allocation, as a shell under salloc would be."""
    plain_slurm.run("salloc", "--no-shell", "--ntasks=4", "--job-name=outer")
    job_id, _, nodes = plain_slurm.queue("--name=outer")[0].split()
    monkeypatch.setenv("SLURM_JOB_ID", job_id)
    monkeypatch.setenv("SLURM_JOB_NODELIST", nodes)
    yield
    plain_slurm.run("scancel", job_id)
    wait_until(lambda: not plain_slurm.queue(), "the allocation is given back")


@pytest.mark.parametrize("check", LAUNCHER_CHECKS, ids=lambda check: check.__name__)
def test_conformance_inside(inside_allocation, check):
    impossible = Slurm(mem_per_worker="1000G")
    check(LauncherCase(Slurm(allocation="current"), impossible=impossible, impossible_says="Unable to create step"))
