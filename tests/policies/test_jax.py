"""A policy in JAX, in a process of its own: JAX warns of every later fork in the one that has imported it."""

import subprocess
import sys

import pytest

pytestmark = pytest.mark.slow

SCRIPT = """
import jax
import numpy as np
from gymnasium import spaces

import envfleet
from envfleet.testing import check_policy


def logits(weights, obs):
    return jax.numpy.asarray(obs) @ weights["w"]


def act(weights, obs):
    actions = jax.random.categorical(jax.random.key(np.random.randint(2**31)), logits(weights, obs))
    return actions, log_prob(weights, obs, actions)


def log_prob(weights, obs, actions):
    rows = jax.numpy.arange(len(obs))
    return jax.nn.log_softmax(logits(weights, obs))[rows, jax.numpy.asarray(actions)]


def policy(num_inputs):
    return envfleet.FunctionPolicy(
        act,
        log_prob,
        {"w": jax.random.normal(jax.random.key(0), (num_inputs, 2))},
        lambda weights, obs: logits(weights, obs).sum(1),
        distribution=lambda weights, obs: envfleet.Categorical(logits(weights, obs)),
    )


check_policy(policy(3), spaces.Box(-1, 1, (3,)), spaces.Discrete(2))
agent = policy(4)
with envfleet.ClusterEnv("CartPole-v1", 2, 2, sync=envfleet.APS(), seed=1) as cluster:
    rollout = cluster.rollout(agent, 8)
    expected = agent.log_prob(rollout.obs.reshape(-1, 4), rollout.actions.reshape(-1))
    np.testing.assert_allclose(rollout.log_probs.reshape(-1), expected, 1e-5, 1e-5)
print("acted")
"""


def test_a_policy_in_jax():
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=110)
    assert done.stdout == "acted\n", done.stderr
