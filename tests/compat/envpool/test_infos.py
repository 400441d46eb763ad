"""The infos of Atari games and of envs on MuJoCo have EnvPool's keys in every call."""

from itertools import pairwise

import gymnasium
import numpy as np
import pytest

import envfleet.compat.envpool as envpool

ATARI_KEYS = {"env_id", "players", "lives", "reward", "terminated", "ram", "elapsed_step"}


def play(pool, num_steps, seed=0):
    """(obs, reward, terminated, truncated, info of env 0) of random steps."""
    random = np.random.default_rng(seed)
    for _ in range(num_steps):
        obs, rewards, terminated, truncated, info = pool.step(random.integers(pool.action_space.n, size=len(pool)))
        yield (
            obs[0],
            rewards[0],
            terminated[0],
            truncated[0],
            {name: info[name][0] for name in ATARI_KEYS - {"players"}},
        )


def test_atari_has_lives_rewards_and_the_games_memory():
    pytest.importorskip("ale_py")
    with envpool.make_gymnasium("Breakout-v5", num_envs=1, episodic_life=True, reward_clip=True) as pool:
        obs, info = pool.reset()
        assert obs.shape == (1, 4, 84, 84) and obs.dtype == np.uint8
        assert set(info) == ATARI_KEYS
        assert info["ram"].shape == (1, 128) and info["ram"].dtype == np.uint8
        assert info["lives"].dtype == info["terminated"].dtype == np.int32 and info["reward"].dtype == np.float32
        assert info["lives"].tolist() == [5] and info["terminated"].tolist() == [0]
        steps, ended, rams, num_steps = 0, False, set(), []
        for _, reward, terminated, truncated, info in play(pool, 400):
            rams.add(info["ram"].tobytes())
            assert reward == np.sign(info["reward"]) and not truncated
            if ended and info["lives"] == 5:  # a new game
                steps = 0
            elif not ended:
                steps += 1
            assert info["elapsed_step"] == steps  # counts through the lives of a game
            assert info["terminated"] == (terminated and info["lives"] == 0)
            ended = terminated
            num_steps.append(info["elapsed_step"])
        assert len(rams) > 100 and 0 in num_steps and max(num_steps) > 60


def test_a_limit_of_steps_is_one_of_the_game():
    pytest.importorskip("ale_py")
    with envpool.make_gymnasium("Breakout-v5", num_envs=1, episodic_life=True, max_episode_steps=40) as pool:
        pool.reset()
        rows = list(play(pool, 90))
        assert any(terminated and info["elapsed_step"] < 40 for _, _, terminated, _, info in rows)  # a life
        for (_, _, terminated, truncated, info), (*_, following) in pairwise(rows):
            assert truncated == (info["elapsed_step"] == 40) and not (terminated and truncated)
            if truncated:
                assert following["elapsed_step"] == 0 and following["lives"] == 5
        assert sum(truncated for _, _, _, truncated, _ in rows) == 2


def test_a_limit_that_a_life_is_lost_at_ends_the_game():
    pytest.importorskip("ale_py")
    settings = {"num_envs": 1, "episodic_life": True, "seed": 1}
    with envpool.make_gymnasium("Breakout-v5", **settings) as pool:
        pool.reset()
        limit = next(int(info["elapsed_step"]) for _, _, terminated, _, info in play(pool, 200) if terminated)
    with envpool.make_gymnasium("Breakout-v5", max_episode_steps=limit, **settings) as pool:
        pool.reset()
        *_, (_, _, terminated, truncated, last), (*_, following) = play(pool, limit + 1)
        assert truncated and not terminated and last["lives"] == 4 and last["elapsed_step"] == limit
        assert following["lives"] == 5 and following["elapsed_step"] == 0


def test_colours_are_planes():
    pytest.importorskip("ale_py")
    settings = {"num_envs": 1, "stack_num": 2, "seed": 3, "img_height": 210, "img_width": 160}
    with (
        envpool.make_gymnasium("Pong-v5", gray_scale=False, **settings) as pool,
        envpool.make_gymnasium("Pong-v5", gray_scale=False, render_mode="rgb_array", **settings) as drawn,
    ):
        assert pool.observation_space.shape == (6, 210, 160)
        obs, _ = pool.reset()
        drawn.reset()
        assert obs.shape == (1, 6, 210, 160)
        # Straight after the reset the newest frame is what the game shows.
        assert np.array_equal(obs[0, 3:].transpose(1, 2, 0), drawn.render()[0])


def test_mujoco_has_envpools_names_in_every_call():
    pytest.importorskip("mujoco")
    keys = {"reward_linvel", "reward_quadctrl", "reward_alive", "reward_impact", "x_position", "x_velocity"}
    with envpool.make_gymnasium("Humanoid-v5", num_envs=2) as pool:
        _, info = pool.reset()
        assert keys <= set(info) and not info["reward_linvel"].any()
        action = np.full((2, 17), 0.1)
        _, rewards, _, _, info = pool.step(action)
        parts = [info[name] for name in ("reward_linvel", "reward_quadctrl", "reward_alive", "reward_impact")]
        assert info["reward_alive"].tolist() == [5.0, 5.0]
        np.testing.assert_allclose(sum(parts), rewards, rtol=1e-6)
        assert not any(name.startswith("_") for name in info)


def test_mujocos_first_state_can_be_had_straight_after_a_reset():
    pytest.importorskip("mujoco")
    env = gymnasium.make("Hopper-v5").unwrapped
    with envpool.make_gymnasium("Hopper-v5", num_envs=3) as pool:
        _, early = pool.reset()
        obs, info = pool.reset(np.array([2, 0]))
        assert "qpos0" not in info  # EnvPool's releases do not have it
        assert info["qpos0"].shape == (2, 6) and info["qvel0"].shape == (2, 6)
        np.testing.assert_array_equal(obs[:, :5], info["qpos0"][:, 1:])
        with pytest.raises(KeyError, match="straight after"):
            early["qpos0"]
        env.reset()
        env.set_state(info["qpos0"][0], info["qvel0"][0])
        action = np.full(3, 0.5, np.float32)
        expected = env.step(action)[0]
        np.testing.assert_allclose(pool.step(action[None], np.array([2]))[0][0], expected, atol=1e-12)
    env.close()


def test_acrobot_has_its_angles():
    with envpool.make_gymnasium("Acrobot-v1", num_envs=2) as pool:
        obs, info = pool.reset()
        np.testing.assert_allclose(np.cos(info["state"]), obs[:, [0, 2]], rtol=1e-6)
        np.testing.assert_allclose(np.sin(info["state"]), obs[:, [1, 3]], rtol=1e-5)
