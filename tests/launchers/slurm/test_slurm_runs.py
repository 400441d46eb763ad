"""Runs on a real Slurm: started, refused, kept waiting, ended. Nothing is left in the queue."""

import logging
import os
import re
import signal
import subprocess
import sys
import textwrap
import threading

import pytest

import envfleet
from envfleet.contract.errors import ClusterError, JoinTimeout, WorkerLost
from envfleet.launchers.slurm.settings import Slurm
from envfleet.testing import LAUNCHER_CHECKS, LauncherCase
from envfleet.testing.cluster_arguments import cluster_arguments
from tests.launchers.slurm.slurm_agent import AGENT
from tests.support.envs.cluster_envs import CountingEnv
from tests.support.scripts import EXAMPLES
from tests.support.waiting import is_running, wait_until

QUICK = {"backend": "serial", "timing": {"heartbeat_s": 0.2, "timeout_s": 60.0, "start_timeout_s": 60.0}}


def cluster(num_workers=4, launcher=None, **settings):
    launcher = Slurm() if launcher is None else launcher
    return envfleet.ClusterEnv("CartPole-v1", num_workers, 2, launcher=launcher, **cluster_arguments(QUICK, settings))


@pytest.mark.parametrize("check", LAUNCHER_CHECKS, ids=lambda check: check.__name__)
def test_conformance(plain_slurm, check):
    check(
        LauncherCase(
            Slurm(),
            impossible=Slurm(mem_per_worker="1000G"),
            impossible_says="Memory specification can not be satisfied",
        )
    )
    wait_until(lambda: not plain_slurm.queue(), "the queue is empty")


# -- four nodes with networks of their own --


def test_four_nodes(slurm, tmp_path):
    """One worker on each; the head is found by the routing table; steps, rollouts, more workers, fewer; logs stay."""
    assert Slurm().host_of_workers() == slurm.address("node1")
    with cluster(launcher=Slurm(exclusive=True, job_name="four.nodes")) as envs:
        obs, _ = envs.reset(seed=0)
        assert len(obs) == 8
        names = set(slurm.run("squeue", "-h", "-r", "-o", "%j").split())
        assert len(names) == 1 and names.pop().startswith("four.nodes-")
        envs.step(envs.action_space.sample())
        assert envs.rollout(AGENT, 16).rewards.shape == (16, 8)
        assert sorted(worker.host for worker in envs.stats().workers) == slurm.nodes
        assert len(slurm.queue()) == 4
    wait_until(lambda: not slurm.queue(), "the queue is empty")
    logs = list((tmp_path / "envfleet-logs").glob("*/worker-*.log"))
    assert sorted(log.name for log in logs) == [f"worker-{worker}.log" for worker in range(4)]
    assert all("leaving: the run is over" in log.read_text() for log in logs)


def test_ppo_across_four_nodes(slurm, monkeypatch):
    """DETACH: workers act with their copies of the policy on four nodes; the learner is here."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    import ppo

    where = {"launcher": "slurm", "launcher_setting": ("exclusive=true",), "num_workers": 4, "num_envs_per_worker": 4}
    run = ppo.train(ppo.Settings(**where, total_steps=4000, num_rollout_steps=32))
    assert run.num_updates >= 5 and run.num_steps >= 4000
    assert {worker.host for worker in run.stats.workers} == set(slurm.nodes)


def test_settings_reach_slurm_and_the_worker(slurm, tmp_path, monkeypatch):
    """Also past variables of the user's that say otherwise; a folder for logs with anything in its name."""
    monkeypatch.setenv("SBATCH_EXPORT", "NONE")
    monkeypatch.setenv("SBATCH_PARTITION", "high")
    monkeypatch.setenv("OMP_NUM_THREADS", "64")
    log_dir = tmp_path / 'log\'s 100% "mine"'
    launcher = Slurm(
        partition="low",
        time_limit="1:00:00",
        cpus_per_worker=2,
        mem_per_worker="300M",
        gpus_per_worker="toy:1",
        setup=["export FROM_SETUP='it is'"],
        extra_sbatch={"comment": "the learner's; $HOME", "exclude": "node1,node2"},
        log_dir=log_dir,
    )
    with envfleet.ClusterEnv(CountingEnv, 2, launcher=launcher, **QUICK) as envs:
        assert envs.call("variable", "FROM_SETUP") == ("it is", "it is")
        assert envs.call("variable", "ENVFLEET_NUM_CPUS") == envs.call("variable", "OMP_NUM_THREADS") == ("2", "2")
        assert all(device in ("0", "1") for device in envs.call("variable", "CUDA_VISIBLE_DEVICES"))
        job = slurm.queue()[0].split("_")[0]
        shown = slurm.run("scontrol", "show", "job", job)
        for part in ("Partition=low", "TimeLimit=01:00:00", "NumCPUs=2", "MinMemoryNode=300M", "Requeue=1"):
            assert part in shown
        assert "Comment=the learner's; $HOME" in shown
        assert {line.split()[-1] for line in slurm.queue()} <= {"node3", "node4"}
        # No secret in the script that Slurm keeps.
        slurm.run("scontrol", "write", "batch_script", job, str(tmp_path / "script"))
        script = (tmp_path / "script").read_text()
        keys = envs._run._monitor._job.unguarded._job.environment["ENVFLEET_KEYS"]
        assert not any(key in script for key in keys.split())
    assert sorted(log.name for log in log_dir.iterdir()) == ["worker-0.log", "worker-1.log"]


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"partition": "nowhere"}, "invalid partition specified: nowhere"),
        ({"mem_per_worker": "1000G"}, "Memory specification can not be satisfied"),
        ({"constraint": "quantum"}, "Invalid feature specification"),
        ({"extra_sbatch": {"no-such-option": "1"}}, "unrecognized option '--no-such-option=1'"),
    ],
    ids=str,
)
def test_refused(slurm, settings, words):
    with pytest.raises(ClusterError, match="sbatch failed") as caught:
        cluster(launcher=Slurm(**settings))
    assert words in str(caught.value)


def test_too_many_for_an_array(slurm):
    with pytest.raises(ClusterError, match="Invalid job array specification"):
        envfleet.ClusterEnv("CartPole-v1", 1100, 1, launcher=Slurm(), **QUICK)


def test_no_room(slurm, capfd):
    """Five whole nodes are wanted, four are there: one waits, and that is said, until the user's patience is over."""
    with pytest.raises(JoinTimeout, match=r"Slurm job \d+_\d: PENDING \((Resources|Priority)\)"):
        cluster(5, Slurm(exclusive=True, queue_timeout_s=6.0))
    assert re.search(r"PENDING \((Resources|Priority)\)", capfd.readouterr().err)
    wait_until(lambda: not slurm.queue(), "the queue is empty")


def test_room_comes_late(slurm):
    """As long as it takes, whatever the timeouts for what runs are."""
    blocker = slurm.run("sbatch", "--parsable", "--exclusive", "--nodes=4", "--wrap=sleep 100").strip()
    wait_until(lambda: not slurm.idle_nodes(), "all nodes are taken")
    timer = threading.Timer(8.0, slurm.run, ("scancel", blocker))
    timer.start()
    with cluster(2, start_timeout_s=7.0, join_timeout_s=5.0) as envs:
        assert envs.rollout(AGENT, 4).rewards.shape == (4, 4)
    timer.join()


def test_never_to_run(slurm):
    """Slurm takes it, and would let it wait for ever."""
    with pytest.raises(WorkerLost, match="PartitionConfig"):
        cluster(1, Slurm(cpus_per_worker=1000))
    slurm.run("scontrol", "update", "PartitionName=main", "MaxTime=5")
    try:
        with pytest.raises(WorkerLost, match="PartitionTimeLimit"):
            cluster(1, Slurm(time_limit="10"))
    finally:
        slurm.run("scontrol", "update", "PartitionName=main", "MaxTime=INFINITE")


def test_a_worker_that_cannot_start(slurm):
    """The error has the end of its log."""
    with pytest.raises(WorkerLost) as caught:
        cluster(1, Slurm(setup=["module load nothing"]))
    assert "this line of setup failed: module load nothing" in str(caught.value)
    assert "FAILED" in str(caught.value)


# -- the end of the head --

HEAD = """
import sys, time
import envfleet
from envfleet.launchers.slurm.settings import Slurm

if __name__ == "__main__":
    with envfleet.ClusterEnv("CartPole-v1", 2, launcher=Slurm(), backend="serial", timing={"heartbeat_s": 0.2}) as envs:
        envs.reset(seed=0)
        print("ready", *(worker.pid for worker in envs.stats().workers), flush=True)
        while True:
            envs.step(envs.action_space.sample())
            time.sleep(0.05)
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_the_head_is_ended(slurm, tmp_path, number):
    (tmp_path / "head.py").write_text(textwrap.dedent(HEAD))
    with (tmp_path / "errors").open("wb") as errors:
        head = subprocess.Popen([sys.executable, "head.py"], stdout=subprocess.PIPE, stderr=errors, text=True)
    try:
        words = head.stdout.readline().split()
        assert words[:1] == ["ready"], (tmp_path / "errors").read_text()
        head.send_signal(number)
        head.wait(30)
    finally:
        head.kill()
        head.wait()
        head.stdout.close()
    # If it was killed: workers find out by themselves, and their jobs end with them.
    wait_until(lambda: not slurm.queue(), "the queue is empty", 30.0)
    assert not any(is_running(int(pid)) for pid in words[1:])


def test_in_a_fork_nothing_is_done(slurm):
    with cluster(1) as envs:
        pid = os.fork()
        if pid == 0:
            envs._run._monitor._job.cancel(0.0)
            os._exit(0)
        os.waitpid(pid, 0)
        envs.rollout(AGENT, 4)
        assert len(slurm.queue()) == 1


def test_closed_while_slurmctld_is_down(slurm, caplog):
    """Bounded, and it is said what may be left; workers have left anyway."""
    envs = cluster(2)
    pids = [worker.pid for worker in envs.stats().workers]
    slurm.stop_controller(signal.SIGTERM)
    try:
        with caplog.at_level(logging.WARNING):
            envs.close()
        assert "may still be in the queue" in caplog.text
        wait_until(lambda: not any(map(is_running, pids)), "the workers have left")
        with pytest.raises(ClusterError, match="Unable to contact slurm controller"):
            cluster(1)
    finally:
        slurm.start_controller()
    wait_until(lambda: not slurm.queue(), "Slurm knows, too", 60.0)
