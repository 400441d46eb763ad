"""What happens to jobs on a real Slurm, while a stream runs: it goes on, and workers come back."""

import contextlib
import os
import signal
import time

import numpy as np
import pytest

import envfleet
from envfleet.launchers.slurm.settings import Slurm
from envfleet.testing.cluster_arguments import cluster_arguments
from tests.support.envs.cluster_envs import Agent, CountingEnv
from tests.support.waiting import is_running, wait_until

PATIENCE_S = 60.0
pytestmark = pytest.mark.timeout(400)  # several blows in one test, each of which Slurm takes its time for
AGENT = Agent()


class Streaming:
    """A cluster whose stream is taken from while something happens to its jobs."""

    def __init__(self, slurm, envs):
        self.slurm = slurm
        self.envs = envs
        self.stream = envs.stream(AGENT, 4)
        self.num_rollouts = 0

    def go_on(self, condition, what, timeout_s=PATIENCE_S):
        """Take rollouts until something is so, and one more from then on."""
        deadline_s = time.monotonic() + timeout_s
        while not condition():
            assert time.monotonic() < deadline_s, f"after {timeout_s:g} s still not true: {what}; {self.state()}"
            self.take()
        self.take()

    def take(self):
        rollout = next(self.stream)
        assert np.shape(rollout.rewards) == (4, 1)
        self.num_rollouts += 1

    def worker(self, number):
        return self.envs.stats().workers[number]

    def worker_on(self, node):
        return next(worker for worker in self.envs.stats().workers if worker.host == node)

    def element(self, number):
        """Its newest: (id, state, node)."""
        lines = (line.split(" ") for line in self.slurm.queue())
        mine = [line for line in lines if line[0].endswith(f"_{number}") and line[1] != "COMPLETING"]
        return max(mine, key=lambda line: int(line[0].split("_")[0]), default=("", "", ""))

    def wait_for_another(self, before, what):
        """Until another process has the place of a worker, and works."""

        def has_come():
            now = self.worker(before.worker)
            return now.stage == "present" and now.pid != before.pid and now.num_steps > before.num_steps

        self.go_on(has_come, f"worker {before.worker} works again after {what}")
        assert not is_running(before.pid)

    def state(self):
        workers = [(each.worker, each.stage, each.host, each.problem) for each in self.envs.stats().workers]
        return f"{workers}, {self.slurm.queue()}"


@contextlib.contextmanager
def streaming(slurm, num_workers, launcher, **settings):
    settings = {"heartbeat_s": 0.2, "silence_s": 2.0, "reconnect_s": 1.0, "resend_s": 1.0, "timeout_s": 60.0} | settings
    kwargs = {"step_s": 0.02}
    with envfleet.ClusterEnv(
        CountingEnv,
        num_workers,
        1,
        launcher=launcher,
        backend="serial",
        env_kwargs=kwargs,
        **cluster_arguments(settings),
    ) as envs:
        run = Streaming(slurm, envs)
        run.go_on(lambda: all(each.num_steps for each in envs.stats().workers), "all workers work")
        yield run
    wait_until(lambda: not slurm.queue(), "the queue is empty")


def test_blows_to_jobs(slurm, caplog):
    """One after the other, to workers that have a node each."""
    with streaming(slurm, 4, Slurm(partition="low", exclusive=True)) as run:
        # A task is killed: it comes back in place, without a new job or a new wait.
        before, element = run.worker(1), run.element(1)
        os.kill(before.pid, signal.SIGKILL)
        run.wait_for_another(before, "SIGKILL")
        assert run.element(1) == element

        # An operator requeues a job.
        before, element = run.worker(2), run.element(2)
        slurm.run("scontrol", "requeue", element[0])
        run.wait_for_another(before, "scontrol requeue")
        assert run.element(2)[0] == element[0]

        # Somebody more important takes a node: the worker there waits, the others go on, and it comes back.
        before = run.worker_on("node3")
        element = run.element(before.worker)
        other = slurm.run(
            "sbatch", "--parsable", "-p", "high", "--exclusive", "-w", "node3", "-o", "/dev/null", "--wrap=sleep 100"
        ).strip()
        run.go_on(lambda: run.element(before.worker)[:2] == [element[0], "PENDING"], "it was preempted and requeued")
        run.go_on(lambda: run.worker(before.worker).stage != "present", "the head knows")
        num_rollouts = run.num_rollouts
        run.go_on(lambda: run.num_rollouts >= num_rollouts + 20, "the others go on")
        slurm.run("scancel", other)
        run.wait_for_another(before, "preemption")
        assert run.element(before.worker)[0] == element[0]

        # Its time is up: it finishes its rollout, leaves, and a new job takes its place.
        before, element = run.worker(0), run.element(0)
        slurm.run("scancel", "--signal=USR1", "--batch", element[0])
        run.wait_for_another(before, "the signal before the time limit")
        assert run.element(0)[0] != element[0]
        assert "it left: its time limit is near" in caplog.text

        # Somebody cancels one, and then all.
        before = run.worker(3)
        slurm.run("scancel", run.element(3)[0])
        run.wait_for_another(before, "scancel")
        before = run.envs.stats().workers
        slurm.run("scancel", "--user=root")
        for worker in before:
            run.wait_for_another(worker, "scancel of all")


def test_blows_to_nodes(slurm):
    """Two workers and four nodes: there is room elsewhere."""
    with streaming(slurm, 2, Slurm(exclusive=True), join_timeout_s=6.0) as run:
        # An operator takes a node down: Slurm requeues what was there.
        before, element = run.worker(0), run.element(0)
        slurm.run("scontrol", "update", f"NodeName={before.host}", "State=DOWN", "Reason=test")
        run.wait_for_another(before, "its node was set DOWN")
        assert run.worker(0).host != before.host
        assert run.element(0)[0] == element[0]
        slurm.run("scontrol", "update", f"NodeName={before.host}", "State=RESUME")

        # A node's network is cut: its worker leaves by itself, and another takes its place.
        before = run.worker(1)
        slurm.cut(before.host)
        run.wait_for_another(before, "its node's network was cut")
        assert run.worker(1).host != before.host
        slurm.heal(before.host)
        run.go_on(lambda: before.host in slurm.idle_nodes(), "the node is back")

        # The controller dies, and comes back: the run does not mind.
        pids = [worker.pid for worker in run.envs.stats().workers]
        slurm.stop_controller()
        num_rollouts = run.num_rollouts
        run.go_on(lambda: run.num_rollouts >= num_rollouts + 50, "the stream goes on")
        slurm.start_controller()
        os.kill(pids[0], signal.SIGKILL)
        run.go_on(lambda: run.worker(0).stage == "present" and run.worker(0).pid != pids[0], "it comes back")
        run.go_on(lambda: run.element(0)[1] == "RUNNING" and run.element(1)[1] == "RUNNING", "Slurm knows its jobs")


def test_a_link_is_cut_and_healed(slurm):
    """All nodes are taken: the worker comes back where it was, as soon as its network does."""
    with streaming(slurm, 4, Slurm(exclusive=True), join_timeout_s=5.0) as run:
        before = run.worker_on("node2")
        slurm.cut("node2")
        run.go_on(lambda: run.worker(before.worker).stage != "present", "the head knows")
        num_rollouts = run.num_rollouts
        run.go_on(lambda: run.num_rollouts >= num_rollouts + 20, "the others go on")
        wait_until(lambda: not is_running(before.pid), "the worker without a head has left")
        slurm.heal("node2")
        run.wait_for_another(before, "its network was cut and healed")
        assert run.worker(before.worker).host == "node2"


def test_scaling(slurm):
    """Up and down, while a stream runs."""
    with streaming(slurm, 1, Slurm()) as run:
        run.envs.scale(4)
        run.go_on(lambda: all(each.num_steps for each in run.envs.stats().workers), "the new workers work")
        assert len(slurm.queue()) == 4
        run.envs.scale(2)
        run.go_on(lambda: len(slurm.queue()) == 2, "two jobs are left")
        assert [worker.stage for worker in run.envs.stats().workers] == ["present"] * 2
