"""make_dm() gives batched TimeSteps."""

import numpy as np
import pytest

import envfleet.compat.envpool as envpool

dm_env = pytest.importorskip("dm_env", reason="needs dm_env")


def test_a_timestep_has_a_row_for_each_env():
    with envpool.make_dm("CartPole-v1", num_envs=2, max_episode_steps=2) as pool:
        assert isinstance(pool, dm_env.Environment) and isinstance(pool, envpool.DMEnvPool)
        first = pool.reset()
        assert first.first().all() and first.step_type.dtype == np.int32
        assert first.reward.tolist() == [0.0, 0.0] and first.reward.dtype == first.discount.dtype == np.float32
        assert first.observation.obs.shape == (2, 4)
        assert first.observation.env_id.tolist() == first.observation.players.env_id.tolist() == [0, 1]
        action = np.zeros(2, np.int32)
        mid, last, again = (pool.step(action) for _ in range(3))
        assert mid.mid().all() and mid.discount.tolist() == [1.0, 1.0]
        assert last.last().all() and last.discount.tolist() == [0.0, 0.0]
        assert again.first().all() and again.discount.tolist() == [1.0, 1.0]
        assert pool.reset(np.array([1])).observation.env_id.tolist() == [1]
        assert pool.step(action).step_type.tolist() == [1, 1]


def test_specs_are_those_of_one_env():
    spec = envpool.make_spec("CartPole-v1")
    assert spec.action_spec() == dm_env.specs.DiscreteArray(2, dtype=np.int32, name="action")
    obs = spec.observation_spec().obs
    assert isinstance(obs, dm_env.specs.BoundedArray) and obs.shape == (4,) and obs.dtype == np.float32
    with envpool.make_dm("Pendulum-v1") as pool:
        assert pool.action_spec() == dm_env.specs.BoundedArray((1,), np.float32, -2.0, 2.0, name="action")
        step = pool.reset()
        pool.observation_spec().obs.validate(step.observation.obs[0])


def test_an_asynchronous_pool_gives_the_first():
    with envpool.make_dm("CartPole-v1", num_envs=4, batch_size=2) as pool:
        step = pool.reset()
        for _ in range(10):
            assert len(step.observation.env_id) == 2
            step = pool.step(np.zeros(2, np.int32), step.observation.env_id)


def test_a_lost_life_may_end_the_discounting():
    pytest.importorskip("ale_py")
    with envpool.make_dm("Breakout-v5", num_envs=1, zero_discount_on_life_loss=True) as pool:
        step = pool.reset()
        lives, num_lost = int(step.observation.lives[0]), 0
        random = np.random.default_rng(0)
        for _ in range(150):
            step = pool.step(random.integers(4, size=1))
            is_lost = int(step.observation.lives[0]) < lives
            assert step.discount.tolist() == [0.0 if is_lost else 1.0]
            lives, num_lost = int(step.observation.lives[0]), num_lost + is_lost
        assert num_lost >= 2
