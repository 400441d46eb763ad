"""A fork of the process that made a pool cannot use it, and does it no harm."""

import gc
import os
from functools import partial

import numpy as np
import pytest
from gymnasium.vector import AsyncVectorEnv

import envfleet
from envfleet.testing import ScriptedEnv
from tests.support.waiting import wait_until

NO_ACTS = np.zeros(2, int)
MAKERS = {
    "serial": partial(envfleet.make, ScriptedEnv, 2, backend="serial"),
    "process": partial(envfleet.make, ScriptedEnv, 2, backend="process", num_workers=1),
    "native": partial(envfleet.make, "CartPole-v1", 2),
    "vector": lambda: envfleet.make(
        lambda num_envs: AsyncVectorEnv([ScriptedEnv] * num_envs, shared_memory=False), 2, backend="vector"
    ),
}


def run_in_fork(function):
    """Exit status 0: it returned."""
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            function()
            status = 0
        finally:
            os._exit(status)
    ended = []

    def has_ended():
        ended.append(os.waitpid(pid, os.WNOHANG))
        return ended[-1][0] == pid

    wait_until(has_ended, "the fork has ended")
    return os.waitstatus_to_exitcode(ended[-1][1])


@pytest.mark.filterwarnings("ignore:This process.*fork:DeprecationWarning")
@pytest.mark.parametrize("maker", MAKERS)
def test_a_fork_cannot_use_its_parents_pool(maker):
    pools = [MAKERS[maker]()]
    pools[0].reset(seed=0)
    pools[0].step(NO_ACTS)

    def use():
        pool = pools[0]
        calls = [
            lambda: pool.step(NO_ACTS),
            lambda: pool.send(NO_ACTS),
            lambda: pool.reset(seed=1),
            lambda: pool.async_reset(),
            lambda: pool.recv(),
            lambda: pool.call("render"),
            lambda: pool.set_attr("name", "x"),
            lambda: pool.np_random_seed,
        ]
        for call in calls:
            with pytest.raises(envfleet.PoolClosed, match="a fork of it must make its own"):
                call()
        pool.close()
        with pytest.raises(envfleet.PoolClosed):
            pool.step(NO_ACTS)

    def forget():
        pools.clear()
        gc.collect()

    for in_fork in (use, forget):
        assert run_in_fork(in_fork) == 0
        assert not pools[0].step(NO_ACTS)[3].any()
    pools[0].close()


@pytest.mark.filterwarnings("ignore:This process.*fork:DeprecationWarning")
def test_a_fork_can_make_pools_of_its_own():
    def make_one():
        with envfleet.make(ScriptedEnv, 2, backend="process", num_workers=1) as own:
            own.reset(seed=0)
            assert own.step(NO_ACTS)[0][:, 1].tolist() == [1, 1]

    with envfleet.make(ScriptedEnv, 2, backend="process", num_workers=1) as pool:
        pool.reset(seed=0)
        assert run_in_fork(make_one) == 0
        assert pool.step(NO_ACTS)[0][:, 1].tolist() == [1, 1]
