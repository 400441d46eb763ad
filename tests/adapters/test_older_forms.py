"""Gymnasium029 and Gym021: the same steps as the pool's, in the forms of older vector envs."""

from functools import partial

import gymnasium
import numpy as np
import pytest

import envfleet
from envfleet.adapters.gym021 import Gym021
from envfleet.adapters.gymnasium029 import Gymnasium029
from envfleet.adapters.vector_source import VectorSource
from tests.support.envs.walk_env import WalkEnv

NUM_ENVS, NUM_STEPS = 4, 30
FORKED_WITH = ("tests.support.envs.walk_env",)
WALK = partial(WalkEnv, max_steps=4)


def pool(**options):
    return envfleet.make(WALK, NUM_ENVS, backend="serial", autoreset_mode="same_step", **options)


def cluster():
    return envfleet.ClusterEnv(WALK, 2, NUM_ENVS // 2, autoreset_mode="same_step")


def all_actions():
    return np.random.default_rng(1).integers(0, 2, (NUM_STEPS, NUM_ENVS))


def single_episodes(row, seed=3):
    """What one env alone does with its actions: (last observation, info of the last step, return, length)."""
    env = WALK()
    env.reset(seed=seed + row)
    episodes, total, length = [], 0.0, 0
    for actions in all_actions():
        obs, reward, terminated, truncated, info = env.step(actions[row])
        total, length = total + reward, length + 1
        if terminated or truncated:
            episodes.append((obs, info, total, length))
            env.reset()
            total, length = 0.0, 0
    return episodes


@pytest.mark.parametrize("make_envs", [pool, cluster], ids=["pool", "cluster"])
def test_final_infos_are_arrays_of_objects_as_in_gymnasium_029(quick_workers, make_envs):
    envs = Gymnasium029(make_envs())
    assert isinstance(envs, gymnasium.vector.VectorEnv)
    obs, infos = envs.reset(seed=3)
    assert infos["_start"].all() and infos["start"].shape == (NUM_ENVS,)
    seen = {row: [] for row in range(NUM_ENVS)}
    for actions in all_actions():
        obs, _, terminated, truncated, infos = envs.step(actions)
        ended = terminated | truncated
        assert ("final_info" in infos) == ("final_observation" in infos) == ended.any()
        assert "final_obs" not in infos and obs in envs.observation_space
        if not ended.any():
            assert isinstance(infos["where"][0]["side"], np.integer)  # a dictionary of an env is one here, too
            continue
        for name in ("final_info", "final_observation"):
            assert infos[name].dtype == object and infos[name].shape == (NUM_ENVS,)
            np.testing.assert_array_equal(infos[f"_{name}"], ended)
        for row in range(NUM_ENVS):
            assert (infos["final_info"][row] is None) == (not ended[row])
            if ended[row]:
                seen[row].append((infos["final_observation"][row], infos["final_info"][row]))
    envs.close()
    for row, episodes in seen.items():
        expected = single_episodes(row)
        assert len(episodes) == len(expected) > 3
        for (obs, info), (last_obs, last_info, total, length) in zip(episodes, expected, strict=True):
            np.testing.assert_array_equal(obs, last_obs)
            assert info["place"] == last_info["place"] and info["where"] == last_info["where"]
            assert info["episode"]["r"] == np.float32(total) and info["episode"]["l"] == length


@pytest.mark.parametrize("make_envs", [pool, cluster], ids=["pool", "cluster"])
def test_steps_have_four_values_and_infos_are_a_list_as_in_gym_021(quick_workers, make_envs):
    envs = Gym021(make_envs())
    envs.seed(3)
    assert envs.reset() in envs.observation_space
    seen = {row: [] for row in range(NUM_ENVS)}
    for actions in all_actions():
        _, _, dones, infos = envs.step(actions)
        for row, info in enumerate(infos):
            assert ("terminal_observation" in info) == ("episode" in info) == dones[row]
            if dones[row]:
                seen[row].append(info)
    envs.close()
    num_cut = 0
    for row, episodes in seen.items():
        for info, (last_obs, last_info, total, length) in zip(episodes, single_episodes(row), strict=True):
            np.testing.assert_array_equal(info["terminal_observation"], last_obs)
            assert info["place"] == last_info["place"]
            assert info["episode"]["r"] == np.float32(total) and info["episode"]["l"] == length
            has_ended = abs(last_info["place"]) > 3
            assert info.get("TimeLimit.truncated", False) == (length == 4 and not has_ended)
            num_cut += info.get("TimeLimit.truncated", False)
    assert num_cut


class Clipped(gymnasium.Wrapper):
    """As Atari games with reward_clip: the env's own reward is in the info."""

    metadata = {"clips_rewards": True}  # noqa: RUF012

    def step(self, action):
        obs, reward, terminated, truncated, info = self.env.step(action)
        return obs, float(np.sign(reward)), terminated, truncated, info | {"reward": reward}


def test_statistics_count_the_games_own_rewards_where_the_learners_are_clipped():
    envs = Gym021(envfleet.make(lambda: Clipped(WALK()), 1, backend="serial", autoreset_mode="same_step"))
    envs.seed(3)
    envs.reset()
    returns = []
    for actions in all_actions():
        _, rewards, _, infos = envs.step(actions[:1])
        assert abs(rewards[0]) == 1.0
        returns += [info["episode"]["r"] for info in infos if "episode" in info]
    envs.close()
    assert returns == [np.float32(total) for _, _, total, _ in single_episodes(0)]


def test_what_an_env_says_of_its_episodes_itself_is_kept():
    def make_env():
        return gymnasium.wrappers.RecordEpisodeStatistics(WALK())

    envs = Gymnasium029(envfleet.make(make_env, 1, backend="serial", autoreset_mode="same_step"))
    envs.reset(seed=3)
    for actions in all_actions():
        infos = envs.step(actions[:1])[4]
        if "final_info" in infos:
            break
    envs.close()
    assert isinstance(infos["final_info"][0]["episode"]["r"], float)  # our own would be a float32


@pytest.mark.parametrize("adapter", [Gymnasium029, Gym021])
def test_a_script_may_write_to_its_spaces(adapter):
    """CleanRL's SAC sets the dtype of single_observation_space."""
    inner = envfleet.make("Pendulum-v1", 2, autoreset_mode="same_step")
    envs = adapter(inner)
    envs.single_observation_space.dtype = np.float64
    assert inner.single_observation_space.dtype == np.float32
    envs.close()
    assert inner.closed


@pytest.mark.parametrize("adapter", [Gymnasium029, Gym021])
def test_envs_that_reset_later_are_refused(adapter):
    with (
        envfleet.make("CartPole-v1", 2) as inner,
        pytest.raises(envfleet.UsageError, match=f"{adapter.__name__} needs envs .* autoreset_mode='same_step'"),
    ):
        adapter(inner)


def test_next_observations_have_the_last_of_each_episode_that_has_ended():
    make_env = partial(WalkEnv, max_steps=3, has_dict=True)
    with VectorSource(envfleet.make(make_env, 3, backend="serial", autoreset_mode="same_step"), "Test") as source:
        source.reset(seed=0)
        for number in range(1, 7):
            step = source.step(np.ones(3, int))
            place = source.next_obs(step)["place"]
            expected = [step.final_obs(row)["place"] if step.ended[row] else step.obs["place"][row] for row in range(3)]
            np.testing.assert_array_equal(place, expected)
            if number in (3, 6):
                assert step.ended.all() and not np.array_equal(place, step.obs["place"])
