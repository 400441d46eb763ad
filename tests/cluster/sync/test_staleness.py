"""stream(max_lag=...) on two real workers, one of them slow: what reaches the learner is never too old, and is counted.

The action of each policy version is another one, so that rewards tell which version really acted.
"""

import os
import signal

import numpy as np
import pytest

import envfleet
from envfleet import APS, UsageError
from envfleet.testing.cluster_arguments import cluster_arguments
from tests.support.envs.cluster_envs import Accounts, Agent, CountingEnv
from tests.support.waiting import wait_until

pytestmark = pytest.mark.slow

T, CREDIT = 5, 2
QUICK = {"heartbeat_s": 0.2, "resend_s": 1.0, "timeout_s": 60.0, "backend": "serial", "credit": CREDIT}


def uneven(**settings):
    kwargs = [{"step_s": 0.0}, {"step_s": 0.003}]
    return envfleet.ClusterEnv(CountingEnv, 2, 1, env_kwargs=kwargs, **cluster_arguments(QUICK, settings))


@pytest.fixture(scope="module")
def envs():
    with uneven() as cluster:
        yield cluster


class Learner:
    """Takes rollouts, checks them, and publishes after each batch."""

    def __init__(self, envs, num_versions=1, action_of=None, **stream):
        self.envs, self.num_versions, self.agent = envs, num_versions, Agent()
        self.before = envs.stats()
        self.action_of = {} if action_of is None else action_of  # of each version
        self.accounts = Accounts()
        self.accounts.interrupted(2)  # envs go on where the test before left them
        self.is_dropping = stream.get("on_stale") == "drop"
        self.max_lag, self.num_taken, self.lags, self.num_dropped = stream["max_lag"], [0, 0], [], 0
        self._publish()
        self.stream = envs.stream(self.agent, T, **stream)

    def _publish(self):
        self.agent.weights["action"] = (self.agent.weights["action"] + 1) % 3
        self.action_of[self.envs.publish(self.agent)] = int(self.agent.weights["action"][0])

    def learn(self, num_batches):
        for _ in range(num_batches):
            newest, rollout = self.envs.stats().version, next(self.stream)
            assert rollout.lags.tolist() == [newest - version for version in rollout.versions.tolist()]
            assert rollout.lag <= self.max_lag
            for column, version in enumerate(rollout.versions.tolist()):  # one env each
                assert (rollout.actions[:, column] == self.action_of[version]).all()
            num_dropped = sum(self.counted("num_dropped_rollouts"))
            if self.is_dropping or num_dropped > self.num_dropped:  # their rows are missing, and were counted
                self.accounts.interrupted(2)
            self.num_dropped = num_dropped
            self.accounts.add(rollout)
            for worker in rollout.workers.tolist():
                self.num_taken[worker] += 1
            self.lags += rollout.lags.tolist()
            for _ in range(self.num_versions):
                self._publish()

    def counted(self, name):
        return [
            getattr(new, name) - getattr(old, name)
            for new, old in zip(self.envs.stats().workers, self.before.workers, strict=True)
        ]


@pytest.mark.parametrize("max_lag", [0, 1, 4])
def test_with_a_pace_nothing_gets_too_old_and_nothing_is_dropped(envs, max_lag):
    learner = Learner(envs, max_lag=max_lag)
    learner.learn(40)
    learner.stream.close()
    assert min(learner.num_taken) > 0
    assert learner.counted("num_dropped_rollouts") == [0, 0]
    assert max(learner.lags) == max_lag, "workers wait no more than they must"


def test_a_pace_for_batches(envs):
    """Two rollouts for each version: all workers are at work, and none is behind."""
    learner = Learner(envs, max_lag=0, num_rollouts=2)
    learner.learn(20)
    learner.stream.close()
    assert learner.num_taken == [20, 20]
    assert learner.counted("num_dropped_rollouts") == [0, 0]


def test_a_pace_that_is_too_fast_at_first(envs):
    """Three versions for each batch are more than was expected: only what was ordered until then is dropped."""
    learner = Learner(envs, num_versions=3, max_lag=3)
    learner.learn(60)
    learner.stream.close()
    assert sum(learner.counted("num_dropped_rollouts")) <= 2 * CREDIT


def require_counts(learner):
    """What was accepted was taken, or dropped, or waits: as many of each worker as it may be ahead."""
    wait_until(
        lambda: (
            [accepted - taken - dropped for accepted, taken, dropped in zip(
                learner.counted("num_rollouts"),
                learner.num_taken,
                learner.counted("num_dropped_rollouts"),
                strict=True,
            )] == [CREDIT, CREDIT]
        ),
        lambda: f"{learner.counted('num_rollouts')}, {learner.num_taken}, {learner.counted('num_dropped_rollouts')}",
    )  # fmt: skip


def test_what_is_dropped_is_counted(envs):
    learner = Learner(envs, num_versions=3, max_lag=2, on_stale="drop")
    learner.learn(30)
    require_counts(learner)
    num_dropped = learner.counted("num_dropped_rollouts")
    assert sum(num_dropped) > 0
    assert learner.counted("num_dropped_steps") == [T * each for each in num_dropped]
    assert "dropped as too old" in str(envs.stats())
    learner.stream.close()


def test_dropping_from_batches(envs):
    learner = Learner(envs, max_lag=1, on_stale="drop", num_rollouts=3)
    learner.learn(15)
    require_counts(learner)
    assert sum(learner.num_taken) == 45
    learner.stream.close()


def test_batches_are_side_by_side_as_they_come(envs):
    agent, accounts = Agent(), Accounts()
    accounts.interrupted(2)
    stream = envs.stream(agent, T, num_rollouts=3)
    workers, num_batches = set(), 0
    while num_batches < 6 or (workers != {0, 1} and num_batches < 1000):  # the slow one may be late
        rollout = next(stream)
        num_batches += 1
        assert rollout.rewards.shape == (T, 3) and rollout.obs.shape == (T, 3, 2) and rollout.next_obs.shape == (3, 2)
        assert rollout.env_ids.tolist() == rollout.workers.tolist()
        assert rollout.versions.shape == rollout.lags.shape == (3,)
        accounts.add(rollout)
        workers |= set(rollout.workers.tolist())
    stream.close()
    assert workers == {0, 1} and accounts.num_rows == num_batches * 3 * T


def test_settings_that_are_refused(envs):
    for wrong, words in (
        ({"max_lag": -1}, "max_lag must be a whole number of at least 0"),
        ({"max_lag": 1.5}, "max_lag must be"),
        ({"num_rollouts": 0}, "num_rollouts must be a whole number of at least 1"),
        ({"max_lag": 1, "on_stale": "wait"}, "on_stale must be 'pace' or 'drop'"),
        ({"on_stale": "drop"}, "say max_lag, too"),
    ):
        with pytest.raises(UsageError, match=words):
            envs.stream(Agent(), T, **wrong)
    envs.stream(Agent(), np.int64(T), max_lag=np.int64(1), num_rollouts=np.int32(2)).close()


@pytest.mark.parametrize("on_stale", ["pace", "drop"])
def test_killed_workers_come_back(on_stale):
    """Their rollouts under way are lost, the other worker's go on; none is too old, and none comes twice."""
    with uneven() as envs:
        learner = Learner(envs, max_lag=1, on_stale=on_stale)
        learner.learn(5)
        for victim in (1, 0):
            os.kill(envs.stats().workers[victim].pid, signal.SIGKILL)
            wait_until(lambda worker=victim: envs.stats().workers[worker].stage != "present", "the worker is lost")
            accepted = learner.counted("num_rollouts")[victim]

            def has_collected(worker=victim, before=accepted):
                learner.learn(1)
                return learner.counted("num_rollouts")[worker] > before + CREDIT

            wait_until(has_collected, "its replacement collects", 60.0)
        learner.learn(10)
        if on_stale == "drop":
            require_counts(learner)
        learner.stream.close()
        assert learner.counted("num_restarts") == [1, 1]


def test_max_lag_goes_above_the_rule_of_synchronisation():
    """Under a rule that lets workers keep their policy for long they pull in time, and no sooner than they must."""
    with uneven(sync=APS(threshold=1e9, max_lag=10**6)) as envs:
        action_of = {}
        for on_stale in ("pace", "drop"):
            learner = Learner(envs, action_of=action_of, max_lag=8, on_stale=on_stale)
            learner.learn(60)
            learner.stream.close()
            assert max(learner.lags) > 2
            assert max(learner.counted("num_pulls")) <= 30, "far less than versions"
