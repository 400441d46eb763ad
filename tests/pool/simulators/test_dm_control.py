"""dm_control's suite, through shimmy, in child processes."""

import warnings

import gymnasium
import numpy as np
import pytest
from numpy.testing import assert_array_equal

import envfleet

ENV_ID = "dm_control/cartpole-balance-v0"
NUM_ENVS = 3


@pytest.fixture(scope="module")
def reference():
    """Not in the test itself: what dm_control imports keeps the frames alive in which it was imported."""
    with warnings.catch_warnings(action="ignore"):  # glfw misses a display
        gymnasium.register_envs(pytest.importorskip("shimmy", reason="needs envfleet[dm-control]"))
        try:
            return [gymnasium.make(ENV_ID, disable_env_checker=True) for _ in range(NUM_ENVS)]
        except Exception as error:
            pytest.skip(f"dm_control does not work with the installed mujoco: {error}")


@pytest.mark.filterwarnings("ignore")
def test_the_suite_runs_in_processes(reference):
    with envfleet.make(ENV_ID, NUM_ENVS, num_workers=2) as pool:
        assert pool.backend == "process"
        obs, _ = pool.reset(seed=4)
        for seed, env in enumerate(reference, start=4):
            env.reset(seed=seed)
        for _ in range(20):
            actions = pool.action_space.sample()
            obs, rewards, *_ = pool.step(actions)
            for env_id, env in enumerate(reference):
                their_obs, their_reward, *_ = env.step(actions[env_id])
                for name in ("position", "velocity"):
                    assert_array_equal(obs[name][env_id], their_obs[name])
                assert np.isclose(rewards[env_id], their_reward, rtol=0, atol=0)


def test_an_entry_point_without_a_name():
    """shimmy registers functools.partial objects."""
    from functools import partial

    from envfleet.testing import ScriptedEnv

    spec = gymnasium.envs.registration.EnvSpec("Partial-v0", entry_point=partial(ScriptedEnv))
    with envfleet.make(spec, 2, backend="serial") as pool:
        pool.reset(seed=0)
    with envfleet.make(spec, 2) as pool:
        assert pool.backend == "process"
