"""ClusterEnv's example agent, a module that acts by forward, is taken as it is: it trains with rollout() and step()."""

import numpy as np
import pytest
import torch  # noqa: TID253 - agents of torch are what this is about

from envfleet import APS, ClusterEnv, losses
from envfleet.cluster.sync import probe_rows
from envfleet.policies.adapting import as_policy
from tests.support.agents.forward_agents import ForwardAgent, WarmAgent

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("quick_workers")]
FORKED_WITH = ("torch",)

N = 16  # envs of each worker


@pytest.fixture(scope="module")
def cluster():
    with ClusterEnv("CartPole-v1", 2, N, seed=0) as cluster:
        yield cluster


def learn(agent, optimizer, obs, actions, log_probs, found, num_epochs=6):
    """Some epochs of decoupled PPO on rows [B, ...]."""
    advantages = (found.advantages - found.advantages.mean()) / (found.advantages.std() + 1e-6)
    with torch.no_grad():
        start = agent(obs, actions)[1]
    for _ in range(num_epochs):
        _, new, entropy, values = agent(obs, actions)
        policy_loss = losses.ppo_decoupled_loss(new, start, log_probs, advantages.flatten())
        value_loss = (values.flatten() - found.returns.flatten()).square().mean()
        optimizer.zero_grad()
        (policy_loss + 0.005 * value_loss - 0.01 * entropy.mean()).backward()
        optimizer.step()


def test_it_trains_with_rollouts(cluster):
    torch.manual_seed(0)
    agent = ForwardAgent()
    optimizer, returns = torch.optim.Adam(agent.parameters(), lr=0.01), []
    cluster.reset(seed=0)
    for _ in range(14):
        rollout = cluster.rollout(agent, 64).to_torch()
        returns.append(float(rollout.episode_returns.mean()))
        found = losses.gae(
            rollout.rewards, rollout.extras["values"], rollout.next_values, rollout.terminations, rollout.truncations,
            rollout.final_values,
        )  # fmt: skip
        rows = rollout.obs.flatten(0, 1), rollout.actions.flatten(), rollout.log_probs.flatten()
        learn(agent, optimizer, *rows, found)
    assert np.mean(returns[-3:]) > 2 * returns[0], returns
    assert cluster.stats().version >= 14


def test_it_trains_with_single_steps(cluster):
    """As with ClusterEnv: step(agent), and the actions and log-probs are in the info."""
    torch.manual_seed(0)
    agent = ForwardAgent()
    optimizer = torch.optim.Adam(agent.parameters(), lr=0.01)
    obs, _ = cluster.reset(seed=0)
    for update in range(2):
        before = as_policy(agent).get_weights()
        before = {name: array.copy() for name, array in before.items()}
        columns = {name: [] for name in ("obs", "actions", "log_probs", "values", "rewards", "ended")}
        for _ in range(8):
            columns["obs"].append(obs)
            obs, rewards, terminations, truncations, info = cluster.step(agent)
            for name in ("actions", "log_probs", "values"):
                columns[name].append(info[name])
            columns["rewards"].append(rewards.astype(np.float32))
            columns["ended"].append(terminations | truncations)
        batch = {name: torch.from_numpy(np.stack(column)) for name, column in columns.items()}
        rows = batch["obs"].flatten(0, 1), batch["actions"].flatten()
        with torch.no_grad():  # the workers acted with these weights
            _, log_probs, _, values = agent(*rows)
        torch.testing.assert_close(batch["log_probs"].flatten(), log_probs, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(batch["values"].flatten(), values.flatten(), rtol=1e-4, atol=1e-5)
        next_values = torch.from_numpy(as_policy(agent).values(obs))
        ended, zeros = batch["ended"], torch.zeros(8, 2 * N)
        found = losses.gae(batch["rewards"], batch["values"], next_values, ended, torch.zeros_like(ended), zeros)
        learn(agent, optimizer, *rows, batch["log_probs"].flatten(), found)
        after = as_policy(agent).get_weights()
        assert any(not np.array_equal(before[name], after[name]) for name in before), update


@pytest.mark.parametrize("make", [ForwardAgent, WarmAgent])
def test_divergences_are_exact_where_the_actor_can_be_believed(make):
    """WarmAgent draws from other logits than its actor gives: it is compared by log-probs."""
    num_steps, num_probes = 16, 16 * N
    with ClusterEnv("CartPole-v1", 2, N, seed=0, sync=APS(threshold=10.0, num_probes=num_probes)) as cluster:
        torch.manual_seed(1)
        agent = make()
        rollout = cluster.rollout(agent, num_steps)
        rows = probe_rows(num_steps, N, num_probes)
        obs, actions = (
            torch.from_numpy(each[:, :N].reshape(-1, *each.shape[2:])[rows]) for each in (rollout.obs, rollout.actions)
        )
        heat = 2 if make is WarmAgent else 1
        with torch.no_grad():
            old = torch.log_softmax(agent.actor(obs) / heat, 1)
            agent.actor[2].weight.mul_(3.0)
            new = torch.log_softmax(agent.actor(obs) / heat, 1)
            cluster.rollout(agent, num_steps)
        exact = (old.exp() * (old - new)).sum(1).mean()
        log_ratio = (new - old).gather(1, actions[:, None])
        estimate = (log_ratio.exp() - 1 - log_ratio).mean()
        assert abs(exact - estimate) > 1e-3 * exact  # or the two could not be told apart
        expected = float(exact if make is ForwardAgent else estimate)
        assert cluster.stats().workers[0].divergence == pytest.approx(expected, rel=2e-4)
