"""Random numbers of policies, saved and put back: they go on where they were."""

import random

import numpy as np
import pytest
import torch  # noqa: TID253 - its generators are part of this

from envfleet import EpsilonGreedy, GaussianNoise, NormalizedPolicy, SquashedGaussian
from envfleet.cluster.wire.plain_values import from_plain, to_plain
from envfleet.contract.policy import SavesRandomState
from envfleet.policies.seeding import random_states, set_random_states
from tests.support.cluster.torch_learners import OBS


class Actor(torch.nn.Module):
    """SAC's: mean and log-std."""

    def __init__(self):
        super().__init__()
        self.mean = torch.nn.Linear(4, 2)

    def forward(self, obs):
        return self.mean(obs), torch.zeros(len(obs), 2)


POLICIES = {
    "EpsilonGreedy": lambda: EpsilonGreedy(torch.nn.Linear(4, 3), 0.5),
    "GaussianNoise": lambda: GaussianNoise(torch.nn.Linear(4, 2), 0.3, -1.0, 1.0),
    "SquashedGaussian": lambda: SquashedGaussian(Actor()),
    "NormalizedPolicy": lambda: NormalizedPolicy(EpsilonGreedy(torch.nn.Linear(4, 3), 0.5), OBS),
}


@pytest.mark.parametrize("name", POLICIES)
def test_a_policys_own_numbers_go_on(name):
    policy, copy = POLICIES[name](), POLICIES[name]()
    copy.set_weights(policy.get_weights())
    assert isinstance(policy, SavesRandomState)
    copy.set_random_state(policy.get_random_state())  # never seeded
    assert copy.get_random_state() is None
    policy.seed(3)
    obs = np.random.default_rng(0).normal(size=(16, 4)).astype(np.float32)
    policy.act(obs)
    state = from_plain(to_plain(policy.get_random_state()))
    expected = [policy.act(obs).actions for _ in range(3)]
    copy.set_random_state(state)
    assert np.array_equal([copy.act(obs).actions for _ in range(3)], expected)


def test_global_numbers_go_on():
    def drawn():
        return random.random(), random.gauss(0, 1), np.random.normal(size=3).tolist(), torch.randn(3).tolist()

    drawn()
    states = from_plain(to_plain(random_states()))
    expected = [drawn(), drawn()]
    assert set_random_states(states)
    assert [drawn(), drawn()] == expected
