"""Room for final observations, which pools of cluster workers always have, takes no memory before it is used."""

import os

import gymnasium
import numpy as np
import pytest

from envfleet import Autoreset
from envfleet.contract.pool_config import PoolConfig
from envfleet.contract.spec import EnvSpec
from envfleet.pool.make import make_pool

NUM_ENVS, IMAGE = 4, (64, 1024)  # 64 kB, many pages


class ImageEnv(gymnasium.Env):
    observation_space = gymnasium.spaces.Box(0, 255, IMAGE, np.uint8)
    action_space = gymnasium.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self._num_steps = 0
        return np.full(IMAGE, 1, np.uint8), {}

    def step(self, action):
        self._num_steps += 1
        return np.full(IMAGE, 1 + self._num_steps, np.uint8), 1.0, self._num_steps == 3, False, {}


def held_bytes(pool):
    """Of the batches, after episodes have ended."""
    pool.reset(seed=0)
    for _ in range(10):
        pool.step(np.zeros(NUM_ENVS, np.int64))
    return os.fstat(pool._backend._files.full).st_blocks * 512


@pytest.mark.slow
def test_the_room_is_address_space_until_the_first_final_observation():
    held = {}
    for switches in (False, True):
        config = PoolConfig(num_envs=NUM_ENVS, backend="process", num_workers=1, switches_autoreset=switches)
        with make_pool(EnvSpec(factory=ImageEnv), config) as pool:
            held[switches] = held_bytes(pool)
            if switches:
                pool.switch_autoreset(Autoreset.SAME_STEP)
                assert held_bytes(pool) >= 1.9 * held[True], "this test can fail"
    assert held[True] == held[False] > 0
