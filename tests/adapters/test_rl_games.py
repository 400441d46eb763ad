"""RLGamesVecEnv in rl_games' registers; an example trains with it (tests/examples)."""

import numpy as np
import pytest

import envfleet
from tests.support.envs.learner_envs import OftenEndingEnv, played_by_hand

vecenv = pytest.importorskip("rl_games.common.vecenv")
env_configurations = pytest.importorskip("rl_games.common.env_configurations")
rl_games = pytest.importorskip("envfleet.adapters.rl_games")

FORKED_WITH = ("tests.support.envs.learner_envs",)
NUM_ENVS = 4


def steps_of(envs, actions):
    """Observations before and after each step, rewards, ends and truncations."""
    obs, rows = envs.reset(), []
    for row in actions:
        next_obs, rewards, dones, infos = envs.step(row)
        rows.append((obs, next_obs, rewards, dones, infos["time_outs"]))
        obs = next_obs
    envs.close()
    return [np.stack(each) for each in zip(*rows, strict=True)]


def assert_played(envs):
    actions = np.random.default_rng(1).integers(3, size=(40, NUM_ENVS))
    expected = played_by_hand([OftenEndingEnv() for _ in range(NUM_ENVS)], actions, 5)
    obs, next_obs, rewards, dones, time_outs = steps_of(envs, actions)
    assert np.array_equal(obs, expected.obs)
    assert np.array_equal(next_obs[:-1], expected.obs[1:])  # after the last step: the first one of the next episode
    assert np.array_equal(rewards, expected.rewards)
    assert np.array_equal(dones, expected.terminated | expected.truncated)
    assert np.array_equal(time_outs, expected.truncated)


def test_a_pool_by_its_name():
    rl_games.register()
    envs = vecenv.create_vec_env("envfleet", NUM_ENVS, env=OftenEndingEnv, backend="serial", seed=5)
    assert envs.get_env_info() == {
        "action_space": OftenEndingEnv().action_space,
        "observation_space": OftenEndingEnv().observation_space,
    }
    assert_played(envs)


def test_a_cluster_by_its_name(quick_workers):
    def make_envs(num_envs, seed):
        return envfleet.ClusterEnv(
            OftenEndingEnv, 2, num_envs // 2, backend="serial", autoreset_mode="same_step", seed=seed
        )

    rl_games.register("often", make_envs)
    assert_played(vecenv.create_vec_env("often", NUM_ENVS, seed=5))


def test_players_have_one_env():
    rl_games.register()
    env = env_configurations.configurations["envfleet"]["env_creator"](env="CartPole-v1")
    assert env_configurations.get_env_info(env)["agents"] == 1
    assert env.reset().shape == (1, 4)
    obs, rewards, dones, _ = env.step(np.zeros((1, 1), np.int64))  # as a2c_discrete may give them
    assert obs.shape == (1, 4) and rewards.tolist() == [1] and dones.tolist() == [False]
    env.close()


def test_float64_becomes_float32():
    pytest.importorskip("mujoco")
    rl_games.register()
    envs = vecenv.create_vec_env("envfleet", 2, env="HalfCheetah-v5", seed=1)
    assert envs.observation_space.dtype == envs.reset().dtype == np.float32
    obs, rewards, *_ = envs.step(np.zeros((2, 6), np.float32))
    assert obs.dtype == np.float32 and rewards.shape == (2,)
    obs[:] = 0  # its own memory, not the pool's
    envs.close()


def test_dicts_stay_dicts_and_tuples_are_refused():
    rl_games.register()
    envs = vecenv.create_vec_env("envfleet", 2, env=OftenEndingEnv, env_kwargs={"form": "dict"}, backend="serial")
    assert sorted(envs.reset()) == ["num_steps", "place"]
    envs.close()
    options = {"backend": "serial", "autoreset_mode": "same_step", "env_kwargs": {"form": "tuple"}}
    with (
        envfleet.make(OftenEndingEnv, 2, **options) as pool,
        pytest.raises(envfleet.UsageError, match="dicts of arrays"),
    ):
        rl_games.RLGamesVecEnv(pool)
