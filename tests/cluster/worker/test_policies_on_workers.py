"""Policies of every kind on real workers, under APS: what their copies do is what the learner's policy says of it."""

from functools import partial

import numpy as np
import pytest
import torch  # noqa: TID253 - agents of torch are what this is about

from envfleet import (
    APS,
    ClusterEnv,
    EpsilonGreedy,
    EveryUpdate,
    GaussianNoise,
    NormalizedPolicy,
    RewardScaler,
    SquashedGaussian,
)
from envfleet.contract.spaces import SpaceTree
from envfleet.policies.adapting import as_policy
from tests.support.agents.detach_agents import DiscreteAgent, linear
from tests.support.agents.worker_policies import MaskedAgent, MaskedEnv, SacActor, SwitchesAgent, Td3Actor
from tests.support.envs.detach_envs import EveryKindEnv

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("quick_workers")]
FORKED_WITH = ("torch",)

KINDS = {
    "Q network": ("CartPole-v1", lambda: EpsilonGreedy(linear(4, 2, 1), epsilon=0.3)),
    "SAC": ("Pendulum-v1", lambda: SquashedGaussian(SacActor())),
    "TD3": ("Pendulum-v1", lambda: GaussianNoise(Td3Actor(), 0.1, -2.0, 2.0)),
    "masks": (MaskedEnv, MaskedAgent),
    "switches": (partial(EveryKindEnv, actions="multi_binary"), SwitchesAgent),
}


def rows(tree, space):
    """A rollout's [T, N, ...] as [T * N, ...]."""
    flat = SpaceTree(space)
    return flat.unflatten([leaf.reshape(-1, *leaf.shape[2:]) for leaf in flat.flatten(tree)])


def log_probs_here(agent, cluster, rollout):
    obs, actions = (
        rows(rollout.obs, cluster.single_observation_space),
        rows(rollout.actions, cluster.single_action_space),
    )
    return as_policy(agent).log_prob(obs, actions).reshape(rollout.rewards.shape)


@pytest.mark.parametrize("kind", KINDS)
def test_what_workers_do_is_what_the_policy_says(kind):
    env, make_agent = KINDS[kind]
    agent = make_agent()
    with ClusterEnv(env, 2, 3, sync=APS(threshold=1e9), seed=1) as cluster:
        rollout = cluster.rollout(agent, 30)
        np.testing.assert_allclose(rollout.log_probs, log_probs_here(agent, cluster, rollout), 1e-4, 1e-4)
        tree = SpaceTree(cluster.single_action_space)
        for leaf in zip(*(each.reshape(-1, *each.shape[2:]) for each in tree.flatten(rollout.actions)), strict=True):
            assert tree.unflatten(list(leaf)) in cluster.single_action_space
        module = getattr(agent, "q_network", getattr(agent, "actor", agent))
        with torch.no_grad():
            next(module.parameters()).mul_(-1.0)
        assert cluster.rollout(agent, 5).lags.tolist() == [1, 1]
        assert all(each.divergence > 0 for each in cluster.stats().workers)


def test_exploration_travels_with_the_weights():
    agent = EpsilonGreedy(linear(4, 2, 1), epsilon=1.0)
    with ClusterEnv("CartPole-v1", 2, 3, sync=EveryUpdate(), seed=1) as cluster:
        for epsilon in (1.0, 0.0):
            agent.epsilon = epsilon
            rollout = cluster.rollout(agent, 40)
            with torch.no_grad():
                best = agent.q_network(torch.from_numpy(rollout.obs.copy())).argmax(-1).numpy()
            assert (rollout.actions == best).all() == (epsilon == 0.0)


def test_statistics_live_at_the_head_and_travel_with_the_weights():
    with ClusterEnv("CartPole-v1", 2, 3, seed=1) as cluster:
        agent = NormalizedPolicy(DiscreteAgent(), cluster.single_observation_space)
        scaler, seen = RewardScaler(0.99), []
        for number in range(3):
            rollout = cluster.rollout(agent, 20)
            assert rollout.version == number + 1, "new statistics are new weights"
            np.testing.assert_allclose(rollout.log_probs, log_probs_here(agent, cluster, rollout), 1e-5, 1e-5)
            before = log_probs_here(agent, cluster, rollout)
            seen.append(rollout.obs.reshape(-1, 4))
            agent.update(rollout)
            scaler.update(rollout)
            assert not np.allclose(log_probs_here(agent, cluster, rollout), before, atol=1e-4)
    everything = np.concatenate(seen).astype(np.float64)
    weights = agent.get_weights()
    np.testing.assert_allclose(weights["normalizer.obs.mean"], everything.mean(0))
    np.testing.assert_allclose(weights["normalizer.obs.var"], everything.var(0))
    assert scaler.std > 0
