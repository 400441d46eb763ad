"""Adaptive Policy Synchronization on real workers: they pull when the rule says so, and act with what they pulled.

The divergence that the head announces is computed here once more, from the rollout before.
"""

import itertools
import logging
import math
import time
from collections import Counter

import numpy as np
import pytest
import torch  # noqa: TID253 - agents of torch are part of this

from envfleet import APS, ClusterEnv, ClusterTimeout, Every, EveryUpdate, Never, PolicyFailed, PolicySpec, UsageError
from envfleet.cluster.sync import probe_rows
from envfleet.testing.cluster_arguments import cluster_arguments
from envfleet.testing.programs import require_equal
from tests.support.agents.aps_agents import (
    LossyPolicy,
    NoiseEnv,
    SampledPolicy,
    SeedablePolicy,
    ShownPolicy,
    SilentPolicy,
    log_softmax,
)
from tests.support.agents.detach_agents import DiscreteAgent

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("quick_workers")]
FORKED_WITH = ("torch",)

T, N = 8, 3  # steps, envs of each worker
THRESHOLD, MAX_LAG, NUM_PROBES = 0.05, 6, 16
SCALES = [1.0] * N + [0.2] * N  # the second worker sees little: what is changed in the first layer matters less
SEEDS = itertools.count(100)


def noisy(sync, scales=SCALES, **kwargs):
    return ClusterEnv(
        NoiseEnv,
        2,
        N,
        sync=sync,
        backend="serial",
        env_kwargs=[{"scale": scale} for scale in scales],
        **cluster_arguments(kwargs),
    )


@pytest.fixture(scope="module")
def aps():
    with noisy(APS(threshold=THRESHOLD, max_lag=MAX_LAG, num_probes=NUM_PROBES)) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def patient():
    """Only a divergence can make its workers pull."""
    with noisy(APS(threshold=THRESHOLD, max_lag=10**6, num_probes=NUM_PROBES)) as cluster:
        yield cluster


def fresh(kind=ShownPolicy):
    """Unlike all others: to a cluster that has seen the same one before, it would be no other policy."""
    return kind(seed=next(SEEDS))


def change(agent, amount, random, names=("first", "bias", "last")):
    for name in names:
        weights = agent.weights[name]
        weights += (amount * random.standard_normal(weights.shape)).astype(np.float32)


def copied(agent):
    return {name: weights.copy() for name, weights in agent.weights.items()}


def acting_as(agent, weights):
    other = type(agent)()
    other.weights = weights
    return other


def own(rollout, worker):
    """The columns of one worker."""
    position = rollout.workers.tolist().index(worker)
    return slice(position * N, (position + 1) * N)


def expected_divergence(worker_policy, learner, rollout, worker, num_probes=NUM_PROBES):
    """KL(worker || learner) on the probed rows of the worker's rollout, by the definition."""
    rows = probe_rows(rollout.num_steps, N, num_probes)
    obs = rollout.obs[:, own(rollout, worker)].reshape(-1, 3)[rows]
    if isinstance(learner, ShownPolicy):
        p, q = log_softmax(worker_policy.logits(obs)), log_softmax(learner.logits(obs))
        return (np.exp(p) * (p - q)).sum(-1).mean()
    actions = rollout.actions[:, own(rollout, worker)].reshape(-1)[rows]
    log_ratio = learner.log_prob(obs, actions).astype(np.float64) - worker_policy.log_prob(obs, actions)
    return (np.exp(log_ratio) - 1 - log_ratio).mean()


def check_log_probs(agent, rollout, weights_of_version):
    """Each worker acted with the weights of the version it says, and with no others."""
    for worker, version in zip(rollout.workers.tolist(), rollout.versions.tolist(), strict=True):
        obs, actions = (each[:, own(rollout, worker)] for each in (rollout.obs, rollout.actions))
        policy = acting_as(agent, weights_of_version[version])
        expected = policy.log_prob(obs.reshape(-1, 3), actions.reshape(-1)).reshape(actions.shape)
        np.testing.assert_allclose(rollout.log_probs[:, own(rollout, worker)], expected, 1e-5, 1e-5)


def pulls(cluster):
    return np.array([each.num_pulls for each in cluster.stats().workers])


def divergences(cluster):
    return [each.divergence for each in cluster.stats().workers]


# -- APS --


@pytest.mark.parametrize("kind", [ShownPolicy, SampledPolicy])
def test_workers_pull_when_their_divergence_is_above_the_threshold(aps, kind):
    agent, random = fresh(kind), np.random.default_rng(2)
    aps.reset(seed=3)
    rollout = aps.rollout(agent, T)
    newest = rollout.version
    held, weights = [newest, newest], {newest: copied(agent)}
    assert rollout.versions.tolist() == held and rollout.states is None
    outcomes, num_pulls, num_measurements = Counter(), pulls(aps), aps.stats().num_measurements
    for amount in [0.02, 0.05, 1.0, 0.02, 0.2, 0.1, 0.1, 0.5, 0.001, 1.0, 0.3, 0.02, 0.02, 0.02] + [0.005] * 7:
        change(agent, amount, random, ["first"])
        before, newest = rollout, newest + 1
        weights[newest] = copied(agent)
        rollout = aps.rollout(agent, T)
        for worker in (0, 1):
            expected = expected_divergence(acting_as(agent, weights[held[worker]]), agent, before, worker)
            assert divergences(aps)[worker] == pytest.approx(expected, abs=1e-5)
            is_far, is_late = expected > THRESHOLD, newest - held[worker] > MAX_LAG
            if is_far or is_late:
                held[worker] = newest
                num_pulls[worker] += 1
            outcomes[worker, "far" if is_far else "late" if is_late else "near"] += 1
        assert rollout.versions.tolist() == held
        assert rollout.lags.tolist() == [newest - version for version in held]
        assert pulls(aps).tolist() == num_pulls.tolist()
        outcomes["versions differ"] += held[0] != held[1]
        check_log_probs(agent, rollout, weights)
    for outcome in ((0, "far"), (0, "near"), (1, "near"), (1, "late"), "versions differ"):
        assert outcomes[outcome], (outcome, outcomes)
    stats = aps.stats()
    assert stats.version == newest and stats.measure_s > 0
    assert 0 < stats.num_measurements - num_measurements <= 21
    assert [each.version for each in stats.workers] == held


def test_max_lag_forces_a_pull(aps):
    agent, random = fresh(), np.random.default_rng(0)
    first = aps.rollout(agent, T).version
    versions = []
    for _ in range(2 * MAX_LAG + 3):
        change(agent, 1e-4, random)
        versions.append((aps.rollout(agent, T).versions - first).tolist())
    late = MAX_LAG + 1
    assert versions == [[0, 0]] * MAX_LAG + [[late, late]] * late + [[2 * late, 2 * late]] * 2


def test_unchanged_weights_cost_nothing(aps):
    agent = fresh()
    aps.rollout(agent, T)
    change(agent, 0.01, np.random.default_rng(0))
    version = aps.rollout(agent, T).lag + aps.rollout(agent, T).version
    before = aps.stats()
    for _ in range(3):
        assert aps.rollout(agent, T).lag == 1
        assert aps.publish(agent) == version == before.version
    after = aps.stats()
    assert (after.version, after.num_measurements, after.measure_s) == (
        before.version, before.num_measurements, before.measure_s,
    )  # fmt: skip
    assert pulls(aps).tolist() == [each.num_pulls for each in before.workers]


def test_an_order_announces_in_few_bytes(aps):
    agent, random = fresh(), np.random.default_rng(0)
    aps.rollout(agent, T)
    for _ in range(4):
        before = aps.stats()
        change(agent, 0.01, random)
        aps.rollout(agent, T)
        for old, new in zip(before.workers, aps.stats().workers, strict=True):
            assert 24 <= new.announcement_bytes - old.announcement_bytes <= 150


def test_measurements_are_counted(aps):
    agent, random = fresh(), np.random.default_rng(0)
    before = aps.stats()
    aps.rollout(agent, T)
    assert aps.stats().num_measurements == before.num_measurements, "of a new agent's first weights there is nothing"
    for number in range(1, 4):
        change(agent, 0.001, random)
        aps.rollout(agent, T)
        now = aps.stats()
        assert now.num_measurements == before.num_measurements + number, "of both workers at once"
        assert now.measure_s > before.measure_s
        assert all(each.divergence is not None and 0 < each.divergence < THRESHOLD for each in now.workers)
        assert "divergence" in now.summary


def test_measuring_may_be_rarer():
    """A jump between two measurements is seen at the next one."""
    agent, random = fresh(), np.random.default_rng(0)
    versions, counts = [], []
    with noisy(APS(threshold=THRESHOLD, measure_every=3)) as cluster:
        for number in range(1, 12):
            rollout = cluster.rollout(agent, T)
            versions.append(rollout.versions.tolist())
            counts.append(cluster.stats().num_measurements)
            change(agent, 2.0 if number == 6 else 1e-4, random)
    # Measured at version 2, because nothing was known, then at 5, 8 (a pull) and 11.
    assert versions == [[1, 1]] * 7 + [[8, 8]] * 4
    assert counts == [0, 1, 1, 1, 2, 2, 2, 3, 3, 3, 4]


def test_short_rollouts_are_probed_together(patient):
    """Two steps of three envs are six rows: the ones before them count, too."""
    agent, random = fresh(), np.random.default_rng(0)
    start = acting_as(agent, copied(agent))
    seen = [patient.rollout(agent, 2).obs for _ in range(4)]
    change(agent, 0.02, random)
    patient.rollout(agent, 2)
    for worker, divergence in enumerate(divergences(patient)):
        rows = np.concatenate([obs[:, worker * N : (worker + 1) * N].reshape(-1, 3) for obs in seen])[-NUM_PROBES:]
        p, q = log_softmax(start.logits(rows)), log_softmax(agent.logits(rows))
        assert divergence == pytest.approx((np.exp(p) * (p - q)).sum(-1).mean(), rel=1e-4, abs=1e-7)


def test_a_learner_that_has_come_apart_is_pulled(aps):
    """NaN is no small divergence. What the workers do with it is another matter."""
    agent = fresh()
    aps.rollout(agent, T)
    agent.weights["last"][0, 0] = np.nan
    num_pulls = pulls(aps)
    aps.rollout(agent, T)
    assert divergences(aps) == [math.inf, math.inf]
    assert (pulls(aps) - num_pulls).tolist() == [1, 1]


def test_a_rollout_shorter_than_the_probes(aps):
    agent = fresh()
    for num_steps in (1, 2, 9):
        agent.weights["last"] *= -3.0  # all workers pull that
        before = copied(agent)
        rollout = aps.rollout(agent, num_steps)
        assert rollout.lag == 0
        change(agent, 0.01, np.random.default_rng(9))
        aps.rollout(agent, num_steps)
        for worker in (0, 1):
            expected = expected_divergence(acting_as(agent, before), agent, rollout, worker)
            assert divergences(aps)[worker] == pytest.approx(expected, abs=1e-5)


def test_without_probabilities_the_head_says_so(aps):
    agent = fresh(SilentPolicy)
    assert aps.rollout(agent, T).log_probs is None, "nothing to compare yet"
    change(agent, 0.1, np.random.default_rng(0))
    for _ in range(2):
        with pytest.raises(UsageError, match="APS compares policies by their probabilities"):
            aps.rollout(agent, T)
    rollout = aps.rollout(fresh(), T)
    assert rollout.lag == 0, "another agent is welcome"


def test_policies_by_their_path(aps):
    learner, random = ShownPolicy(seed=5), np.random.default_rng(0)
    spec = PolicySpec("tests.support.agents.aps_agents:ShownPolicy", {"seed": 8}, learner)
    rollout = aps.rollout(spec, T)
    first, weights = rollout.version, {rollout.version: copied(learner)}
    check_log_probs(learner, rollout, weights)
    for number, amount in enumerate((0.01, 0.01, 0.5), 1):
        change(learner, amount, random)
        weights[first + number] = copied(learner)
        before, rollout = rollout, aps.rollout(spec, T)
        for worker, version in enumerate(before.versions.tolist()):
            expected = expected_divergence(acting_as(learner, weights[version]), learner, before, worker)
            assert divergences(aps)[worker] == pytest.approx(expected, abs=1e-5)
        check_log_probs(learner, rollout, weights)
    assert rollout.versions[0] == first + 3 and before.versions[0] == first
    near = {name: each + np.float32(1e-5) for name, each in weights[first + 3].items()}
    again = PolicySpec("tests.support.agents.aps_agents:ShownPolicy", {"seed": 8}, near)
    assert aps.rollout(again, T).versions[0] == first + 3, "the same code goes on with other weights"


def test_another_agent_is_compared_with_none_before_it(aps):
    """Its distribution may be of another kind, and its arrays of other shapes."""
    for agent in (ShownPolicy(num_hidden=5), SampledPolicy(num_hidden=9), DiscreteAgent(3, 4, seed=5), fresh()):
        before = aps.stats().num_measurements
        assert aps.rollout(agent, T).lag == 0
        assert aps.stats().num_measurements == before


def test_torch_agents_are_measured(aps):
    agent = DiscreteAgent(3, 4)
    before = aps.rollout(agent, T)
    with torch.no_grad():
        agent.actor.weight += 0.3
        agent.actor.weight[0] += 0.3
    rollout = aps.rollout(agent, T)
    for worker in (0, 1):
        rows = probe_rows(T, N, NUM_PROBES)
        obs = torch.from_numpy(before.obs[:, own(before, worker)].reshape(-1, 3)[rows])
        actions = torch.from_numpy(before.actions[:, own(before, worker)].reshape(-1)[rows])
        with torch.no_grad():
            log_probs = agent.get_action_and_value(obs, actions)[1].numpy()
        log_ratio = log_probs - before.log_probs[:, own(before, worker)].reshape(-1)[rows].astype(np.float64)
        expected = (np.exp(log_ratio) - 1 - log_ratio).mean()
        assert divergences(aps)[worker] == pytest.approx(expected, abs=1e-5)
        assert (rollout.lags[worker] == 0) == (expected > THRESHOLD)
    assert agent.actor.weight.requires_grad and not agent.actor.weight.is_inference()


# -- streams --


def _num_pulls(stats):
    return sum(each.num_pulls for each in stats.workers)


def test_streams_announce_and_workers_pull_when_it_is_due(patient):
    agent, random = fresh(), np.random.default_rng(0)
    stream = patient.stream(agent, 2)
    rollout = next(stream)
    weights = {rollout.version: copied(agent)}
    before, last = patient.stats(), {0: 0, 1: 0}
    deadline_s = time.monotonic() + 60.0
    num_versions = 0
    # At least 60; on a busy machine it may take more until a worker has heard of one, and acts on it.
    while num_versions < 60 or _num_pulls(patient.stats()) == _num_pulls(before):
        assert time.monotonic() < deadline_s, "no worker pulls"
        num_versions += 1
        change(agent, 0.02, random)
        version = patient.publish(agent)
        weights[version] = copied(agent)
        assert version == max(weights)
        rollout = next(stream)
        check_log_probs(agent, rollout, weights)
        worker = int(rollout.workers[0])
        assert rollout.version >= last[worker]
        last[worker] = rollout.version
    stream.close()
    after = patient.stats()
    assert after.num_measurements > before.num_measurements
    for old, new in zip(before.workers, after.workers, strict=True):
        num_pulls = new.num_pulls - old.num_pulls
        assert num_pulls < num_versions / 2, "far less than versions"
        num_orders = num_versions + new.num_rollouts - old.num_rollouts + 2
        assert new.announcement_bytes - old.announcement_bytes <= 150 * num_orders


def test_a_divergence_measured_before_the_last_pull_is_no_reason_for_another(patient):
    """The head goes on measuring on rollouts that were begun before the pull."""
    agent, random = fresh(), np.random.default_rng(1)
    before, taken = [each.num_rollouts for each in patient.stats().workers], Counter()
    stream = patient.stream(agent, 2)

    def take():
        """One rollout, once the workers have done all they may: each is two rollouts ahead."""
        deadline_s = time.monotonic() + 60
        while any(
            each.num_rollouts - start < taken[each.worker] + 2
            for each, start in zip(patient.stats().workers, before, strict=True)
        ):
            assert time.monotonic() < deadline_s
            time.sleep(0.001)
        rollout = next(stream)
        taken.update(rollout.workers.tolist())
        return rollout

    while min(taken[0], taken[1]) < 1:
        take()
    num_pulls, versions = pulls(patient), {0: [], 1: []}
    agent.weights["last"] *= -3.0
    jumped = patient.publish(agent)
    is_late = Counter()  # announcements of a divergence of the policy that was held before
    while min(len(each) for each in versions.values()) < 4:
        rollout = take()
        worker = int(rollout.workers[0])
        if rollout.version >= jumped:
            versions[worker].append(rollout.version)
        change(agent, 1e-5, random)
        patient.publish(agent)
        is_late[worker] += rollout.version < jumped and divergences(patient)[worker] > THRESHOLD
    stream.close()
    assert min(is_late[0], is_late[1]) > 0
    assert (pulls(patient) - num_pulls).tolist() == [1, 1]
    assert [len(set(each)) for each in versions.values()] == [1, 1]


def test_a_stream_begins_with_a_measurement(patient):
    """What was measured for an older version says nothing of the newest."""
    agent, random = fresh(), np.random.default_rng(1)
    patient.rollout(agent, T)
    change(agent, 1e-5, random)
    assert patient.rollout(agent, T).lag == 1
    agent.weights["last"] *= -3.0
    stream = patient.stream(agent, T)
    assert [next(stream).lag for _ in range(4)] == [0] * 4
    stream.close()


def test_without_probabilities_a_stream_says_so(patient):
    agent = fresh(SilentPolicy)
    stream = patient.stream(agent, 2)
    next(stream)
    change(agent, 0.1, np.random.default_rng(0))
    with pytest.raises(UsageError, match="APS compares policies by their probabilities"):
        patient.publish(agent)
    stream.close()


# -- a policy that is held back --


def test_a_worker_that_pulls_for_its_age_alone_is_told_of_once(caplog):
    agent = fresh()
    start, random = copied(agent), np.random.default_rng(0)
    with noisy(APS(threshold=THRESHOLD, max_lag=6)) as patient, caplog.at_level(logging.WARNING, "envfleet.cluster"):
        patient.rollout(agent, T)
        for number in range(20):
            agent.weights = {name: weights.copy() for name, weights in start.items()}
            change(agent, 1e-5, random)
            assert patient.rollout(agent, T).lag == (number + 1) % 7
            assert bool(caplog.records) == (number >= 6)
    texts = [record.getMessage() for record in caplog.records]
    assert len(texts) == 1
    assert "worker 0" in texts[0] and "7 versions old" in texts[0] and "max_lag=6" in texts[0]
    assert "plain PPO" in texts[0] and "decoupled PPO" in texts[0] and "0.05" in texts[0]


# -- other rules --


@pytest.mark.parametrize(
    ("rule", "expected"), [(Every(3), [1, 1, 1, 4, 4, 4, 7, 7]), (Never(), [1] * 8)], ids=["every third", "never"]
)
def test_rules_that_only_count(rule, expected):
    agent, random, weights = ShownPolicy(), np.random.default_rng(0), {}
    with noisy(rule) as cluster:
        for number, version in enumerate(expected, 1):
            weights[number] = copied(agent)
            rollout = cluster.rollout(agent, T)
            assert rollout.versions.tolist() == [version, version]
            assert rollout.lags.tolist() == [number - version] * 2
            check_log_probs(agent, rollout, weights)
            change(agent, 1.0, random)
        stats = cluster.stats()
        assert (stats.num_measurements, stats.measure_s, divergences(cluster)) == (0, 0.0, [None, None])
        assert pulls(cluster).tolist() == [len(set(expected))] * 2


# -- weights on the way --


def rounded(weights):
    return {
        name: torch.from_numpy(each).to(torch.bfloat16).float().numpy() if each.size >= 256 else each
        for name, each in weights.items()
    }


def test_with_bfloat16_workers_act_with_exactly_the_rounded_weights():
    random, num_bytes = np.random.default_rng(0), {}
    for weights_dtype in (None, "bfloat16"):
        agent = ShownPolicy(num_hidden=2000)
        num_weights = sum(each.size for each in agent.weights.values())
        with noisy(None, weights_dtype=weights_dtype) as cluster:
            cluster.rollout(agent, T)
            change(agent, 0.5, random)
            before = cluster.stats().workers[0].weight_bytes
            rollout = cluster.rollout(agent, T)
            num_bytes[weights_dtype] = cluster.stats().workers[0].weight_bytes - before
            held = rounded(agent.weights) if weights_dtype else agent.weights
            check_log_probs(agent, rollout, {rollout.version: held})
            if weights_dtype:
                with pytest.raises(AssertionError, match="Not equal to tolerance"):
                    check_log_probs(agent, rollout, {rollout.version: agent.weights})
            small = ShownPolicy(num_hidden=100)  # its bias is not worth rounding
            rollout = cluster.rollout(small, T)
            held = rounded(small.weights) if weights_dtype else small.weights
            check_log_probs(small, rollout, {rollout.version: held})
    assert 0 < num_bytes[None] - 4 * num_weights < 500
    assert 0 < num_bytes["bfloat16"] - 2 * num_weights < 500


def test_a_policy_that_does_not_keep_its_weights_is_refused(aps):
    agent = fresh(LossyPolicy)
    for _ in range(2):
        with pytest.raises(PolicyFailed, match=r"does not hold the weights.*differs in last") as caught:
            aps.rollout(agent, T)
        assert "first" not in str(caught.value) and "bias" not in str(caught.value)
    for name in agent.weights:
        agent.weights[name] = agent.weights[name].astype(np.float16).astype(np.float32)
    assert aps.rollout(agent, T).lag == 0, "nothing is lost of these"


# -- seeds --


def columns(rollout):
    return {"obs": rollout.obs, "actions": rollout.actions, "log_probs": rollout.log_probs, "rewards": rollout.rewards}


def torch_agent():
    return DiscreteAgent(3, 4, seed=7)


@pytest.mark.parametrize("kind", [SampledPolicy, SeedablePolicy, torch_agent])
def test_the_same_seed_gives_the_same_rollouts(aps, patient, kind):
    """Bit by bit, on different clusters, whatever they did before."""
    found = []
    for cluster, seed in ((aps, 5), (patient, 5), (aps, 6), (aps, 5)):
        agent = kind()
        cluster.reset(seed=seed)
        found.append([columns(cluster.rollout(agent, num_steps)) for num_steps in (T, 3)])
    require_equal(found[0], found[1])
    require_equal(found[0], found[3])
    assert (found[0][0]["actions"] != found[2][0]["actions"]).any()
    first, second = found[0][0]["actions"][:, :N], found[0][0]["actions"][:, N:]
    assert (first != second).any(), "workers have random numbers of their own"


def test_workers_never_draw_the_same_numbers():
    """Without a seed, with the same one for all, and for an agent after another."""
    with noisy(APS(), scales=[0.0] * 2 * N) as cluster:
        found = [columns(cluster.rollout(fresh(SeedablePolicy), 40))["actions"] for _ in range(2)]
        cluster.reset(seed=[5] * 2 * N)
        found.append(columns(cluster.rollout(fresh(SeedablePolicy), 40))["actions"])
    for actions in found:
        assert (actions[:, :N] != actions[:, N:]).any()


def test_a_rollout_that_was_begun_is_of_its_own_agent(patient):
    agent = fresh()
    patient.rollout(agent, T)
    change(agent, 1e-4, np.random.default_rng(0))
    assert patient.rollout(agent, T).lag == 1, "a divergence was measured: too small for a pull"
    for _ in range(8):  # the workers may be anywhere: before, while or after they get code and weights of the first
        first, second = fresh(), fresh()
        with pytest.raises(ClusterTimeout):
            patient.rollout(first, 200, timeout_s=1e-4)
        version = patient.publish(second)
        rollout = patient.rollout(second, 20)
        assert rollout.versions.tolist() == [version, version]
        check_log_probs(second, rollout, {version: second.weights})


def test_an_agent_made_anew_for_each_call_is_told_of_once(caplog):
    with noisy(EveryUpdate()) as cluster, caplog.at_level(logging.WARNING, "envfleet.cluster"):
        for _ in range(3):
            cluster.rollout(fresh(), 2)
        assert not caplog.records
        for _ in range(5):
            cluster.rollout(fresh(), 2)
    texts = [record.getMessage().partition(",")[0] for record in caplog.records]
    assert texts == ["the agent is another object with every call"]


def test_a_seed_is_the_policys_too():
    """All observations are the same: what differs, the policy has drawn."""
    found = []
    for seed in (5, 5, 6):
        with noisy(APS(), scales=[0.0] * 2 * N, seed=seed) as cluster:
            first = columns(cluster.rollout(SampledPolicy(), T))
            cluster.reset(seed=seed)
            found.append([first, columns(cluster.rollout(SampledPolicy(), T))])
    require_equal(found[0], found[1])
    for one, other in zip(found[0], found[2], strict=True):
        assert (one["actions"] != other["actions"]).any(), "another seed"
        assert (one["actions"][:, :N] != one["actions"][:, N:]).any(), "another worker"
