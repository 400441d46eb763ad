"""A learner inside a job, on a real Slurm: told before the limit it saves, the job is requeued, and it goes on."""

import json
import sys

import pytest

from envfleet import Slurm, load_checkpoint
from envfleet.launchers.slurm.script import head_script
from tests.support.scripts import EXAMPLES, ROOT
from tests.support.short_examples import SHORT_FLAGS
from tests.support.waiting import is_running, wait_until

START_S = 100.0

# Its first life ends when it is told to, or is ended; one that goes on from a checkpoint makes five updates more.
LEARNER = """
import json, math, os, sys
from pathlib import Path

import envfleet
from tests.launchers.slurm.slurm_agent import AGENT

path = Path("checkpoint")
with (
    envfleet.ClusterEnv(
        "CartPole-v1", 2, 2, launcher=envfleet.launcher_of("slurm", json.loads(sys.argv[1])), seed=1,
        resume=path if path.exists() else None, timing=envfleet.Timing(heartbeat_s=0.2),
    ) as cluster,
    envfleet.StopSignal(path) as stop,
):
    first = num_updates = 0 if cluster.resumed is None else cluster.resumed.extra["num_updates"]
    last = math.inf if cluster.resumed is None else first + 5
    while num_updates < last and not stop.is_set:
        cluster.rollout(AGENT, 8)
        num_updates += 1
        if len(sys.argv) > 2 and num_updates % int(sys.argv[2]) == 0:
            cluster.save(path, extra={"num_updates": num_updates})
        pids = [worker.pid for worker in cluster.stats().workers]
        Path("now.new").write_text(json.dumps({"num_updates": num_updates, "pids": pids}))
        Path("now.new").rename("now")
    cluster.save(path, extra={"num_updates": num_updates})
with open("lives", "a") as lives:
    lives.write(json.dumps([first, num_updates, stop.number, cluster.resumed and cluster.resumed.version]) + "\\n")
sys.exit(stop.exit_code)
"""


class Learning:
    """The job of a learner and its two workers."""

    def __init__(self, slurm, folder, settings=None, command=None, launcher_settings=None, save_every=()):
        self.slurm, self.folder = slurm, folder
        (folder / "learner.py").write_text(LEARNER)
        command = command or [sys.executable, "learner.py", json.dumps(launcher_settings or {}), *save_every]
        (folder / "script").write_text(head_script(settings or Slurm(), 2, command))
        options = ["--parsable", f"--output={folder}/out", f"--export=ALL,PYTHONPATH={ROOT}"]
        self.job = slurm.run("sbatch", *options, str(folder / "script")).strip()

    def out(self):
        return (self.folder / "out").read_text() if (self.folder / "out").exists() else ""

    def now(self):
        file = self.folder / "now"
        return json.loads(file.read_text()) if file.exists() else {"num_updates": 0, "pids": []}

    def lives(self):
        file = self.folder / "lives"
        return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []

    def wait_for(self, condition, what, timeout_s=START_S):
        wait_until(condition, lambda: f"{what}: {self.out()}", timeout_s)

    def wait_for_updates(self):
        self.wait_for(lambda: self.now()["num_updates"] >= 3, "it has begun")
        return self.now()["pids"]

    def wait_for_end(self):
        self.wait_for(lambda: not self.slurm.queue(), "the job has ended")

    def state(self):
        return self.slurm.run("squeue", "-h", "--states=all", f"--jobs={self.job}", "--format=%T").strip()

    def tell_of_the_limit(self):
        self.slurm.run("scancel", "--signal=USR1", "--batch", self.job)


def went_on(learning, signal_number):
    """Two lives: the second began where the first has ended, and has finished."""
    (first, last, told, resumed_from), *rest = learning.lives()
    assert (first, told, resumed_from) == (0, signal_number, None) and last >= 3
    assert [life[:3] for life in rest] == [[last, last + 5, None]]
    return True


@pytest.mark.parametrize("allocation", ["current", "new"])
def test_told_of_the_limit(plain_slurm, tmp_path, allocation):
    """Workers are steps of the job, or a job of their own: in both lives, and none is left."""
    learning = Learning(plain_slurm, tmp_path, launcher_settings={"allocation": allocation})
    pids = learning.wait_for_updates()
    learning.tell_of_the_limit()
    learning.wait_for(lambda: "the job is requeued" in learning.out(), "it is requeued")
    wait_until(lambda: not any(map(is_running, pids)), "the workers of the first life have ended")
    learning.wait_for_end()
    assert went_on(learning, 10), learning.out()
    assert learning.state() == "COMPLETED"
    assert not any(map(is_running, learning.now()["pids"]))


@pytest.mark.long
@pytest.mark.timeout(300)
def test_the_real_limit(plain_slurm, tmp_path):
    learning = Learning(plain_slurm, tmp_path, Slurm(time_limit="1"))
    learning.wait_for(lambda: "the job is requeued" in learning.out(), "its time is over", 120.0)
    learning.wait_for_end()
    assert went_on(learning, 10), learning.out()
    assert learning.state() == "COMPLETED"


def test_preempted(plain_slurm, tmp_path):
    """Slurm requeues it by itself. Its workers are told to leave at the same time, so it goes on from what it had."""
    learning = Learning(plain_slurm, tmp_path, Slurm(partition="low"), save_every=["3"])
    pids = learning.wait_for_updates()
    plain_slurm.run("sbatch", "--partition=high", "--nodes=4", "--exclusive", "--output=/dev/null", "--wrap=sleep 1")
    wait_until(lambda: not any(map(is_running, pids)), "its workers have ended", 40.0)
    learning.wait_for_end()
    ((first, last, told, _),) = learning.lives()  # the first was killed
    assert first >= 3 and first % 3 == 0 and (last, told) == (first + 5, None), learning.out()
    assert learning.state() == "COMPLETED"


def test_preempted_with_a_grace_time(plain_slurm, tmp_path):
    """It is told as before the time limit: it saves and is requeued. Its workers stay meanwhile, so nothing is lost."""
    with plain_slurm.configured("SlurmctldParameters=preempt_send_user_signal"):
        learning = Learning(plain_slurm, tmp_path, Slurm(partition="grace"))
        learning.wait_for_updates()
        plain_slurm.run("sbatch", "--partition=high", "--nodes=4", "--exclusive", "--output=/dev/null", "--wrap=true")
        learning.wait_for(lambda: "the job is requeued" in learning.out(), "it is requeued")
        learning.wait_for_end()
    assert went_on(learning, 10), learning.out()
    assert learning.state() == "COMPLETED"


def test_cancelled(plain_slurm, tmp_path):
    """Its workers have a job of their own, so it can still save; then it ends, and stays cancelled."""
    learning = Learning(plain_slurm, tmp_path, launcher_settings={"allocation": "new"})
    pids = learning.wait_for_updates()
    plain_slurm.run("scancel", learning.job)
    learning.wait_for_end()
    assert learning.state() == "CANCELLED"
    wait_until(lambda: not any(map(is_running, pids)), "no worker is left", 40.0)
    assert "it has saved; Slurm ends this job: submit it again to go on" in learning.out()
    assert load_checkpoint(tmp_path / "checkpoint").extra["num_updates"] == learning.lives()[0][1]


@pytest.mark.timeout(300)
def test_an_example_goes_on(plain_slurm, tmp_path):
    flags = [*SHORT_FLAGS["ppo"].split(), "--total-steps", "8000", "--launcher", "slurm", "--num-envs-per-worker", "2"]
    flags += ["--checkpoint", "saved", "--checkpoint-every-s", "0.3", "--resume", "auto"]
    learning = Learning(plain_slurm, tmp_path, command=[sys.executable, str(EXAMPLES / "ppo.py"), *flags])
    learning.wait_for((tmp_path / "saved").exists, "it has saved")
    learning.tell_of_the_limit()
    learning.wait_for(lambda: "the job is requeued" in learning.out(), "it is requeued")
    num_steps = load_checkpoint(tmp_path / "saved").extra["run"]["num_steps"]
    assert 0 < num_steps < 8000
    learning.wait_for_end()
    assert learning.state() == "COMPLETED", learning.out()
    assert f"num_steps={num_steps}," in learning.out().partition("Going on from saved")[2]
    assert learning.out().count("after 8,") == 1  # its last words, once
