"""cluster.evaluate(): the episodes of a local evaluation, beside whatever the workers do, whatever is killed."""

import contextlib
import os
import signal
import threading

import numpy as np
import pytest
from numpy.testing import assert_array_equal

import envfleet
from envfleet import ClusterTimeout, EnvFailed, PolicyFailed, PolicySpec, UsageError
from envfleet.testing.cluster_arguments import cluster_arguments
from tests.policies.test_evaluate import require_same
from tests.support.envs.cluster_envs import EPISODE_LENGTH, Accounts, Agent, CountingEnv
from tests.support.envs.evaluation_envs import (
    BareAgent,
    LengthEnv,
    ModalAgent,
    RaisingAgent,
    RememberingAgent,
    expected_length,
)
from tests.support.waiting import descendants, wait_until

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("quick_workers")]

QUICK = {"heartbeat_s": 0.2, "resend_s": 1.0, "timeout_s": 60.0, "backend": "serial"}
SEED, NUM_EPISODES = 3, 23


@contextlib.contextmanager
def cluster(env=LengthEnv, num_workers=2, num_envs=3, **settings):
    with envfleet.ClusterEnv(env, num_workers, num_envs, **cluster_arguments({**QUICK, **settings})) as envs:
        yield envs


def local(agent, num_episodes=NUM_EPISODES, **settings):
    with envfleet.make(LengthEnv, 4, backend="serial", render_mode="rgb_array") as pool:
        return envfleet.evaluate(pool, agent, num_episodes, seed=SEED, **settings)


class OneAgent(Agent):
    """Acts with its weight in rollouts, and with 2 in evaluations."""

    def act_deterministically(self, obs):
        return self.act(obs)._replace(actions=np.full(len(obs), 2))


def test_equals_a_local_evaluation():
    spec = envfleet.EnvSpec(factory=LengthEnv, render_mode="rgb_array")
    agent = ModalAgent()
    with cluster(spec) as envs:
        pids = [worker.pid for worker in envs.stats().workers]
        expected = local(agent, num_recorded=5)
        evaluation = envs.evaluate(agent, NUM_EPISODES, seed=SEED, num_recorded=5)
        require_same(evaluation, expected)
        assert_array_equal(evaluation.lengths, [expected_length(seed) for seed in evaluation.seeds])
        assert_array_equal(evaluation.frames[4][:, 0, 0, 0], np.arange(evaluation.lengths[4] + 1))
        require_same(envs.evaluate(agent, 1, seed=SEED), local(agent, 1))
        require_same(envs.evaluate(RememberingAgent(), NUM_EPISODES, seed=SEED), local(RememberingAgent()))
        # The weights of the call count; nothing is published.
        agent.weights["shift"][0] = 1
        require_same(envs.evaluate(agent, NUM_EPISODES, seed=SEED), local(agent))
        assert not np.array_equal(local(agent).returns, expected.returns)
        by_path = PolicySpec("tests.support.envs.evaluation_envs:ModalAgent", {"shift": 1})
        require_same(envs.evaluate(by_path, NUM_EPISODES, seed=SEED), local(agent))
        assert envs.stats().version == 0
        # Chance: each worker draws its own numbers.
        samples = [
            envs.evaluate(agent, NUM_EPISODES, seed=seed, deterministic=False) for seed in (SEED, SEED, SEED + 1)
        ]
        assert_array_equal(samples[0].lengths, expected.lengths)
        require_same(samples[0], samples[1])
        assert not np.array_equal(samples[0].returns, expected.returns)
        for num_workers in (3, 1):
            envs.scale(num_workers)
            require_same(envs.evaluate(agent, NUM_EPISODES, seed=SEED), local(agent))
        envs.set_attr("bonus", 10.0)
        assert_array_equal(
            envs.evaluate(agent, 4, seed=SEED).returns, local(agent, 4).returns + 10 * expected.lengths[:4]
        )
        assert envs.stats().workers[0].pid == pids[0] and envs.stats().workers[0].num_restarts == 0


def test_beside_a_stream_and_between_rollouts():
    agent, accounts = OneAgent(1), Accounts()
    with cluster(CountingEnv, num_envs=2, seed=0) as envs:
        accounts.add(envs.rollout(agent, 5))
        assert (envs.evaluate(agent, 9).returns == 2 * EPISODE_LENGTH).all()
        accounts.add(envs.rollout(agent, 5))
        stream = envs.stream(agent, 4)
        versions = []
        for index in range(24):
            rollout = next(stream)
            assert (rollout.actions == 1).all()
            accounts.add(rollout)
            versions.append(rollout.versions[0])
            if index % 4 == 1:
                evaluation = envs.evaluate(agent, 9)
                assert_array_equal(evaluation.lengths, np.full(9, EPISODE_LENGTH))
                assert (evaluation.returns == 2 * EPISODE_LENGTH).all()
        stream.close()
        assert set(versions) == {1}
        assert accounts.num_env_objects == 4, "the envs of the stream are the same to the end"
        # Steps that were sent come back, too.
        envs.reset()
        envs.send(np.ones(4, np.int64))
        envs.evaluate(agent, 3)
        assert (envs.recv()[1] == 1).all()


def test_a_killed_worker_is_replaced_and_plays_anew(tmp_path):
    result = {}
    with cluster(num_envs=2, env_kwargs={"folder": str(tmp_path)}) as envs:
        pid = envs.stats().workers[1].pid
        (tmp_path / "hold").touch()  # before the stream: a worker that has used up its credit does not step
        stream, accounts = envs.stream(ModalAgent(), 3), 0
        wait_until(lambda: (tmp_path / f"holding-{pid}").exists(), "worker 1 holds in the stream")

        def play():
            result["evaluation"] = envs.evaluate(ModalAgent(), NUM_EPISODES, seed=SEED)

        player = threading.Thread(target=play)
        player.start()
        try:
            (tmp_path / f"holding-{pid}").unlink()
            os.kill(pid, signal.SIGKILL)
        finally:
            (tmp_path / "hold").unlink()
            player.join(60)
        assert not player.is_alive()
        require_same(result["evaluation"], local(ModalAgent()))
        for _ in range(6):
            accounts += next(stream).num_steps
        assert envs.stats().workers[1].num_restarts == 1

        # In the middle of the evaluation itself: nothing else is under way.
        stream.close()
        pid = envs.stats().workers[0].pid
        (tmp_path / "hold").touch()
        player = threading.Thread(target=play)
        player.start()
        try:
            wait_until(lambda: (tmp_path / f"holding-{pid}").exists(), "worker 0 plays")
            os.kill(pid, signal.SIGKILL)
        finally:
            (tmp_path / "hold").unlink()
            player.join(60)
        require_same(result["evaluation"], local(ModalAgent()))
        assert envs.stats().workers[0].num_restarts == 1


def test_errors_reach_the_caller_and_leave_nothing_behind(tmp_path):
    settings = {"env_kwargs": {"folder": str(tmp_path), "fails_at": None}, "pool_timeout_s": 2.0}
    with cluster(num_envs=2, backend="process", **settings) as envs:
        num_before = len(descendants(os.getpid()))
        stream = envs.stream(ModalAgent(), 3)
        next(stream)
        with pytest.raises(PolicyFailed, match="the network is empty"):
            envs.evaluate(RaisingAgent(), 5)
        with pytest.raises(UsageError, match=r"act_deterministically\(obs\)"):
            envs.evaluate(BareAgent(), 5)
        with pytest.raises(UsageError, match=r"act_deterministically\(obs\)"):
            envs.evaluate(PolicySpec("tests.support.envs.evaluation_envs:BareAgent"), 5)
        with pytest.raises(UsageError, match="render_mode"):
            envs.evaluate(ModalAgent(), 5, num_recorded=1)
        with pytest.raises(UsageError, match=r"call its evaluate"):
            envfleet.evaluate(envs, ModalAgent(), 5)
        next(stream)
        stream.close()
        (tmp_path / "hold").touch()
        with pytest.raises(EnvFailed, match=r"EnvTimedOut: its step\(\) had not returned.*timeout_s=2 s"):
            envs.evaluate(ModalAgent(), 5)
        with pytest.raises(ClusterTimeout, match=r"no episode was finished within 0\.5 s; 0 of 5 are"):
            envs.evaluate(ModalAgent(), 5, timeout_s=0.5)
        (tmp_path / "hold").unlink()
        require_same(envs.evaluate(ModalAgent(), NUM_EPISODES, seed=SEED), local(ModalAgent()))
        assert envs.rollout(ModalAgent(), 3).num_steps == 3
        assert len(descendants(os.getpid())) > num_before  # the evaluation's pools are kept
    with cluster(num_envs=2, env_kwargs={"fails_at": 4}) as envs:
        with pytest.raises(EnvFailed, match="the gripper broke") as raised:
            envs.evaluate(ModalAgent(), 60, seed=SEED)
        assert 0 <= raised.value.env_id < 4
        assert envs.evaluate(ModalAgent(), 1, seed=SEED).num_episodes == 1


def test_wrong_names_are_refused_before_an_order_is_issued():
    """A worker cannot read them, and would wait for that order for ever."""
    with cluster(num_envs=1) as envs:
        for wrong in (
            lambda: envs.evaluate(ModalAgent(), 1, action_mask=True),
            lambda: envs.call(5),
            lambda: envs.set_attr(None, 1),
        ):
            with pytest.raises(UsageError):
                wrong()
        assert envs.evaluate(ModalAgent(), 1, seed=1).num_episodes == 1
