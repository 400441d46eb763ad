"""Native envs are shown by Gymnasium's own renderer: frame for frame as Gymnasium's envs are, and so are attributes."""

import gymnasium
import numpy as np
import pytest
from gymnasium.vector import SyncVectorEnv
from numpy.testing import assert_array_equal

import envfleet

NUM_ENVS = 3
NUM_STEPS = 12

# What a renderer or a reader of attributes finds in each env.
ATTRIBUTES = {
    "CartPole-v1": ["state"],
    "MountainCar-v0": ["state"],
    "MountainCarContinuous-v0": ["state"],
    "Pendulum-v1": ["state", "last_u"],
    "Acrobot-v1": ["state"],
    "FrozenLake-v1": ["s", "lastaction"],
    "CliffWalking-v1": ["s", "lastaction"],
    "Taxi-v4": ["s", "lastaction", "fickle_step"],
    "Blackjack-v1": ["player", "dealer", "dealer_top_card_suit", "dealer_top_card_value_str"],
}
HAVE_TEXT = ["FrozenLake-v1", "CliffWalking-v1", "Taxi-v4"]
KWARGS = {"Taxi-v4": {"fickle_passenger": True}}


def make_both(env_id, **kwargs):
    kwargs = {**KWARGS.get(env_id, {}), **kwargs}
    render_mode = kwargs.pop("render_mode", None)
    pool = envfleet.make(env_id, NUM_ENVS, backend="native", env_kwargs=kwargs, render_mode=render_mode)

    def make_env():
        return gymnasium.make(env_id, disable_env_checker=True, render_mode=render_mode, **kwargs)

    return pool, SyncVectorEnv([make_env] * NUM_ENVS)


def both_after_each_step(env_id, **kwargs):
    """Yield a pool and Gymnasium's envs, after their reset and after each of some steps."""
    pool, reference = make_both(env_id, **kwargs)
    pool.action_space.seed(4)
    with pool:
        pool.reset(seed=3)
        reference.reset(seed=3)
        yield pool, reference
        for _ in range(NUM_STEPS):
            actions = pool.action_space.sample()
            pool.step(actions)
            reference.step(actions)
            yield pool, reference
    reference.close()


def require_equal_frames(ours, theirs):
    assert isinstance(ours, tuple)
    for frame, their_frame in zip(ours, theirs, strict=True):
        assert type(frame) is type(their_frame)
        assert_array_equal(frame, their_frame)


@pytest.mark.parametrize("env_id", ATTRIBUTES)
def test_frames(env_id):
    for pool, reference in both_after_each_step(env_id, render_mode="rgb_array"):
        require_equal_frames(pool.render(), reference.render())


@pytest.mark.parametrize("env_id", HAVE_TEXT)
def test_text(env_id):
    for pool, reference in both_after_each_step(env_id, render_mode="ansi"):
        require_equal_frames(pool.render(), reference.render())


def test_a_map_of_ones_own():
    desc = ["SFFFF", "FHHFG"]
    for pool, reference in both_after_each_step("FrozenLake-v1", desc=desc, render_mode="rgb_array"):
        require_equal_frames(pool.render(), reference.render())


@pytest.mark.parametrize("env_id", ATTRIBUTES)
def test_attributes(env_id):
    for pool, reference in both_after_each_step(env_id):
        for name in ATTRIBUTES[env_id]:
            for ours, theirs in zip(pool.get_attr(name), reference.get_attr(name), strict=True):
                assert_array_equal(ours, theirs, err_msg=name)
                assert np.asarray(ours).dtype == np.asarray(theirs).dtype
