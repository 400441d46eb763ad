"""The stand-in and the real EnvPool side by side: arguments, specs, infos, forms, errors."""

import importlib.util
import sys

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces

import envfleet
import envfleet.compat.envpool as ours
from envfleet.compat.envpool.tasks import task_ids

theirs = pytest.importorskip("envpool", reason="needs envpool")

# EnvPool's spaces lose precision, and Gymnasium says so; its unbounded ones have odd limits.
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")

ONE_OF_EACH_KIND = [
    *("CartPole-v0", "CartPole-v1", "Pendulum-v1", "MountainCar-v0", "MountainCarContinuous-v0", "Acrobot-v1"),
    *("FrozenLake-v1", "FrozenLake8x8-v1", "Taxi-v3", "CliffWalking-v0", "CliffWalkingSlippery-v1", "Blackjack-v1"),
    *("LunarLander-v2", "LunarLanderContinuous-v3", "BipedalWalker-v3", "BipedalWalkerHardcore-v3"),
    *("Pong-v5", "Breakout-v5", "Ant-v4", "Ant-v5", "HalfCheetah-v4", "HalfCheetah-v5", "Hopper-v4", "Hopper-v5"),
    *("Humanoid-v4", "Humanoid-v5", "HumanoidStandup-v4", "HumanoidStandup-v5", "InvertedPendulum-v4"),
    *("InvertedPendulum-v5", "InvertedDoublePendulum-v4", "InvertedDoublePendulum-v5", "Pusher-v5", "Reacher-v4"),
    *("Reacher-v5", "Swimmer-v4", "Swimmer-v5", "Walker2d-v4", "Walker2d-v5"),
]

ALSO_IN_PROCESSES = ("Ant-v4", "Humanoid-v5", "Reacher-v5")


def needed_module(task_id):
    if task_id in ("Pong-v5", "Breakout-v5"):
        return "ale_py"
    kinds = ("Ant", "Half", "Hopper", "Human", "Inverted", "Pusher", "Reacher", "Swimmer", "Walker2d")
    return "mujoco" if task_id.startswith(kinds) else None


def both(task_id, **kwargs):
    """A pool of each kind, ours first."""
    module = needed_module(task_id)
    if module is not None and importlib.util.find_spec(module) is None:
        pytest.skip(f"needs {module}")
    if module == "mujoco" and task_id not in envfleet.registry() and task_id not in ALSO_IN_PROCESSES:
        pytest.skip("where MuJoCo's envs are not native, a few of them are enough: each starts processes")
    return [envpool.make(task_id, env_type="gymnasium", **kwargs) for envpool in (ours, theirs)]


def random_actions(space, num_envs, random):
    if isinstance(space, spaces.Discrete):
        return random.integers(space.n, size=num_envs)
    return random.uniform(space.low, space.high, (num_envs, *space.shape))


def shapes(value):
    """Names, dtypes and shapes of nested arrays."""
    if isinstance(value, dict):
        return {name: shapes(each) for name, each in value.items()}
    return value.dtype, value.shape


def without_players(shape):
    return [length for length in shape if length != -1]


def test_all_our_tasks_are_envpools():
    known = set(theirs.list_all_envs())
    assert [task_id for task_id in task_ids() if task_id not in known] == []
    listed = ours.list_all_envs()
    assert known == set(listed) and len(listed) == len(set(listed))


@pytest.mark.parametrize("task_id", ONE_OF_EACH_KIND)
def test_arguments_spaces_and_batches_have_the_same_form(task_id):
    mine, real = both(task_id, num_envs=3)
    expected = {name: value for name, value in real.config.items() if name != "base_path"}
    assert {name: value for name, value in mine.config.items() if name != "base_path"} == expected
    assert list(mine.config) == list(real.config)
    assert mine.spec.config._fields == real.spec.config._fields
    assert mine.spec.reward_threshold == real.spec.reward_threshold
    assert type(mine).__name__ == type(real).__name__ and type(mine.spec).__name__ == type(real.spec).__name__
    for space, expected in ((mine.observation_space, real.observation_space), (mine.action_space, real.action_space)):
        assert type(space) is type(expected)
        assert space.shape == expected.shape and space.dtype == expected.dtype
    assert str(mine.action_space) == str(real.action_space)
    for arrays, expected in (
        (mine.spec.state_array_spec, real.spec.state_array_spec),
        (mine.spec.action_array_spec, real.spec.action_array_spec),
    ):
        assert list(arrays) == list(expected)
        for name, each in expected.items():
            assert np.dtype(arrays[name].dtype) == np.dtype(each.dtype), name
            # -1 stands for the number of players; EnvPool's Box2D has none.
            assert without_players(arrays[name].shape) == without_players(each.shape), name
    for (obs, info), (real_obs, real_info) in [[mine.reset(), real.reset()]]:
        assert shapes(obs) == shapes(real_obs) and shapes(info) == shapes(real_info)
        assert list(info) == list(real_info)
    random = np.random.default_rng(0)
    for _ in range(5):
        action = random_actions(mine.action_space, 3, random)
        result, expected = mine.step(action), real.step(action)
        assert [shapes(each) for each in result] == [shapes(each) for each in expected]
    mine.close()
    real.close()


@pytest.mark.parametrize("task_id", ["CartPole-v1", "Pendulum-v1"])
def test_episodes_follow_each_other_in_the_same_way(task_id):
    mine, real = both(task_id, num_envs=3, max_episode_steps=7)
    mine.step(np.zeros((3, 1)) if task_id.startswith("Pend") else np.zeros(3))
    real.step(np.zeros((3, 1), np.float32) if task_id.startswith("Pend") else np.zeros(3, np.int32))
    random = np.random.default_rng(1)
    for number in range(40):
        action = random_actions(mine.action_space, 3, random) * 0  # CartPole falls after 9 steps or so
        if number % 5 == 4:
            env_ids = random.permutation(3)[:2]
            assert_same(mine.step(action[:2], env_ids), real.step(action[:2], env_ids))
        elif number % 11 == 10:
            (_, info), (_, expected) = mine.reset(np.array([2, 0])), real.reset(np.array([2, 0]))
            for name in ("env_id", "elapsed_step"):
                np.testing.assert_array_equal(info[name], expected[name])
        else:
            assert_same(mine.step(action), real.step(action))
    mine.close()


def assert_same(result, expected):
    """All but observations and what follows from them."""
    assert [shapes(each) for each in result] == [shapes(each) for each in expected]
    np.testing.assert_array_equal(result[3], expected[3])
    for name in ("env_id", "elapsed_step"):
        np.testing.assert_array_equal(result[-1][name], expected[-1][name])
    is_reset = expected[-1]["elapsed_step"] == 0
    assert not result[1][is_reset].any()


def test_atari_plays_by_the_same_rules():
    mine, real = both("Breakout-v5", num_envs=2, episodic_life=True, reward_clip=True, max_episode_steps=60)
    seen = []
    for pool in (mine, real):
        pool.reset()
        random, lives_at_ends, truncations = np.random.default_rng(2), [], 0
        for _ in range(200):
            _, _, terminated, truncated, info = pool.step(random.integers(4, size=2))
            assert (info["elapsed_step"] <= 60).all()
            np.testing.assert_array_equal(truncated, info["elapsed_step"] == 60)
            truncations += int(truncated.sum())
            lives_at_ends += info["lives"][terminated].tolist()
        seen.append((truncations > 2, set(lives_at_ends) >= {4, 3}, 5 in lives_at_ends))
    assert seen[0] == seen[1] == (True, True, False)
    mine.close()


def test_asynchronous_pools_return_the_same_number_of_rows():
    mine, real = both("CartPole-v1", num_envs=4, batch_size=2)
    for pool in (mine, real):
        assert pool.is_async and len(pool) == 4
        obs, info = pool.reset()
        assert obs.shape == (2, 4)
        for _ in range(10):
            *_, info = pool.step(np.zeros(2, np.int32), info["env_id"])
            assert len(info["env_id"]) == 2
    mine.close()


def test_dm_env_has_the_same_structure():
    pytest.importorskip("ale_py")
    for task_id in ("CartPole-v1", "Pong-v5"):
        mine, real = (envpool.make_dm(task_id, num_envs=2, max_episode_steps=2) for envpool in (ours, theirs))
        assert mine.action_spec() == real.action_spec()
        assert mine.observation_spec()._fields == real.observation_spec()._fields
        for name, spec in mine.observation_spec()._asdict().items():
            expected = getattr(real.observation_spec(), name)
            assert type(spec).__name__ == type(expected).__name__
            assert name == "players" or (spec.shape == expected.shape and spec.dtype == expected.dtype)
        steps = [(pool.reset(), *(pool.step(np.zeros(2, np.int32)) for _ in range(4))) for pool in (mine, real)]
        for step, expected in zip(*steps, strict=True):
            assert step.observation._fields == expected.observation._fields
            for name in ("step_type", "discount"):
                got, wanted = getattr(step, name), getattr(expected, name)
                assert got.dtype == wanted.dtype
                np.testing.assert_array_equal(got, wanted)
            assert step.reward.dtype == expected.reward.dtype
        mine.close()


@pytest.mark.parametrize(
    "call",
    [
        lambda envpool: envpool.make("Nothing-v1", env_type="gymnasium"),
        lambda envpool: envpool.make("CartPole-v1", env_type="nothing"),
        lambda envpool: envpool.make("CartPole-v1"),
        lambda envpool: envpool.make_gymnasium("CartPole-v1", nothing=1),
        lambda envpool: envpool.make_gymnasium("CartPole-v1", num_envs=0),
        lambda envpool: envpool.make_gymnasium("CartPole-v1", num_envs=2, batch_size=3),
        lambda envpool: envpool.make_gymnasium("CartPole-v1", seed=2**31),
        lambda envpool: envpool.make_gymnasium("CartPole-v1", num_envs=2, seed=[1]),
        lambda envpool: envpool.make_gymnasium("CartPole-v1", gym_reset_return_info=False),
        lambda envpool: envpool.make_gymnasium("CartPole-v1", render_mode="nothing"),
        lambda envpool: envpool.make_gymnasium("CartPole-v1").render(),
        lambda envpool: envpool.make_gymnasium("CartPole-v1").step({"action": np.zeros(1, np.int64)}),
        lambda envpool: envpool.make_gymnasium("CartPole-v1").reset(options={"nothing": 1}),
    ],
)
def test_what_envpool_refuses_is_refused_with_an_error_of_the_same_kind(call):
    with pytest.raises(Exception) as expected:
        call(theirs)
    with pytest.raises(expected.type):
        call(ours)


def test_pictures_have_the_same_shape():
    pytest.importorskip("pygame")
    mine, real = both("CartPole-v1", num_envs=3, render_mode="rgb_array")
    for pool in (mine, real):
        pool.reset()
    for env_ids in (None, 1, [0, 2], np.array([2])):
        assert shapes(mine.render(env_ids)) == shapes(real.render(env_ids))
    mine.close()


def test_tasks_that_are_not_ours_are_envpools_own():
    pool = ours.make("WalkerWalk-v1", env_type="gymnasium", num_envs=2)
    assert type(pool).__module__ == type(theirs.make_gymnasium("WalkerWalk-v1")).__module__
    assert isinstance(pool, gymnasium.vector.VectorEnv)
    assert pool.reset()[1]["env_id"].tolist() == [0, 1]
    assert ours.make_spec("WalkerWalk-v1").config.num_envs == 1
    assert sys.modules["envpool"] is theirs


@pytest.mark.parametrize("make", ["make_gymnasium", "make_dm"])
@pytest.mark.parametrize("task_id", ["CartPole-v1", "Acrobot-v1", "FrozenLake-v1", "Pendulum-v1"])
def test_compiled_functions_have_the_same_form(task_id, make):
    jax = pytest.importorskip("jax", reason="needs jax")
    mine, real = (
        getattr(envpool, make)(task_id, num_envs=6, batch_size=3, max_episode_steps=4) for envpool in (ours, theirs)
    )
    batches = []
    for pool in (mine, real):
        handle, recv, send, _ = pool.xla()
        space = mine.spec.action_space
        action = np.zeros((3, *space.shape), space.dtype).astype(np.float32 if space.shape else np.int32)

        @jax.jit
        def exchange(handle, env_id, recv=recv, send=send, action=action):
            return recv(send(handle, action, env_id))

        pool.async_reset()
        handle, batch = jax.jit(recv)(handle)
        seen = []
        for _ in range(8):
            env_id = batch[4]["env_id"] if make == "make_gymnasium" else batch.observation.env_id
            handle, batch = exchange(handle, env_id)
            seen.append(jax.tree.map(lambda leaf: (leaf.dtype, leaf.shape), batch))
        batches.append(seen)
        assert handle.shape == (8,) and handle.dtype == np.uint8
    assert str(batches[0]) == str(batches[1])
    mine.close()
    real.close()
