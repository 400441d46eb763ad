"""States of native envs can be saved and restored, their generators included."""

import pickle

import numpy as np
import pytest
from numpy.testing import assert_array_equal

import envfleet
from envfleet.testing.programs import require_equal

MODES = list(envfleet.Autoreset)


def _trajectory(pool, actions):
    return [pool.step(each) for each in actions]


@pytest.mark.parametrize("env_id", envfleet.registry())
def test_a_restored_env_repeats_its_trajectory(env_id):
    """Over several episodes: what is drawn at the resets repeats as well."""
    kwargs = {"max_episode_steps": 20}
    with envfleet.make(env_id, 6, backend="native", **kwargs) as pool:
        pool.reset(seed=3)
        pool.action_space.seed(3)
        _trajectory(pool, [pool.action_space.sample() for _ in range(33)])
        saved = pool.get_state()
        actions = [pool.action_space.sample() for _ in range(70)]
        expected = _trajectory(pool, actions)
        assert any((step[2] | step[3]).any() for step in expected)
        pool.set_state(saved)
        require_equal(_trajectory(pool, actions), expected)
        with envfleet.make(env_id, 6, backend="native", **kwargs) as other:
            other.set_state(pickle.loads(pickle.dumps(saved)))
            require_equal(_trajectory(other, actions), expected)


def test_some_envs_can_be_copied_to_others():
    with envfleet.make("CartPole-v1", 4) as pool:
        pool.reset(seed=0)
        pool.step(np.array([0, 1, 0, 1]))
        pool.set_state(2 * pool.get_state([1]), env_ids=[0, 3])
        obs, *_ = pool.step(np.array([1, 1, 0, 1]))
        assert_array_equal(obs[0], obs[1])
        assert_array_equal(obs[3], obs[1])
        assert (obs[2] != obs[1]).any()


def test_what_does_not_fit_is_refused():
    with envfleet.make("CartPole-v1", 2) as pool, envfleet.make("Pendulum-v1", 2) as other:
        with pytest.raises(envfleet.NotReset):
            pool.get_state()
        pool.reset(seed=0)
        other.reset(seed=0)
        with pytest.raises(envfleet.UsageError, match="the state of a Pendulum"):
            pool.set_state(other.get_state())
        with pytest.raises(envfleet.UsageError, match="expected 2, got 1"):
            pool.set_state(pool.get_state([0]))
        with pytest.raises(envfleet.UsageError, match="between 0 and 1"):
            pool.get_state([2])
        pool.send(np.array([0, 1]))
        with pytest.raises(envfleet.EnvBusy):
            pool.get_state()
        pool.recv()


@pytest.mark.parametrize("env_ids", [[5], [0, 0], [[0]]])
def test_errors_name_the_argument_env_ids(env_ids):
    with envfleet.make("CartPole-v1", 2, backend="native") as pool:
        pool.reset(seed=0)
        with pytest.raises(envfleet.UsageError, match=r"^env_ids "):
            pool.get_state(env_ids)
        with pytest.raises(envfleet.UsageError, match=r"^env_ids "):
            pool.set_state(pool.get_state([0]), env_ids)
