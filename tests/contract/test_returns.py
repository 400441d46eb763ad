"""GAE against a case computed by hand, and both against their definitions, written out as sums."""

import dataclasses

import numpy as np
import pytest
from numpy.testing import assert_allclose

import envfleet
from envfleet.contract.returns import gae, gae_of, vtrace
from envfleet.contract.rollout import Rollout


def _column(*values):
    return np.array(values, dtype=np.float64)[:, None]


def test_gae_by_hand():
    """gamma = lam = 0.5. Step 1 truncates: its final observation is worth 8. Step 3 terminates."""
    result = gae(
        rewards=_column(1, 2, 3, 4, 5),
        values=_column(10, 20, 30, 40, 50),
        next_values=np.array([60.0]),
        terminated=_column(0, 0, 0, 1, 0).astype(bool),
        truncated=_column(0, 1, 0, 0, 0).astype(bool),
        final_values=_column(0, 8, 0, 999, 0),
        gamma=0.5,
        lam=0.5,
    )
    # deltas: 1 + 10 - 10 = 1; 2 + 4 - 20 = -14; 3 + 20 - 30 = -7; 4 + 0 - 40 = -36; 5 + 30 - 50 = -15
    assert_allclose(result.advantages[:, 0], [1 - 14 / 4, -14, -7 - 36 / 4, -36, -15])
    assert_allclose(result.returns, result.advantages + _column(10, 20, 30, 40, 50))


def _random_case(seed, num_steps=30, num_envs=4):
    generator = np.random.default_rng(seed)
    shape = (num_steps, num_envs)
    return {
        "rewards": generator.normal(size=shape),
        "values": generator.normal(size=shape),
        "next_values": generator.normal(size=num_envs),
        "terminated": generator.random(shape) < 0.1,
        "truncated": generator.random(shape) < 0.1,
        "final_values": generator.normal(size=shape),
    }


def _value_after(case, t, n):
    """Of what follows step t within its episode."""
    if case["terminated"][t, n]:
        return 0.0
    if case["truncated"][t, n]:
        return case["final_values"][t, n]
    return case["values"][t + 1, n] if t + 1 < len(case["values"]) else case["next_values"][n]


def _last_step(case, t, n):
    """The last step of the episode that step t is part of, or of the rollout."""
    ended = case["terminated"][:, n] | case["truncated"][:, n]
    return next((s for s in range(t, len(ended)) if ended[s]), len(ended) - 1)


@pytest.mark.parametrize("seed", range(5))
def test_gae_is_its_definition(seed):
    case, gamma, lam = _random_case(seed), 0.97, 0.9
    result = gae(**case, gamma=gamma, lam=lam)
    for t, n in np.ndindex(case["rewards"].shape):
        expected = sum(
            (gamma * lam) ** (s - t) * (case["rewards"][s, n] + gamma * _value_after(case, s, n) - case["values"][s, n])
            for s in range(t, _last_step(case, t, n) + 1)
        )
        assert_allclose(result.advantages[t, n], expected)


@pytest.mark.parametrize("seed", range(5))
def test_vtrace_is_its_definition(seed):
    case, gamma, max_rho, max_c = _random_case(seed), 0.97, 1.3, 0.9
    generator = np.random.default_rng(100 + seed)
    behaviour, target = generator.normal(size=(2, *case["rewards"].shape)) / 2
    result = vtrace(behaviour, target, **case, gamma=gamma, max_rho=max_rho, max_c=max_c)
    ratios = np.exp(target - behaviour)
    rhos, cs = np.minimum(ratios, max_rho), np.minimum(ratios, max_c)

    def value_target(t, n):
        total = case["values"][t, n]
        for s in range(t, _last_step(case, t, n) + 1):
            delta = rhos[s, n] * (case["rewards"][s, n] + gamma * _value_after(case, s, n) - case["values"][s, n])
            total += gamma ** (s - t) * np.prod(cs[t:s, n]) * delta
        return total

    for t, n in np.ndindex(case["rewards"].shape):
        assert_allclose(result.value_targets[t, n], value_target(t, n))
        is_last = _last_step(case, t, n) == t
        after = _value_after(case, t, n) if is_last else value_target(t + 1, n)
        advantage = rhos[t, n] * (case["rewards"][t, n] + gamma * after - case["values"][t, n])
        assert_allclose(result.advantages[t, n], advantage)


def test_vtrace_on_policy_is_gae():
    """With the same policy and lam = 1 V-trace's targets are GAE's returns."""
    case = _random_case(7)
    log_probs = np.random.default_rng(7).normal(size=case["rewards"].shape)
    on_policy = vtrace(log_probs, log_probs, **case, gamma=0.9)
    assert_allclose(on_policy.value_targets, gae(**case, gamma=0.9, lam=1.0).returns)


def test_shapes_are_checked():
    case = _random_case(0)
    for name, words in (("values", "values must have the shape of rewards"), ("next_values", "next_values must have")):
        with pytest.raises(envfleet.UsageError, match=words):
            gae(**{**case, name: np.zeros((3, 3))})
    with pytest.raises(envfleet.UsageError, match="target_log_probs must have"):
        vtrace(case["rewards"], np.zeros(3), **case)
    with pytest.raises(envfleet.UsageError, match="T at least 1"):
        gae(**{name: np.zeros((0, 4)) for name in case})


def test_vtrace_by_hand():
    """gamma = 0.5, ratios 2 (clipped to 1), 0.5, 1. Step 1 truncates: its final observation is worth 8."""
    result = vtrace(
        np.zeros((3, 1)),
        np.log(_column(2, 0.5, 1)),
        rewards=_column(1, 2, 3),
        values=_column(10, 20, 30),
        next_values=np.array([40.0]),
        terminated=_column(0, 0, 0).astype(bool),
        truncated=_column(0, 1, 0).astype(bool),
        final_values=_column(0, 8, 0),
        gamma=0.5,
    )
    # deltas: 1 * (1 + 10 - 10) = 1; 0.5 * (2 + 4 - 20) = -7; 1 * (3 + 20 - 30) = -7
    assert_allclose(result.value_targets[:, 0], [10 + 1 + 0.5 * -7, 20 - 7, 30 - 7])
    assert_allclose(result.advantages[:, 0], [1 + 0.5 * 13 - 10, 0.5 * (2 + 0.5 * 8 - 20), -7])


def test_final_values_count_only_where_an_episode_was_cut_off():
    """What a terminated episode's or a running episode's final value is makes no difference, not even NaN."""
    case = _random_case(3)
    counts = case["truncated"] & ~case["terminated"]
    other = {**case, "final_values": np.where(counts, case["final_values"], np.nan)}
    assert_allclose(gae(**case).advantages, gae(**other).advantages)


def test_vtrace_of_an_impossible_action_is_clipped_without_a_warning():
    case = _random_case(4)
    behaviour, target = np.zeros((2, *case["rewards"].shape))
    behaviour[0, 0] = -1e4
    surely = vtrace(behaviour, target, **case)
    assert_allclose(surely.value_targets, vtrace(target, target, **case).value_targets)


def _rollout(case, **changes):
    fields = dict.fromkeys(field.name for field in dataclasses.fields(Rollout))
    fields |= {name: case[name] for name in ("rewards", "next_values", "final_values")}
    fields |= {"terminations": case["terminated"], "truncations": case["truncated"]}
    return Rollout(**{**fields, "extras": {"values": case["values"]}, **changes})


def test_gae_of_a_rollout():
    case = _random_case(5)
    assert_allclose(gae_of(_rollout(case), gamma=0.9, lam=0.8), gae(**case, gamma=0.9, lam=0.8))


def test_gae_of_a_rollout_without_values():
    case = _random_case(5)
    with pytest.raises(
        envfleet.UsageError, match=r"act\(\) must give extras\['values'\].*extras of this rollout: state"
    ):
        gae_of(_rollout(case, extras={"state": case["values"]}))
    with pytest.raises(envfleet.UsageError, match=r"its values\(\) must not be None"):
        gae_of(_rollout(case, final_values=None))
