"""Pixel observations cross the wire as those of a pool do; what cannot be had is refused before a worker starts."""

import numpy as np
import pytest
from numpy.testing import assert_array_equal

import envfleet

pytestmark = pytest.mark.slow

PIXELS = envfleet.Pixels(height=40, width=60, grayscale=True)


def _left(obs):
    return np.zeros(len(obs), np.int64)


def _certain(obs, actions):
    return np.zeros(len(obs), np.float32)


def test_workers_see_what_a_pool_sees():
    pytest.importorskip("pygame", reason="needs pygame")
    generator = np.random.default_rng(0)
    with (
        envfleet.make("CartPole-v1", 4, pixels=PIXELS, backend="serial") as pool,
        envfleet.ClusterEnv(envfleet.EnvSpec(id="CartPole-v1", pixels=PIXELS), 2, 2, backend="serial") as cluster,
    ):
        assert cluster.single_observation_space == pool.single_observation_space
        assert_array_equal(cluster.reset(seed=3)[0], pool.reset(seed=3)[0])
        for _ in range(15):
            actions = generator.integers(0, 2, 4)
            for got, expected in zip(cluster.step(actions)[:4], pool.step(actions)[:4], strict=True):
                assert_array_equal(got, expected)
        rollout = cluster.rollout((_left, _certain), 5)
        assert rollout.obs.shape == (5, 4, 3, 40, 60) and rollout.obs.dtype == np.uint8
        assert_array_equal(rollout.obs[1:, :, :-1][:, 0, 0], rollout.obs[:-1, :, 1:][:, 0, 0])


@pytest.mark.parametrize("wrong", [{"backend": "native"}, {"render_mode": "human"}, {"pixels": True}])
def test_what_cannot_be_had_is_refused_at_once(wrong):
    arguments = dict(wrong)
    backend = arguments.pop("backend", "auto")
    with pytest.raises(envfleet.UsageError, match=r"pixel observations|envfleet\.Pixels"):
        env = envfleet.EnvSpec(id="CartPole-v1", **{"pixels": PIXELS, **arguments})
        envfleet.ClusterEnv(env, 2, 1, backend=backend)
