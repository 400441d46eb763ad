"""make() and its kin take EnvPool's arguments, and say what they cannot do."""

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces

import envfleet.compat.envpool as envpool
from envfleet import UsageError
from envfleet.compat.envpool.real_envpool import is_installed


def test_a_pool_has_envpools_names():
    pool = envpool.make("CartPole-v1", env_type="gymnasium", num_envs=3, seed=7)
    assert isinstance(pool, gymnasium.vector.VectorEnv) and isinstance(pool, gymnasium.Env)
    assert isinstance(pool, envpool.GymnasiumEnvPool) and isinstance(pool, envpool.EnvPool)
    assert len(pool) == pool.num_envs == 3
    assert pool.all_env_ids.tolist() == [0, 1, 2] and pool.all_env_ids.dtype == np.int32
    assert not pool.is_async
    assert pool.observation_space == pool.single_observation_space == gymnasium.make("CartPole-v1").observation_space
    assert pool.action_space == pool.single_action_space == spaces.Discrete(2)
    assert pool.metadata["autoreset_mode"] is gymnasium.vector.AutoresetMode.NEXT_STEP
    assert pool.config["seed"] == 7 and pool.config["max_episode_steps"] == 500
    assert pool.spec.config.num_envs == pool.spec.config.batch_size == 3
    assert pool.spec.reward_threshold == 475.0
    assert repr(pool).startswith("CartPoleGymnasiumEnvPool(num_envs=3, batch_size=3")
    pool.num_envs = 3  # CleanRL and SB3's example set it
    with pytest.warns(UserWarning, match="pass seed to make"):
        pool.seed(1)
    pool.close()
    pool.close()


def test_all_ways_to_make_a_pool():
    for make in (envpool.make_gym, envpool.make_gymnasium, envpool.registry.make_gymnasium):
        with make("CartPole-v0") as pool:
            assert pool.config["max_episode_steps"] == 200
    assert envpool.make_spec("CartPole-v0", num_envs=4, batch_size=2).config.batch_size == 2
    assert {"CartPole-v1", "Pong-v5", "Ant-v5"} <= set(envpool.list_all_envs())
    assert envpool.registry.list_all_envs() == envpool.list_all_envs()


@pytest.mark.parametrize(
    ("arguments", "kind", "words"),
    [
        ({"env_type": "gim"}, AssertionError, "'dm', 'gym', 'gymnasium'; got 'gim'"),
        ({"frames": 3}, TypeError, "no argument frames"),
        ({"num_envs": 0}, AssertionError, "num_envs must be a whole number of at least 1"),
        ({"num_envs": 2, "batch_size": 3}, AssertionError, "between 0 and num_envs=2"),
        ({"seed": 2**31}, AssertionError, "seed must be a whole number from -2147483648"),
        ({"num_envs": 2, "seed": [1]}, AssertionError, "for each of num_envs=2 envs; got 1"),
        ({"max_num_players": 2}, AssertionError, "one player"),
        ({"gym_reset_return_info": False}, ValueError, "env_type='gym'"),
        ({"render_mode": "human"}, ValueError, "use 'rgb_array'"),
        ({"render_width": 64}, ValueError, "render_width"),
        ({"from_pixels": True}, ValueError, "Pixels"),
    ],
)
def test_what_is_wrong_is_refused_in_words(arguments, kind, words):
    with pytest.raises(kind, match=words) as caught:
        envpool.make("CartPole-v1", **{"env_type": "gymnasium", **arguments})
    assert isinstance(caught.value, UsageError)


def test_an_unknown_task_is_refused_with_the_nearest_ones():
    with pytest.raises(AssertionError, match="did you mean CartPole-v1"):
        envpool.make("CartPoll-v1", env_type="gym")
    with pytest.raises(AssertionError, match="no task"):
        envpool.make_spec("CartPoll-v1")
    with pytest.raises(ValueError, match="with Gymnasium"):
        envpool.register("Mine-v0", "mine", "Spec", "DM", "Gymnasium")


@pytest.mark.skipif(is_installed(), reason="with EnvPool installed it runs the task")
def test_a_task_that_only_envpool_has_is_refused_without_it():
    with pytest.raises(AssertionError, match="pip install envpool"):
        envpool.make("WalkerWalk-v1", env_type="gymnasium")


def test_seeds_are_one_for_each_env():
    def first(**seeds):
        with envpool.make_gymnasium("CartPole-v1", num_envs=3, **seeds) as pool:
            return pool.reset()[0]

    assert np.array_equal(first(seed=5), first(seed=[5, 6, 7]))
    assert np.array_equal(first(seed=5), first(env_seed=[5, 6, 7]))
    assert not np.array_equal(first(seed=5), first(seed=6))
    assert np.array_equal(first(), first(seed=42))
    assert first(seed=-5).shape == (3, 4)


def test_arguments_of_tasks_reach_our_envs():
    pytest.importorskip("mujoco")
    with envpool.make_gymnasium(
        "Ant-v4", exclude_current_positions_from_observation=False, healthy_z_min=0.0, reset_noise_scale=0.0
    ) as pool:
        assert pool.observation_space.shape == (29,)
        assert pool.action_space.dtype == np.float64
        assert pool.reset()[0][0, 2] == 0.75  # without noise, where the model has it
    with pytest.raises(ValueError, match=r"velocity_min of GymHopper can only be -10\.0"):
        envpool.make_gymnasium("Hopper-v4", velocity_min=-5.0)
    with pytest.raises(ValueError, match=r"EnvFleet has no GymAnt with .*it has Ant-v5"):
        envpool.make_gymnasium("Ant-v5", post_constraint=False)


def test_the_spec_describes_all_arrays():
    spec = envpool.make_spec("Pendulum-v1", num_envs=2)
    assert list(spec.action_array_spec) == ["env_id", "players.env_id", "action"]
    assert spec.action_array_spec["action"].shape == [-1, 1]
    assert spec.action_array_spec["action"].minimum == -2.0
    assert spec.state_array_spec["obs"].maximum.tolist() == [1.0, 1.0, 8.0]
    assert spec.state_array_spec["reward"].dtype is np.float32
    assert repr(spec).startswith("PendulumEnvSpec(num_envs=2")
    spec.id = "Pendulum-v1"  # SB3's example sets it
    made = type(spec)(type(spec).gen_config(num_envs=5))
    assert made.config.num_envs == made.config.batch_size == 5


def test_what_is_discrete_is_int32_and_blackjack_is_one_array():
    with envpool.make_gymnasium("FrozenLake-v1", num_envs=2) as pool:
        obs, info = pool.reset()
        assert obs.dtype == np.int32 and obs.tolist() == [0, 0]
        assert set(info) == {"env_id", "players", "elapsed_step"}
    with envpool.make_gymnasium("Blackjack-v1", num_envs=2) as pool:
        obs, _ = pool.reset()
        assert obs.dtype == np.int32 and obs.shape == (2, 3)
        assert pool.observation_space == spaces.Box(0, 31, (3,), np.int32)


def test_frames_can_be_stacked():
    with envpool.make_gymnasium("Pendulum-v1", num_envs=2) as plain:
        first, _ = plain.reset()
        second = plain.step(np.zeros((2, 1), np.float32))[0]
    pytest.importorskip("mujoco")
    with envpool.make_gymnasium("HalfCheetah-v5", num_envs=2, frame_stack=3) as pool:
        assert pool.observation_space.shape == (3, 17)
        first, _ = pool.reset()
        assert first.shape == (2, 3, 17)
        second = pool.step(np.zeros((2, 6)))[0]
        assert np.array_equal(second[:, :2], first[:, 1:]) and not np.array_equal(second[:, 2], first[:, 2])
