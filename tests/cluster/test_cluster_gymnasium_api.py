"""What code written for Gymnasium's and EnvPool's vector envs relies on, on a cluster; and messages in words."""

import logging
import threading

import numpy as np
import pytest
from gymnasium.vector import AutoresetMode
from numpy.testing import assert_array_equal

import envfleet
from envfleet import ClusterEnv, EnvFailed, NothingToReceive, UsageError
from envfleet.testing import Act, ScriptedEnv

pytestmark = pytest.mark.usefixtures("quick_workers")

STEP = 1


def acts(*actions):
    return np.array(actions, dtype=np.int64)


@pytest.fixture(scope="module")
def pairs():
    """Three workers with two envs each."""
    with ClusterEnv(ScriptedEnv, 3, 2, backend="serial") as cluster:
        yield cluster


def test_some_workers_can_be_stepped(pairs):
    first = pairs.reset(seed=3)[0].copy()
    env_ids = [5, 0, 4, 1]  # all envs of workers 2 and 0
    obs, rewards, terminated, truncated, infos = pairs.step(
        acts(Act.GO_ON, Act.TERMINATE, Act.GO_ON, Act.GO_ON), env_ids
    )
    assert_array_equal(infos["env_id"], env_ids)
    assert_array_equal(obs[:, 0], first[env_ids, 0])
    assert_array_equal(obs[:, STEP], [1, 1, 1, 1])
    assert_array_equal(rewards, [1.1, 1.1, 1.1, 1.1])
    assert_array_equal(terminated, [False, True, False, False])
    assert not truncated.any()
    assert_array_equal(infos["_episode"], [False, True, False, False])
    pairs.send(acts(Act.GO_ON, Act.GO_ON), [3, 2])
    pairs.send(acts(Act.GO_ON, Act.GO_ON), [0, 1])
    obs, *_, infos = pairs.recv()
    assert_array_equal(infos["env_id"], [3, 2, 0, 1])
    assert_array_equal(obs[:, STEP], [1, 1, 0, 2])
    with pytest.raises(NothingToReceive, match="no env is in flight"):
        pairs.recv()
    assert_array_equal(pairs.step(acts(*[Act.GO_ON] * 6))[0][:, STEP], [1, 3, 2, 2, 2, 2])


def test_envs_of_one_worker_are_stepped_together(pairs):
    pairs.reset(seed=3)
    with pytest.raises(UsageError, match=r"all envs of a worker, each once: envs 2 to 3 of worker 1; got \[3\]"):
        pairs.step(acts(Act.GO_ON), [3])
    with pytest.raises(UsageError, match=r"all envs of a worker, each once: envs 2 to 3 of worker 1; got \[3\]"):
        pairs.set_attr("name", "x", [3])
    assert_array_equal(pairs.step(acts(*[Act.GO_ON] * 6))[0][:, STEP], np.ones(6))


def test_after_a_failure_the_same_rows_are_received(pairs):
    pairs.reset(seed=3)
    with pytest.raises(EnvFailed):
        pairs.step(acts(Act.GO_ON, Act.RAISE), [5, 4])
    obs, _, _, truncated, infos = pairs.recv()
    assert_array_equal(infos["env_id"], [5, 4])
    assert_array_equal(truncated, [False, True])
    assert obs[0, STEP] == 1 and "told to fail" in infos["env_error"][1]
    assert_array_equal(pairs.step(acts(Act.GO_ON, Act.GO_ON), [0, 1])[0][:, STEP], [1, 1])


def test_attributes_of_some_workers(pairs):
    pairs.set_attr("name", "all")
    pairs.set_attr("name", ["f", "e"], np.array([5, 4]))
    assert pairs.get_attr("name") == ("all", "all", "all", "all", "e", "f")
    pairs.set_attr("name", "two", [2, 3])
    assert pairs.get_attr("name") == ("all", "all", "two", "two", "e", "f")
    with pytest.raises(UsageError, match="a value for each of 2 envs, or one for all; got 3"):
        pairs.set_attr("name", ["a", "b", "c"], [0, 1])


def test_a_policy_acts_for_all_envs(pairs):
    torch = pytest.importorskip("torch")
    with pytest.raises(UsageError, match="takes no env_id"):
        pairs.step(torch.nn.Linear(4, 4), [0, 1])


def test_an_asynchronous_cluster_needs_enough_envs_for_a_batch():
    with ClusterEnv(ScriptedEnv, 3, 1, backend="serial", batch_size=2) as cluster:
        cluster.reset(seed=0)
        with pytest.raises(NothingToReceive, match="a batch has 2 rows, but only 1 envs are in flight"):
            cluster.step(acts(Act.GO_ON), [0])
        obs, *_, infos = cluster.step(acts(Act.GO_ON, Act.GO_ON), [2, 0])  # nothing was sent before
        assert_array_equal(infos["env_id"], [0, 2])
        assert_array_equal(obs[:, STEP], [1, 1])


def test_the_autoreset_mode_is_an_attribute(pairs):
    assert pairs.autoreset_mode is AutoresetMode.NEXT_STEP is pairs.metadata["autoreset_mode"]


def test_seeds_that_are_no_seeds(pairs):
    for seed in (1.5, "12", {1, 2}):
        with pytest.raises(UsageError, match="seed must be a whole number, a list with a seed"):
            pairs.reset(seed=seed)
        with pytest.raises(UsageError, match="seed must be a whole number, a list with a seed"):
            ClusterEnv(ScriptedEnv, 1, 1, seed=seed)
    pairs.reset(seed=1)


def test_a_lock_cannot_travel():
    lock = threading.Lock()
    with pytest.raises(UsageError, match=r"env_kwargs\[0\]\['kept'\] cannot be pickled for the workers: TypeError"):
        ClusterEnv(ScriptedEnv, 1, 1, env_kwargs={"kept": lock})
    with pytest.raises(UsageError, match="env cannot be pickled for the workers: TypeError"):
        ClusterEnv(lambda: (lock, ScriptedEnv())[1], 1, 1)


@pytest.mark.parametrize("env", ["CartPole-v1", ScriptedEnv, [ScriptedEnv]])
def test_a_limit_of_steps_among_the_arguments_of_an_env(env):
    with pytest.raises(UsageError, match="use max_episode_steps=5 beside env_kwargs"):
        ClusterEnv(env, 1, 1, env_kwargs={"max_episode_steps": 5})


class SeveralAgentsEnv:
    """As PettingZoo's envs look, without PettingZoo."""

    possible_agents = ("rock", "paper")


def test_envs_with_several_agents_get_a_hint():
    with pytest.raises(UsageError, match=r"env must be a Gymnasium id.*several agents act in it"):
        ClusterEnv(SeveralAgentsEnv(), 1, 1)
    with pytest.raises(envfleet.EnvFleetError, match="several agents act in it"):
        ClusterEnv(SeveralAgentsEnv, 1, 1)


def test_an_older_id_says_whose_env_it_gives(caplog):
    with caplog.at_level(logging.WARNING, "envfleet"), ClusterEnv("Taxi-v3", 1, 1) as cluster:
        assert cluster.spec.id == "Taxi-v4"
    assert "Gymnasium no longer has Taxi-v3: the envs are those of Taxi-v4" in caplog.text
