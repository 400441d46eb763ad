"""Workers build, reset and step the envs that the caller asked for and no others: each one takes notes."""

from collections import Counter
from functools import partial

import gymnasium
import numpy as np
import pytest

import envfleet
from envfleet.testing.cluster_arguments import cluster_arguments
from tests.support.envs.cluster_envs import Agent

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("quick_workers")]

NUM_ENVS = 4
BACKENDS = {
    "serial": {"backend": "serial"},
    "process": {"backend": "process"},
    "process, two for each worker": {"backend": "process", "pool_workers": 2},
}


class Robot(gymnasium.Env):
    observation_space = gymnasium.spaces.Box(0, 9, (4,))
    action_space = gymnasium.spaces.Discrete(3)

    def __init__(self, path):
        self.path = path
        self.note("built")

    def note(self, what):
        with open(self.path, "a") as file:
            file.write(f"{what}\n")

    def reset(self, *, seed=None, options=None):
        self.note("reset")
        return np.zeros(4, np.float32), {}

    def step(self, action):
        self.note("step")
        return np.ones(4, np.float32), 0.0, False, False, {}

    def close(self):
        self.note("close")


@pytest.fixture
def notes(tmp_path):
    """What the robots wrote, counted; and a robot that writes there."""
    path = tmp_path / "notes"
    path.touch()
    return lambda: Counter(path.read_text().split()), partial(Robot, path)


def times(resets=0, steps=0, closes=0):
    done = {"built": NUM_ENVS, "reset": resets * NUM_ENVS, "step": steps * NUM_ENVS, "close": closes * NUM_ENVS}
    return {what: number for what, number in done.items() if number}


@pytest.mark.parametrize("backend", BACKENDS)
def test_steps_then_rollouts_then_steps(notes, backend):
    counts, robot = notes
    with envfleet.ClusterEnv(robot, 2, 2, **cluster_arguments(BACKENDS[backend])) as cluster:
        assert counts() == times()
        cluster.reset(seed=0)
        assert counts() == times(resets=1)
        cluster.step(np.zeros(NUM_ENVS, int))
        assert counts() == times(resets=1, steps=1)
        assert cluster.rollout(Agent(), 5).rewards.shape == (5, NUM_ENVS)
        assert counts() == times(resets=2, steps=6)  # the episodes of step() end there
        cluster.reset(seed=0)
        cluster.step(np.zeros(NUM_ENVS, int))
        assert counts() == times(resets=3, steps=7)
    assert counts() == times(resets=3, steps=7, closes=1)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_rollout_begins_with_the_episodes_of_a_reset(notes, backend):
    counts, robot = notes
    with envfleet.ClusterEnv(robot, 2, 2, **cluster_arguments(BACKENDS[backend])) as cluster:
        cluster.reset(seed=0)
        cluster.rollout(Agent(), 5)
        assert counts() == times(resets=1, steps=5)


@pytest.mark.parametrize("mode", ["next_step", "same_step", "disabled"])
def test_a_mode_that_was_chosen(notes, mode):
    counts, robot = notes
    with envfleet.ClusterEnv(robot, 2, 2, backend="process", autoreset_mode=mode) as cluster:
        cluster.reset(seed=0)
        cluster.step(np.zeros(NUM_ENVS, int))
        assert counts() == times(resets=1, steps=1)
