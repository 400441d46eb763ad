"""What comes vectorized runs on workers, too; so do Atari games, by their ids."""

import numpy as np
import pytest
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from numpy.testing import assert_array_equal

import envfleet
from envfleet.testing.cluster_arguments import cluster_arguments
from envfleet.testing.envs import ScriptedEnv

pytestmark = pytest.mark.slow

IGNORED = "ignore::UserWarning"  # EnvPool's spaces lose precision, and Gymnasium says so


def scripted_vector(num_envs, autoreset_mode):
    return SyncVectorEnv([ScriptedEnv] * num_envs, autoreset_mode=AutoresetMode(autoreset_mode))


def _require_same_steps(cluster, pool, actions):
    assert_array_equal(cluster.reset(seed=3)[0], pool.reset(seed=3)[0])
    for each in actions:
        for got, expected in zip(cluster.step(each)[:4], pool.step(each)[:4], strict=True):
            assert_array_equal(got, expected)


def _first_action(obs):
    return np.zeros(len(obs), np.int64)


def test_factories_of_vector_envs():
    actions = np.random.default_rng(0).choice([0, 0, 0, 1, 2], (30, 4))
    with (
        envfleet.make(scripted_vector, 4, backend="vector") as pool,
        envfleet.ClusterEnv(scripted_vector, 2, 2, backend="vector", autoreset_mode="next_step") as cluster,
    ):
        _require_same_steps(cluster, pool, actions)


def test_vector_envs_that_take_one_seed_only():
    """Also without seeds: then workers choose them, and not the same ones."""
    with (
        envfleet.make("CartPole-v1", 2, backend="vector") as pool,
        envfleet.ClusterEnv("CartPole-v1", 2, 2, backend="vector", autoreset_mode="next_step") as cluster,
    ):
        assert len(np.unique(cluster.reset()[0], axis=0)) == 4
        assert_array_equal(cluster.reset(seed=3)[0][:2], pool.reset(seed=3)[0])
        with pytest.raises(envfleet.UsageError, match="cannot be reset alone"):
            cluster.reset(options={"reset_mask": np.array([True, False, False, False])})
        cluster.reset()  # other workers may have reset theirs, so all begin anew
        assert cluster.step(np.ones(4, np.int64))[0].shape == (4, 4)


@pytest.mark.filterwarnings(IGNORED)
def test_envpools_tasks():
    pytest.importorskip("envpool", reason="needs envpool")
    with (
        envfleet.make("envpool:CartPole-v1", 4) as pool,
        envfleet.ClusterEnv("envpool:CartPole-v1", 2, 2, autoreset_mode="next_step") as cluster,
    ):
        _require_same_steps(cluster, pool, np.ones((20, 4), np.int64))


@pytest.mark.filterwarnings(IGNORED)
def test_rollouts_of_envpools_tasks():
    """They reset in the same step, which EnvPool does not do by itself."""
    pytest.importorskip("envpool", reason="needs envpool")
    policy = envfleet.FunctionPolicy(_first_action)
    with envfleet.ClusterEnv("envpool:CartPole-v1", 2, 2, seed=1) as cluster:
        rollout = cluster.rollout(policy, 40)
        assert rollout.rewards.shape == (40, 4)
        assert len(rollout.final_steps) >= 4
        assert_array_equal(rollout.rewards, np.ones((40, 4)))


def test_atari_by_its_id():
    pytest.importorskip("ale_py", reason="needs envfleet[atari]")
    settings = {"env_kwargs": {"screen_size": (42, 40), "max_num_frames_per_episode": 40}}
    with (
        envfleet.make("ALE/Pong-v5", 2, autoreset_mode="next_step", **settings) as pool,
        envfleet.ClusterEnv("ALE/Pong-v5", 2, 1, autoreset_mode="next_step", **cluster_arguments(settings)) as cluster,
    ):
        assert cluster.single_observation_space.shape == (4, 40, 42)
        _require_same_steps(cluster, pool, np.ones((20, 2), np.int64))
