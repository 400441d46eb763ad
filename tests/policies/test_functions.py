"""FunctionPolicy: plain functions, with and without weights."""

import numpy as np
import pytest
from numpy.testing import assert_array_equal

import envfleet
from envfleet.contract.policy import ExposesDistribution, Policy
from envfleet.policies.functions import FunctionPolicy

OBS = np.arange(6.0).reshape(3, 2)


def _zeros(obs):
    return np.zeros(len(obs), np.int64)


@pytest.mark.parametrize(
    ("outcome", "log_probs", "extras"),
    [
        (np.arange(3), None, {}),
        ((np.arange(3), [0, -1, -2]), [0, -1, -2], {}),
        ((np.arange(3), None), None, {}),
        ((np.arange(3), np.zeros((3, 1)), {"state": [1, 2, 3]}), [0, 0, 0], {"state": [1, 2, 3]}),
    ],
)
def test_what_act_may_return(outcome, log_probs, extras):
    policy = FunctionPolicy(lambda obs: outcome)
    assert isinstance(policy, Policy)
    acted = policy.act(OBS)
    assert_array_equal(acted.actions, np.arange(3))
    if log_probs is None:
        assert acted.log_probs is None
    else:
        assert_array_equal(acted.log_probs, np.array(log_probs, np.float32), strict=True)
    assert {name: array.tolist() for name, array in acted.extras.items()} == extras


def test_actions_of_a_tuple_space():
    acted = FunctionPolicy(lambda obs: ((np.zeros(3), [1, 2, 3]), None)).act(OBS)
    assert isinstance(acted.actions, tuple) and isinstance(acted.actions[1], np.ndarray)


def test_wrong_outcomes_are_named():
    with pytest.raises(envfleet.UsageError, match=r"act must return .* got a tuple of int, int, int"):
        FunctionPolicy(lambda obs: (1, 2, 3)).act(OBS)
    with pytest.raises(envfleet.UsageError, match=r"log_probs .* got \(3, 2\): sum the log-probs"):
        FunctionPolicy(lambda obs: (np.zeros((3, 2)), np.zeros((3, 2)))).act(OBS)


def test_values_come_from_their_function_unless_act_gives_them():
    values = lambda obs: obs.sum(1)  # noqa: E731
    policy = FunctionPolicy(_zeros, values=values)
    assert_array_equal(policy.act(OBS).extras["values"], np.array([1, 5, 9], np.float32), strict=True)
    assert_array_equal(policy.values(OBS), [1, 5, 9])
    own = FunctionPolicy(lambda obs: (_zeros(obs), None, {"values": np.ones(3)}), values=values)
    assert_array_equal(own.act(OBS).extras["values"], [1, 1, 1])
    assert FunctionPolicy(_zeros).values(OBS) is None


def test_functions_with_weights_and_dict_observations():
    weights = {"w": np.ones(2, np.float32), "bias": np.float64(0.5)}
    policy = FunctionPolicy(
        act=lambda weights, obs: (obs["x"] @ weights["w"], obs["x"] @ weights["w"] + weights["bias"]),
        log_prob=lambda weights, obs, actions: actions + weights["bias"],
        values=lambda weights, obs: obs["x"][:, 0] * weights["bias"],
        weights=weights,
    )
    obs = {"x": OBS}
    acted = policy.act(obs)
    assert_array_equal(acted.log_probs, [1.5, 5.5, 9.5])
    assert_array_equal(policy.log_prob(obs, acted.actions), acted.log_probs)
    weights["bias"] = np.float64(1.0)  # the learner goes on
    assert policy.get_weights()["bias"] == 1.0
    policy.set_weights({"w": np.full(2, 2.0), "bias": np.array(3.0)})
    assert policy.get_weights()["w"].dtype == np.float32
    assert_array_equal(policy.values(obs), [0, 6, 12])
    assert_array_equal(weights["w"], [1, 1])  # the user's own mapping stays as it is
    with pytest.raises(envfleet.UsageError, match="missing: bias; unexpected: tail"):
        policy.set_weights({"w": np.ones(2), "tail": np.ones(1)})


def test_without_weights_there_are_none():
    policy = FunctionPolicy(_zeros)
    assert policy.get_weights() == {}
    policy.set_weights({})
    assert_array_equal(policy.act(OBS).actions, np.zeros(3))


def test_wrong_arguments_are_named():
    with pytest.raises(envfleet.UsageError, match="act must be a function; got NoneType"):
        FunctionPolicy(None)
    with pytest.raises(envfleet.UsageError, match="values must be a function; got int"):
        FunctionPolicy(_zeros, values=3)
    with pytest.raises(envfleet.UsageError, match="weights must be a mapping"):
        FunctionPolicy(_zeros, weights=[1, 2])
    with pytest.raises(envfleet.UsageError, match="no log_prob function"):
        FunctionPolicy(_zeros).log_prob(OBS, np.zeros(3))


def test_a_distribution_comes_from_its_function():
    policy = FunctionPolicy(_zeros, distribution=lambda obs: envfleet.Categorical(obs.tolist()))
    assert isinstance(policy, ExposesDistribution)
    shown = policy.distribution(OBS)
    assert isinstance(shown, envfleet.Categorical)
    assert_array_equal(shown.logits, OBS)
    weighted = FunctionPolicy(
        lambda weights, obs: _zeros(obs),
        weights={"std": np.full(2, 0.5)},
        distribution=lambda weights, obs: envfleet.Gaussian(obs, np.log(weights["std"]) + 0 * obs),
    )
    assert_array_equal(weighted.distribution(OBS).log_std, np.full((3, 2), np.log(0.5)))
    assert FunctionPolicy(_zeros).distribution(OBS) is None
    assert FunctionPolicy(_zeros, distribution=lambda obs: None).distribution(OBS) is None
    with pytest.raises(
        envfleet.UsageError, match=r"one of envfleet's \(Categorical, .*, Gaussian\) or None; got ndarray"
    ):
        FunctionPolicy(_zeros, distribution=lambda obs: obs).distribution(OBS)
    with pytest.raises(envfleet.UsageError, match="distribution must be a function; got int"):
        FunctionPolicy(_zeros, distribution=3)
