"""Divergence: exact and estimated; a mean over rows of each worker, whoever else is measured with it."""

import dataclasses

import numpy as np
import pytest
from gymnasium import spaces

from envfleet import UsageError
from envfleet.cluster.head.divergence import Probes, added, measured, probes_of
from envfleet.cluster.sync import probe_rows
from envfleet.cluster.wire.rollouts.collected import Collected
from envfleet.contract import distributions
from envfleet.contract.spaces import SpaceTree
from tests.support.agents.aps_agents import (
    NUM_ACTIONS,
    NUM_INPUTS,
    GaussianPolicy,
    ModestPolicy,
    SampledPolicy,
    ShownPolicy,
    log_softmax,
)

OBS = SpaceTree(spaces.Box(-np.inf, np.inf, (NUM_INPUTS,), np.float32))
DISCRETE = SpaceTree(spaces.Discrete(NUM_ACTIONS))
BOX = SpaceTree(spaces.Box(-np.inf, np.inf, (2,), np.float64))


def moved(policy, amount, seed=9):
    """Another policy of the same kind, nearby."""
    random, other = np.random.default_rng(seed), type(policy)()
    other.weights = {
        name: (each + amount * random.standard_normal(each.shape)).astype(each.dtype)
        for name, each in policy.weights.items()
    }
    return other


def probes(policy, num_rows, seed=1, is_shown=True, version=1, scale=1.0):
    """What `policy` did with random observations."""
    random = np.random.default_rng(seed)
    obs = (scale * random.standard_normal((num_rows, NUM_INPUTS))).astype(np.float32)
    if isinstance(policy, GaussianPolicy):
        shown = policy.distribution(obs)
        actions = shown.mean + np.exp(shown.log_std) * random.standard_normal(shown.mean.shape)
    else:
        actions = (policy.logits(obs) + random.gumbel(size=(num_rows, NUM_ACTIONS))).argmax(-1)
    distribution = policy.distribution(obs) if is_shown else None
    return Probes(version, [obs], [actions], policy.log_prob(obs, actions), distribution, None)


def alone(policy, each, actions=DISCRETE):
    return measured(policy, [each], OBS, actions)[0]


def expected_kl(worker, learner, obs):
    """By the definition."""
    p, q = log_softmax(worker.logits(obs)), log_softmax(learner.logits(obs))
    return float((np.exp(p) * (p - q)).sum(-1).mean())


@pytest.mark.parametrize("amount", [0.02, 0.1, 0.5])
@pytest.mark.parametrize(("kind", "actions"), [(ShownPolicy, DISCRETE), (GaussianPolicy, BOX)])
def test_the_estimate_agrees_with_the_exact_divergence(kind, actions, amount):
    worker = kind()
    learner = moved(worker, amount)
    seen = probes(worker, 200_000)
    exact = alone(learner, seen, actions)
    estimated = alone(learner, dataclasses.replace(seen, distribution=None), actions)
    assert exact > 0 and estimated > 0
    assert estimated != exact
    assert estimated == pytest.approx(exact, rel=0.1)


def test_exactly_by_the_definition():
    worker = ShownPolicy()
    learner = moved(worker, 0.3)
    seen = probes(worker, 50)
    assert alone(learner, seen) == pytest.approx(expected_kl(worker, learner, seen.obs[0]), abs=1e-6)
    assert alone(learner, seen) != pytest.approx(expected_kl(learner, worker, seen.obs[0]), abs=1e-4), "not reversed"


def test_a_gaussian_by_the_definition():
    worker = GaussianPolicy()
    learner = moved(worker, 0.3)
    seen = probes(worker, 50)
    p, q = worker.distribution(seen.obs[0]), learner.distribution(seen.obs[0])
    ratio = np.exp(p.log_std) ** 2 / np.exp(q.log_std) ** 2
    distance = (p.mean - q.mean) ** 2 / np.exp(q.log_std) ** 2
    expected = 0.5 * (ratio + distance - 1 - np.log(ratio)).sum(-1).mean()
    assert alone(learner, seen, BOX) == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("is_shown", [True, False])
def test_the_same_policy_is_at_no_distance(is_shown):
    policy = ShownPolicy()
    assert alone(policy, probes(policy, 30, is_shown=is_shown)) == pytest.approx(0.0, abs=1e-12)


@pytest.mark.parametrize("is_shown", [True, False])
def test_more_rows_and_more_workers_do_not_make_it_larger(is_shown):
    """The same rows several times: a sum would grow with them."""
    worker = ShownPolicy()
    learner, seen = moved(worker, 0.3), probes(worker, 20, is_shown=is_shown)
    once = alone(learner, seen)
    rows = np.tile(np.arange(20), 10)
    many = Probes(
        1,
        [seen.obs[0][rows]],
        [seen.actions[0][rows]],
        seen.log_probs[rows],
        worker.distribution(seen.obs[0][rows]) if is_shown else None,
        None,
    )
    assert once > 0.01
    assert alone(learner, many) == pytest.approx(once, rel=1e-6)
    assert measured(learner, [seen] * 7, OBS, DISCRETE) == pytest.approx([once] * 7, rel=1e-6)


@pytest.mark.parametrize("is_shown", [True, False])
def test_several_workers_at_once_as_one_by_one(is_shown):
    """Also if they have different numbers of rows, versions and policies."""
    learner = ShownPolicy(seed=3)
    each = [
        probes(moved(learner, amount), num_rows, seed, is_shown, version=seed, scale=amount * 4)
        for seed, (amount, num_rows) in enumerate([(0.1, 5), (0.5, 1), (0.3, 40), (0.9, 12)])
    ]
    one_by_one = [alone(learner, part) for part in each]
    assert len({round(number, 4) for number in one_by_one}) == 4
    assert measured(learner, each, OBS, DISCRETE) == pytest.approx(one_by_one, rel=1e-6)
    assert measured(learner, each[::-1], OBS, DISCRETE) == pytest.approx(one_by_one[::-1], rel=1e-6)


def test_each_is_measured_as_exactly_as_it_can_be():
    worker = ShownPolicy()
    learner = moved(worker, 0.3)
    shown, hidden = probes(worker, 30, seed=1), probes(worker, 30, seed=2, is_shown=False)
    expected = [alone(learner, shown), alone(learner, hidden)]
    assert measured(learner, [shown, hidden], OBS, DISCRETE) == pytest.approx(expected)
    estimated = alone(learner, dataclasses.replace(shown, distribution=None))
    assert expected[0] != pytest.approx(estimated, rel=1e-3)


@pytest.mark.parametrize("kind", [SampledPolicy, ModestPolicy])
def test_if_the_learner_does_not_show_it_all_are_estimated(kind):
    worker, learner = ShownPolicy(), moved(kind(), 0.3)
    seen = probes(worker, 30)
    expected = alone(moved(ShownPolicy(), 0.3), dataclasses.replace(seen, distribution=None))
    assert alone(learner, seen) == pytest.approx(expected)


@pytest.mark.parametrize("num_silent", [1, 2])
def test_without_probabilities_it_says_what_to_do(num_silent):
    policy = SampledPolicy()
    spoken = probes(policy, 5, is_shown=False)
    each = [spoken] * (2 - num_silent) + [dataclasses.replace(spoken, log_probs=None)] * num_silent
    with pytest.raises(UsageError, match=r"log_prob\(\), or distribution\(\).*EveryUpdate\(\)"):
        measured(policy, each, OBS, DISCRETE)


def test_a_distribution_is_enough():
    worker = ShownPolicy()
    seen = dataclasses.replace(probes(worker, 30), log_probs=None)
    learner = moved(worker, 0.3)
    assert alone(learner, seen) == pytest.approx(expected_kl(worker, learner, seen.obs[0]), abs=1e-6)


@pytest.mark.parametrize("is_shown", [True, False])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.filterwarnings("ignore:invalid value encountered in matmul")  # the policy's own
def test_a_broken_learner_is_infinitely_far(bad, is_shown):
    worker, learner = ShownPolicy(), ShownPolicy()
    learner.weights["last"][0, 1] = bad
    assert alone(learner, probes(worker, 30, is_shown=is_shown)) == np.inf


@pytest.mark.parametrize("is_shown", [True, False])
def test_a_learner_that_rules_out_what_the_worker_does_is_far(is_shown):
    """And it is measured without a warning, however large the ratios are."""
    worker = ShownPolicy()
    learner = ShownPolicy()
    for sign in (1, -1):
        learner.weights["last"] = (sign * 1e6 * worker.weights["last"]).astype(np.float32)
        assert alone(learner, probes(worker, 30, is_shown=is_shown)) > 1000
    other = dataclasses.replace(probes(worker, 30, is_shown=False), log_probs=np.full(30, -1e4, np.float32))
    assert alone(worker, other) == np.inf


def test_nested_spaces_reach_the_policy_in_their_form():
    obs = SpaceTree(spaces.Dict({"a": spaces.Discrete(3), "b": spaces.Box(-1, 1, (2,), np.float32)}))
    actions = SpaceTree(spaces.Tuple((spaces.Discrete(2), spaces.Discrete(5))))

    class Nested:
        def log_prob(self, seen, taken):
            assert isinstance(taken, tuple)
            return -(seen["a"] + seen["b"].sum(-1) + taken[0] + 10 * taken[1]) / 100

    leaves = [np.array([0, 1, 2]), np.ones((3, 2), np.float32)]
    seen = Probes(1, leaves, [np.array([0, 1, 0]), np.array([4, 0, 1])], np.zeros(3), None, None)
    ratios = -np.array([0 + 2 + 0 + 40, 1 + 2 + 1 + 0, 2 + 2 + 0 + 10]) / 100
    assert measured(Nested(), [seen], obs, actions)[0] == pytest.approx((np.exp(ratios) - 1 - ratios).mean())


@pytest.mark.parametrize("is_shown", [True, False])
def test_what_a_recurrent_policy_remembered_is_passed(is_shown):
    class Remembering(ShownPolicy):
        def distribution(self, obs, state):
            return super().distribution(obs + state["h"])

        def log_prob(self, obs, actions, state):
            return super().log_prob(obs + state["h"], actions)

    worker, learner = ShownPolicy(), moved(Remembering(), 0.3)
    plain, parts = moved(ShownPolicy(), 0.3), []
    for seed, num_rows in ((1, 8), (2, 3)):
        seen = probes(worker, num_rows, seed, is_shown)
        state = np.random.default_rng(seed).standard_normal(seen.obs[0].shape).astype(np.float32)
        parts.append(dataclasses.replace(seen, obs=[seen.obs[0] - state], state={"h": state}))
    expected = [alone(plain, probes(worker, num_rows, seed, is_shown)) for seed, num_rows in ((1, 8), (2, 3))]
    assert measured(learner, parts, OBS, DISCRETE) == pytest.approx(expected, rel=1e-4)
    assert alone(learner, parts[1]) == pytest.approx(expected[1], rel=1e-4)


# -- which rows --


@pytest.mark.parametrize(("num_steps", "num_envs"), [(128, 8), (8, 128), (1, 300), (300, 1)])
def test_probed_rows_are_spread(num_steps, num_envs):
    rows = probe_rows(num_steps, num_envs, 256)
    assert len(rows) == 256 == len(set(rows.tolist())) and (np.diff(rows) > 0).all()
    assert rows.min() >= 0 and rows.max() < num_steps * num_envs
    steps, envs = np.divmod(rows, num_envs)
    for places, size in ((steps, num_steps), (envs, num_envs)):
        assert len(set(places.tolist())) > 0.7 * min(size, 256)
        halves = np.count_nonzero(places < size / 2) / 256
        assert size == 1 or 0.35 < halves < 0.65


def test_probed_rows_are_the_same_everywhere():
    first = probe_rows(16, 4, 10).tolist()
    probe_rows.cache_clear()
    np.random.seed(5)
    assert probe_rows(16, 4, 10).tolist() == first
    assert not probe_rows(16, 4, 10).flags.writeable, "it is handed out again"


@pytest.mark.parametrize(("num_probes", "expected"), [(0, 0), (5, 5), (6, 6), (7, 6), (256, 6)])
def test_no_more_probes_than_rows(num_probes, expected):
    rows = probe_rows(3, 2, num_probes)
    assert len(rows) == expected
    if expected == 6:
        assert rows.tolist() == list(range(6))


def collected(num_steps=4, num_envs=3, num_probes=5, **more):
    random = np.random.default_rng(0)
    rows = probe_rows(num_steps, num_envs, num_probes)
    arrays = {
        "rewards": np.zeros((num_steps, num_envs)),
        "probe.logits": random.standard_normal((len(rows), NUM_ACTIONS)),
        "probe_state.h": random.standard_normal((len(rows), 2)),
    }
    return Collected(1, 6, 0, num_steps, {**arrays, **more}, "categorical"), rows


def test_probes_are_copies_of_their_rows():
    part, rows = collected()
    obs = np.arange(12.0).reshape(4, 3, 1)
    actions, log_probs = np.arange(12).reshape(4, 3), -np.arange(12.0).reshape(4, 3)
    found = probes_of(part, [obs], [actions], log_probs, 5)
    assert found.version == 6
    assert found.obs[0][:, 0].tolist() == found.actions[0].tolist() == rows.tolist()
    assert found.log_probs.tolist() == (-rows).tolist()
    logits, state = part.arrays["probe.logits"], part.arrays["probe_state.h"]
    np.testing.assert_array_equal(found.distribution.logits, logits)
    np.testing.assert_array_equal(found.state["h"], state)
    pairs = ((found.obs[0], obs), (found.actions[0], actions), (found.log_probs, log_probs),
             (found.distribution.logits, logits), (found.state["h"], state))  # fmt: skip
    assert not any(np.shares_memory(*pair) for pair in pairs), "the message they came in may be large"


def test_probes_of_a_policy_that_shows_nothing():
    part, _ = collected()
    bare = Collected(1, 6, 0, 4, {"rewards": part.arrays["rewards"]}, None)
    found = probes_of(bare, [np.zeros((4, 3, 1))], [np.zeros((4, 3))], None, 5)
    assert (found.log_probs, found.distribution, found.state) == (None, None, None)


# -- rows of short rollouts --


def held(version, numbers, shown=True):
    rows = np.array(numbers, np.float32)
    distribution = distributions.Categorical(np.stack([rows, -rows], 1)) if shown else None
    return Probes(version, [rows[:, None]], [rows.astype(np.int64)], -rows, distribution, {"h": rows[:, None]})


def numbers_in(probes):
    rows = probes.obs[0][:, 0].tolist()
    assert rows == probes.actions[0].tolist() == (-probes.log_probs).tolist() == probes.state["h"][:, 0].tolist()
    if probes.distribution is not None:
        assert rows == probes.distribution.logits[:, 0].tolist()
    return rows


def test_short_rollouts_of_one_policy_are_put_together():
    probes = None
    for numbers in ([1, 2], [3, 4], [5, 6]):
        probes = added(probes, held(7, numbers), 5)
    assert numbers_in(probes) == [2, 3, 4, 5, 6]


def test_those_of_another_policy_are_not():
    assert numbers_in(added(held(1, [1, 2]), held(2, [3]), 5)) == [3]
    assert numbers_in(added(held(1, [1, 2]), held(1, [3], shown=False), 5)) == [3]
    assert numbers_in(added(held(1, [1, 2]), held(1, [3, 4, 5]), 3)) == [3, 4, 5]
