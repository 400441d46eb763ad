"""Vector envs that are built anew for another autoreset mode, and which of their envs fail."""

import os
from warnings import catch_warnings, simplefilter

import gymnasium
import numpy as np
import pytest
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv

import envfleet
from envfleet.contract.pool_config import PoolConfig
from envfleet.contract.spec import EnvSpec
from envfleet.pool.make import make_pool
from envfleet.testing import Act, ScriptedEnv


class OneMode(SyncVectorEnv):
    """Cannot reset some of its envs. Counts how many of it are open."""

    num_open = 0
    most_open = 0
    refuses_attributes = False

    def __init__(self, num_envs, autoreset_mode):
        super().__init__([lambda: gymnasium.make("CartPole-v1")] * num_envs, autoreset_mode=autoreset_mode)
        OneMode.num_open += 1
        OneMode.most_open = max(OneMode.most_open, OneMode.num_open)

    def reset(self, *, seed=None, options=None):
        return super().reset(seed=seed, options=options)

    def set_attr(self, name, values):
        if OneMode.refuses_attributes:
            raise RuntimeError("no such attribute today")
        super().set_attr(name, values)

    def close_extras(self, **kwargs):
        OneMode.num_open -= 1
        super().close_extras(**kwargs)


@pytest.fixture
def pool():
    OneMode.num_open = OneMode.most_open = 0
    OneMode.refuses_attributes = False
    config = PoolConfig(num_envs=2, backend="vector", switches_autoreset=True)
    with make_pool(EnvSpec(factory=OneMode), config) as made:
        made.reset(seed=0)
        yield made
    assert OneMode.num_open == 0


def test_there_are_never_two_at_once(pool):
    assert pool.switch_autoreset("same_step") is False
    assert pool.autoreset_mode is AutoresetMode.SAME_STEP
    assert pool.switch_autoreset(AutoresetMode.NEXT_STEP) is False
    assert OneMode.most_open == 1


def test_a_switch_that_fails_leaves_the_old_mode_and_a_pool_that_can_be_reset(pool):
    pool.set_attr("colour", "red")
    OneMode.refuses_attributes = True
    with pytest.raises(envfleet.EnvFailed, match=r"could not be built anew for autoreset_mode='same_step'.*reset"):
        pool.switch_autoreset("same_step")
    assert pool.autoreset_mode is AutoresetMode.NEXT_STEP and OneMode.num_open == 0
    with pytest.raises(envfleet.NotReset):
        pool.step(np.zeros(2, int))
    OneMode.refuses_attributes = False
    pool.reset(seed=0)
    assert pool.step(np.zeros(2, int))[0].shape == (2, 4)
    assert pool.get_attr("colour") == ("red", "red") and OneMode.most_open == 1


def test_an_unknown_mode_is_refused(pool):
    with pytest.raises(envfleet.UsageError, match="autoreset_mode must be one of 'next_step'"):
        pool.switch_autoreset("sometimes")
    assert pool.step(np.zeros(2, int))[0].shape == (2, 4)


def failing():
    """(Shared memory would leave multiprocessing's own file open.)"""
    pool = envfleet.make(
        lambda num_envs: AsyncVectorEnv([ScriptedEnv] * num_envs, shared_memory=False), 3, backend="vector"
    )
    pool.reset(seed=0)
    return pool


ONE_RAISES = np.array([Act.GO_ON, Act.GO_ON, Act.RAISE])


@pytest.mark.filterwarnings("ignore:.*ERROR:UserWarning")
def test_the_env_of_an_async_vector_env_that_failed_is_named():
    with failing() as pool:
        with pytest.raises(envfleet.EnvFailed, match=r"^env 2 of the vector env raised") as caught:
            pool.step(ONE_RAISES)
        assert caught.value.env_id == 2
        assert pool.recv()[3].all()


@pytest.mark.parametrize("warnings", ["ignore", "error"])
def test_an_async_vector_env_that_failed_leaves_no_file_open(warnings):
    """Though the traceback, which the caller may keep, keeps it alive. Gymnasium's warning may be an error."""
    num_open = len(os.listdir("/proc/self/fd"))
    with failing() as pool, catch_warnings():
        simplefilter(warnings)
        with pytest.raises(envfleet.EnvFailed) as caught:
            pool.step(ONE_RAISES)
        assert len(os.listdir("/proc/self/fd")) > num_open
        pool.close()
    assert caught.value.__context__ is not None
    assert len(os.listdir("/proc/self/fd")) == num_open


def test_where_the_vector_env_does_not_say_which_env_failed_it_is_not_known():
    with envfleet.make(lambda num_envs: SyncVectorEnv([ScriptedEnv] * num_envs), 3, backend="vector") as pool:
        pool.reset(seed=0)
        with pytest.raises(envfleet.EnvFailed, match="it does not say in which env"):
            pool.step(np.array([Act.GO_ON, Act.GO_ON, Act.RAISE]))
