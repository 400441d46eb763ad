"""Native envs on Box2D: Gymnasium's as far as two versions of Box2D can agree, and themselves to the last bit.

Gymnasium runs Box2D 2.3.10, the native envs 2.4.1, so trajectories drift apart after contacts. What holds: the same
spaces, draws and worlds, the same flight before the first contact (nearly), and the same returns and lengths of
episodes as far as statistics can tell.
"""

import dataclasses
from pathlib import Path

import gymnasium
import numpy as np
import pytest
from gymnasium.vector import AutoresetMode, SyncVectorEnv

import envfleet
from envfleet.pool.simulators import box2d as native_box2d
from tests.support.box2d_policies import FIRST_SEED, TRIALS, WIND
from tests.support.equal_arrays import assert_array_equal

pytestmark = pytest.mark.slow

IDS = ["LunarLander-v3", "LunarLanderContinuous-v3", "BipedalWalker-v3", "BipedalWalkerHardcore-v3"]
OPTIONS = [
    *((env_id, {}) for env_id in IDS),
    ("LunarLander-v3", {"continuous": True, "gravity": -3.7}),
    ("LunarLander-v3", {**WIND, "wind_power": 20.0, "turbulence_power": 2}),
    ("LunarLanderContinuous-v3", {**WIND, "gravity": -11.9}),
    ("BipedalWalker-v3", {"hardcore": True}),
]
GOLDEN = Path(__file__).parent / "golden" / "box2d_episodes.npz"

HULL, ANGLES, LIDAR = [0, 1, 2, 3], [4, 6, 9, 11], list(range(14, 24))  # of the walker's observation

needs_native = pytest.mark.skipif(not native_box2d.is_available(), reason="EnvFleet was built without libbox2d-dev")


def make(env_id, num_envs, **kwargs):
    return envfleet.make(env_id, num_envs, backend="native", **kwargs)


def sampled_actions(pool, num_steps, seed):
    pool.action_space.seed(seed)
    return [pool.action_space.sample() for _ in range(num_steps)]


# -- equal to Gymnasium's --


@needs_native
@pytest.mark.parametrize(("env_id", "kwargs"), OPTIONS)
def test_spaces_and_settings(env_id, kwargs):
    reference = gymnasium.make(env_id, **kwargs)
    with make(env_id, 1, env_kwargs=kwargs) as pool:
        assert pool.single_observation_space == reference.observation_space
        assert pool.single_action_space == reference.action_space
        assert pool.metadata["render_modes"] == reference.metadata["render_modes"]
        assert pool.metadata["render_fps"] == reference.metadata["render_fps"]
    reference.close()


@needs_native
@pytest.mark.parametrize(("env_id", "kwargs"), OPTIONS)
def test_first_observations(env_id, kwargs):
    """Also of the second episode: a reset takes as many random numbers as Gymnasium's."""
    reference = SyncVectorEnv([lambda: gymnasium.make(env_id, **kwargs)] * 20)
    with make(env_id, 20, env_kwargs=kwargs) as pool:
        for seed in (5, None):
            (ours, infos), (theirs, _) = pool.reset(seed=seed), reference.reset(seed=seed)
            assert ours.dtype == theirs.dtype and not infos
            np.testing.assert_allclose(ours, theirs, atol=1e-3)  # most: 3e-4
    reference.close()


@needs_native
@pytest.mark.parametrize(("env_id", "kwargs"), [each for each in OPTIONS if "Lunar" in each[0]])
def test_flight(env_id, kwargs):
    """Before the first contact only the joints of the legs are solved in another way."""
    reference = SyncVectorEnv([lambda: gymnasium.make(env_id, **kwargs)] * 10)
    with make(env_id, 10, env_kwargs=kwargs) as pool:
        pool.reset(seed=5), reference.reset(seed=5)
        for actions in sampled_actions(pool, 20, seed=1):
            ours, theirs = pool.step(actions), reference.step(actions)
            np.testing.assert_allclose(ours[0], theirs[0], atol=1e-3)
            np.testing.assert_allclose(ours[1], theirs[1], atol=0.05)
            assert_array_equal(ours[2], theirs[2])
            assert ours[0].dtype == theirs[0].dtype and not ours[4]
    reference.close()


@needs_native
@pytest.mark.parametrize("env_id", IDS[2:])
def test_first_steps_of_the_walker(env_id):
    """It stands on the ground from the beginning, and some walkers stand up in another way."""
    reference = SyncVectorEnv([lambda: gymnasium.make(env_id)] * 20)
    with make(env_id, 20) as pool:
        pool.reset(seed=5), reference.reset(seed=5)
        for actions in sampled_actions(pool, 3, seed=1):
            ours, theirs = pool.step(actions), reference.step(actions)
            for part, most in ((HULL, 0.005), (ANGLES, 0.05), (LIDAR, 0.005)):
                assert np.median(np.abs(ours[0][:, part] - theirs[0][:, part]).max(axis=1)) < most
            assert np.median(np.abs(ours[1] - theirs[1])) < 0.05
    reference.close()


def play(trial, num_at_once=25):
    """Returns and lengths of the episodes."""
    returns, lengths = np.zeros(trial.num_episodes), np.zeros(trial.num_episodes, int)
    numbers = np.arange(num_at_once)  # of the episode that each env plays
    is_played = np.zeros(trial.num_episodes, bool)
    with make(
        trial.env_id,
        num_at_once,
        env_kwargs=trial.env_kwargs,
        max_episode_steps=trial.max_episode_steps,
        autoreset_mode=AutoresetMode.DISABLED,
    ) as pool:
        obs = pool.reset(seed=(FIRST_SEED + numbers).tolist())[0]
        policies = [trial.make_policy(FIRST_SEED + number) for number in numbers]
        while not is_played.all():
            actions = np.array([policy(row) for policy, row in zip(policies, obs, strict=True)])
            obs, rewards, terminated, truncated, _ = pool.step(actions)
            counts = ~is_played[numbers]  # at the end some envs play episodes again
            np.add.at(returns, numbers[counts], rewards[counts])
            np.add.at(lengths, numbers[counts], 1)
            ended = terminated | truncated
            if ended.any():
                is_played[numbers[ended]] = True
                for env_id in np.flatnonzero(ended):
                    numbers[env_id] = (numbers[env_id] + num_at_once) % trial.num_episodes
                    policies[env_id] = trial.make_policy(FIRST_SEED + numbers[env_id])
                obs = pool.reset(seed=(FIRST_SEED + numbers).tolist(), options={"reset_mask": ended})[0]
    return returns, lengths


def ks_distance(a, b):
    """The two-sample statistic of Kolmogorov and Smirnov: the largest distance of the distributions."""
    values = np.concatenate([a, b])
    below_a = np.searchsorted(np.sort(a), values, side="right") / len(a)
    below_b = np.searchsorted(np.sort(b), values, side="right") / len(b)
    return np.abs(below_a - below_b).max()


@needs_native
@pytest.mark.long
@pytest.mark.parametrize("trial", TRIALS, ids=str)
def test_returns_and_lengths_are_gymnasiums(trial):
    """500 episodes with a random and with a good policy, against golden/make_box2d_episodes.py's of Gymnasium.

    Both samples have the same seeds, so they are closer than independent ones would be, and what is left is the
    difference of the engines. The tests are those for independent samples.
    """
    with np.load(GOLDEN) as golden:
        expected = {name: golden[f"{trial}/{name}"] for name in ("returns", "lengths")}
    for (name, theirs), ours in zip(expected.items(), play(trial), strict=True):
        n = len(theirs)
        assert ks_distance(ours, theirs) < 1.63 * np.sqrt(2 / n), name  # alpha = 0.01
        standard_error = np.sqrt((ours.var() + theirs.var()) / n)
        assert abs(ours.mean() - theirs.mean()) < 3 * standard_error, name


# -- equal to themselves --


def trajectory(pool, actions):
    return [tuple(np.array(each) for each in pool.step(action)[:4]) for action in actions]


def require_equal_bits(these, those):
    for this, that in zip(these, those, strict=True):
        for a, b in zip(this, that, strict=True):
            assert_array_equal(a, b)


@needs_native
@pytest.mark.parametrize("env_id", IDS)
def test_threads_and_neighbours_change_nothing(env_id):
    num_envs = 12
    with make(env_id, num_envs, num_workers=1) as alone, make(env_id, num_envs, num_workers=4) as four:
        actions = sampled_actions(alone, 300, seed=3)
        assert_array_equal(alone.reset(seed=7)[0], four.reset(seed=7)[0])
        expected = trajectory(alone, actions)
        require_equal_bits(trajectory(four, actions), expected)
        alone.reset(seed=7)  # in worlds that were used before
        require_equal_bits(trajectory(alone, actions), expected)
    with make(env_id, 1) as single:
        single.reset(seed=7 + 5)
        ours = trajectory(single, [action[5:6] for action in actions])
        require_equal_bits(ours, [tuple(column[5:6] for column in each) for each in expected])


@needs_native
@pytest.mark.parametrize("env_id", ["LunarLander-v3", "BipedalWalkerHardcore-v3"])
def test_batches_change_nothing(env_id):
    num_envs, num_steps = 8, 150
    with make(env_id, num_envs) as whole, make(env_id, num_envs, batch_size=3, num_workers=3) as halves:
        actions = np.array(sampled_actions(whole, num_steps, seed=3))
        whole.reset(seed=7)
        expected = trajectory(whole, actions)
        num_done = np.zeros(num_envs, int)
        halves.async_reset(seed=7)
        while num_done.min() < num_steps:
            obs, rewards, terminated, truncated, info = halves.recv()
            for row, env_id in enumerate(info["env_id"]):
                step = num_done[env_id] - 1
                if 0 <= step < num_steps:
                    ours = (obs[row], rewards[row], terminated[row], truncated[row])
                    require_equal_bits([ours], [tuple(column[env_id] for column in expected[step])])
                num_done[env_id] += 1
            sent = np.array(info["env_id"])
            halves.send(actions[np.minimum(num_done[sent] - 1, num_steps - 1), sent], sent)


@needs_native
@pytest.mark.parametrize(("env_id", "kwargs"), [*OPTIONS])
def test_a_restored_env_goes_on_alike(env_id, kwargs):
    with make(env_id, 4, env_kwargs=kwargs) as pool, make(env_id, 4, env_kwargs=kwargs) as other:
        actions = sampled_actions(pool, 260, seed=3)
        pool.reset(seed=1)
        trajectory(pool, actions[:130])  # some have begun another episode by now
        states = pool.get_state()
        expected = trajectory(pool, actions[130:])
        pool.set_state(states)
        require_equal_bits(trajectory(pool, actions[130:]), expected)
        other.set_state(states[::-1])
        assert other.get_state()[0].state == states[3].state
        mirrored = trajectory(other, [action[::-1] for action in actions[130:]])
        require_equal_bits(mirrored, [tuple(column[::-1] for column in each) for each in expected])


@needs_native
def test_episodes_longer_than_a_state_holds():
    num_envs, limit = 10, 2000
    with make("BipedalWalker-v3", num_envs, max_episode_steps=-1) as pool:
        actions = sampled_actions(pool, limit + 2, seed=0)
        pool.reset(seed=0)
        has_ended = np.zeros(num_envs, bool)
        for step in actions[:limit]:
            has_ended |= pool.step(step)[2]
        long_lived = int(np.flatnonzero(~has_ended)[0])  # walkers that sit on their legs
        at_the_limit = pool.get_state([long_lived])
        obs = np.array(pool.step(actions[limit])[0][long_lived])
        beyond = pool.get_state([long_lived])
        expected = np.array(pool.step(actions[limit + 1])[0][long_lived])
        with pytest.raises(envfleet.UsageError, match=r"2001 steps.*up to step 2000"):
            pool.set_state(beyond, [long_lived])
        pool.set_state(at_the_limit, [long_lived])
        assert_array_equal(pool.step(actions[limit])[0][long_lived], obs)
        assert_array_equal(pool.step(actions[limit + 1])[0][long_lived], expected)


@needs_native
@pytest.mark.parametrize(("where", "number"), [(0, np.nan), (0, -7.0), (1, 1e9), (1, 3.0), (1, np.nan)])
def test_states_that_are_none(where, number):
    """Nothing happens to any env, not even to those whose states are right."""
    with make("LunarLander-v3", 2) as pool:
        actions = sampled_actions(pool, 30, seed=0)
        pool.reset(seed=0)
        saved = pool.get_state()
        trajectory(pool, actions[:10])
        before = pool.get_state()
        numbers = np.frombuffer(saved[1].state).copy()
        numbers[where] = number
        wrong = dataclasses.replace(saved[1], state=numbers.tobytes())
        with pytest.raises(envfleet.UsageError, match="no state that get_state"):
            pool.set_state([saved[0], wrong])
        after = pool.get_state()
        assert after == before
        expected = trajectory(pool, actions[10:])
        pool.set_state(before)
        require_equal_bits(trajectory(pool, actions[10:]), expected)


@needs_native
@pytest.mark.parametrize(
    ("env_id", "kwargs", "other"),
    [
        ("LunarLander-v3", {}, WIND),
        ("LunarLander-v3", WIND, {"gravity": -9.0}),
        ("BipedalWalker-v3", {}, {"hardcore": True}),
    ],
)
def test_a_state_of_an_env_with_other_arguments(env_id, kwargs, other):
    with make(env_id, 1, env_kwargs=kwargs) as pool, make(env_id, 1, env_kwargs=other) as stranger:
        pool.reset(seed=0)
        stranger.reset(seed=0)
        with pytest.raises(envfleet.UsageError, match="other arguments"):
            stranger.set_state(pool.get_state())


# -- options and what goes wrong --


@needs_native
def test_gravity_out_of_bounds():
    for gravity in (-12.0, 0.0, 3.0):
        with pytest.raises(envfleet.UsageError, match="'gravity' must be between -12 and 0"):
            make("LunarLander-v3", 1, env_kwargs={"gravity": gravity})
        with pytest.raises(Exception, match="must be between -12 and 0"):
            envfleet.make("LunarLander-v3", 1, env_kwargs={"gravity": gravity})


@needs_native
@pytest.mark.parametrize(("name", "value"), [("wind_power", 21.0), ("wind_power", -1), ("turbulence_power", 2.5)])
def test_wind_beyond_what_is_recommended(name, value):
    with pytest.warns(UserWarning, match=f"{name} value is recommended to be between"):
        make("LunarLander-v3", 1, env_kwargs={**WIND, name: value}).close()


@needs_native
@pytest.mark.parametrize(
    "kwargs", [{"enable_wind": 1}, {"continuous": "yes"}, {"wind_power": np.inf}, {"turbulence_power": 2e6}]
)
@pytest.mark.filterwarnings("ignore:.*recommended")
def test_what_only_python_can_do_runs_in_processes(kwargs):
    with pytest.raises(envfleet.UsageError, match="backend='native' is not available"):
        make("LunarLander-v3", 1, env_kwargs=kwargs)
    with envfleet.make("LunarLander-v3", 1, env_kwargs=kwargs) as pool:
        assert pool.backend == "process"


@needs_native
def test_strong_wind_and_great_actions_do_no_harm():
    kwargs = {**WIND, "wind_power": 1e6, "turbulence_power": -1e6, "continuous": True}
    with pytest.warns(UserWarning), make("LunarLander-v3", 4, env_kwargs=kwargs) as pool:
        pool.reset(seed=0)
        for _ in range(200):
            assert np.isfinite(pool.step(np.full((4, 2), 3e38, np.float32))[0]).all()
    with make("BipedalWalker-v3", 4) as pool:
        pool.reset(seed=0)
        for _ in range(200):
            assert np.isfinite(pool.step(np.full((4, 4), -np.inf, np.float32))[0]).all()


# -- rendering --


@needs_native
@pytest.mark.parametrize(
    ("env_id", "kwargs", "share"),
    [("LunarLander-v3", {}, 0.001), ("LunarLanderContinuous-v3", WIND, 0.001), ("BipedalWalkerHardcore-v3", {}, 0.02)],
)
def test_pictures_are_gymnasiums(env_id, kwargs, share):
    """Flames of the engines and the walker's lidar included; a body may be a pixel off."""
    reference = gymnasium.make(env_id, render_mode="rgb_array", **kwargs)
    with make(env_id, 2, env_kwargs=kwargs, render_mode="rgb_array") as pool:
        pool.reset(seed=[3, 4])
        reference.reset(seed=3)
        reference.render()
        for actions in sampled_actions(pool, 12, seed=1):
            pool.step(actions)
            reference.step(actions[0])
            theirs = reference.render()
            ours, neighbour = pool.render()
            assert ours.shape == theirs.shape and ours.dtype == theirs.dtype
            assert np.mean(np.any(ours != theirs, axis=-1)) < share
            assert np.mean(np.any(neighbour != theirs, axis=-1)) > 2 * share
    reference.close()


@needs_native
def test_attributes_come_from_the_state():
    with make("LunarLander-v3", 2, env_kwargs=WIND) as pool:
        pool.reset(seed=0)
        obs = pool.step(np.array([2, 2]))[0]
        angles = [lander.angle for lander in pool.get_attr("lander")]
        assert angles[-1] == obs[-1, 4]  # one instance answers for all envs, one after the other
        assert pool.get_attr("enable_wind") == (True, True)
        assert pool.backend == "native"
