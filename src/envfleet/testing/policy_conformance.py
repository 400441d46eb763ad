"""The conformance suite for policies: what every agent that acts on a worker must do, whatever it is made of.

Each check takes a PolicyCase: the agent, the spaces of its envs, and a few words about it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
from gymnasium import spaces
from numpy.testing import assert_allclose, assert_array_equal

from envfleet.contract.arrays import Array
from envfleet.contract.distributions import Bernoulli, Categorical, Distribution, Gaussian, from_arrays, k3, kl
from envfleet.contract.errors import InvalidAction
from envfleet.contract.policy import Acted, ActsDeterministically, ExposesDistribution, MovesToDevice, Policy, Recurrent
from envfleet.contract.spaces import SpaceTree
from envfleet.policies.adapting import as_policy, build_policy, code_of, is_policy_like
from envfleet.policies.seeding import seed_policy

NUM_ROWS = 6
NUM_SAMPLES = 1000  # for each of NUM_ROWS observations, where a mean is compared


@dataclass(frozen=True, slots=True)
class PolicyCase:
    """An agent, and what the suite must know of it."""

    agent: Any  # what a cluster accepts as an agent
    observation_space: spaces.Space[Any]  # of one env
    action_space: spaces.Space[Any]
    is_squashed: bool = False  # its distribution is that before a squashing: it does not give the actions' log-probs
    make_obs: Callable[[int], Any] | None = None  # B observations; None: sampled from the space
    constants: tuple[str, ...] = ("action_scale", "action_bias")  # endings of names of weights that never change

    def obs(self, num_rows: int = NUM_ROWS) -> Any:
        """B observations, the same ones each time, which cannot be written."""
        if self.make_obs is not None:
            return self.make_obs(num_rows)
        space = copy.deepcopy(self.observation_space)
        space.seed(0)
        tree = SpaceTree(space)
        columns = zip(*(tree.flatten(space.sample()) for _ in range(num_rows)), strict=True)
        arrays = [np.stack([np.asarray(value) for value in column]) for column in columns]
        for array in arrays:
            array.flags.writeable = False
        return tree.unflatten(arrays)


def check_policy(
    agent: Any,
    observation_space: spaces.Space[Any],
    action_space: spaces.Space[Any],
    *,
    is_squashed: bool = False,
    make_obs: Callable[[int], Any] | None = None,
    constants: tuple[str, ...] = ("action_scale", "action_bias"),
) -> None:
    """Run all checks on an agent.

    Args:
        agent: what a cluster accepts as an agent.
        observation_space: of one env.
        action_space: of one env.
        is_squashed: whether the distribution is that before a squashing, and does not give the actions' log-probs.
        make_obs: `make_obs(num_rows)` returns observations; None: samples of the space.
        constants: endings of the names of weights that no learner changes.

    Raises:
        AssertionError: the agent does something else than the contract says. Errors of the agent are passed on.
    """
    case = PolicyCase(agent, observation_space, action_space, is_squashed, make_obs, constants)
    for check in POLICY_CHECKS:
        check(case)


def is_taken_as_an_agent(case: PolicyCase) -> None:
    """A cluster accepts it, and tells it from actions."""
    assert is_policy_like(case.agent), f"{type(case.agent).__name__} is not taken for an agent"
    assert isinstance(as_policy(case.agent), Policy)


def acts_in_the_form_of_the_spaces(case: PolicyCase) -> None:
    """Actions are values of the action space; log-probs, values and extras have a row for each observation."""
    policy = as_policy(case.agent)
    for num_rows in (1, NUM_ROWS):
        obs = case.obs(num_rows)
        before = copy.deepcopy(obs)
        acted = policy.act(obs, **_start(policy, num_rows))
        _require_equal(SpaceTree(case.observation_space), obs, before, "act() changed the observations")
        _require_actions(case.action_space, acted.actions, num_rows)
        if acted.log_probs is not None:
            _require_float_rows(acted.log_probs, num_rows, "log_probs of act()")
        for name, extra in acted.extras.items():
            array = np.asarray(extra)
            assert array.shape[:1] == (num_rows,), f"extra {name!r} must have {num_rows} rows; got shape {array.shape}"
            assert array.dtype.kind in "biuf", f"extra {name!r} must be of numbers; got dtype {array.dtype}"


def log_probs_are_those_of_the_actions(case: PolicyCase) -> None:
    """log_prob(obs, actions) equals what act() gave, and so it does for one row at a time."""
    policy, obs = as_policy(case.agent), case.obs()
    start = _start(policy, NUM_ROWS)
    acted = policy.act(obs, **start)
    if acted.log_probs is None:
        return
    log_probs = policy.log_prob(obs, acted.actions, **start)
    _require_float_rows(log_probs, NUM_ROWS, "log_prob()")
    assert_allclose(log_probs, acted.log_probs, rtol=1e-4, atol=1e-4, err_msg="log_prob() differs from act()")
    _require_no_rows_mixed(policy, case, acted, log_probs)


def values_are_those_of_acting(case: PolicyCase) -> None:
    """values(obs) equals the "values" that act() gave; a policy has both or none."""
    policy, obs = as_policy(case.agent), case.obs()
    start = _start(policy, NUM_ROWS)
    values, extras = policy.values(obs, **start), policy.act(obs, **start).extras
    if values is None:
        assert "values" not in extras, 'act() gives "values", but values() gives None'
        return
    _require_float_rows(values, NUM_ROWS, "values()")
    if "values" in extras:
        assert_allclose(extras["values"], values, rtol=1e-4, atol=1e-4, err_msg="values() differs from act()")


def weights_make_a_copy_equal(case: PolicyCase) -> None:
    """A worker's copy that gets weights gives back the same bits, acts by them, and keeps nothing of the message."""
    policy = as_policy(case.agent)
    before = _copied(policy.get_weights())
    other = _varied(case)
    weights = _copied(other.get_weights())
    twin = build_policy(code_of(case.agent))
    message = _copied(weights)
    twin.set_weights(_read_only(message))
    for array in message.values():
        array.fill(0)
    _require_same_bits(twin.get_weights(), weights, "weights that were set and got again differ")
    _require_same_bits(policy.get_weights(), before, "the copy shares its weights with the original")
    obs = case.obs()
    start = _start(policy, NUM_ROWS)
    acted = other.act(obs, **start)
    if acted.log_probs is not None:
        expected = other.log_prob(obs, acted.actions, **start)
        assert_array_equal(twin.log_prob(obs, acted.actions, **start), expected, "equal weights, other log-probs")


def wrong_weights_are_refused_whole(case: PolicyCase) -> None:
    """Weights with a missing, an unknown or a misshapen array raise, and change nothing."""
    twin = build_policy(code_of(case.agent))
    own = _copied(twin.get_weights())
    varied = _copied(_varied(case).get_weights())
    if not own:
        return
    last = list(own)[-1]
    wrong: dict[str, dict[str, Array]] = {
        "a missing array": {name: array for name, array in varied.items() if name != last},
        "an unknown array": varied | {"envfleet.unknown": np.zeros(3, np.float32)},
        "an array of another shape": varied | {last: np.zeros((2, *own[last].shape), own[last].dtype)},
    }
    for what, weights in wrong.items():
        try:
            twin.set_weights(_read_only(weights))
        except Exception:
            _require_same_bits(twin.get_weights(), own, f"weights with {what} were refused, but some were taken")
        else:
            raise AssertionError(f"weights with {what} were taken: set_weights() must raise")


def seeded_acting_repeats_itself(case: PolicyCase) -> None:
    """After the same seeds the policy, and a copy of it, act the same."""
    obs, tree = case.obs(), SpaceTree(case.action_space)
    twin = build_policy(code_of(case.agent))
    twin.set_weights(_read_only(_copied(as_policy(case.agent).get_weights())))
    runs = []
    for policy in (as_policy(case.agent), as_policy(case.agent), twin):
        seed_policy(policy, 3)
        start = _start(policy, NUM_ROWS)
        runs.append([policy.act(obs, **start).actions for _ in range(4)])
    for run in runs[1:]:
        for actions, expected in zip(run, runs[0], strict=True):
            _require_equal(tree, actions, expected, "acting after the same seed differs")


def the_distribution_gives_the_log_probs(case: PolicyCase) -> None:
    """What distribution() shows is what act() draws from."""
    policy, obs = as_policy(case.agent), case.obs()
    start = _start(policy, NUM_ROWS)
    shown = _distribution(policy, obs, start)
    if shown is None:
        return
    arrays = shown.arrays()
    for name, array in arrays.items():
        assert isinstance(array, np.ndarray), f"{name} of the distribution must be an array; got {type(array).__name__}"
        assert len(array) == NUM_ROWS, f"{name} of the distribution must have {NUM_ROWS} rows; got {array.shape}"
    assert_array_equal(kl(shown, from_arrays(shown.kind, arrays)), np.zeros(NUM_ROWS))
    acted = policy.act(obs, **start)
    is_one_array = SpaceTree(case.action_space).is_one_array
    if acted.log_probs is not None and is_one_array and not case.is_squashed:
        expected = _log_probs(shown, acted.actions, case.action_space)
        assert_allclose(acted.log_probs, expected, rtol=1e-3, atol=1e-3, err_msg="log-probs are not the distribution's")


def estimates_agree_with_the_exact_divergence(case: PolicyCase) -> None:
    """The mean of k3 over many actions comes to the exact divergence between two sets of weights."""
    policy, other = as_policy(case.agent), _varied(case)
    rows = np.repeat(np.arange(NUM_ROWS), NUM_SAMPLES)
    tree = SpaceTree(case.observation_space)
    obs = tree.unflatten([leaf[rows] for leaf in tree.flatten(case.obs())])
    start = _start(policy, len(rows))
    p, q = (_distribution(each, obs, start) for each in (policy, other))
    if p is None or q is None:
        return
    seed_policy(policy, 0)
    acted = policy.act(obs, **start)
    if acted.log_probs is None:
        return
    estimates = k3(acted.log_probs, other.log_prob(obs, acted.actions, **start))
    standard_error = estimates.std() / np.sqrt(len(rows))
    exact, estimated = kl(p, q).mean(), estimates.mean()
    assert abs(exact - estimated) <= 5 * standard_error + 1e-4, (
        f"the exact divergence is {exact:.5g}, but k3 comes to {estimated:.5g} with a standard error of "
        f"{standard_error:.2g}: actions, log_prob() and distribution() do not belong together"
    )


def acting_without_chance_gives_the_mode(case: PolicyCase) -> None:
    """If the policy acts deterministically: always the same actions, row by row, and none is more likely."""
    policy, obs, tree = as_policy(case.agent), case.obs(), SpaceTree(case.action_space)
    if not isinstance(policy, ActsDeterministically):
        return
    start = _start(policy, NUM_ROWS)
    seed_policy(policy, 0)
    acted = policy.act_deterministically(obs, **start)
    _require_actions(case.action_space, acted.actions, NUM_ROWS)
    assert (acted.state is not None) == isinstance(policy, Recurrent), "only recurrent policies return a state, always"
    twin = build_policy(code_of(case.agent))
    twin.set_weights(_read_only(_copied(policy.get_weights())))
    for seed, other in ((1, policy), (2, twin)):
        seed_policy(other, seed)
        again = cast(ActsDeterministically, other).act_deterministically(obs, **start)
        _require_equal(tree, again.actions, acted.actions, "deterministic actions depend on chance")
    obs_tree = SpaceTree(case.observation_space)
    for row in range(NUM_ROWS):
        alone = obs_tree.unflatten([leaf[row : row + 1] for leaf in obs_tree.flatten(obs)])
        actions = policy.act_deterministically(alone, **_start(policy, 1)).actions
        for one, all_rows in zip(tree.flatten(actions), tree.flatten(acted.actions), strict=True):
            message = "rows influence each other's deterministic actions"
            assert_allclose(one[0], all_rows[row], rtol=1e-4, atol=1e-5, err_msg=message)
    if tree.is_one_array and not case.is_squashed:
        _require_most_likely(policy, obs, acted.actions, case.action_space)


def _require_most_likely(policy: Policy, obs: Any, actions: Any, space: spaces.Space[Any]) -> None:
    start = _start(policy, NUM_ROWS)
    shown = _distribution(policy, obs, start)
    if shown is None:
        return
    chosen = _log_probs(shown, actions, space)
    for seed in range(8):
        seed_policy(policy, seed)
        drawn = _log_probs(shown, policy.act(obs, **start).actions, space)
        assert (drawn <= chosen + 1e-4).all(), "a drawn action is more likely than the deterministic one"


def what_it_remembers_has_a_row_for_each_env(case: PolicyCase) -> None:
    """A recurrent policy's state keeps its form, and rows put back to the initial state are as in a new episode."""
    policy = as_policy(case.agent)
    if not isinstance(policy, Recurrent):
        return
    initial = policy.initial_state(NUM_ROWS)
    for name, array in policy.initial_state(1).items():
        assert_array_equal(initial[name], np.repeat(array, NUM_ROWS, 0), f"rows of the initial state {name!r} differ")
    obs, state = case.obs(), initial
    for _ in range(3):
        acted = policy.act(obs, **{"state": state})
        assert acted.state is not None, "act() of a recurrent policy must return the next state"
        forms = [{name: (each.shape, each.dtype) for name, each in some.items()} for some in (initial, acted.state)]
        assert forms[0] == forms[1], f"the state after acting must have the form {forms[0]}; got {forms[1]}"
        state = acted.state
    ended = np.arange(NUM_ROWS) % 2 == 0
    mixed = {name: np.where(_column(ended, array), initial[name], array) for name, array in state.items()}
    acted = policy.act(obs, **{"state": mixed})
    if acted.log_probs is None:
        return
    by_state = [policy.log_prob(obs, acted.actions, **{"state": each}) for each in (mixed, initial, state)]
    expected = np.where(ended, by_state[1], by_state[2])
    assert_allclose(by_state[0], expected, rtol=1e-4, atol=1e-4, err_msg="rows of the state influence each other")


def moving_to_a_device_keeps_what_it_is(case: PolicyCase) -> None:
    """If the policy moves to devices: to_device("cpu") leaves its weights, and arrays still go in and come out."""
    twin = build_policy(code_of(case.agent))
    if not isinstance(twin, MovesToDevice):
        return
    policy, obs = as_policy(case.agent), case.obs()
    weights = _copied(policy.get_weights())
    twin.set_weights(_read_only(weights))
    twin.to_device("cpu")
    _require_same_bits(twin.get_weights(), weights, "to_device() changed the weights")
    twin.set_weights(_read_only(_copied(_varied(case).get_weights())))
    twin.set_weights(_read_only(weights))
    start = _start(policy, NUM_ROWS)
    acted = twin.act(obs, **start)
    _require_actions(case.action_space, acted.actions, NUM_ROWS)
    if acted.log_probs is not None:
        expected = policy.log_prob(obs, acted.actions, **start)
        assert_allclose(acted.log_probs, expected, rtol=1e-3, atol=1e-3, err_msg="to_device() changed the log-probs")


Check = Callable[[PolicyCase], None]

POLICY_CHECKS: tuple[Check, ...] = (
    is_taken_as_an_agent,
    acts_in_the_form_of_the_spaces,
    log_probs_are_those_of_the_actions,
    values_are_those_of_acting,
    weights_make_a_copy_equal,
    wrong_weights_are_refused_whole,
    seeded_acting_repeats_itself,
    the_distribution_gives_the_log_probs,
    estimates_agree_with_the_exact_divergence,
    what_it_remembers_has_a_row_for_each_env,
    acting_without_chance_gives_the_mode,
    moving_to_a_device_keeps_what_it_is,
)


def _start(policy: Policy, num_rows: int) -> dict[str, Any]:
    """What else a policy's methods take at the start of an episode."""
    return {"state": policy.initial_state(num_rows)} if isinstance(policy, Recurrent) else {}


def _distribution(policy: Policy, obs: Any, start: dict[str, Any]) -> Distribution | None:
    return policy.distribution(obs, **start) if isinstance(policy, ExposesDistribution) else None


def _varied(case: PolicyCase) -> Policy:
    """A copy with other weights. Each moves towards 0, so that probabilities and deviations stay what they are."""
    policy = build_policy(code_of(case.agent))
    generator = np.random.default_rng(1)
    weights = _copied(as_policy(case.agent).get_weights())
    for name, array in weights.items():
        if array.dtype.kind == "f" and not name.endswith(case.constants):
            array *= np.asarray(1 - 0.2 * generator.random(array.shape), array.dtype)
    policy.set_weights(_read_only(weights))
    return policy


def _log_probs(shown: Distribution, actions: Any, space: spaces.Space[Any]) -> Array:
    taken = np.asarray(actions).reshape(len(actions), -1)
    if isinstance(shown, Gaussian):
        log_std = np.asarray(shown.log_std, np.float64)
        each = -0.5 * ((taken - shown.mean) * np.exp(-log_std)) ** 2 - log_std - 0.5 * np.log(2 * np.pi)
        return np.asarray(each.sum(-1))
    if isinstance(shown, Bernoulli):
        logits = np.asarray(shown.logits, np.float64)
        return np.asarray(-np.logaddexp(0, np.where(taken == 1, -logits, logits)).sum(-1))
    choices = (shown.logits,) if isinstance(shown, Categorical) else shown.logits
    first = np.ravel(getattr(space, "start", 0))
    return sum(
        (_chosen(logits, column) for logits, column in zip(choices, (taken - first).T, strict=True)), np.zeros(())
    )


def _chosen(logits: Array, chosen: Array) -> Array:
    logits = np.asarray(logits, np.float64)
    return np.asarray(logits[np.arange(len(logits)), chosen] - np.logaddexp.reduce(logits, -1))


def _require_no_rows_mixed(policy: Policy, case: PolicyCase, acted: Acted, log_probs: Array) -> None:
    obs_tree, action_tree = SpaceTree(case.observation_space), SpaceTree(case.action_space)
    obs_leaves, action_leaves = obs_tree.flatten(case.obs()), action_tree.flatten(acted.actions)
    for row in range(NUM_ROWS):
        obs = obs_tree.unflatten([leaf[row : row + 1] for leaf in obs_leaves])
        actions = action_tree.unflatten([leaf[row : row + 1] for leaf in action_leaves])
        alone = policy.log_prob(obs, actions, **_start(policy, 1))
        assert_allclose(alone[0], log_probs[row], rtol=1e-3, atol=1e-3, err_msg="rows influence each other's log-probs")


def _require_actions(space: spaces.Space[Any], actions: Any, num_rows: int) -> None:
    tree = SpaceTree(space)
    try:
        leaves = tree.require_batch(actions, num_rows, "actions")
    except InvalidAction as error:
        raise AssertionError(str(error)) from error
    for leaf, batch in zip(tree.leaves, leaves, strict=True):
        for row, value in enumerate(batch):
            single = value if leaf.dtype is None else np.asarray(value, leaf.dtype)
            single = single[()] if isinstance(leaf.space, spaces.Discrete) else single
            assert leaf.space.contains(single), f"{leaf.name_in('actions')}, row {row}: {leaf.space} has no {single}"


def _require_float_rows(array: Any, num_rows: int, name: str) -> None:
    assert isinstance(array, np.ndarray), f"{name} must be an array; got {type(array).__name__}"
    assert array.shape == (num_rows,), f"{name} must have shape ({num_rows},); got {array.shape}"
    assert array.dtype == np.float32, f"{name} must be float32; got {array.dtype}"
    assert np.isfinite(array).all(), f"{name} must be finite; got {array}"


def _require_equal(tree: SpaceTree, given: Any, expected: Any, message: str) -> None:
    for one, other in zip(tree.flatten(given), tree.flatten(expected), strict=True):
        assert_array_equal(one, other, message)


def _require_same_bits(given: Mapping[str, Array], expected: Mapping[str, Array], message: str) -> None:
    forms = [{name: (each.dtype, each.shape) for name, each in weights.items()} for weights in (given, expected)]
    assert forms[0] == forms[1], f"{message}: {forms[0]}, expected {forms[1]}"
    for name, array in expected.items():
        assert given[name].tobytes() == array.tobytes(), f"{message}: {name}"


def _copied(weights: Mapping[str, Array]) -> dict[str, Array]:
    return {name: np.array(array) for name, array in weights.items()}


def _read_only(weights: Mapping[str, Array]) -> dict[str, Array]:
    """Views that cannot be written, as a worker gets them."""
    views = {name: array.view() for name, array in weights.items()}
    for view in views.values():
        view.flags.writeable = False
    return views


def _column(rows: Array, array: Array) -> Array:
    return rows.reshape(-1, *[1] * (array.ndim - 1))
