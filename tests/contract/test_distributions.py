"""Divergences of distributions: exact against torch's, and estimates against the exact ones."""

import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

import envfleet
from envfleet.contract.distributions import Bernoulli, Categorical, Gaussian, MultiCategorical, from_arrays, k3, kl

RANDOM = np.random.default_rng(0)
NUM_ROWS = 7


def _pairs():
    def two(*shape):
        return [RANDOM.normal(size=(NUM_ROWS, *shape)).astype(np.float32) * 2 for _ in range(2)]

    gaussians = zip(two(3), two(3), strict=True)
    return {
        "categorical": [Categorical(each) for each in two(4)],
        "multi_categorical": [MultiCategorical(pair) for pair in zip(two(4), two(2), strict=True)],
        "bernoulli": [Bernoulli(each) for each in two(5)],
        "gaussian": [Gaussian(mean, log_std / 3) for mean, log_std in gaussians],
    }


PAIRS = _pairs()
kinds = pytest.mark.parametrize("kind", PAIRS)


def _in_torch(torch, given):
    """A list of torch distributions whose divergences add up to that of `given`."""
    make = torch.distributions
    arrays = {name: torch.from_numpy(array).double() for name, array in given.arrays().items()}
    if isinstance(given, Gaussian):
        return [make.Independent(make.Normal(arrays["mean"], arrays["log_std"].exp()), 1)]
    if isinstance(given, Bernoulli):
        return [make.Independent(make.Bernoulli(logits=arrays["logits"]), 1)]
    return [make.Categorical(logits=logits) for logits in arrays.values()]


@kinds
def test_kl_is_torchs(kind):
    torch = pytest.importorskip("torch")
    p, q = PAIRS[kind]
    parts = zip(_in_torch(torch, p), _in_torch(torch, q), strict=True)
    expected = sum(torch.distributions.kl_divergence(one, other) for one, other in parts).numpy()
    assert kl(p, q).dtype == np.float64 and kl(p, q).shape == (NUM_ROWS,)
    assert_allclose(kl(p, q), expected, rtol=1e-6)
    assert not np.allclose(kl(p, q), kl(q, p))


def test_kl_of_squashed_gaussians_is_that_of_the_gaussians_under_them():
    torch = pytest.importorskip("torch")
    make = torch.distributions

    def squashed(given):
        base = _in_torch(torch, given)[0]
        return make.TransformedDistribution(base, [make.TanhTransform(), make.AffineTransform(1.0, 2.0)])

    p, q = PAIRS["gaussian"]
    assert_allclose(kl(p, q), make.kl_divergence(squashed(p), squashed(q)).numpy(), rtol=1e-6)
    # The same by definition: the mean of log p - log q over squashed samples.
    torch.manual_seed(0)
    close = Gaussian(p.mean + 0.1, p.log_std)
    samples = squashed(p).base_dist.sample((20_000,)).clamp(-6, 6)
    near = torch.from_numpy(np.abs(p.mean).max(1) < 2)  # elsewhere tanh is 1 in float64
    for transform in squashed(p).transforms:
        samples = transform(samples)
    ratios = (squashed(p).log_prob(samples) - squashed(close).log_prob(samples)).numpy()
    error = 5 * ratios.std(0) / np.sqrt(len(ratios))
    assert (np.abs(ratios.mean(0) - kl(p, close)) < error)[near.numpy()].all() and near.any()


@kinds
def test_kl_of_equals_is_zero_and_never_negative(kind):
    p, q = PAIRS[kind]
    assert_array_equal(kl(p, p), np.zeros(NUM_ROWS))
    assert (kl(p, q) > 0).all()
    nearly = from_arrays(kind, {name: array * np.float32(1 + 1e-7) for name, array in p.arrays().items()})
    assert (kl(p, nearly) >= 0).all()


def test_masked_logits():
    logits, mask = RANDOM.normal(size=(2, 4)), np.array([[True, False, True, True]] * 2)
    p, q = (Categorical(np.where(mask, each, -np.inf)) for each in (logits, logits[::-1]))
    assert_allclose(kl(p, q), kl(Categorical(p.logits[:, [0, 2, 3]]), Categorical(q.logits[:, [0, 2, 3]])))
    low = [Categorical(np.where(mask, each, -1e8).astype(np.float32)) for each in (logits, logits[::-1])]
    assert_allclose(kl(*low), kl(p, q), rtol=1e-5)
    assert_array_equal(kl(Categorical(logits), q), [np.inf, np.inf])  # q rules out what p may do
    assert np.isfinite(kl(p, Categorical(logits))).all()
    only = Categorical(np.array([[0.0, -np.inf]]))
    assert_array_equal(kl(only, only), [0.0])
    assert_array_equal(kl(Bernoulli(np.array([[-np.inf]])), Bernoulli(np.array([[0.0]]))), [np.log(2)])


def test_unnormalised_logits_are_the_same_distribution():
    p, q = PAIRS["categorical"]
    assert_allclose(kl(Categorical(p.logits + 100), q), kl(p, q), rtol=1e-4)


def test_what_cannot_be_compared():
    p, g = PAIRS["categorical"][0], PAIRS["gaussian"][0]
    multi = PAIRS["multi_categorical"][0]
    with pytest.raises(envfleet.UsageError, match=r"different shapes cannot be compared: \(7, 4\) and \(7, 3\)"):
        kl(p, Categorical(p.logits[:, :3]))
    with pytest.raises(envfleet.UsageError, match="different shapes"):
        kl(g, Gaussian(g.mean[:, :2], g.log_std[:, :2]))
    with pytest.raises(envfleet.UsageError, match="different shapes"):
        kl(PAIRS["bernoulli"][0], Bernoulli(np.zeros((NUM_ROWS, 4))))
    with pytest.raises(envfleet.UsageError, match="a categorical and a gaussian distribution cannot be compared"):
        kl(p, g)
    with pytest.raises(envfleet.UsageError, match="differ in their parts"):
        kl(multi, MultiCategorical(multi.logits[:1]))


@kinds
def test_arrays_and_back(kind):
    p, q = PAIRS[kind]
    again = from_arrays(p.kind, p.arrays())
    assert type(again) is type(p)
    assert_array_equal(kl(again, q), kl(p, q))
    with pytest.raises(envfleet.UsageError, match=f"no distribution of kind '{kind}' consists of other"):
        from_arrays(kind, {"other": np.zeros((1, 1))})
    with pytest.raises(envfleet.UsageError, match="consists of nothing"):
        from_arrays(kind, {})


@kinds
def test_k3_agrees_with_kl_in_the_mean(kind):
    torch = pytest.importorskip("torch")
    torch.manual_seed(0)
    p = PAIRS[kind][0]
    q = from_arrays(kind, {name: array * np.float32(0.8) for name, array in p.arrays().items()})
    num_samples = 4000
    log_probs, other_log_probs = 0.0, 0.0
    for one, other in zip(_in_torch(torch, p), _in_torch(torch, q), strict=True):
        actions = one.sample((num_samples,))
        log_probs = log_probs + one.log_prob(actions).numpy()
        other_log_probs = other_log_probs + other.log_prob(actions).numpy()
    estimates = k3(log_probs, other_log_probs)
    assert estimates.shape == (num_samples, NUM_ROWS) and (estimates >= 0).all()
    errors = estimates.std(0) / np.sqrt(num_samples)
    assert (np.abs(estimates.mean(0) - kl(p, q)) < 5 * errors + 1e-6).all()


@kinds
def test_each_state_has_its_own_divergence_so_more_states_do_not_make_it_larger(kind):
    p, q = PAIRS[kind]
    twice_p, twice_q = (
        from_arrays(kind, {name: np.concatenate([array, array]) for name, array in each.arrays().items()})
        for each in (p, q)
    )
    assert_array_equal(kl(twice_p, twice_q), np.tile(kl(p, q), 2))
    assert_allclose(kl(twice_p, twice_q).mean(), kl(p, q).mean())


def test_k3_of_equal_policies_is_zero():
    log_probs = RANDOM.normal(size=5).astype(np.float32)
    assert_array_equal(k3(log_probs, log_probs), np.zeros(5))
    assert k3(np.float32([-1]), np.float32([-1 - 1e-4])).item() == pytest.approx(0.5e-8, rel=1e-2)
