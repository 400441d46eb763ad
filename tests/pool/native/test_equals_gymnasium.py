"""Native envs equal Gymnasium's: same seeds and same actions bring the same episodes, to the last bit.

Two exceptions, both about sines:
 - Acrobot's first observation. Its state is float32 then, for which NumPy has its own sine: the two may differ in the
   last bit (1 ulp). Nothing is computed from it, so all later rows are equal again.
 - On machines where NumPy has its own sine for float64 too (AVX-512), envs that call np.sin are equal within float32
   rounding, and are compared over short episodes, before such differences can grow.
"""

import math
from dataclasses import dataclass, field

import gymnasium
import numpy as np
import pytest
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from gymnasium.wrappers.vector import RecordEpisodeStatistics
from numpy.testing import assert_allclose, assert_array_max_ulp

import envfleet
from tests.support.equal_arrays import assert_array_equal

pytestmark = pytest.mark.slow

NUM_ENVS = 20
SAMPLE = np.linspace(-20.0, 20.0, 5_000)
NUMPY_USES_LIBM = all(np.cos(x) == math.cos(x) and np.sin(x) == math.sin(x) for x in SAMPLE)
USE_NUMPYS_SINE = {"CartPole-v0", "CartPole-v1", "Pendulum-v1", "Acrobot-v1"}


@dataclass(frozen=True)
class Case:
    id: str
    kwargs: dict = field(default_factory=dict)
    max_episode_steps: int | None = None  # None: as registered
    num_episodes: int = 1000
    swing: int | None = None  # half of the envs push along this velocity (a column of obs), and so reach the goal

    def __str__(self):
        return ",".join([self.id, *(f"{name}={value}" for name, value in self.kwargs.items())])

    @property
    def is_exact(self):
        return NUMPY_USES_LIBM or self.id not in USE_NUMPYS_SINE

    @property
    def time_limit(self):
        return self.max_episode_steps if self.is_exact else 25


CASES = [
    Case("CartPole-v1"),
    Case("CartPole-v1", {"sutton_barto_reward": True}, num_episodes=200),
    Case("MountainCar-v0", swing=1),
    Case("MountainCar-v0", {"goal_velocity": 0.03}, num_episodes=200, swing=1),
    Case("MountainCarContinuous-v0", swing=1),
    Case("MountainCarContinuous-v0", {"goal_velocity": 0.03}, max_episode_steps=200, num_episodes=200, swing=1),
    Case("Pendulum-v1"),
    Case("Pendulum-v1", {"g": 9.81}, num_episodes=200),
    Case("Acrobot-v1", swing=5),
    Case("FrozenLake-v1"),
    Case("FrozenLake8x8-v1"),
    Case("FrozenLake-v1", {"is_slippery": False}, num_episodes=200),
    Case("FrozenLake-v1", {"map_name": "8x8", "success_rate": 0.7}, num_episodes=200),
    Case("FrozenLake-v1", {"reward_schedule": (10, -3, -0.1)}, num_episodes=200),
    Case("FrozenLake-v1", {"desc": None, "map_name": "8x8"}, num_episodes=200),
    Case("FrozenLake-v1", {"desc": ["SFSFF", "FXFHF", "SFGSF"]}, num_episodes=200),
    Case("CliffWalking-v1", max_episode_steps=100),
    Case("CliffWalkingSlippery-v1", max_episode_steps=100, num_episodes=200),
    Case("Taxi-v4"),
    Case("Taxi-v4", {"is_rainy": True, "fickle_passenger": True}, num_episodes=200),
    Case("Taxi-v4", {"is_rainy": True, "rainy_probability": 0.55}, num_episodes=200),
    Case("Taxi-v4", {"fickle_passenger": True, "fickle_probability": 1.0}, num_episodes=200),
    Case("Blackjack-v1", num_episodes=5000),
    Case("Blackjack-v1", {"sab": False, "natural": True}, num_episodes=5000),
    Case("Blackjack-v1", {"sab": False, "natural": False}, num_episodes=1000),
]
NEVER_TERMINATE = {"Pendulum-v1"}


class FloatProb(gymnasium.Wrapper):
    """Gymnasium's reset() gives prob as an int, and SyncVectorEnv then casts the prob of all later envs to int."""

    def reset(self, **kwargs):
        obs, info = self.env.reset(**kwargs)
        if "prob" in info:
            info["prob"] = float(info["prob"])
        return obs, info


def make_reference(env_id, kwargs, max_episode_steps=None, autoreset_mode=AutoresetMode.NEXT_STEP):
    def make_env():
        env = gymnasium.make(env_id, disable_env_checker=True, max_episode_steps=max_episode_steps, **kwargs)
        return FloatProb(env)

    return SyncVectorEnv([make_env] * NUM_ENVS, autoreset_mode=autoreset_mode)


def make_both(case, autoreset_mode=AutoresetMode.NEXT_STEP):
    pool = envfleet.make(
        case.id,
        NUM_ENVS,
        backend="native",
        env_kwargs=case.kwargs,
        max_episode_steps=case.time_limit,
        autoreset_mode=autoreset_mode,
    )
    return pool, make_reference(case.id, case.kwargs, case.time_limit, autoreset_mode)


def draw_actions(rng, pool, obs, swing):
    space = pool.single_action_space
    if isinstance(space, gymnasium.spaces.Discrete):
        actions = rng.integers(space.n, size=pool.num_envs)
        left, right = np.zeros_like(actions), np.full_like(actions, space.n - 1)
    else:  # also beyond the bounds: the envs clip
        size = (pool.num_envs, *space.shape)
        actions = rng.uniform(1.5 * space.low, 1.5 * space.high, size).astype(space.dtype)
        left, right = -np.abs(actions), np.abs(actions)
    if swing is not None:
        actions[::2] = np.where(obs[::2, swing] < 0, left[::2].T, right[::2].T).T
    return actions


def require_equal_obs(ours, theirs, case, was_reset):
    assert isinstance(ours, tuple) == isinstance(theirs, tuple)
    for our, their in zip(*((obs if isinstance(obs, tuple) else (obs,)) for obs in (ours, theirs)), strict=True):
        assert our.dtype == their.dtype
        if not case.is_exact:
            assert_allclose(our, their, rtol=1e-6, atol=1e-6)
        elif case.id == "Acrobot-v1" and was_reset.any():
            assert_array_max_ulp(our[was_reset], their[was_reset], maxulp=1)
            assert_array_equal(our[~was_reset], their[~was_reset])
        else:
            assert_array_equal(our, their)


def require_equal_infos(ours, theirs):
    assert set(ours) == set(theirs)
    for name in ours:
        assert ours[name].dtype == theirs[name].dtype
        assert_array_equal(ours[name], theirs[name])


def require_equal_step(ours, theirs, case, was_reset):
    require_equal_obs(ours[0], theirs[0], case, was_reset)
    assert ours[1].dtype == theirs[1].dtype
    if case.is_exact:
        assert_array_equal(ours[1], theirs[1])
    else:
        assert_allclose(ours[1], theirs[1], rtol=1e-6, atol=1e-6)
    assert_array_equal(ours[2], theirs[2])
    assert_array_equal(ours[3], theirs[3])
    require_equal_infos(ours[4], theirs[4])


def require_equal_resets(pool, reference, case, **kwargs):
    (obs, infos), (their_obs, their_infos) = pool.reset(**kwargs), reference.reset(**kwargs)
    require_equal_obs(obs, their_obs, case, was_reset=np.ones(NUM_ENVS, np.bool_))
    require_equal_infos(infos, their_infos)
    return obs


def require_equal_steps(pool, reference, case, obs, num_episodes=None, num_steps=None):
    """Step both until so many episodes have ended, or so often. Returns the number of terminations."""
    rng = np.random.default_rng(0)
    num_ended, num_terminated, num_stepped = 0, 0, 0
    was_reset = np.zeros(NUM_ENVS, np.bool_)
    while num_ended < num_episodes if num_episodes is not None else num_stepped < num_steps:
        actions = draw_actions(rng, pool, obs, case.swing)
        ours, theirs = pool.step(actions), reference.step(actions)
        require_equal_step(ours, theirs, case, was_reset)
        obs, _, terminations, truncations, _ = ours
        was_reset = terminations | truncations
        num_ended += np.count_nonzero(was_reset)
        num_terminated += np.count_nonzero(terminations)
        num_stepped += 1
    return num_terminated


@pytest.mark.parametrize("part", ["a tenth", pytest.param("the others", marks=pytest.mark.long)])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_episodes(case, part):
    """`make test` has a tenth of the episodes, `make test-all` the others too."""
    is_most = part == "the others"
    num_episodes = case.num_episodes // 10
    num_episodes = case.num_episodes - num_episodes if is_most else num_episodes
    pool, reference = make_both(case)
    with pool:
        assert pool.single_observation_space == reference.single_observation_space
        assert pool.single_action_space == reference.single_action_space
        obs = require_equal_resets(pool, reference, case, seed=321 if is_most else 123)
        num_terminated = require_equal_steps(pool, reference, case, obs, num_episodes=num_episodes)
        if case.id in NEVER_TERMINATE:
            assert num_terminated == 0
        elif case.is_exact and is_most:  # by chance alone, few episodes need not have one
            assert num_terminated > 0
    reference.close()


@pytest.mark.filterwarnings("ignore:.*out of date")
def test_cart_pole_v0():
    case = Case("CartPole-v0", num_episodes=200)
    pool, reference = make_both(case)
    with pool:
        obs = require_equal_resets(pool, reference, case, seed=5)
        require_equal_steps(pool, reference, case, obs, num_episodes=case.num_episodes)


def test_taxi_v3():
    """Gymnasium has only v4 now, which without rain and fickle passengers is the same."""
    case = Case("Taxi-v3")
    reference = make_reference("Taxi-v4", {}, max_episode_steps=200)
    with envfleet.make("Taxi-v3", NUM_ENVS, backend="native") as pool:
        obs = require_equal_resets(pool, reference, case, seed=5)
        require_equal_steps(pool, reference, case, obs, num_episodes=100)


OPTIONS = {
    "CartPole-v1": {"low": -0.2, "high": 0.1},
    "MountainCar-v0": {"low": -1.3, "high": 0.55},
    "MountainCarContinuous-v0": {"low": -1.3, "high": 0.55},
    "Pendulum-v1": {"x_init": 10, "y_init": 9.5},
    "Acrobot-v1": {"low": -4.0, "high": 5},
}


@pytest.mark.parametrize(
    ("env_id", "options"),
    [*OPTIONS.items(), ("CartPole-v1", {"high": 0.2}), ("Pendulum-v1", {"y_init": 0.0}), ("FrozenLake-v1", {"low": 1})],
)
def test_reset_options(env_id, options):
    case = Case(env_id)
    pool, reference = make_both(case)
    with pool:
        for seed in range(20):
            obs = require_equal_resets(pool, reference, case, seed=seed, options=options)
            require_equal_steps(pool, reference, case, obs, num_steps=10)


def test_a_goal_velocity_that_float32_cannot_tell_from_the_limit():
    """At its limit the velocity is a Python float, which is compared in float64: it never reaches this goal's."""
    case = Case("MountainCarContinuous-v0", {"goal_velocity": 0.07 + 1e-12}, swing=1)
    pool, reference = make_both(case)
    with pool:
        for seed in range(5):
            obs = require_equal_resets(pool, reference, case, seed=seed, options={"low": -1.2, "high": -1.0})
            assert require_equal_steps(pool, reference, case, obs, num_steps=100) == 0


@pytest.mark.parametrize("env_id", ["CartPole-v1", "Blackjack-v1", "Taxi-v4"])
def test_seeds_of_each_env_and_resets_without_a_seed(env_id):
    """A reset without a seed, of all envs or of some, goes on with the generator of each env."""
    case = Case(env_id, {"fickle_passenger": True} if env_id == "Taxi-v4" else {})
    seeds = [0, 2**40, *range(7, 7 * NUM_ENVS - 13, 7)]
    mask = np.arange(NUM_ENVS) % 3 == 0
    pool, reference = make_both(case)
    with pool:
        obs = require_equal_resets(pool, reference, case, seed=seeds)
        require_equal_steps(pool, reference, case, obs, num_steps=50)
        obs = require_equal_resets(pool, reference, case)
        require_equal_steps(pool, reference, case, obs, num_steps=50)
        ours, _ = pool.reset(options={"reset_mask": mask})
        theirs, _ = reference.reset(options={"reset_mask": mask})
        require_equal_obs(ours, theirs, case, mask)
        require_equal_steps(pool, reference, case, ours, num_steps=50)


@pytest.mark.parametrize(
    "case",
    [Case("MountainCar-v0", max_episode_steps=20), Case("Taxi-v4", max_episode_steps=20), Case("Blackjack-v1")],
    ids=str,
)
def test_same_step_autoreset(case):
    pool, reference = make_both(case, AutoresetMode.SAME_STEP)
    rng = np.random.default_rng(2)
    num_ended = 0
    with pool:
        obs = require_equal_resets(pool, reference, case, seed=2)
        for _ in range(200):
            actions = draw_actions(rng, pool, obs, case.swing)
            (*ours, infos), (*theirs, their_infos) = pool.step(actions), reference.step(actions)
            final_obs, their_final_obs = (each.pop("final_obs", ()) for each in (infos, their_infos))
            for our, their in zip(final_obs, their_final_obs, strict=True):
                assert_array_equal(our, their)
            require_equal_infos(infos.pop("final_info", {}), their_infos.pop("final_info", {}))
            require_equal_step((*ours, infos), (*theirs, their_infos), case, was_reset=ours[2] | ours[3])
            num_ended += np.count_nonzero(ours[2] | ours[3])
    assert num_ended >= 200


@pytest.mark.parametrize(
    "case", [Case("CartPole-v1"), Case("MountainCarContinuous-v0", swing=1), Case("Blackjack-v1")], ids=str
)
def test_episode_statistics(case):
    pool, reference = make_both(case)
    with pool:
        ours, theirs = RecordEpisodeStatistics(pool), RecordEpisodeStatistics(reference)
        obs, _ = ours.reset(seed=1)
        theirs.reset(seed=1)
        rng = np.random.default_rng(1)
        for _ in range(300):
            actions = draw_actions(rng, pool, obs, case.swing)
            (obs, *_, infos), (*_, their_infos) = ours.step(actions), theirs.step(actions)
            assert ("episode" in infos) == ("episode" in their_infos)
            if "episode" in infos:
                assert_array_equal(infos["_episode"], their_infos["_episode"])
                assert_array_equal(infos["episode"]["l"], their_infos["episode"]["l"])
                assert_array_equal(infos["episode"]["r"], their_infos["episode"]["r"])
        assert list(ours.length_queue) == list(theirs.length_queue) != []
        assert list(ours.return_queue) == list(theirs.return_queue)
