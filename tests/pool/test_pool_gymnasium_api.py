"""What code written for Gymnasium's own vector envs relies on: error classes, attributes, arguments."""

import multiprocessing
import pickle

import gymnasium
import numpy as np
import pytest
from gymnasium.spaces import Box, Dict, Discrete
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from gymnasium.vector.utils import batch_differing_spaces
from numpy.testing import assert_array_equal

import envfleet
from envfleet.testing import ScriptedEnv
from tests.support.native_makers import make_native

pytestmark = pytest.mark.usefixtures("quick_spawners")


class BoundedEnv(gymnasium.Env):
    """Observations of a space that the caller chooses."""

    action_space = Discrete(2)

    def __init__(self, space):
        self.observation_space = space

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return self.observation_space.sample(), {}

    def step(self, action):
        return self.observation_space.sample(), 0.0, False, False, {}


def make(backend, num_envs=3, **kwargs):
    """A pool of ScriptedEnv."""
    if backend == "native":
        return make_native(ScriptedEnv, num_envs, **kwargs)
    if backend == "vector":
        return envfleet.make(sync_vector, num_envs, backend="vector", **kwargs)
    return envfleet.make(ScriptedEnv, num_envs, backend=backend, **kwargs)


def sync_vector(num_envs, autoreset_mode):
    return SyncVectorEnv([ScriptedEnv] * num_envs, autoreset_mode=autoreset_mode)


backends = pytest.mark.parametrize("backend", ["native", "process", "serial", "vector"])
python_backends = pytest.mark.parametrize("backend", ["process", "serial"])


@pytest.mark.parametrize(
    ("kind", "base"),
    [
        (envfleet.InvalidAction, gymnasium.error.InvalidAction),
        (envfleet.EnvBusy, gymnasium.error.AlreadyPendingCallError),
        (envfleet.NothingToReceive, gymnasium.error.NoAsyncCallError),
        (envfleet.NotReset, gymnasium.error.ResetNeeded),
        (envfleet.StepOnEndedEpisode, gymnasium.error.ResetNeeded),
        (envfleet.PoolClosed, gymnasium.error.ClosedEnvironmentError),
        (envfleet.SpacesDiffer, RuntimeError),
        (envfleet.PoolTimeout, multiprocessing.TimeoutError),
        (envfleet.PoolTimeout, TimeoutError),
        (envfleet.ClusterTimeout, multiprocessing.TimeoutError),
        (envfleet.ClusterTimeout, TimeoutError),
    ],
)
def test_errors_are_those_of_gymnasium_as_well(kind, base):
    assert issubclass(kind, base)
    error = pickle.loads(pickle.dumps(kind("what is wrong")))
    assert type(error) is kind and str(error) == "what is wrong" and error.args == ("what is wrong",)


@backends
def test_misuse_is_caught_as_gymnasium_names_it(backend):
    with make(backend) as pool:
        actions = np.zeros(3, np.int64)
        with pytest.raises(gymnasium.error.ResetNeeded):
            pool.step(actions)
        pool.reset(seed=0)
        with pytest.raises(gymnasium.error.InvalidAction):
            pool.step(actions[:2])
        with pytest.raises(gymnasium.error.NoAsyncCallError) as missing:
            pool.recv()
        pool.send(actions)
        with pytest.raises(gymnasium.error.AlreadyPendingCallError) as pending:
            pool.send(actions)
        assert missing.value.name == pending.value.name == "step"
    with pytest.raises(gymnasium.error.ClosedEnvironmentError):
        pool.reset()


def test_a_wait_that_ends_is_a_timeout_of_multiprocessing():
    pool = envfleet.make(SlowEnv, 2, backend="process", timeout_s=0.2)
    with pool, pytest.raises(multiprocessing.TimeoutError):
        pool.reset()


class SlowEnv(ScriptedEnv):
    """Takes too long to reset."""

    def reset(self, *, seed=None, options=None):
        import time

        time.sleep(1.0)
        return super().reset(seed=seed, options=options)


@backends
@pytest.mark.parametrize("mode", list(AutoresetMode))
def test_the_autoreset_mode_is_an_attribute(backend, mode):
    with make(backend, autoreset_mode=mode) as pool:
        assert pool.autoreset_mode is mode


@pytest.mark.parametrize("backend", ["process", "serial", "vector"])
def test_attributes_of_some_envs(backend):
    with make(backend) as pool:
        pool.set_attr("name", ["a", "b", "c"])
        pool.set_attr("name", ["z", "y"], [2, 0])
        assert pool.get_attr("name") == ("y", "b", "z")
        pool.set_attr("name", "all of these", np.array([1, 2]))
        assert pool.get_attr("name") == ("y", "all of these", "all of these")
        with pytest.raises(envfleet.UsageError, match="a value for each of 2 envs, or one for all; got 3"):
            pool.set_attr("name", ["a", "b", "c"], [0, 1])
        for wrong in ([], [3], [-1], [0, 0], [0.5]):
            with pytest.raises(envfleet.UsageError, match="env_ids"):
                pool.set_attr("name", "x", wrong)
        assert pool.get_attr("name") == ("y", "all of these", "all of these")


def test_a_rebuilt_vector_env_has_what_was_set_for_some():
    with make("vector") as pool:
        pool.reset(seed=0)
        pool.set_attr("name", "set", [1])
        with pytest.raises(envfleet.EnvFailed):
            pool.reset(options={"fail": True})
        pool.reset(seed=0)
        assert pool.get_attr("name") == ("env", "set", "env")


def test_a_vector_env_that_cannot_reach_single_envs_says_so():
    def build(num_envs):  # (Shared memory would leave a file of multiprocessing open.)
        return gymnasium.vector.AsyncVectorEnv([ScriptedEnv] * num_envs, shared_memory=False)

    with envfleet.make(build, 2, backend="vector") as pool:
        with pytest.raises(envfleet.UsageError, match="sets 'name' of all its envs or of none"):
            pool.set_attr("name", "x", [1])
        pool.set_attr("name", ["a", "b"])
        assert pool.get_attr("name") == ("a", "b")


def test_attributes_of_native_envs_cannot_be_set_for_some_either():
    pool = envfleet.make("CartPole-v1", 2, backend="native")
    with pool, pytest.raises(envfleet.UsageError, match="'gravity' of a native env cannot be set"):
        pool.set_attr("gravity", 1.0, [0])


DIFFERENT = [Box(0, high, (2,), np.float32) for high in (1, 2, 3)]


@python_backends
def test_observation_spaces_may_differ_in_their_bounds(backend):
    factories = [lambda space=space: BoundedEnv(space) for space in DIFFERENT]
    with envfleet.make(factories, backend=backend, observation_mode="different") as pool:
        assert pool.single_observation_space == DIFFERENT[0]
        assert pool.observation_space == batch_differing_spaces(DIFFERENT)
        obs, _ = pool.reset(seed=0)
        assert pool.observation_space.contains(obs)
        assert pool.observation_space.contains(pool.step(np.zeros(3, np.int64))[0])
    with pytest.raises(RuntimeError, match=r"env 1 has another observation_space .*observation_mode='different'"):
        envfleet.make(factories, backend=backend)


@python_backends
@pytest.mark.parametrize(
    "other", [Box(0, 1, (3,), np.float32), Box(0, 1, (2,), np.float64), Discrete(2), Dict(a=DIFFERENT[0])], ids=str
)
def test_observation_spaces_of_another_form_are_refused(backend, other):
    factories = [lambda space=space: BoundedEnv(space) for space in (DIFFERENT[0], other)]
    with pytest.raises(envfleet.SpacesDiffer, match="env 1 has another observation_space than env 0") as caught:
        envfleet.make(factories, backend=backend, observation_mode="different")
    assert "pass observation_mode" not in str(caught.value)


@backends
def test_observation_modes_that_a_pool_does_not_have_are_refused(backend):
    with pytest.raises(envfleet.UsageError, match="observation_mode must be 'same' or 'different'; got 'other'"):
        make(backend, observation_mode="other")


def test_a_vector_env_decides_about_its_observations_itself():
    with pytest.raises(envfleet.UsageError, match="say observation_mode to what makes it"):
        make("vector", observation_mode="different")


def test_native_envs_have_equal_bounds_in_any_mode():
    with envfleet.make("CartPole-v1", 2, backend="native", observation_mode="different") as pool:
        expected = batch_differing_spaces([pool.single_observation_space] * 2)
        assert pool.observation_space == expected
        assert_array_equal(pool.reset(seed=0)[0].shape, (2, 4))
