"""No env is built, reset or stepped that the caller did not ask for: each one writes down what is done to it."""

import os
import sys
from collections import Counter
from functools import partial

import gymnasium
import numpy as np
import pytest
from gymnasium.vector import SyncVectorEnv

import envfleet
from envfleet.contract.errors import ChildDied
from tests.support.waiting import wait_until

pytestmark = pytest.mark.slow

NUM_ENVS = 5


class Robot(gymnasium.Env):
    """There are NUM_ENVS of them, each with a door that only one program can enter."""

    observation_space = gymnasium.spaces.Box(0, 9, (1,))
    action_space = gymnasium.spaces.Discrete(5)

    def __init__(self, path, exits_in=None):
        self.path, self.exits_in = path, exits_in
        self.note("built")

    def note(self, what):
        with open(self.path, "a") as file:
            file.write(f"{what}\n")
        if what == self.exits_in:
            sys.exit(f"left in {what}")

    def reset(self, *, seed=None, options=None):
        self.note("reset")
        return np.zeros(1, np.float32), {}

    def step(self, action):
        self.note("step")
        return np.ones(1, np.float32), 0.0, False, False, {}

    def close(self):
        self.note("close")


def vector_of(robot, num_envs):
    return SyncVectorEnv([robot] * num_envs)


BACKENDS = {
    "serial": {"backend": "serial"},
    "process": {"backend": "process"},
    "process, one for each env": {"backend": "process", "num_workers": NUM_ENVS},
    "process, async": {"backend": "process", "batch_size": 2},
    "process, restart": {"backend": "process", "on_env_error": "restart"},
    "vector": {"backend": "vector"},
}


@pytest.fixture
def notes(tmp_path):
    """What the robots wrote, counted; and where they write it."""
    path = tmp_path / "notes"
    path.touch()
    return lambda: Counter(path.read_text().split()), partial(Robot, path)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_pool_does_what_it_is_told_and_nothing_else(notes, backend):
    counts, robot = notes
    if backend == "vector":
        robot = partial(vector_of, robot)
    with envfleet.make(robot, NUM_ENVS, **BACKENDS[backend]) as pool:
        assert counts() == {"built": NUM_ENVS}
        pool.reset(seed=0)
        assert counts() == {"built": NUM_ENVS, "reset": NUM_ENVS}
        pool.send(np.zeros(NUM_ENVS, int))
        pool.recv()
        wait_until(lambda: counts() == {"built": NUM_ENVS, "reset": NUM_ENVS, "step": NUM_ENVS}, "all have stepped")
    assert counts() == {"built": NUM_ENVS, "reset": NUM_ENVS, "step": NUM_ENVS, "close": NUM_ENVS}


def test_a_pool_whose_envs_differ_closes_those_it_has_built(notes):
    counts, robot = notes

    def another(space):
        env = robot()
        env.observation_space = space
        return env

    kwargs = [{"space": gymnasium.spaces.Box(0, 9, (1 + env_id // 4,))} for env_id in range(NUM_ENVS)]
    with pytest.raises(envfleet.UsageError, match="env 4 has another observation_space than env 0"):
        envfleet.make(another, NUM_ENVS, env_kwargs=kwargs, backend="process", num_workers=2)
    assert counts() == {"built": NUM_ENVS, "close": NUM_ENVS}


@pytest.mark.parametrize("backend", ["serial", "process"])
@pytest.mark.parametrize("exits_in", ["reset", "step"])
def test_an_env_that_exits_in_a_step_is_not_called_one_that_cannot_be_built(notes, backend, exits_in):
    _, robot = notes
    with envfleet.make(partial(robot, exits_in=exits_in), 2, backend=backend) as pool:
        with pytest.raises(envfleet.EnvFailed, match=rf"env \d raised SystemExit: left in {exits_in}") as raised:
            pool.reset(seed=0)
            pool.step(np.zeros(2, int))
        assert "cannot be built" not in str(raised.value) and "sys.exit(" in raised.value.child_traceback


def test_an_env_that_exits_while_it_is_built_says_so(notes):
    _, robot = notes
    with pytest.raises(envfleet.EnvFailed, match="env 0 cannot be built: SystemExit: left in built"):
        envfleet.make(partial(robot, exits_in="built"), 2, backend="process")
    factories = [robot, partial(robot, exits_in="built")]
    with pytest.raises(envfleet.EnvFailed, match="env 1 cannot be built: SystemExit: left in built"):
        envfleet.make(factories, 2, backend="process", num_workers=2)


def test_a_process_that_ends_while_it_builds_the_first_env():
    with pytest.raises(ChildDied, match="the process that built the first env left with exit status 9"):
        envfleet.make(lambda: os._exit(9), 2, backend="process")


def test_an_env_that_takes_too_long_to_build():
    with pytest.raises(envfleet.PoolTimeout, match=r"the first env was not built after start_timeout_s=0\.5 s"):
        envfleet.make(_never_built, 2, backend="process", start_timeout_s=0.5)


def _never_built():
    import threading

    threading.Event().wait()
