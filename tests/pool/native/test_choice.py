"""Which backend make() takes, and that a native env presents itself as Gymnasium's does."""

import warnings

import gymnasium
import numpy as np
import pytest
from gymnasium.envs.classic_control import CartPoleEnv
from gymnasium.envs.registration import EnvSpec as GymnasiumSpec

import envfleet
from tests.support.inside import native_choice

GYMNASIUM_IDS = [env_id for env_id in envfleet.registry() if env_id in gymnasium.registry]


def _backend(*args, **kwargs):
    with envfleet.make(*args, **kwargs) as pool:
        return pool.backend


def test_native_is_taken_where_there_is_one():
    assert _backend("CartPole-v1", 2) == "native"
    assert _backend(gymnasium.spec("CartPole-v1"), 2) == "native"
    assert _backend(envfleet.EnvSpec(id="CartPole-v1", kwargs={"sutton_barto_reward": True}), 2) == "native"
    assert _backend("CartPole-v1", 2, env_kwargs=[{}, {}]) == "native"
    assert _backend("CartPole-v1", 2, env_kwargs=lambda env_id: {"sutton_barto_reward": True}) == "native"
    assert _backend("CartPole-v1", 2, backend="process") == "process"


@pytest.mark.parametrize(
    ("words", "kwargs"),
    [
        ("only registered envs", {"env": lambda: gymnasium.make("CartPole-v1")}),
        ("the same arguments", {"env_kwargs": [{}, {"sutton_barto_reward": True}]}),
        ("render_mode='human'", {"render_mode": "human"}),
        ("'sutton_barto_reward' must be True or False", {"env_kwargs": {"sutton_barto_reward": "yes"}}),
        ("no native twin", {"env": "tabular/CliffWalking-v0"}),
    ],
)
def test_native_says_why_it_cannot(words, kwargs):
    with pytest.raises(envfleet.UsageError, match=words):
        envfleet.make(**{"env": "CartPole-v1", "num_envs": 2, "backend": "native", **kwargs})


def test_otherwise_processes_run_the_env():
    make = [lambda: gymnasium.make("CartPole-v1")] * 2
    assert _backend(make) == "process"
    assert _backend("CartPole-v1", 2, env_kwargs=[{}, {"sutton_barto_reward": True}]) == "process"


@pytest.fixture
def register():
    """Register envs for one test."""
    before = dict(gymnasium.registry)
    yield gymnasium.register
    gymnasium.registry.clear()
    gymnasium.registry.update(before)


def test_the_registered_class_decides_not_the_name(register):
    register("Long-v0", entry_point="gymnasium.envs.classic_control.cartpole:CartPoleEnv", max_episode_steps=1234)
    register("Wrapped-v0", entry_point="gymnasium.envs.classic_control.cartpole:CartPoleEnv")
    gymnasium.registry["Wrapped-v0"].additional_wrappers = (
        gymnasium.wrappers.TransformReward.wrapper_spec(func=lambda reward: 2 * reward),
    )
    register("ByClass-v0", entry_point=CartPoleEnv)
    register("Other-v0", entry_point="envfleet.testing:ScriptedEnv")
    gymnasium.registry["CartPole-v1"] = GymnasiumSpec("CartPole-v1", entry_point="envfleet.testing:ScriptedEnv")
    assert {"Long-v0", "ByClass-v0"} <= set(envfleet.registry())
    assert not {"Wrapped-v0", "Other-v0", "CartPole-v1"} & set(envfleet.registry())
    with envfleet.make("Long-v0", 2) as pool:
        assert native_choice(pool).max_episode_steps == 1234
    with envfleet.make("Long-v0", 2, max_episode_steps=-1) as pool:
        assert native_choice(pool).max_episode_steps == 0
    assert _backend("CartPole-v1", 2) == "process"
    with pytest.raises(envfleet.UsageError, match="registered with wrappers"):
        envfleet.make("Wrapped-v0", 2, backend="native")


def test_an_id_with_the_module_that_registers_it(tmp_path, monkeypatch):
    (tmp_path / "brings_its_env.py").write_text(
        "import gymnasium\n"
        "from gymnasium.envs.classic_control import CartPoleEnv\n"
        "gymnasium.register('Brought-v0', entry_point=CartPoleEnv, max_episode_steps=7)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    with envfleet.make("brings_its_env:Brought-v0", 2) as pool:
        assert pool.reset(seed=0)[0].shape == (2, 4)
    with envfleet.ClusterEnv("brings_its_env:Brought-v0", 1, 2) as cluster:
        assert cluster.reset(seed=0)[0].shape == (2, 4)


@pytest.mark.parametrize("env_id", GYMNASIUM_IDS)
def test_spaces_metadata_and_spec_are_gymnasiums(env_id, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # Gymnasium's HalfCheetah leaves a file
    with warnings.catch_warnings(action="ignore"):  # some ids are out of date
        single = gymnasium.make(env_id)
    with envfleet.make(env_id, 3, backend="native", render_mode="rgb_array") as pool:
        assert pool.single_observation_space == single.observation_space
        assert pool.single_action_space == single.action_space
        assert {**pool.metadata, **single.metadata} == pool.metadata
        assert pool.spec == gymnasium.spec(env_id)
        assert pool.render_mode == "rgb_array"
        obs, _ = pool.reset(seed=0)
        assert pool.observation_space.contains(obs)
        steps = native_choice(pool).max_episode_steps
        assert steps == (gymnasium.spec(env_id).max_episode_steps or 0)


def test_taxi_v3_has_its_default_arguments_only():
    with pytest.raises(envfleet.UsageError, match="default arguments only; got is_rainy"):
        envfleet.make("Taxi-v3", 2, backend="native", env_kwargs={"is_rainy": True})


def test_actions_are_checked_before_any_env_sees_them():
    with envfleet.make("CartPole-v1", 3) as pool, envfleet.make("CartPole-v1", 3) as untouched:
        pool.reset(seed=0)
        untouched.reset(seed=0)
        for wrong in ([0, 2, 0], [0, 0, -1]):
            with pytest.raises(envfleet.InvalidAction, match=r"row \d: Discrete\(2\) has no value"):
                pool.step(np.array(wrong))
        with pytest.raises(envfleet.InvalidAction):
            pool.send(np.array([7]), [1])
        for dtype in (np.int32, np.uint8, np.int64):
            obs = pool.step(np.array([0, 1, 0], dtype))[0]
            np.testing.assert_array_equal(obs, untouched.step(np.array([0, 1, 0]))[0])
        np.testing.assert_array_equal(pool.step([1, 1, 1])[0], untouched.step(np.ones(6, np.int64)[::2])[0])
    with envfleet.make("Pendulum-v1", 2) as pool:
        pool.reset(seed=0)
        with pytest.raises(envfleet.InvalidAction, match=r"NaN in rows \[1\]"):
            pool.step(np.array([[0.0], [np.nan]], np.float32))
        pool.step(np.array([[0.5], [9.0]]))
