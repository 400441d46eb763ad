"""One after the other on one cluster: steps, calls, rollouts and streams, also when one of them was broken off."""

import os
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

import envfleet
from envfleet.contract.errors import ChildDied, ClusterTimeout, EnvBusy, UsageError
from envfleet.testing.cluster_arguments import cluster_arguments
from tests.support.envs.cluster_envs import Agent, CountingEnv
from tests.support.inside import fleet, impatient_cluster
from tests.support.waiting import is_running, wait_until

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("quick_workers")]

QUICK = {"heartbeat_s": 0.2, "resend_s": 1.0, "timeout_s": 60.0, "backend": "serial"}


class SlowToCall(CountingEnv):
    """Has methods that take their time, and one that gives a lot."""

    level = 0

    def slow(self, seconds):
        time.sleep(seconds)
        return "slow"

    def large(self, num_bytes):
        return np.zeros(num_bytes, np.uint8)

    def start_program(self):
        """Something that an env may have started, and that knows nothing of us."""
        return subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"]).pid


@pytest.fixture
def envs():
    with envfleet.ClusterEnv(SlowToCall, 2, 2, **cluster_arguments(QUICK)) as cluster:
        yield cluster


def counts(obs):
    return obs[:, 1].tolist()


def test_a_call_that_timed_out_leaves_nothing_behind(envs):
    obs, _ = envs.reset(seed=0)
    before = counts(obs)
    with impatient_cluster(envs, 0.2), pytest.raises(ClusterTimeout):
        envs.call("slow", 1.0)
    for number in range(1, 4):
        obs = envs.step(np.zeros(4, int))[0]
        assert counts(obs) == [each + number for each in before]
    assert envs.call("slow", 0.0) == ("slow",) * 4


def test_an_interrupted_call_leaves_nothing_behind(envs):
    obs, _ = envs.reset(seed=0)
    before = counts(obs)
    threading.Timer(0.3, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt):
        envs.call("slow", 1.5)
    assert counts(envs.step(np.zeros(4, int))[0]) == [each + 1 for each in before]


def test_calls_after_a_stream_that_was_left(envs):
    for _ in envs.stream(Agent(), 5):
        break
    assert envs.call("slow", 0.0) == ("slow",) * 4
    assert envs.rollout(Agent(), 5).rewards.shape == (5, 4)


def test_a_call_does_not_take_the_rollouts_of_a_stream(envs):
    stream = envs.stream(Agent(), 5)
    next(stream)
    wait_until(lambda: not envs._head.wait(lambda: False, 0.05) and all(each.answers for each in fleet(envs)), "ahead")
    with pytest.raises(EnvBusy, match="stream"):
        envs.call("slow", 0.0)
    assert next(stream).rewards.shape == (5, 2)
    stream.close()
    assert envs.call("slow", 0.0) == ("slow",) * 4


def test_a_stream_keeps_its_cluster():
    stream = envfleet.ClusterEnv(CountingEnv, 1, 1, **cluster_arguments(QUICK)).stream(Agent(), 3)
    assert next(stream).rewards.shape == (3, 1)
    stream._owner.close()
    assert next(stream, None) is None


def test_large_results_of_calls_arrive_and_what_is_too_large_is_an_error(envs, monkeypatch):
    assert [len(each) for each in envs.call("large", 9_000_000)] == [9_000_000] * 4
    obs, _ = envs.reset(seed=0)
    with pytest.raises(UsageError, match="too large"):
        envs.call("large", 300_000_000)
    assert counts(envs.step(np.zeros(4, int))[0]) == [each + 1 for each in counts(obs)]


def test_attributes_are_set_on_a_replacement(envs):
    envs.set_attr("level", [1, 2, 3, 4])
    os.kill(envs.stats().workers[1].pid, signal.SIGKILL)
    envs.rollout(Agent(), 3)
    assert envs.get_attr("level") == (1, 2, 3, 4)


@pytest.mark.parametrize("chosen", [[0, 2], [0, 1]], ids=["one of each worker", "all of one worker"])
def test_a_partial_reset_after_a_loss_tells_of_it(chosen):
    mask = np.isin(np.arange(4), chosen)
    with envfleet.ClusterEnv(SlowToCall, 2, 2, autoreset_mode="disabled", **cluster_arguments(QUICK)) as envs:
        envs.reset(seed=0)
        envs.step(np.zeros(4, int))
        os.kill(envs.stats().workers[1].pid, signal.SIGKILL)
        with pytest.raises(ChildDied, match="worker 1"):
            envs.reset(options={"reset_mask": mask})
        info = envs.recv()[4]
        assert info["_env_error"].tolist() == [False, False, not mask[2], True]


def test_actions_may_be_changed_after_they_were_sent(envs):
    envs.reset(seed=0)
    actions = np.full(4, 2)
    envs.send(actions)
    actions[:] = 0
    assert envs.recv()[1].tolist() == [2.0] * 4


def test_what_an_env_had_started_ends_with_its_killed_worker(envs):
    programs = envs.call("start_program")
    os.kill(envs.stats().workers[0].pid, signal.SIGKILL)
    wait_until(lambda: not any(map(is_running, programs[:2])), "the programs of worker 0 are gone")
    assert all(map(is_running, programs[2:]))


@pytest.mark.parametrize("setting", ["silence_s", "heartbeat_s", "reconnect_s"])
def test_no_setting_is_endless(setting):
    with pytest.raises(UsageError, match=setting):
        envfleet.ClusterEnv(CountingEnv, 1, 1, **cluster_arguments({**QUICK, setting: float("inf")}))
