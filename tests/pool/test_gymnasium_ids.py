"""gymnasium.make_vec("envfleet/ID") gives a pool: from here, from a process that imports nothing, with all options."""

import subprocess
import sys

import gymnasium
import numpy as np
import pytest
from gymnasium.vector import AutoresetMode

import envfleet
from envfleet.pool.registrations import Registrations
from tests.support.scripts import script_environment


def test_make_vec_makes_the_pool_that_make_makes():
    with envfleet.make("CartPole-v1", 8) as pool:
        expected = pool.reset(seed=4)[0].copy()
    envs = gymnasium.make_vec("envfleet/CartPole-v1", num_envs=8)
    assert isinstance(envs, envfleet.EnvPool) and envs.backend == "native"
    np.testing.assert_array_equal(envs.reset(seed=4)[0], expected)
    envs.close()


def test_the_module_in_the_id_is_enough():
    """In a process of its own: this one has imported envfleet."""
    program = """
import sys
import gymnasium
before = dict(gymnasium.registry)
assert "envfleet/CartPole-v1" not in before
envs = gymnasium.make_vec("envfleet:envfleet/CartPole-v1", num_envs=2)
print(type(envs).__name__, envs.reset(seed=0)[0].shape, "zmq" in sys.modules)
envs.close()
print({env_id: spec for env_id, spec in gymnasium.registry.items() if spec.namespace != "envfleet"} == before)
"""
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=script_environment(),
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert done.stdout.splitlines() == ["EnvPool (2, 4) False", "True"]


def test_options_of_the_pool_and_arguments_of_the_env_are_plain_keyword_arguments():
    envs = gymnasium.make_vec(
        "envfleet/CartPole-v1",
        num_envs=3,
        autoreset_mode="same_step",
        max_episode_steps=2,
        backend="serial",
        sutton_barto_reward=True,
        env_kwargs={"render_mode": None},
    )
    assert envs.metadata["autoreset_mode"] is AutoresetMode.SAME_STEP and envs.backend == "serial"
    assert envs.get_attr("_sutton_barto_reward") == (True,) * 3
    envs.reset(seed=0)
    envs.step(np.zeros(3, int))
    *_, truncated, info = envs.step(np.zeros(3, int))
    assert truncated.all() and "final_obs" in info
    again = gymnasium.make_vec(envs.spec)
    assert again.num_envs == 3 and again.backend == "serial"
    assert again.spec == envs.spec and again.spec.id == "envfleet/CartPole-v1"
    again.close()
    envs.close()


def test_each_of_gymnasiums_own_ids_is_there_and_no_retired_one():
    ours = {spec.kwargs["env_id"] for spec in gymnasium.registry.values() if spec.namespace == "envfleet"}
    assert {"CartPole-v1", "LunarLander-v3", "Ant-v5", "Taxi-v4", "CarRacing-v3"} <= ours
    assert "GymV26Environment-v0" not in ours
    assert not any("envfleet" in env_id for env_id in envfleet.registry())


@pytest.mark.parametrize("env_id", ["envfleet/CartPole-v1", "envfleet:envfleet/CartPole-v1"])
def test_make_takes_the_same_ids(env_id):
    with envfleet.make(env_id, 2) as pool:
        assert pool.backend == "native"


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"num_worker": 2}, envfleet.UsageError, "no argument 'num_worker'; did you mean 'num_workers'"),
        ({"backend": "quick"}, envfleet.UsageError, "no backend is called 'quick'"),
        ({"gravity": 2.0}, envfleet.UsageError, "no argument 'gravity'.* Of the env: sutton_barto_reward"),
        (
            {"sutton_barto_reward": True, "env_kwargs": [{}, {}]},
            envfleet.UsageError,
            "arguments of the env must be in there",
        ),
        ({"vector_kwargs": {"copy": True}}, gymnasium.error.Error, "only through kwargs"),
        ({"vectorization_mode": "sync"}, gymnasium.error.Error, "doesn't have an entry point"),
    ],
)
def test_wrong_arguments_are_refused_in_words(arguments, error, text):
    with pytest.raises(error, match=text):
        gymnasium.make_vec("envfleet/CartPole-v1", num_envs=2, **arguments)


def test_unknown_ids_are_refused_in_words():
    with pytest.raises(gymnasium.error.Error, match="CartPole"):
        gymnasium.make_vec("envfleet/CartPol-v1", num_envs=2)


def test_registrations_do_not_travel_to_children():
    """They import envfleet, too."""
    travelling = Registrations.of_this_process()
    assert not any(env_id.startswith("envfleet/") for env_id in (*travelling.pickles, *travelling.refusals))
