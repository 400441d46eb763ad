"""Errors say what was expected, what came, and what to do: calls that once ended in a raw message."""

import logging
import os
import signal
import threading
import time
from types import ModuleType

import gymnasium
import numpy as np
import pytest
from gymnasium.spaces import Box, Discrete
from gymnasium.vector import SyncVectorEnv

import envfleet
from envfleet.testing import ScriptedEnv
from tests.support.inside import child_pid
from tests.support.native_makers import make_native
from tests.support.waiting import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("quick_spawners")]

backends = pytest.mark.parametrize("backend", ["native", "process", "serial", "vector"])
python_backends = pytest.mark.parametrize("backend", ["process", "serial"])


def make(backend, num_envs=2, **kwargs):
    """A pool of ScriptedEnv."""
    if backend == "native":
        return make_native(ScriptedEnv, num_envs, **kwargs)
    if backend == "vector":
        return envfleet.make(sync_vector, num_envs, backend="vector", **kwargs)
    return envfleet.make(ScriptedEnv, num_envs, backend=backend, **kwargs)


def sync_vector(num_envs):
    return SyncVectorEnv([ScriptedEnv] * num_envs)


# -- what cannot be pickled --


class KeepsEnv(ScriptedEnv):
    """Takes anything."""

    def __init__(self, kept=None):
        super().__init__()
        self.kept = kept


def test_a_lock_among_the_arguments_of_an_env():
    with pytest.raises(envfleet.UsageError, match=r"env_kwargs\['kept'\]\['deep'\]\[1\] cannot be passed") as caught:
        envfleet.make(KeepsEnv, 2, backend="process", env_kwargs={"kept": {"deep": [1, threading.Lock()]}})
    assert "'_thread.lock'" in str(caught.value) and "backend='serial'" in str(caught.value)
    with pytest.raises(envfleet.UsageError, match=r"env_kwargs\['kept'\] cannot be passed"):  # of the second env
        kwargs = [{}, {"kept": threading.Lock()}]
        envfleet.make(KeepsEnv, 2, backend="process", num_workers=1, env_kwargs=kwargs)
    with envfleet.make(KeepsEnv, 2, backend="serial", env_kwargs={"kept": threading.Lock()}) as pool:
        pool.reset()


def test_a_lock_in_a_closure():
    lock = threading.Lock()
    with pytest.raises(envfleet.UsageError, match="env cannot be passed to another process"):
        envfleet.make(lambda: KeepsEnv(lock), 2, backend="process")


def test_a_lock_in_options_and_calls():
    with envfleet.make(KeepsEnv, 2, backend="process", num_workers=1) as pool:
        lock = threading.Lock()
        for wrong, name in [
            (lambda: pool.reset(options={"kept": lock}), r"options\['kept'\]"),
            (lambda: pool.call("double", lock), r"args\[0\]"),
            (lambda: pool.call("double", by=lock), r"kwargs\['by'\]"),
            (lambda: pool.set_attr("kept", lock), r"values\[0\]"),
        ]:
            with pytest.raises(envfleet.UsageError, match=f"{name} cannot be passed to another process"):
                wrong()
        pool.reset(seed=0)  # nothing is lost
        assert pool.call("double", 2) == (4, 4)


# -- seeds and counts --


@backends
@pytest.mark.parametrize(
    "seed", [1.5, "12", {1, 2}, object(), np.zeros((2, 1), np.int64)], ids=lambda seed: str(type(seed))
)
def test_seeds_that_are_no_seeds(backend, seed):
    with make(backend) as pool:
        with pytest.raises(envfleet.UsageError, match="seed must be a whole number, a list with a seed"):
            pool.reset(seed=seed)
        with pytest.raises(envfleet.UsageError, match="seed must be a whole number, a list with a seed"):
            pool.async_reset(seed=seed)
        pool.reset(seed=[3, np.int64(4)])
        pool.reset(seed=np.array([3, 4]))


@backends
def test_a_wrong_seed_is_refused_before_envs_are_built(backend):
    with pytest.raises(envfleet.UsageError, match="seed must be a whole number"):
        make(backend, seed=1.5)


@backends
@pytest.mark.parametrize("name", ["num_envs", "batch_size", "num_workers"])
def test_counts_are_whole_numbers(backend, name):
    with pytest.raises(envfleet.UsageError, match=rf"{name} must be a whole number of at least 1; got 1\.5"):
        make(backend, **{name: 1.5})


# -- arguments of gymnasium.make() among those of the env --


@pytest.mark.parametrize("backend", ["auto", "native", "process", "serial"])
@pytest.mark.parametrize("env", ["CartPole-v1", gymnasium.spec("CartPole-v1"), envfleet.EnvSpec(id="CartPole-v1")])
def test_a_limit_of_steps_among_the_arguments_of_a_registered_env(backend, env):
    with pytest.raises(
        envfleet.UsageError, match=r"'max_episode_steps', which is no .*: use max_episode_steps=5 beside"
    ):
        envfleet.make(env, 2, backend=backend, env_kwargs={"max_episode_steps": 5})
    with pytest.raises(
        envfleet.UsageError, match="'disable_env_checker', which is no argument of the env: leave it out"
    ):
        envfleet.make(env, 2, backend=backend, env_kwargs={"disable_env_checker": True})


@python_backends
def test_a_limit_of_steps_among_the_arguments_of_a_class(backend):
    with pytest.raises(envfleet.UsageError, match="use max_episode_steps=5 beside env_kwargs"):
        envfleet.make(ScriptedEnv, 2, backend=backend, env_kwargs={"max_episode_steps": 5})
    with envfleet.make(LimitedEnv, 2, backend=backend, env_kwargs={"max_episode_steps": 5}) as pool:
        assert pool.get_attr("limit") == (5, 5)  # its own


class LimitedEnv(ScriptedEnv):
    """Has an argument of that name."""

    def __init__(self, max_episode_steps):
        super().__init__()
        self.limit = max_episode_steps


def test_a_limit_of_steps_for_a_vector_env():
    with pytest.raises(envfleet.UsageError, match="use max_episode_steps=5 beside env_kwargs"):
        make("vector", env_kwargs={"max_episode_steps": 5})
    with envfleet.make("CartPole-v1", 2, backend="vector", env_kwargs={"max_episode_steps": 5}) as pool:
        pool.reset()  # Gymnasium's vector CartPole has an argument of that name


@pytest.mark.parametrize("env", ["CartPole-v1", sync_vector])
def test_the_number_of_envs_among_the_arguments_of_a_vector_env(env):
    with pytest.raises(envfleet.UsageError, match="env_kwargs must not have num_envs"):
        envfleet.make(env, 2, backend="vector", env_kwargs={"num_envs": 5})


# -- envs of other kinds --


class SeveralAgentsEnv:
    """As PettingZoo's envs look, without PettingZoo."""

    possible_agents = ("rock", "paper")
    agents = possible_agents

    def observation_space(self, agent):
        return Discrete(2)


def from_pettingzoo():
    """A class whose module is one of PettingZoo's."""
    return type("raw_env", (), {"__module__": "pettingzoo.classic.rps.rps"})()


@python_backends
@pytest.mark.parametrize("build", [SeveralAgentsEnv, from_pettingzoo])
def test_envs_with_several_agents_get_a_hint(backend, build):
    with pytest.raises(envfleet.UsageError, match=r"must return a gymnasium.Env; got .*several agents act in it"):
        envfleet.make(build, 2, backend=backend)
    with pytest.raises(envfleet.UsageError, match=r"env must be a Gymnasium id.*several agents act in it"):
        envfleet.make(build(), 2, backend=backend)
    with pytest.raises(envfleet.UsageError, match=r"env must be a Gymnasium id.*several agents act in it"):
        envfleet.make(ModuleType("pettingzoo.classic.rps_v2"), 2, backend=backend)


def test_envs_with_several_agents_get_a_hint_as_vector_envs():
    with pytest.raises(envfleet.UsageError, match=r"needs a factory of .*several agents act in it"):
        envfleet.make(lambda num_envs: SeveralAgentsEnv(), 2, backend="vector")
    with pytest.raises(envfleet.UsageError, match=r"takes one factory .*several agents act in it"):
        envfleet.make(SeveralAgentsEnv(), 2, backend="vector")


def test_the_real_pettingzoo():
    rps = pytest.importorskip("pettingzoo.classic.rps_v2")
    for build in (rps.env, rps.parallel_env):
        with pytest.raises(envfleet.UsageError, match="several agents act in it"):
            envfleet.make(build, 2, backend="serial")


@python_backends
def test_an_env_instead_of_what_makes_it(backend):
    with pytest.raises(envfleet.UsageError, match=r"pass what makes the env .*, not an env that is made already"):
        envfleet.make(ScriptedEnv(), 2, backend=backend)
    with pytest.raises(envfleet.UsageError, match="it is a vector env: pass what makes it"):
        envfleet.make(sync_vector(2), 2, backend=backend)


# -- spaces that differ, and processes that have not started --


class WideEnv(gymnasium.Env):
    """Its observation is as wide as the caller says."""

    action_space = Discrete(2)

    def __init__(self, width):
        self.observation_space = Box(0, 1, (width,), np.float32)


@pytest.mark.parametrize("backend", ["process", "serial"])
def test_an_env_with_another_space_is_named_once(backend):
    with pytest.raises(envfleet.SpacesDiffer) as caught:
        envfleet.make(WideEnv, 2, backend=backend, env_kwargs=[{"width": 2}, {"width": 3}])
    assert str(caught.value).startswith("env 1 has another observation_space than env 0: ")


class SlowToRebuild(ScriptedEnv):
    """Takes for ever to build, once its process has been replaced."""

    def __init__(self, flag):
        super().__init__()
        if os.path.exists(flag):
            time.sleep(60)


def test_a_wait_for_a_process_that_is_being_started(tmp_path):
    flag = tmp_path / "slow"
    kwargs = {"env_kwargs": {"flag": str(flag)}, "on_env_error": "restart", "num_workers": 1}
    with envfleet.make(SlowToRebuild, 2, backend="process", **kwargs) as pool:
        pool.reset(seed=0)
        pid = child_pid(pool)
        flag.touch()
        os.kill(pid, signal.SIGKILL)
        pool.send(np.zeros(2, np.int64))
        with pytest.raises(envfleet.PoolTimeout) as caught:
            pool.recv(timeout_s=0.5)
        text = str(caught.value)
        assert "is building its envs; envs that wait for that: [0, 1]" in text
        assert "None" not in text and "idle" not in text
        wait_until(lambda: child_pid(pool) not in (None, pid), "another child has started")
        with pytest.raises(envfleet.PoolTimeout, match=f"process {child_pid(pool)} is building its envs") as caught:
            pool.recv(timeout_s=0.5)
        assert "time.sleep(60)" in str(caught.value) or "__init__" in str(caught.value)  # its stack


class DiesWhenRebuilt(ScriptedEnv):
    """Its process ends as soon as it builds it again."""

    def __init__(self, flag):
        super().__init__()
        if os.path.exists(flag):
            os.kill(os.getpid(), signal.SIGKILL)


def test_a_wait_while_a_process_is_replaced_again_and_again(tmp_path):
    flag = tmp_path / "dies"
    kwargs = {"env_kwargs": {"flag": str(flag)}, "on_env_error": "restart", "max_env_restarts": 1000}
    with envfleet.make(DiesWhenRebuilt, 2, backend="process", num_workers=1, **kwargs) as pool:
        pool.reset(seed=0)
        flag.touch()
        os.kill(child_pid(pool, 0), signal.SIGKILL)
        pool.send(np.zeros(2, np.int64))
        with pytest.raises(envfleet.PoolTimeout) as caught:
            pool.recv(timeout_s=3.0)
        assert "None" not in str(caught.value) and "idle" not in str(caught.value)


# -- older ids --


def test_an_older_id_says_whose_env_it_gives(caplog):
    with caplog.at_level(logging.WARNING, "envfleet"), envfleet.make("Taxi-v3", 2) as pool:
        assert pool.spec.id == "Taxi-v4"
    assert "Gymnasium no longer has Taxi-v3: the envs are those of Taxi-v4" in caplog.text


@pytest.mark.parametrize("env_id", ["Taxi-v4", "CartPole-v1"])
def test_an_id_of_today_says_nothing(env_id, caplog):
    with caplog.at_level(logging.WARNING, "envfleet"), envfleet.make(env_id, 2) as pool:
        assert pool.spec.id == env_id
    assert caplog.text == ""


@pytest.mark.parametrize("backend", ["process", "serial", "vector"])
def test_an_older_id_without_a_native_env_is_refused_by_gymnasium(backend):
    with pytest.raises(gymnasium.error.DeprecatedEnv, match="use `Taxi-v4` instead"):
        envfleet.make("Taxi-v3", 2, backend=backend)
