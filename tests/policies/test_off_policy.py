"""EpsilonGreedy, SquashedGaussian and GaussianNoise: exploration, probabilities, and what travels."""

import pickle

import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

import envfleet
from envfleet import EpsilonGreedy, GaussianNoise, SquashedGaussian
from envfleet.contract.distributions import kl
from envfleet.policies.adapting import build_policy, code_of

torch = pytest.importorskip("torch")

from tests.support.agents.torch_agents import QNetwork, SacActor, Td3Actor  # noqa: E402  # needs torch

OBS = np.random.default_rng(0).normal(size=(5, 4)).astype(np.float32)
MANY = np.repeat(OBS, 2000, 0)
LOW, HIGH = np.float32([-1, -2]), np.float32([3, 2])


def _best(network):
    with torch.no_grad():
        return network(torch.from_numpy(OBS)).argmax(1).numpy()


@pytest.mark.parametrize("epsilon", [0.0, 0.3, 1.0])
def test_epsilon_is_how_often_an_action_is_random(epsilon):
    policy = EpsilonGreedy(QNetwork(), epsilon, start=2)
    policy.seed(0)
    acted = policy.act(MANY)
    assert acted.actions.dtype == np.int64 and set(acted.actions.tolist()) <= {2, 3, 4} and acted.extras == {}
    is_best = (acted.actions - 2 == np.repeat(_best(policy.q_network), 2000)).mean()
    expected = 1 - epsilon + epsilon / 3
    assert abs(is_best - expected) <= 5 * np.sqrt(expected * (1 - expected) / len(MANY))
    assert policy.values(OBS) is None


def test_epsilon_greedy_probabilities():
    policy = EpsilonGreedy(QNetwork(), 0.3)
    best = _best(policy.q_network)
    expected = np.full((5, 3), 0.1)
    expected[np.arange(5), best] = 0.8
    assert_allclose(np.exp(policy.distribution(OBS).logits), expected, rtol=1e-6)
    assert_allclose(policy.log_prob(OBS, (best + 1) % 3), np.full(5, np.log(0.1)), rtol=1e-6)
    assert policy.log_prob(OBS, best).dtype == np.float32


@pytest.mark.parametrize("num_actions", [3, 1000])
def test_greedy_policies_have_a_finite_divergence(num_actions):
    policies = [EpsilonGreedy(QNetwork(num_actions), 0) for _ in range(2)]
    one, other = (policy.distribution(OBS) for policy in policies)
    assert_allclose(np.exp(one.logits).sum(1), np.ones(5), rtol=1e-4)
    assert np.exp(one.logits).max() >= 0.9
    differs = _best(policies[0].q_network) != _best(policies[1].q_network)
    assert np.isfinite(kl(one, other)).all()
    assert_array_equal(kl(one, other) > 1, differs)


def test_epsilon_travels_with_the_weights():
    policy = EpsilonGreedy(QNetwork(), 1.0, start=-3)
    worker = build_policy(code_of(policy))
    assert isinstance(worker, EpsilonGreedy) and worker.epsilon == 1.0 and worker.act(OBS).actions.min() >= -3
    policy.epsilon = 0.0
    with torch.no_grad():
        policy.q_network.network[0].weight.mul_(2)
    worker.set_weights(policy.get_weights())
    assert worker.epsilon == 0.0
    assert_array_equal(worker.act(OBS).actions, _best(policy.q_network) - 3)
    assert set(policy.get_weights()) >= {"epsilon", "q_network.network.0.weight"}


def test_wrong_epsilons_and_networks_are_refused():
    policy = EpsilonGreedy(QNetwork(), 0.5)
    for wrong in (-0.1, 1.1, float("nan")):
        with pytest.raises(envfleet.UsageError, match=f"epsilon must be a probability, from 0 to 1; got {wrong}"):
            policy.epsilon = wrong
    before = {name: array.copy() for name, array in policy.get_weights().items()}
    others = {name: array + 1 for name, array in before.items()}
    with pytest.raises(envfleet.UsageError, match="epsilon must be a probability"):
        policy.set_weights(others)
    for name, array in policy.get_weights().items():
        assert_array_equal(array, before[name])
    with pytest.raises(envfleet.UsageError, match=r"EpsilonGreedy takes a torch\.nn\.Module; got function"):
        EpsilonGreedy(_best)
    with pytest.raises(envfleet.UsageError, match=r"q_network\(obs\) must be \[5, number of actions\]; got \(20,\)"):
        EpsilonGreedy(torch.nn.Flatten(0)).act(OBS)
    with torch.no_grad():
        policy.q_network.network[2].bias.fill_(np.nan)
    with pytest.raises(envfleet.UsageError, match=r"Q values are NaN in rows 0, .* the learner has diverged"):
        policy.act(OBS)


def test_own_random_numbers_do_not_touch_torchs():
    for policy in (
        EpsilonGreedy(QNetwork(), 0.9),
        SquashedGaussian(SacActor(LOW, HIGH)),
        GaussianNoise(Td3Actor(), 0.5, LOW, HIGH),
    ):
        policy.seed(1)
        before = torch.random.get_rng_state()
        first = policy.act(MANY).actions
        assert torch.equal(torch.random.get_rng_state(), before)
        policy.seed(1)
        assert_array_equal(policy.act(MANY).actions, first)
        assert not np.array_equal(policy.act(MANY).actions, first)
        again = pickle.loads(pickle.dumps(policy))
        again.seed(1)
        assert_array_equal(again.act(MANY).actions, first)


def test_squashed_log_probs_are_those_of_torch_and_of_cleanrl():
    torch.manual_seed(1)  # a sample at the very bound rounds otherwise, about one time in 400
    actor = SacActor(LOW, HIGH)
    policy = SquashedGaussian(actor)
    acted = policy.act(OBS)
    assert acted.actions.dtype == np.float32 and (acted.actions > LOW).all() and (acted.actions < HIGH).all()
    make = torch.distributions
    with torch.no_grad():
        mean, log_std = actor(torch.from_numpy(OBS))
        under = make.Independent(make.Normal(mean.double(), log_std.exp().double()), 1)
        squashing = [make.TanhTransform(), make.AffineTransform(actor.action_bias, actor.action_scale, event_dim=1)]
        expected = make.TransformedDistribution(under, squashing).log_prob(torch.from_numpy(acted.actions).double())
    assert_allclose(acted.log_probs, expected.numpy(), rtol=1e-4, atol=1e-4)
    with torch.no_grad():
        theirs, their_log_probs = actor.get_action(torch.from_numpy(OBS))
    assert_allclose(policy.log_prob(OBS, theirs.numpy()), their_log_probs.numpy(), rtol=1e-2, atol=1e-2)
    shown = policy.distribution(OBS)
    assert_array_equal(shown.mean, mean.numpy())
    assert_array_equal(shown.log_std, log_std.numpy())


def test_actions_at_the_bounds_have_finite_log_probs():
    actor = SacActor(LOW, HIGH)
    with torch.no_grad():
        actor.fc_mean.bias.fill_(50.0)
    policy = SquashedGaussian(actor)
    acted = policy.act(OBS)
    assert np.isfinite(acted.log_probs).all() and (acted.actions < HIGH).all()
    assert_array_equal(policy.log_prob(OBS, acted.actions), acted.log_probs)
    for bound in (LOW, HIGH):
        assert np.isfinite(policy.log_prob(OBS, np.broadcast_to(bound, (5, 2)))).all()


def test_an_actor_without_bounds_acts_between_minus_one_and_one():
    class Plain(torch.nn.Module):
        def forward(self, x):
            return x[:, :2] * 10, torch.zeros(1, 2)

    acted = SquashedGaussian(Plain()).act(MANY)
    assert -1 < acted.actions.min() < -0.9 and 0.9 < acted.actions.max() < 1
    with pytest.raises(
        envfleet.UsageError, match=r"actor\(obs\) must return mean and log_std, each \[B, D\]; got Tensor"
    ):
        SquashedGaussian(torch.nn.Linear(4, 2)).act(OBS)


def test_noise_has_its_deviation_and_stays_inside_the_bounds():
    actor = Td3Actor()
    policy = GaussianNoise(actor, [0.5, 0.0], LOW, HIGH)
    acted = policy.act(MANY)
    with torch.no_grad():
        mean = actor(torch.from_numpy(MANY)).numpy()
    assert acted.actions.dtype == np.float32 and (acted.actions >= LOW).all() and (acted.actions <= HIGH).all()
    free = GaussianNoise(actor, [0.5, 0.0], -np.inf, np.inf)
    noise = free.act(MANY).actions - mean
    assert abs(noise[:, 0].std() - 0.5) < 0.02
    assert_allclose(noise[:, 1], 0, atol=1e-6)
    assert np.isfinite(acted.log_probs).all() and policy.values(OBS) is None
    assert_allclose(np.exp(policy.distribution(OBS).log_std), np.tile([0.5, 0.002], (5, 1)), rtol=1e-5)
    assert_allclose(np.exp(free.distribution(OBS).log_std), np.tile([0.5, 0.001], (5, 1)), rtol=1e-5)


def test_std_travels_with_the_weights():
    policy = GaussianNoise(Td3Actor(), [0.5, 0.1], LOW, HIGH)
    worker = build_policy(code_of(policy))
    policy.std = 0.2
    assert_array_equal(policy.std, [0.2, 0.2])
    worker.set_weights(policy.get_weights())
    assert_array_equal(worker.std, [0.2, 0.2])
    for wrong, words in ((-1, "not negative"), (np.inf, "finite"), ([1, 2, 3], r"of shape \(2,\); got \(3,\)")):
        with pytest.raises(envfleet.UsageError, match=words):
            policy.std = wrong
    with pytest.raises(envfleet.UsageError, match="std must be finite and not negative"):
        worker.set_weights(policy.get_weights() | {"std": np.array([-1.0, 1.0])})
    with pytest.raises(envfleet.UsageError, match="low must be below high"):
        GaussianNoise(Td3Actor(), 0.1, HIGH, LOW)
    with pytest.raises(envfleet.UsageError, match=r"actor\(obs\) must be \[5, ...\] actions; got \(20,\)"):
        GaussianNoise(torch.nn.Flatten(0), 0.1, LOW, HIGH).act(OBS)
