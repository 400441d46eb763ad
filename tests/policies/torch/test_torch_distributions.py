"""What get_distribution may return, and what becomes of it."""

import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

from envfleet import Bernoulli, Categorical, Gaussian, MultiCategorical, TorchPolicy
from envfleet.contract.distributions import kl
from envfleet.contract.policy import ExposesDistribution
from envfleet.policies.torch.distributions import as_distribution

torch = pytest.importorskip("torch")
make = torch.distributions

from tests.support.agents.torch_agents import DiscreteAgent  # noqa: E402  # needs torch

B = 5
LOGITS, MEAN = torch.randn(B, 3), torch.randn(B, 2)
STD = torch.rand(B, 2) + 0.5
NORMAL = make.Normal(MEAN, STD)
TANH = make.TanhTransform()


def _squashed(*transforms, base=NORMAL):
    return make.TransformedDistribution(base, list(transforms))


def _require_gaussian(shown, mean, std):
    assert isinstance(shown, Gaussian) and shown.mean.shape == shown.log_std.shape == (B, mean.numel() // B)
    assert_allclose(shown.mean, mean.reshape(B, -1).numpy(), rtol=1e-5, atol=1e-6)
    assert_allclose(np.exp(shown.log_std), std.reshape(B, -1).numpy(), rtol=1e-5)


def test_choices():
    one = make.Categorical(logits=LOGITS)
    assert_array_equal(as_distribution(one, B).logits, one.logits.numpy())
    assert as_distribution(one, B).kind == Categorical.kind
    assert as_distribution(make.Categorical(probs=LOGITS.softmax(1)), B).kind == Categorical.kind
    many = as_distribution([one, make.Categorical(logits=torch.randn(B, 2))], B)
    assert isinstance(many, MultiCategorical) and [each.shape for each in many.logits] == [(B, 3), (B, 2)]
    equal = as_distribution(make.Independent(make.Categorical(logits=torch.randn(B, 4, 3)), 1), B)
    assert isinstance(equal, MultiCategorical) and [each.shape for each in equal.logits] == [(B, 3)] * 4


def test_switches():
    switches = make.Bernoulli(logits=LOGITS)
    for given in (switches, make.Independent(switches, 1)):
        shown = as_distribution(given, B)
        assert isinstance(shown, Bernoulli)
        assert_array_equal(shown.logits, LOGITS.numpy())
    assert as_distribution(make.Bernoulli(logits=LOGITS[:, 0]), B).logits.shape == (B, 1)


def test_gaussians():
    for given in (NORMAL, make.Independent(NORMAL, 1)):
        _require_gaussian(as_distribution(given, B), MEAN, STD)
    _require_gaussian(as_distribution(make.Normal(MEAN[:, 0], STD[:, 0]), B), MEAN[:, :1], STD[:, :1])
    _require_gaussian(as_distribution(make.Normal(MEAN, 0.5), B), MEAN, torch.full((B, 2), 0.5))
    images = make.Normal(torch.zeros(B, 2, 3), torch.ones(B, 2, 3))
    _require_gaussian(as_distribution(images, B), images.mean, images.stddev)


def test_squashed_gaussians():
    scale, bias = torch.tensor([1.0, 2.0]), torch.tensor([0.0, 1.0])
    for given in (
        _squashed(TANH),
        _squashed(TANH, base=make.Independent(NORMAL, 1)),
        make.Independent(_squashed(TANH), 1),
        _squashed(TANH, make.AffineTransform(bias, scale)),
        _squashed(make.ComposeTransform([TANH, make.AffineTransform(0.5, 2.0)])),
        _squashed(make.IndependentTransform(TANH, 1), base=make.Independent(NORMAL, 1)),
    ):
        _require_gaussian(as_distribution(given, B), MEAN, STD)


def test_a_network_may_speak_through_an_affine_transform_under_the_squashing():
    standard = make.Normal(torch.zeros(B, 2), 1.0)
    given = _squashed(make.AffineTransform(MEAN, -STD), TANH, base=standard)
    _require_gaussian(as_distribution(given, B), MEAN, STD)


def test_what_cannot_be_compared_is_none():
    learned = torch.nn.Parameter(torch.ones(2))
    for given in (
        None,
        3,
        [],
        [NORMAL],
        [make.Categorical(logits=LOGITS), None],
        make.Categorical(logits=LOGITS[0]),
        make.Categorical(logits=LOGITS[:2]),
        make.Beta(STD, STD),
        make.MultivariateNormal(MEAN, torch.eye(2)),
        _squashed(make.ExpTransform()),
        _squashed(TANH, base=make.Uniform(MEAN, MEAN + 1)),
        _squashed(TANH, make.AffineTransform(0.0, learned)),
        _squashed(TANH, make.AffineTransform(MEAN, 1.0)),
    ):
        assert as_distribution(given, B) is None


def test_a_policy_shows_it_and_the_learner_goes_on_training():
    class Keeps(DiscreteAgent):
        def get_distribution(self, x):
            self.kept = self.actor(x)
            return make.Categorical(logits=self.kept)

    module, obs = Keeps(), np.ones((B, 4), np.float32)
    policy = TorchPolicy(module)
    assert isinstance(policy, ExposesDistribution)
    shown = policy.distribution(obs)
    assert_array_equal(kl(shown, policy.distribution(obs)), np.zeros(B))
    assert not module.kept.is_inference() and not module.kept.requires_grad
    (module.kept.detach() * torch.nn.Parameter(torch.ones(3))).sum().backward()


def test_a_module_without_one():
    class Plain(torch.nn.Module):
        def get_action_and_value(self, x, action=None): ...

    assert TorchPolicy(Plain()).distribution(np.ones((B, 4), np.float32)) is None
