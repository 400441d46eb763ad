"""DmEnv passes dm_env's own tests, and Acme's actor loop runs on it."""

import gymnasium
import numpy as np
import pytest

import envfleet
from tests.support.envs.learner_envs import OftenEndingEnv

test_utils = pytest.importorskip("dm_env.test_utils")
absltest = pytest.importorskip("absl.testing.absltest")
DmEnv = pytest.importorskip("envfleet.adapters.dm_env").DmEnv

FORKED_WITH = ("tests.support.envs.learner_envs",)


def ours(env=OftenEndingEnv, backend="serial", num_envs=1, **kwargs):
    return DmEnv(envfleet.make(env, num_envs, backend=backend, autoreset_mode="same_step", seed=3, **kwargs))


class TestCartPole(test_utils.EnvironmentTestMixin, absltest.TestCase):
    """dm_env's own tests, on a native env whose pole falls."""

    def make_object_under_test(self):
        return ours("CartPole-v1", "native")

    def make_action_sequence(self):
        return [np.int64(1)] * 30


class TestDicts(test_utils.EnvironmentTestMixin, absltest.TestCase):
    """dm_env's own tests, on a Python env that often ends and shows dicts."""

    def make_object_under_test(self):
        return ours(env_kwargs={"form": "dict"})


class TestPendulum(test_utils.EnvironmentTestMixin, absltest.TestCase):
    """dm_env's own tests, with continuous actions."""

    def make_object_under_test(self):
        return ours("Pendulum-v1", "native", max_episode_steps=7)


def test_steps_are_those_of_the_env():
    ours_, theirs = ours(), OftenEndingEnv()
    rng = np.random.default_rng(0)
    expected, _ = theirs.reset(seed=3)
    step = ours_.reset()
    kinds = set()
    for _ in range(80):
        assert np.array_equal(step.observation, expected)
        action = rng.integers(3)
        step = ours_.step(action)
        expected, reward, terminated, truncated, _ = theirs.step(action)
        assert (step.reward, step.last()) == (reward, terminated or truncated)
        assert step.discount == (0.0 if terminated else 1.0)
        assert np.array_equal(step.observation, expected)
        kinds.add((terminated, truncated))
        if step.last():
            step = ours_.step(action)  # ignored
            expected, _ = theirs.reset()
            assert step.first() and step.reward is None and step.discount is None
    assert kinds == {(False, False), (True, False), (False, True)}
    ours_.close()


class CountingActor:
    """An actor as Acme documents it: select_action, observe_first, observe and update. It checks what it is told."""

    def __init__(self, spec):
        self._spec = spec
        self._rng = np.random.default_rng(0)
        self.episodes, self.num_updates = [], 0

    def select_action(self, observation):
        assert np.array_equal(observation, self.episodes[-1][-1].observation)
        return self._spec.validate(self._rng.integers(self._spec.num_values, dtype=self._spec.dtype))

    def observe_first(self, timestep):
        assert timestep.first()
        self.episodes.append([timestep])

    def observe(self, action, next_timestep):
        assert not next_timestep.first()
        self.episodes[-1].append(next_timestep)

    def update(self, wait=False):
        self.num_updates += 1


def run_loop(environment, actor, num_episodes):
    """The environment loop that Acme documents. (dm-acme 0.4 does not install on Python 3.11.)"""
    for _ in range(num_episodes):
        timestep = environment.reset()
        actor.observe_first(timestep)
        while not timestep.last():
            action = actor.select_action(timestep.observation)
            timestep = environment.step(action)
            actor.observe(action, next_timestep=timestep)
            actor.update()


def test_acmes_actor_loop():
    environment = ours()
    actor = CountingActor(environment.action_spec())
    run_loop(environment, actor, 20)
    lengths = [len(episode) - 1 for episode in actor.episodes]
    assert len(lengths) == 20 and actor.num_updates == sum(lengths)
    assert all(episode[0].observation[2] == length for episode, length in zip(actor.episodes, lengths, strict=True))
    environment.close()


def test_the_loop_on_a_worker(quick_workers):
    cluster = envfleet.ClusterEnv(OftenEndingEnv, 1, 1, backend="serial", autoreset_mode="same_step", seed=3)
    here, there = ours(), DmEnv(cluster)
    actors = [CountingActor(here.action_spec()) for _ in range(2)]
    for environment, actor in zip((here, there), actors, strict=True):
        run_loop(environment, actor, 8)
        environment.close()
    for one, other in zip(actors[0].episodes, actors[1].episodes, strict=True):
        assert [(each.step_type, each.reward, each.discount) for each in one] == [
            (each.step_type, each.reward, each.discount) for each in other
        ]
        assert all(np.array_equal(a.observation, b.observation) for a, b in zip(one, other, strict=True))


def test_what_does_not_fit_is_refused():
    with pytest.raises(envfleet.UsageError, match="these are 2: make them with num_envs=1"):
        ours("CartPole-v1", "native", num_envs=2)
    environment = ours(lambda: DictActionEnv(), "serial")
    environment.reset()
    with pytest.raises(envfleet.InvalidAction, match="without 'speed'"):
        environment.step({"other": 1})
    environment.close()


class DictActionEnv(gymnasium.Env):
    observation_space = gymnasium.spaces.Box(0, 1, (1,))
    action_space = gymnasium.spaces.Dict(speed=gymnasium.spaces.Discrete(2))

    def reset(self, *, seed=None, options=None):
        return np.zeros(1, np.float32), {}

    def step(self, action):
        return np.zeros(1, np.float32), float(action["speed"]), False, False, {}
