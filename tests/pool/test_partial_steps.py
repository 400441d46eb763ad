"""Steps of some envs of a synchronous pool: `step(actions, env_ids)`, `send(actions, env_ids)` and `recv()`."""

import os
import signal
import time

import gymnasium
import numpy as np
import pytest
from gymnasium.vector import SyncVectorEnv
from numpy.testing import assert_array_equal

import envfleet
from envfleet.contract.spaces import SpaceTree
from envfleet.testing import Act, ScriptedEnv, TreeEnv
from envfleet.testing.programs import require_equal
from tests.support.inside import child_pid
from tests.support.waiting import wait_until

pytestmark = pytest.mark.usefixtures("quick_spawners")

STEP = 1
NUM_ENVS = 5


class Reference:
    """One env with next-step autoreset, as Gymnasium has it."""

    def __init__(self, env_id):
        self.env = gymnasium.make(env_id)
        self.ended = False

    def step(self, action):
        if self.ended:
            self.ended = False
            obs, info = self.env.reset()
            return obs, 0.0, False, False, info
        result = self.env.step(action)
        self.ended = result[2] or result[3]
        return result


@pytest.mark.parametrize("backend", ["native", "process", "serial"])
@pytest.mark.parametrize("env_id", ["CartPole-v1", "FrozenLake-v1", "Taxi-v4", "Blackjack-v1"])
def test_random_choices_equal_single_envs(env_id, backend):
    generator = np.random.default_rng(3)
    references = [Reference(env_id) for _ in range(NUM_ENVS)]
    num_ended = 0
    with envfleet.make(env_id, NUM_ENVS, backend=backend, num_workers=2) as pool:
        pool.reset(seed=11)
        for index, each in enumerate(references):
            each.env.reset(seed=11 + index)
        tree = SpaceTree(pool.single_observation_space)
        for _ in range(400):
            env_ids = generator.permutation(NUM_ENVS)[: generator.integers(1, NUM_ENVS + 1)]
            actions = generator.integers(pool.single_action_space.n, size=len(env_ids))
            obs, rewards, terminated, truncated, infos = pool.step(actions, env_ids)
            assert_array_equal(infos.pop("env_id"), env_ids)
            for row, (env_id_, action) in enumerate(zip(env_ids, actions, strict=True)):
                expected = references[env_id_].step(action)
                got = tree.unflatten([leaf[row] for leaf in tree.flatten(obs)])
                assert_array_equal(got, expected[0])
                assert (rewards[row], terminated[row], truncated[row]) == expected[1:4]
                num_ended += expected[2] or expected[3]
                for key, value in expected[4].items():
                    assert infos[f"_{key}"][row]
                    assert_array_equal(infos[key][row], value)
    assert num_ended


@pytest.mark.parametrize("backend", ["process", "serial"])
def test_any_space(backend):
    with envfleet.make(TreeEnv, 3, backend=backend, num_workers=2) as pool:
        pool.reset(seed=1)
        references = [TreeEnv() for _ in range(3)]
        for index, env in enumerate(references):
            env.reset(seed=1 + index)
        tree, action_tree = SpaceTree(pool.single_observation_space), SpaceTree(pool.single_action_space)
        pool.action_space.seed(3)
        for env_ids in ([2], [0, 2], [2, 1, 0], [1]):
            actions = pool.action_space.sample()
            actions["pair"][0][:] = 1  # no episode ends
            leaves = [[leaf[row] for row in range(len(env_ids))] for leaf in action_tree.flatten(actions)]
            some = [
                tuple(values) if isinstance(leaf, tuple) else np.array(values)
                for values, leaf in zip(leaves, action_tree.flatten(actions), strict=True)
            ]
            obs, *_ = pool.step(action_tree.unflatten(some), env_ids)
            for row, env_id in enumerate(env_ids):
                action = action_tree.unflatten([values[row] for values in some])
                got = tree.unflatten([leaf[row] for leaf in tree.flatten(obs)])
                require_equal(got, references[env_id].step(action)[0])


def test_rows_are_the_callers_own():
    with envfleet.make("CartPole-v1", 3, backend="native") as pool:
        pool.reset(seed=0)
        env_ids = np.array([2, 0], np.int32)
        pool.send(np.array([1, 1]), env_ids)
        env_ids[:] = 1  # the pool has its own
        obs, *_, infos = pool.recv()
        assert_array_equal(infos["env_id"], [2, 0])
        kept = obs.copy()
        for _ in range(5):
            pool.step(np.array([1, 1, 1]))
        assert_array_equal(obs, kept)


class SleepsEnv(ScriptedEnv):
    """A step takes as long as it is told to."""

    nap_s = 0.0

    def step(self, action):
        time.sleep(self.nap_s)
        return super().step(action)


def test_after_a_timeout_the_same_batch_is_received():
    with envfleet.make(SleepsEnv, 3, backend="process", num_workers=3) as pool:
        pool.reset(seed=0)
        pool.set_attr("nap_s", 1.0, [1])
        pool.send(np.zeros(2, np.int64), [1, 0])
        with pytest.raises(envfleet.PoolTimeout, match=r"still at work: envs \[1\]"):
            pool.recv(timeout_s=0.3)
        with pytest.raises(envfleet.EnvBusy):  # the batch is closed
            pool.send(np.zeros(1, np.int64), [2])
        obs, *_, infos = pool.recv()
        assert_array_equal(infos["env_id"], [1, 0])
        assert_array_equal(obs[:, STEP], [1, 1])
        assert_array_equal(pool.step(np.zeros(1, np.int64), [2])[0][:, STEP], [1])


@pytest.mark.parametrize("on_env_error", ["raise", "restart"])
def test_a_child_that_dies_in_a_step_of_some(on_env_error):
    """The env that killed it has a truncated row now, the others of that process say so in their next row."""
    with envfleet.make(ScriptedEnv, 4, backend="process", num_workers=2, on_env_error=on_env_error) as pool:
        pool.reset(seed=0)
        if on_env_error == "raise":
            with pytest.raises(envfleet.ChildDied, match="SIGKILL"):
                pool.step(np.array([Act.GO_ON, Act.KILL]), [0, 3])
            result = pool.recv()
        else:
            result = pool.step(np.array([Act.GO_ON, Act.KILL]), [0, 3])
        assert_array_equal(result[4]["env_id"], [0, 3])
        assert_array_equal(result[3], [False, True])
        assert "SIGKILL" in result[4]["env_error"][1]
        obs, _, _, truncated, infos = pool.step(np.zeros(2, np.int64), [2, 1])
        assert_array_equal(truncated, [True, False])
        assert "SIGKILL" in infos["env_error"][0] and obs[1, STEP] == 1


def test_a_child_that_dies_between_steps_of_some():
    with envfleet.make(ScriptedEnv, 4, backend="process", num_workers=2, on_env_error="restart") as pool:
        pool.reset(seed=0)
        pid = child_pid(pool, 1)
        os.kill(pid, signal.SIGKILL)
        obs, *_ = pool.step(np.zeros(1, np.int64), [0])  # of the other child
        assert_array_equal(obs[:, STEP], [1])
        wait_until(lambda: child_pid(pool, 1) not in (None, pid), "another child has started")
        _, _, _, truncated, infos = pool.step(np.zeros(2, np.int64), [3, 0])
        assert_array_equal(truncated, [True, False])
        assert "SIGKILL" in infos["env_error"][0]


def sync_vector(num_envs):
    return SyncVectorEnv([ScriptedEnv] * num_envs)


def test_a_vector_env_steps_all_its_envs_together():
    with envfleet.make(sync_vector, 3, backend="vector") as pool:
        pool.reset(seed=0)
        with pytest.raises(envfleet.NothingToReceive, match=r"only 1 envs are in flight.*steps all its envs together"):
            pool.step(np.zeros(1, np.int64), [0])
        pool.send(np.zeros(1, np.int64), [2])  # nothing was sent before
        with pytest.raises(envfleet.NothingToReceive, match="steps all its envs together"):
            pool.recv()
        obs, *_, infos = pool.step(np.zeros(2, np.int64), [1, 0])
        assert_array_equal(infos["env_id"], [2, 1, 0])
        assert_array_equal(obs[:, STEP], [1, 1, 1])


@pytest.mark.parametrize("backend", ["native", "process", "serial"])
def test_too_few_actions_without_env_ids_are_refused(backend):
    with envfleet.make("CartPole-v1", 3, backend=backend) as pool:
        pool.reset(seed=0)
        with pytest.raises(envfleet.InvalidAction, match=r"shape \(3,\), one row for each env; got \(2,\)"):
            pool.step(np.array([1, 1]))
        with pytest.raises(envfleet.InvalidAction, match=r"shape \(2,\), one row for each env; got \(3,\)"):
            pool.step(np.array([1, 1, 1]), [0, 1])
        for wrong in ([], [3], [-1], [1, 1], [0.5], 1):
            with pytest.raises(envfleet.UsageError):
                pool.step(np.ones(1, np.int64), wrong)
        assert_array_equal(pool.step(np.array([1]), [2])[1], [1.0])


@pytest.mark.parametrize("backend", ["native", "serial", "process"])
def test_some_envs_of_an_asynchronous_pool_are_reset_while_others_step(backend):
    with envfleet.make("CartPole-v1", 3, batch_size=2, backend=backend) as pool:
        with pytest.raises(envfleet.NotReset):
            pool.async_reset(env_id=[0])
        first, _ = pool.reset(seed=0)
        pool.send(np.zeros(1, int), [2])
        with pytest.raises(envfleet.EnvBusy):
            pool.async_reset(env_id=[2])
        pool.async_reset(env_id=[1], seed=0)
        obs, _, _, _, infos = pool.recv()
        assert sorted(infos["env_id"].tolist()) == [1, 2]
        row = infos["env_id"].tolist().index(1)
        np.testing.assert_array_equal(obs[row], first[1])  # the seed's first episode again
        assert not np.array_equal(obs[1 - row], first[2])
        pool.reset(options={"low": -0.01, "high": 0.01})
        with pytest.raises(envfleet.UsageError, match="knows no options"):
            pool.async_reset(env_id=[1])
    with envfleet.make("CartPole-v1", 3, backend=backend) as pool:
        pool.reset()
        with pytest.raises(envfleet.UsageError, match="reset_mask"):
            pool.async_reset(env_id=[0])
