"""What envs say in `info` reaches the learner: in rollouts, in step(agent), in stats()."""

import os
import signal

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.wrappers.vector import RecordEpisodeStatistics

import envfleet
from envfleet import ClusterEnv, UsageError
from envfleet.contract.infos.flat import as_table
from envfleet.contract.infos.store import NOT_INFOS
from envfleet.contract.infos.table import InfoTable
from envfleet.contract.spaces import SpaceTree
from envfleet.testing.programs import require_equal
from tests.support.envs.detach_envs import EveryKindEnv

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("quick_workers")]

CASES = {
    "Taxi": {"env": envfleet.EnvSpec(id="Taxi-v4", max_episode_steps=7)},
    "Ant": {"env": envfleet.EnvSpec(id="Ant-v5", max_episode_steps=7)},
    "process": {"env": EveryKindEnv, "backend": "process"},
    "serial": {"env": EveryKindEnv, "backend": "serial"},
}
OBJECTS = ("word", "list", "nothing", "name", "options")


class RandomAgent:
    """Samples of the action space, of a generator of its own on each worker."""

    def __init__(self, space):
        self.space, self.seen = space, 0

    def seed(self, seed):
        self.space.seed(seed)

    def act(self, obs):
        leaf = obs if isinstance(obs, np.ndarray) else next(iter(obs.values()))
        return envfleet.Acted(np.stack([self.space.sample() for _ in range(len(leaf))]), None, {})

    def log_prob(self, obs, actions):
        raise NotImplementedError

    def values(self, obs):
        return None

    def get_weights(self):
        return {}

    def set_weights(self, weights):
        pass


def rows_of(infos, num_rows, without=()):
    """The info of each env."""
    columns = {key: column for key, column in infos.items() if key not in NOT_INFOS}
    return [
        {key: value for key, value in InfoTable(num_rows, columns).row(row).items() if key not in without}
        for row in range(num_rows)
    ]


def check(rollout, pool, without):
    """Each row of each step, and of each end, is what a pool here says after the same actions."""
    num_envs, num_finals = rollout.num_envs, 0
    tree = SpaceTree(pool.single_action_space)
    finals = rows_of(as_table(rollout.final_infos, len(rollout.final_steps)).columns, len(rollout.final_steps))
    for t in range(rollout.num_steps):
        actions = tree.unflatten([np.ascontiguousarray(leaf[t]) for leaf in tree.flatten(rollout.actions)])
        info = pool.step(actions)[-1]
        got = rows_of(as_table(rollout.infos, num_envs, t).columns, num_envs)
        require_equal(got, rows_of(info, num_envs, without), f"step {t}")
        ended = np.flatnonzero(info.get("_final_info", np.zeros(num_envs, bool)))
        for env in ended.tolist():
            (row,) = np.flatnonzero((rollout.final_steps == t) & (rollout.final_envs == env))
            require_equal(finals[row], rows_of(info["final_info"], num_envs, without)[env], f"end of {t}, {env}")
        num_finals += len(ended)
    assert num_finals == len(rollout.final_steps) > 0


@pytest.mark.parametrize("case", CASES)
def test_infos_are_those_of_a_pool_here(case):
    arguments = dict(CASES[case])
    env = arguments.pop("env")
    with (
        ClusterEnv(env, 2, 3, **arguments) as cluster,
        envfleet.make(env, 6, autoreset_mode="same_step", **arguments) as pool,
    ):
        agent = RandomAgent(cluster.single_action_space)
        cluster.reset(seed=8)
        pool.reset(seed=8)
        for num_steps in (20, 9):
            check(cluster.rollout(agent, num_steps), pool, without=OBJECTS)
        keys = ("prob", "x_position", "sum", "word", "list", "sim", "nothing")
        rollout = cluster.rollout(agent, 12, infos=keys)
        assert {key for key in rollout.infos if key[0] != "_"} <= set(keys)
        every = {"action_mask", "first", "options", "name", "steps", "even", "place", "sometimes"}
        every |= {key for key in pool_keys(case) if key not in keys}
        check(rollout, pool, without=every)
        rollout = cluster.rollout(agent, 3, infos=())
        assert rollout.infos == rollout.final_infos == {}


def pool_keys(case):
    ant = (
        "y_position distance_from_origin x_velocity y_velocity reward_forward reward_ctrl reward_contact reward_survive"
    )
    return ant.split() if case == "Ant" else []


@pytest.mark.parametrize("case", ["Taxi", "serial"])
def test_a_step_is_gymnasiums(case):
    arguments = dict(CASES[case])
    env = arguments.pop("env")
    pool = envfleet.make(env, 4, autoreset_mode="same_step", **arguments)
    here = RecordEpisodeStatistics(pool)
    with ClusterEnv(env, 2, 2, **arguments) as cluster, pool:
        agent, num_ended = RandomAgent(cluster.single_action_space), 0
        cluster.reset(seed=3)
        here.reset(seed=3)
        for _ in range(30):
            *got, info = cluster.step(agent)
            *expected, pool_info = here.step(info.pop("actions"))
            require_equal(got, expected)
            assert info.pop("log_probs") is None
            if "episode" in pool_info:
                num_ended += 1
                durations = [each["episode"].pop("t") for each in (info, pool_info)]
                assert ((durations[0] > 0) == pool_info["_episode"]).all()
            require_equal(dict(sorted(info.items())), dict(sorted(pool_info.items())))
        assert num_ended


class LoudEnv(gymnasium.Env):
    """Says its number of steps, whether it won, and shows pictures if it is told to."""

    observation_space, action_space = spaces.Box(-1e9, 1e9, (2,), np.float64), spaces.Discrete(2)

    def __init__(self, num_pixels=0):
        self.num_pixels, self.number, self.name = num_pixels, 0, np.random.default_rng().integers(1 << 30)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.number = 0
        return self.obs(), self.info()

    def step(self, action):
        self.number += 1
        return self.obs(), 1.0, self.number == 5, False, self.info() | {"success": self.name % 2 == 0}

    def obs(self):
        return np.array([self.name, self.number], np.float64)

    def info(self):
        info = {"number": self.number, "name": int(self.name), "words": ["a", self.number]}
        return info | ({"picture": np.full(self.num_pixels, self.number, np.uint8)} if self.num_pixels else {})


def check_loud(rollout):
    """Infos belong to the observations that came with them."""
    after = np.concatenate([rollout.obs[1:], rollout.next_obs[None]])
    np.testing.assert_array_equal(rollout.infos["number"], after[..., 1])
    np.testing.assert_array_equal(rollout.infos["name"], after[..., 0])
    np.testing.assert_array_equal(rollout.infos["_success"], after[..., 1] > 0)
    np.testing.assert_array_equal(rollout.final_infos["number"], rollout.final_obs[:, 1])
    np.testing.assert_array_equal(rollout.final_infos["name"], rollout.final_obs[:, 0])
    for t, n, words in rollout.infos.get("words", ()):
        assert words == ["a", int(after[t, n, 1])]


def test_a_worker_is_killed():
    agent = RandomAgent(LoudEnv.action_space)
    settings = {"pool": {"on_env_error": "restart"}, "timing": {"heartbeat_s": 0.2}}
    keys = ("number", "name", "success", "words")
    with ClusterEnv(LoudEnv, 2, 3, **settings) as cluster:
        check_loud(cluster.rollout(agent, 16, infos=keys))
        stream = cluster.stream(agent, 16, infos=keys)
        for index in range(12):
            if index == 2:
                os.kill(cluster.stats().workers[1].pid, signal.SIGKILL)
            rollout = next(stream)
            check_loud(rollout)
            assert len(rollout.infos["words"]) == 48
        stream.close()
        rollout = cluster.rollout(agent, 16, infos=keys)
        check_loud(rollout)
        assert rollout.workers.tolist() == [0, 1] and cluster.stats().workers[1].num_restarts == 1


def test_metrics_and_the_limit(caplog):
    agent = RandomAgent(LoudEnv.action_space)
    num_pixels = (16 << 20) // (3 * 10) + 1
    with ClusterEnv(LoudEnv, 2, 3, env_kwargs={"num_pixels": num_pixels}, backend="serial") as cluster:
        assert cluster.stats().metrics == {}
        for _ in range(2):
            rollout = cluster.rollout(agent, 10)
            check_loud(rollout)
            assert "picture" not in rollout.infos
        lines = [each.message for each in caplog.records if "come without the infos" in each.message]
        assert len(lines) == 1
        assert "'picture' (uint8" in lines[0] and "16 MiB" in lines[0] and "infos=('key', ...)" in lines[0]
        metrics = cluster.stats().metrics
        wins = rollout.final_infos["success"].mean()
        assert metrics == {
            "episode_return": 5.0,
            "episode_length": 5.0,
            "number": 5.0,
            "name": pytest.approx(rollout.final_infos["name"].mean()),
            "success": pytest.approx(wins),
        }
        assert 0 <= wins <= 1
        rollout = cluster.rollout(agent, 10, infos=("picture",))
        assert rollout.infos["picture"].shape == (10, 6, num_pixels)
        assert (rollout.infos["picture"][..., 0] == np.arange(1, 11)[:, None] % 5).all()
        for wrong in ("success", (1,), 3):
            with pytest.raises(UsageError, match="infos must be a tuple of keys"):
                cluster.rollout(agent, 10, infos=wrong)
