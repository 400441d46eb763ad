"""`np_random_seed` and `np_random` are tuples, as Gymnasium's vector envs have them."""

import gymnasium
import numpy as np
import pytest
from gymnasium.vector import SyncVectorEnv

import envfleet


def make(backend):
    if backend == "vector":
        build = [lambda: gymnasium.make("CartPole-v1")]
        return envfleet.make(lambda num_envs: SyncVectorEnv(build * num_envs), 2, backend="vector")
    return envfleet.make("CartPole-v1", 2, backend=backend)


@pytest.mark.parametrize("backend", ["serial", "process", "native", "vector"])
def test_seeds_and_generators_are_those_of_each_env(backend):
    oracle = SyncVectorEnv([lambda: gymnasium.make("CartPole-v1")] * 2)
    with make(backend) as pool:
        for seed in (5, [7, 3]):
            pool.reset(seed=seed)
            oracle.reset(seed=seed)
            assert pool.np_random_seed == oracle.np_random_seed
            drawn, expected = ([each.random() for each in envs.np_random] for envs in (pool, oracle))
            assert drawn == expected
    oracle.close()


@pytest.mark.parametrize("backend", ["serial", "process", "native"])
def test_envs_without_seeds_say_what_they_drew(backend):
    with make(backend) as pool:
        obs, _ = pool.reset()
        for row, seed in zip(obs, pool.np_random_seed, strict=True):
            np.testing.assert_array_equal(gymnasium.make("CartPole-v1").reset(seed=seed)[0], row)


def test_a_restored_native_env_does_not_know_its_seed():
    with make("native") as pool:
        pool.reset(seed=1)
        pool.set_state(pool.get_state([1]), [1])
        assert pool.np_random_seed == (1, -1)
        pool.reset(seed=4)
        assert pool.np_random_seed == (4, 5)


def test_a_cluster_has_those_of_its_workers():
    with envfleet.ClusterEnv("CartPole-v1", 2, 1) as cluster:
        cluster.reset(seed=5)
        assert cluster.np_random_seed == (5, 6)
        cluster.reset()
        assert cluster.np_random_seed == (5, 6)
