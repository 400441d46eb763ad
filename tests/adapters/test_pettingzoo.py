"""Games of several agents: rows of (env, agent) are what the game gives when it is stepped by hand."""

import numpy as np
import pytest
from gymnasium.spaces import Box, Discrete

import envfleet
from envfleet.adapters.pettingzoo import AgentRows, SharedEnv, agents_of
from tests.support.envs.agents_env import ComingAndGoing

NUM_GAMES, NAMES = 2, ComingAndGoing.possible_agents


def shared_game(**kwargs):
    return SharedEnv(ComingAndGoing, **kwargs)


class ByHand:
    """One game, stepped as PettingZoo says; each agent's row of a step as AgentRows should have it."""

    def __init__(self, seed, max_steps=None, **kwargs):
        self.game, self.max_steps = ComingAndGoing(**kwargs), max_steps
        self.begin(seed)

    def begin(self, seed=None):
        self.seen, _ = self.game.reset(seed=seed)
        self.num_steps = 0

    def now(self):
        absent = np.zeros(4, np.float32)
        return [(self.seen.get(name, absent), name in self.game.agents) for name in NAMES]

    def step(self, actions):
        acted = list(self.game.agents)
        acts = {name: action for name, action in zip(NAMES, actions, strict=True) if name in acted}
        self.seen, rewards, dead, late, _ = self.game.step(acts)
        self.num_steps += 1
        is_cut = self.num_steps == self.max_steps
        late = {name: late[name] or (is_cut and name in self.game.agents) for name in acted}
        rows = [(rewards.get(name, 0.0), dead.get(name, False), late.get(name, False)) for name in NAMES]
        finals = [self.seen[name] if dead.get(name) or late.get(name) else None for name in NAMES]
        if not self.game.agents or is_cut:
            self.begin()
        return rows, finals, self.now()


def pool(backend="serial", **options):
    return AgentRows(envfleet.make(shared_game, NUM_GAMES, backend=backend, autoreset_mode="same_step", **options))


@pytest.mark.parametrize("options", [{}, {"env_kwargs": {"limit": 4}}, {"max_episode_steps": 3}], ids=str)
@pytest.mark.parametrize("backend", ["serial", "process"])
def test_rows_are_those_of_games_stepped_by_hand(backend, options):
    by_hand = [ByHand(seed, options.get("max_episode_steps"), **options.get("env_kwargs", {})) for seed in (7, 8)]
    rng = np.random.default_rng(1)
    num_ends = num_arrivals = 0
    with pool(backend, **options) as rows:
        obs, infos = rows.reset(seed=7)
        assert infos["env_id"].tolist() == [0, 0, 0, 1, 1, 1] and infos["agent_id"].tolist() == [0, 1, 2] * 2
        for _ in range(40):
            now = [each for game in by_hand for each in game.now()]
            assert np.array_equal(obs, [each[0] for each in now])
            assert infos["active"].tolist() == [each[1] for each in now]
            was_active = infos["active"]
            actions = rng.integers(4, size=rows.num_envs)
            obs, rewards, terminated, truncated, infos = rows.step(actions)
            results = [game.step(part) for game, part in zip(by_hand, actions.reshape(2, 3), strict=True)]
            expected = [each for result in results for each in result[0]]
            got = zip(rewards.tolist(), terminated.tolist(), truncated.tolist(), strict=True)
            assert [tuple(each) for each in got] == expected
            finals = [each for result in results for each in result[1]]
            ended = [each is not None for each in finals]
            assert (terminated | truncated).tolist() == ended
            for row in np.flatnonzero(ended):
                assert np.array_equal(infos["final_obs"][row], finals[row]) and infos["_final_obs"][row]
            num_ends += sum(ended)
            num_arrivals += (infos["active"] & ~was_active)[2::3].sum()
    assert num_ends > 20 and num_arrivals > 3


def test_a_game_that_fails_truncates_the_agents_that_are_there():
    with pool("process", env_kwargs=[{"fails_at": 2}, {}]) as rows:
        rows.reset(seed=1)
        rows.step([0] * 6)
        with pytest.raises(envfleet.EnvFailed, match="the game is broken"):
            rows.step([0] * 6)
        obs, rewards, terminated, truncated, infos = rows.recv()
        assert truncated.tolist() == [True, True, False, False, False, False] and not terminated.any()
        assert rewards.tolist() == [0, 0, 0, 0, 10, 0]
        assert infos["final_obs"][1].tolist() == pytest.approx([1, 1, infos["final_obs"][0][2], 0])
        assert infos["active"].tolist() == [True, True, False, True, True, True]
        assert obs[:2, 0].tolist() == [0, 0]


def test_spaces_and_names():
    with pool() as rows:
        assert rows.agents == agents_of(rows._source.envs) == NAMES
        assert rows.num_envs == 6 and rows.single_action_space == Discrete(4)
        assert rows.single_observation_space == Box(-10, 10, (4,), np.float32)
        assert rows.observation_space.shape == (6, 4)
        rows.reset()
        with pytest.raises(envfleet.UsageError, match=r"must have 6 rows, one for each \(env, agent\); got 2"):
            rows.step([0, 0])


class Unequal(ComingAndGoing):
    """Agents that choose from different numbers of actions."""

    def action_space(self, agent):
        return Discrete(2 + NAMES.index(agent))


def test_what_is_refused():
    with pytest.raises(envfleet.UsageError, match="all agents must have the same action_space"):
        SharedEnv(Unequal)
    with pytest.raises(envfleet.UsageError, match="must return a parallel env of PettingZoo"):
        SharedEnv(dict)
    with (
        envfleet.make("CartPole-v1", 1, autoreset_mode="same_step") as envs,
        pytest.raises(envfleet.UsageError, match="the envs are no SharedEnv"),
    ):
        AgentRows(envs)
    with pytest.raises(envfleet.UsageError, match=r"adapters\.pettingzoo\.SharedEnv"):
        envfleet.make(ComingAndGoing, 1)


def test_a_game_of_pettingzoo_where_agents_die():
    game = pytest.importorskip("pettingzoo.butterfly.knights_archers_zombies_v11")

    def make():
        return SharedEnv(game.parallel_env, max_cycles=60)

    with AgentRows(envfleet.make(make, 1, autoreset_mode="same_step", backend="process")) as rows:
        by_hand = game.parallel_env(max_cycles=60)
        rows.action_space.seed(1)
        obs, infos = rows.reset(seed=3)
        seen, _ = by_hand.reset(seed=3)
        for _ in range(59):
            assert infos["active"].tolist() == [name in by_hand.agents for name in rows.agents]
            for row, name in enumerate(rows.agents):
                if infos["active"][row]:
                    assert np.array_equal(obs[row], seen[name])
            actions = rows.action_space.sample()
            acts = {name: int(actions[rows.agents.index(name)]) for name in by_hand.agents}
            seen, rewards, _, _, _ = by_hand.step(acts)
            if not by_hand.agents:
                break
            obs, got, _, _, infos = rows.step(actions)
            assert got.tolist() == [rewards.get(name, 0) if name in acts else 0 for name in rows.agents]
