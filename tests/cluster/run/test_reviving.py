"""Engines that start failed workers again by themselves: the monitor leaves it to them, and counts."""

import os
import signal
import sys

import pytest

from envfleet import ClusterEnv, WorkerLost
from envfleet.cluster.head import restarts
from envfleet.contract.errors import ClusterError
from envfleet.launchers.launcher import WorkerState, WorkerStatus
from envfleet.launchers.local import Local
from envfleet.testing.cluster_arguments import cluster_arguments
from tests.support.agents import numpy_agents
from tests.support.waiting import wait_until

pytestmark = pytest.mark.slow
AGENT = numpy_agents.discrete(num_actions=2)


class Engine:
    """Local processes of an engine that replaces those which have failed; `refusals` times it cannot start one."""

    is_on_this_host = True
    head_address = None
    queue_timeout_s = None
    revives = True

    def __init__(self, python=None, refusals=0, does_revive=True):
        self._python, self._refusals, self._does_revive = python, refusals, does_revive
        self.num_failures = {}
        self.restarted = []

    def launch(self, job):
        self._job = Local(python=self._python).launch(job)
        return self

    def status(self, worker):
        status = self._job.status(worker)
        if status.state is WorkerState.ENDED and self._does_revive:
            self._job.restart(worker)
            self.num_failures[worker] = self.num_failures.get(worker, 0) + 1
            return WorkerStatus(WorkerState.PENDING, status.detail, self.num_failures[worker])
        return WorkerStatus(status.state, status.detail, self.num_failures.get(worker, 0))

    def restart(self, worker):
        self.restarted.append(worker)
        if self._refusals:
            self._refusals -= 1
            raise ClusterError("the controller does not answer")
        self._job.restart(worker)

    def log(self, worker, max_bytes=4000):
        return self._job.log(worker, max_bytes)

    def log_place(self, worker):
        return self._job.log_place(worker)

    def cancel(self, grace_s):
        self._job.cancel(grace_s)


def cluster(launcher, **settings):
    return ClusterEnv(
        "CartPole-v1", 2, 1, backend="serial", launcher=launcher, **cluster_arguments(settings, reconnect_s=0.5)
    )


@pytest.fixture
def program(tmp_path):
    """A program in the place of Python, that does what the text says."""

    def make(text):
        path = tmp_path / "program"
        path.write_text(f"#!{sys.executable}\n{text}\n")
        path.chmod(0o755)
        return str(path)

    return make


def test_what_the_engine_restarts_is_left_to_it():
    engine = Engine()
    with cluster(engine) as envs:
        envs.rollout(AGENT, 4)
        os.kill(envs.stats().workers[1].pid, signal.SIGKILL)
        envs.rollout(AGENT, 4)
        assert engine.num_failures == {1: 1}
        assert engine.restarted == []


def test_what_has_ended_for_good_is_restarted_also_if_that_fails_at_first(monkeypatch):
    monkeypatch.setattr(restarts, "TRY_AGAIN_S", 0.3)
    engine = Engine(refusals=2, does_revive=False)
    with cluster(engine, max_worker_restarts=1) as envs:
        envs.rollout(AGENT, 4)
        os.kill(envs.stats().workers[1].pid, signal.SIGKILL)
        wait_until(lambda: "does not answer" in envs.stats().workers[1].problem, "the refusal is reported")
        envs.rollout(AGENT, 4)
        assert engine.restarted == [1, 1, 1]  # a refusal is no failure of the worker: one of those is allowed


def test_one_that_runs_and_never_joins_is_restarted(program):
    engine = Engine(program("import time; time.sleep(60)"))
    with pytest.raises(WorkerLost, match=r"has not joined.*looked for the head at ipc://"):
        cluster(engine, join_timeout_s=0.5)
    assert set(engine.restarted) == {0, 1}


def test_one_that_fails_before_it_joins_again_and_again(program):
    engine = Engine(program("import sys; print('no such module'); sys.exit(7)"))
    with pytest.raises(WorkerLost, match="exit code 7") as caught, cluster(engine, join_timeout_s=60.0):
        pass
    assert "no such module" in str(caught.value)
