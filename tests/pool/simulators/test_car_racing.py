"""CarRacing, whose observations are pictures, in child processes: what Gymnasium's own env shows."""

import warnings

import gymnasium
import numpy as np
import pytest

import envfleet
from tests.support.equal_arrays import assert_array_equal

pytestmark = pytest.mark.slow

NUM_ENVS, NUM_STEPS = 2, 12


def test_pictures_are_gymnasiums():
    with warnings.catch_warnings(action="ignore"):  # the wheel crashes where SWIG's DeprecationWarning is an error
        references = [gymnasium.make("CarRacing-v3") for _ in range(NUM_ENVS)]
    with envfleet.make("CarRacing-v3", NUM_ENVS) as pool:
        assert pool.backend == "process"
        assert pool.single_observation_space == references[0].observation_space
        obs = pool.reset(seed=5)[0]
        assert obs.shape == (NUM_ENVS, 96, 96, 3) and obs.dtype == np.uint8
        expected = [env.reset(seed=5 + env_id)[0] for env_id, env in enumerate(references)]
        assert_array_equal(obs, np.stack(expected))
        assert not np.array_equal(obs[0], obs[1])
        rng = np.random.default_rng(1)
        for _ in range(NUM_STEPS):
            actions = rng.uniform([-1, 0.5, 0], [1, 1, 0.1], (NUM_ENVS, 3)).astype(np.float32)
            obs, rewards, terminated, truncated, _ = pool.step(actions)
            steps = [env.step(action) for env, action in zip(references, actions, strict=True)]
            assert_array_equal(obs, np.stack([step[0] for step in steps]))
            assert_array_equal(rewards, [step[1] for step in steps])
            assert_array_equal(terminated, [step[2] for step in steps])
            assert_array_equal(truncated, [step[3] for step in steps])
    for env in references:
        env.close()
