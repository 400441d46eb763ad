"""SkrlEnv gives skrl's agents real transitions, also at the end of episodes."""

import numpy as np
import pytest

import envfleet
from tests.support.envs.learner_envs import OftenEndingEnv, played_by_hand

torch = pytest.importorskip("torch")
pytest.importorskip("skrl")
SkrlEnv = pytest.importorskip("envfleet.adapters.skrl").SkrlEnv

FORKED_WITH = ("tests.support.envs.learner_envs",)
NUM_ENVS = 4


def ours(env=OftenEndingEnv, num_envs=NUM_ENVS, backend="serial", **kwargs):
    return SkrlEnv(envfleet.make(env, num_envs, backend=backend, autoreset_mode="same_step", seed=5, **kwargs))


class Recorder:
    """What skrl's trainers need of an agent. It keeps what it is told."""

    def __init__(self):
        self.rows = []

    def record_transition(self, *, observations, next_observations, rewards, terminated, truncated):
        rows = observations, next_observations, rewards, terminated, truncated
        self.rows.append([each.clone().numpy() for each in rows])


def trained(env, actions, is_given_finals=True):
    """The loop of skrl's trainers."""
    agent = Recorder()
    if is_given_finals:
        env.give_final_observations_to(agent)
    observations, _ = env.reset()
    for row in actions:
        next_observations, rewards, terminated, truncated, _ = env.step(torch.as_tensor(row).view(-1, 1))
        agent.record_transition(
            observations=observations,
            next_observations=next_observations,
            rewards=rewards,
            terminated=terminated,
            truncated=truncated,
        )
        observations = next_observations
        if env.num_envs == 1 and (terminated | truncated).any():
            observations, _ = env.reset()
    env.close()
    return [np.stack(each) for each in zip(*agent.rows, strict=True)]


def assert_played(rows, expected):
    obs, next_obs, rewards, terminated, truncated = rows
    assert np.array_equal(obs, expected.obs)
    assert np.array_equal(next_obs, expected.next_obs)
    assert np.array_equal(rewards[..., 0], expected.rewards.astype(np.float32))
    assert np.array_equal(terminated[..., 0], expected.terminated)
    assert np.array_equal(truncated[..., 0], expected.truncated)


@pytest.mark.parametrize("num_envs", [1, NUM_ENVS])
def test_every_row_is_a_real_transition(num_envs):
    actions = np.random.default_rng(1).integers(3, size=(40, num_envs))
    expected = played_by_hand([OftenEndingEnv() for _ in range(num_envs)], actions, 5)
    assert_played(trained(ours(num_envs=num_envs), actions), expected)


def test_without_final_observations_the_next_episode_follows():
    actions = np.ones((40, NUM_ENVS), int)
    expected = played_by_hand([OftenEndingEnv() for _ in range(NUM_ENVS)], actions, 5)
    _, next_obs, *_ = trained(ours(), actions, is_given_finals=False)
    assert np.array_equal(next_obs[:-1], expected.obs[1:])


def test_a_cluster_gives_the_same(quick_workers):
    actions = np.random.default_rng(1).integers(3, size=(30, NUM_ENVS))
    cluster = envfleet.ClusterEnv(OftenEndingEnv, 2, 2, backend="serial", autoreset_mode="same_step", seed=5)
    expected = played_by_hand([OftenEndingEnv() for _ in range(NUM_ENVS)], actions, 5)
    assert_played(trained(SkrlEnv(cluster), actions), expected)


def test_continuous_actions_and_dicts():
    env = ours("Pendulum-v1", backend="native")
    assert (env.num_envs, env.action_space.shape, env.observation_space.shape) == (NUM_ENVS, (1,), (3,))
    env.reset()
    observations, rewards, *_ = env.step(torch.full((NUM_ENVS, 1), 0.5))
    assert observations.shape == (NUM_ENVS, 3) and rewards.shape == (NUM_ENVS, 1)
    assert env.render() is None and env.state() is None
    env.close()
    env.close()
    env = ours(env_kwargs={"form": "dict"})
    observations, _ = env.reset()
    assert observations.shape == (NUM_ENVS, 4)
    env.close()


def test_an_agent_with_some_of_the_envs_is_refused():
    env = ours()
    agent = Recorder()
    env.give_final_observations_to(agent)
    env.reset()
    with pytest.raises(envfleet.UsageError, match="the agent has 2 of 4 envs"):
        for _ in range(10):
            next_observations, *_ = env.step(torch.zeros(NUM_ENVS, 1, dtype=torch.int64))
            agent.record_transition(
                next_observations=next_observations[:2],
                observations=next_observations[:2],
                rewards=torch.zeros(2),
                terminated=torch.zeros(2),
                truncated=torch.zeros(2),
            )
    env.close()


def test_envs_that_do_not_fit_are_refused():
    with (
        envfleet.make("CartPole-v1", 2) as pool,
        pytest.raises(envfleet.UsageError, match="autoreset_mode='same_step'"),
    ):
        SkrlEnv(pool)
