"""Recurrent policies: the worker keeps what they remember, from rollout to rollout, and forgets it at episode ends.

A rollout's states and observations are enough to compute all that the workers computed once more here.
"""

import numpy as np
import pytest
import torch  # noqa: TID253 - agents of torch are part of this

from envfleet import APS, ClusterEnv, PolicyFailed
from envfleet.cluster.sync import probe_rows
from envfleet.policies.adapting import as_policy
from tests.support.agents.aps_agents import NoiseEnv, ShownPolicy, log_softmax
from tests.support.agents.recurrent_agents import (
    LearnedStartPolicy,
    LstmAgent,
    MemoryPolicy,
    OverwritingPolicy,
    ShownLstmAgent,
    ShownMemoryPolicy,
    WrongPolicy,
)

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("quick_workers")]
FORKED_WITH = ("torch",)

T, N = 12, 3  # steps, envs of each worker
NUM_PROBES, MAX_LAG = 20, 3
CLOSE = {"rtol": 1e-5, "atol": 1e-5}


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """Threads cost more than they bring for layers this small."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


@pytest.fixture(scope="module")
def cluster():
    with ClusterEnv(NoiseEnv, 2, N, backend="serial", sync=None) as made:
        yield made


@pytest.fixture(scope="module")
def aps():
    rule = APS(threshold=0.05, max_lag=MAX_LAG, num_probes=NUM_PROBES)
    with ClusterEnv(NoiseEnv, 2, N, backend="serial", sync=rule) as made:
        yield made


def rows_of(state, rows):
    return {name: array[rows] for name, array in state.items()}


def replay(policy, rollout, state):
    """Checks every step, final and next value; returns the states before each step, and after the last."""
    initial, before = policy.initial_state(rollout.num_envs), []
    for t in range(rollout.num_steps):
        before.append(state)
        obs, actions = np.ascontiguousarray(rollout.obs[t]), rollout.actions[t]
        np.testing.assert_allclose(rollout.log_probs[t], policy.log_prob(obs, actions, state=state), **CLOSE)
        np.testing.assert_allclose(rollout.extras["values"][t], policy.values(obs, state=state), **CLOSE)
        state = {name: np.array(array) for name, array in policy.act(obs, state=state).state.items()}
        finals = np.flatnonzero(rollout.final_steps == t)
        if len(finals):
            envs = rollout.final_envs[finals]
            values = policy.values(rollout.final_obs[finals], state=rows_of(state, envs))
            np.testing.assert_allclose(rollout.final_values[t, envs], values, **CLOSE)
            for name, array in state.items():
                array[envs] = initial[name][envs]
    np.testing.assert_allclose(rollout.next_values, policy.values(rollout.next_obs, state=state), **CLOSE)
    ended = rollout.terminations | rollout.truncations
    assert len(rollout.final_steps) == ended.sum() and not rollout.final_values[~ended].any()
    return before, state


def check_states(found, expected):
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        assert found[name].dtype == array.dtype
        np.testing.assert_allclose(found[name], array, **CLOSE)


def two_layers():
    return LstmAgent(seed=2, num_layers=2)


@pytest.mark.parametrize("kind", [LstmAgent, ShownLstmAgent, two_layers, MemoryPolicy, OverwritingPolicy])
def test_rollouts_can_be_replayed_from_their_states(cluster, kind):
    agent = kind()
    policy = as_policy(agent)
    cluster.reset(seed=2)
    state, num_finals = policy.initial_state(2 * N), 0
    for num_steps in (T, 1, T):
        rollout = cluster.rollout(agent, num_steps)
        check_states(rollout.states, state)
        _, state = replay(policy, rollout, rollout.states)
        num_finals += len(rollout.final_steps)
    assert num_finals
    assert not all(np.array_equal(rollout.states[name], each) for name, each in policy.initial_state(2 * N).items())


def test_what_is_remembered_matters(cluster):
    """Otherwise the tests above would say nothing."""
    agent = MemoryPolicy()
    cluster.reset(seed=3)
    cluster.rollout(agent, T)
    rollout = cluster.rollout(agent, T)
    for wrong in (agent.initial_state(2 * N), rows_of(rollout.states, np.arange(2 * N)[::-1])):
        with pytest.raises(AssertionError, match="Not equal to tolerance"):
            replay(agent, rollout, wrong)


def test_new_weights_go_on_with_what_is_remembered(cluster):
    agent = MemoryPolicy(seed=4)
    cluster.reset(seed=4)
    _, state = replay(agent, rollout := cluster.rollout(agent, T), agent.initial_state(2 * N))
    agent.weights["actor"] += 1.0
    agent.weights["fading"] -= 0.3
    again = cluster.rollout(agent, T)
    assert again.version == rollout.version + 1
    check_states(again.states, state)
    replay(agent, again, state)


def test_a_reset_forgets(cluster):
    agent = MemoryPolicy(seed=5)
    cluster.rollout(agent, T)
    cluster.reset(seed=5)
    rollout = cluster.rollout(agent, T)
    check_states(rollout.states, agent.initial_state(2 * N))
    replay(agent, rollout, rollout.states)


def test_another_policy_begins_with_its_own_state(cluster):
    cluster.rollout(MemoryPolicy(seed=6), T)
    agent = LstmAgent(seed=6)
    rollout = cluster.rollout(agent, T)
    check_states(rollout.states, as_policy(agent).initial_state(2 * N))
    replay(as_policy(agent), rollout, rollout.states)
    assert cluster.rollout(ShownPolicy(seed=6), T).states is None


def test_a_streams_rollouts_can_be_replayed(cluster):
    agent, states = MemoryPolicy(seed=7), {}
    cluster.reset(seed=7)
    stream = cluster.stream(agent, 5)
    for _ in range(8):
        rollout = next(stream)
        worker = int(rollout.workers[0])
        check_states(rollout.states, states.get(worker, agent.initial_state(N)))
        _, states[worker] = replay(agent, rollout, rollout.states)
    stream.close()


def test_steps_one_by_one(cluster):
    """Each is a rollout of one step: the state goes on."""
    agent = MemoryPolicy(seed=8)
    obs, _ = cluster.reset(seed=8)
    state, num_ended = agent.initial_state(2 * N), 0
    for _ in range(20):
        next_obs, _, terminated, truncated, info = cluster.step(agent)
        np.testing.assert_allclose(info["log_probs"], agent.log_prob(obs, info["actions"], state), **CLOSE)
        state, ended = agent.after(obs, state), np.flatnonzero(terminated | truncated)
        for name, array in agent.initial_state(2 * N).items():
            state[name][ended] = array[ended]
        obs, num_ended = next_obs, num_ended + len(ended)
    assert num_ended


def test_tensors_have_the_states(cluster):
    tensors = cluster.rollout(LstmAgent(seed=9), T).to_torch()
    assert {name: tuple(each.shape) for name, each in tensors.states.items()} == {"h": (6, 1, 6), "c": (6, 1, 6)}


def test_an_initial_state_that_is_learned(cluster):
    """It is one of the weights: what episodes begin with is that of the version that acts."""
    agent = LearnedStartPolicy()
    cluster.reset(seed=1)
    _, state = replay(agent, cluster.rollout(agent, T), agent.initial_state(2 * N))
    agent.weights["start"] += 2.0
    rollout = cluster.rollout(agent, 3 * T)
    assert len(rollout.final_steps)
    replay(agent, rollout, state)


# -- APS --


def perturb(agent, amount, random):
    if isinstance(agent, MemoryPolicy):
        agent.weights["actor"] += amount * random.standard_normal(agent.weights["actor"].shape).astype(np.float32)
        return
    with torch.no_grad():
        for parameter in agent.parameters():
            parameter += amount * torch.from_numpy(random.standard_normal(parameter.shape).astype(np.float32))


def shown_logits(policy, obs, state):
    return policy.logits(obs, state) if isinstance(policy, MemoryPolicy) else policy.distribution(obs, state).logits


def expected_divergence(held, learner, rollout, states, worker, is_shown):
    """On the probed rows, each with the state that the worker's policy had before it."""
    steps, envs = np.divmod(probe_rows(rollout.num_steps, N, NUM_PROBES), N)
    envs = envs + worker * N
    obs, actions = rollout.obs[steps, envs], rollout.actions[steps, envs]
    names = states[0].keys()
    state = {name: np.stack([states[t][name][n] for t, n in zip(steps, envs, strict=True)]) for name in names}
    if is_shown:
        p, q = (log_softmax(shown_logits(policy, obs, state)) for policy in (held, learner))
        return (np.exp(p) * (p - q)).sum(-1).mean()
    before, now = (policy.log_prob(obs, actions, state=state).astype(np.float64) for policy in (held, learner))
    return (np.exp(now - before) - 1 - (now - before)).mean()


@pytest.mark.parametrize("kind", [MemoryPolicy, ShownMemoryPolicy, LstmAgent, ShownLstmAgent])
def test_divergences_are_measured_with_what_was_remembered(aps, kind):
    agent, random = kind(seed=21), np.random.default_rng(0)
    is_shown = kind in (ShownMemoryPolicy, ShownLstmAgent)
    learner, held = as_policy(agent), {}

    def keep(version):
        held[version] = as_policy(kind())
        held[version].set_weights({name: np.array(each) for name, each in learner.get_weights().items()})

    aps.reset(seed=5)
    rollout = aps.rollout(agent, T)
    newest = rollout.version
    keep(newest)
    states, state = replay(held[newest], rollout, learner.initial_state(2 * N))
    outcomes = set()
    for amount in (0.01, 0.02, 0.6, 0.001, 0.001, 0.001, 0.001, 0.5):
        perturb(agent, amount, random)
        newest += 1
        keep(newest)
        before, rollout = rollout, aps.rollout(agent, T)
        for worker, version in enumerate(before.versions.tolist()):
            expected = expected_divergence(held[version], learner, before, states, worker, is_shown)
            assert aps.stats().workers[worker].divergence == pytest.approx(expected, abs=1e-5)
            due = expected > 0.05 or newest - version > MAX_LAG
            assert rollout.versions[worker] == (newest if due else version)
            outcomes.add(due)
        check_states(rollout.states, state)
        if len(set(rollout.versions.tolist())) == 1:
            states, state = replay(held[rollout.version], rollout, state)
        else:  # each worker's columns are of another version
            parts = [replayed_alone(held[version], rollout, state, w) for w, version in enumerate(rollout.versions)]
            states = [joined([part[0][t] for part in parts]) for t in range(T)]
            state = joined([part[1] for part in parts])
    assert outcomes == {True, False}


def joined(states):
    return {name: np.concatenate([each[name] for each in states]) for name in states[0]}


def replayed_alone(policy, rollout, state, worker):
    """The states of one worker's envs; its log-probs are checked as well."""
    own = slice(worker * N, (worker + 1) * N)
    state, initial, before = rows_of(state, own), policy.initial_state(N), []
    for t in range(rollout.num_steps):
        before.append(state)
        obs, actions = np.ascontiguousarray(rollout.obs[t, own]), rollout.actions[t, own]
        np.testing.assert_allclose(rollout.log_probs[t, own], policy.log_prob(obs, actions, state=state), **CLOSE)
        state = {name: np.array(array) for name, array in policy.act(obs, state=state).state.items()}
        ended = (rollout.terminations | rollout.truncations)[t, own]
        for name, array in state.items():
            array[ended] = initial[name][ended]
    return before, state


def test_under_aps_agents_with_and_without_memory_take_turns(aps):
    """What one of them remembered is nothing to the other."""
    for agent in (MemoryPolicy(seed=31), ShownPolicy(seed=32), LstmAgent(seed=33), ShownMemoryPolicy(seed=34)):
        for amount in (0.0, 0.001):
            if amount and not isinstance(agent, ShownPolicy):
                perturb(agent, amount, np.random.default_rng(0))
            rollout = aps.rollout(agent, 4)
            assert (rollout.states is None) == isinstance(agent, ShownPolicy)


# -- mistakes --


@pytest.mark.parametrize(
    ("mistake", "text"),
    [
        ("initial raises", r"initial_state\(\) raised ValueError: no state today"),
        ("initial rows", r"initial_state\(3\) must give arrays of \[3, \.\.\.\]; got \{'sum': \(1, 3\)\}"),
        ("initial scalar", r"initial_state\(3\) must give arrays of \[3, \.\.\.\]; got \{'count': \(\)\}"),
        ("shape", r"the state that act\(\) returns must be that of initial_state\(\).*\(3, 3\).*got.*\(3, 2\)"),
        ("name", r"the state that act\(\) returns must be that of initial_state\(\).*'sum'.*got.*'other'"),
        ("missing", r"the state that act\(\) returns must be that of .*'sum'.*got \{'count': \(3,\)\}"),
        ("none", r"the state that act\(\) returns must be that of initial_state\(\).*got None"),
    ],
)
def test_wrong_states(cluster, mistake, text):
    with pytest.raises(PolicyFailed, match=text):
        cluster.rollout(WrongPolicy(mistake), T)
    good = MemoryPolicy(seed=40)
    replay(good, rollout := cluster.rollout(good, T), rollout.states)
