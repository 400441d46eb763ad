"""Games of several agents on two workers: several policies by a mapping, rows of agents."""

import os
import signal

import numpy as np
import pytest
import torch  # noqa: TID253
from torch import nn  # noqa: TID253
from torch.distributions import Categorical  # noqa: TID253

import envfleet
from envfleet.adapters.agent_rollouts import agent_rows
from envfleet.adapters.pettingzoo import AgentRows, SharedEnv, agents_of
from envfleet.testing.policy_conformance import check_policy
from tests.support.envs.agents_env import ComingAndGoing

FORKED_WITH = ("torch",)
NAMES = ComingAndGoing.possible_agents
RESTART = {"on_env_error": "restart"}
POLICY_OF = {"a": "learner", "b": "opponent", "c": "learner"}
pytestmark = pytest.mark.usefixtures("quick_workers")


def shared_game():
    return SharedEnv(ComingAndGoing)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.actor, self.critic = nn.Linear(4, 4), nn.Linear(4, 1)

    def get_value(self, obs):
        return self.critic(obs).squeeze(-1)

    def get_action_and_value(self, obs, action=None):
        distribution = Categorical(logits=self.actor(obs))
        action = distribution.sample() if action is None else action
        return action, distribution.log_prob(action), distribution.entropy(), self.get_value(obs)


def mapping():
    torch.manual_seed(1)
    return envfleet.PolicyMapping({"learner": Net(), "opponent": Net()}, POLICY_OF, NAMES)


def test_a_mapping_is_a_policy_as_any_other():
    env = shared_game()
    check_policy(mapping(), env.observation_space, env.action_space)


def test_an_opponent_keeps_the_version_it_was_given():
    both = mapping()
    both.keep_version("opponent", of="learner")
    kept = both.policies["opponent"].module.actor.weight.detach().clone()
    with torch.no_grad():
        both.policies["learner"].module.actor.weight += 1
    assert torch.equal(both.policies["opponent"].module.actor.weight, kept)
    assert torch.equal(both.policies["learner"].module.actor.weight, kept + 1)
    with pytest.raises(envfleet.UsageError, match="no policy is called 'older'"):
        both.keep_version("older", of="learner")
    with pytest.raises(envfleet.UsageError, match="agents without a policy: b, c"):
        envfleet.PolicyMapping({"learner": Net()}, {"a": "learner"}, NAMES)


def test_rows_of_agents_are_those_of_games_stepped_by_hand():
    with envfleet.ClusterEnv(shared_game, num_workers=2, num_envs_per_worker=1, seed=5) as cluster:
        assert agents_of(cluster) == NAMES
        both = mapping()
        rows = agent_rows(cluster.rollout(both, 30))
        rollout = rows.rewards.shape
        assert rollout == (30, 6) and rows.terminations.sum() > 10
        ends = {(t, n): obs for t, n, obs in zip(rows.final_steps, rows.final_rows, rows.final_obs, strict=True)}
        for env in range(2):
            columns = slice(3 * env, 3 * env + 3)
            game = ComingAndGoing()
            seen, _ = game.reset(seed=0)
            for t in range(30):
                game.luck = 0.0
                assert rows.active[t, columns].tolist() == [name in game.agents for name in NAMES]
                acted = list(game.agents)
                acts = {name: int(rows.actions[t, 3 * env + NAMES.index(name)]) for name in acted}
                for name in acted:  # the third number is luck
                    assert rows.obs[t, 3 * env + NAMES.index(name)][[0, 1]].tolist() == seen[name][[0, 1]].tolist()
                seen, rewards, dead, _, _ = game.step(acts)
                assert rows.rewards[t, columns].tolist() == [rewards.get(name, 0) for name in NAMES]
                assert rows.terminations[t, columns].tolist() == [dead.get(name, False) for name in NAMES]
                for name in acted:
                    if dead[name]:
                        final = ends.pop((t, 3 * env + NAMES.index(name)))
                        assert final[[0, 1, 3]].tolist() == seen[name][[0, 1, 3]].tolist()
                if not game.agents:
                    seen, _ = game.reset()
        assert ends == {} and not rows.truncations.any()

        # Each policy acted for its own agents.
        for name, agents in (("learner", (0, 2)), ("opponent", (1,))):
            of_policy = [3 * env + agent for env in range(2) for agent in agents]
            obs, actions = rows.obs[:, of_policy].reshape(-1, 4), rows.actions[:, of_policy].reshape(-1)
            expected = both.policies[name].log_prob(obs, actions)
            assert rows.log_probs[:, of_policy].reshape(-1) == pytest.approx(expected, abs=1e-5)
            values = both.policies[name].values(obs)
            assert rows.extras["values"][:, of_policy].reshape(-1) == pytest.approx(values, abs=1e-5)

        # Without chance the games of the same policies are the same ones.
        played = [cluster.evaluate(both, 4, seed=3) for _ in range(2)]
        assert played[0].returns.tolist() == played[1].returns.tolist()

        # What the opponent keeps is what acts on the workers.
        both.keep_version("opponent", of="learner")
        cluster.publish(both)
        rows = agent_rows(cluster.rollout(both, 4))
        of_opponent = [1, 4]
        obs, actions = rows.obs[:, of_opponent].reshape(-1, 4), rows.actions[:, of_opponent].reshape(-1)
        expected = both.policies["learner"].log_prob(obs, actions)
        assert rows.log_probs[:, of_opponent].reshape(-1) == pytest.approx(expected, abs=1e-5)

        with pytest.raises(envfleet.UsageError, match="takes a rollout of SharedEnv"):
            agent_rows(cluster.rollout(both, 2, infos=()))


def test_a_worker_that_is_killed_costs_no_row_twice():
    with envfleet.ClusterEnv(shared_game, num_workers=2, num_envs_per_worker=1, seed=5, pool=RESTART) as cluster:
        both = mapping()
        agent_rows(cluster.rollout(both, 5))
        os.kill(cluster.stats().workers[0].pid, signal.SIGKILL)
        for _ in range(3):
            rows = agent_rows(cluster.rollout(both, 5))
            # The clock of each game, where an agent is there: one more in each step, or 0 after the game's end.
            clock, there = rows.obs[:, :, 0].reshape(5, 2, 3), rows.active.reshape(5, 2, 3)
            time_of_game = np.where(there, clock, 0).max(-1)
            steps = np.diff(time_of_game, axis=0)
            assert np.all((steps == 1) | (time_of_game[1:] == 0))


def test_a_policy_that_cannot_do_without_chance_is_named():
    policies = {"learner": Drawing(), "opponent": Drawing()}
    both = envfleet.PolicyMapping(policies, POLICY_OF, NAMES)
    obs = {"agents": np.zeros((2, 3, 4), np.float32), "active": np.ones((2, 3), np.int8)}
    assert both.act(obs).actions.shape == (2, 3)
    with pytest.raises(envfleet.UsageError, match="the policy 'learner' has no act_deterministically"):
        both.act_deterministically(obs)


class Drawing:
    """A policy without a mode."""

    def act(self, obs):
        return envfleet.Acted(np.zeros(len(obs), np.int64), np.zeros(len(obs), np.float32), {})

    def log_prob(self, obs, actions):
        return np.zeros(len(obs), np.float32)

    def values(self, obs):
        return None

    def get_weights(self):
        return {}

    def set_weights(self, weights):
        pass


def test_rows_over_a_cluster_that_is_stepped():
    cluster = envfleet.ClusterEnv(shared_game, num_workers=2, num_envs_per_worker=1, autoreset_mode="same_step")
    with AgentRows(cluster) as rows:
        _, infos = rows.reset(seed=1)
        assert infos["active"].tolist() == [True, True, False] * 2
        rewards = rows.step([1, 3, 0, 1, 2, 0])
        assert rewards[1].tolist() == [1, 13, 0, 1, 12, 0]
        assert rewards[2].tolist() == [False, True, False, False, False, False]
        assert rewards[4]["final_obs"][1][[0, 1, 3]].tolist() == [1, 1, 3]
