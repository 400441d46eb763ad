"""Synchronisation rules: pure functions of lag and divergence, which travel to the workers as they are."""

import math

import msgspec
import numpy as np
import pytest

from envfleet import UsageError
from envfleet.cluster.sync import APS, Every, EveryUpdate, Never, SyncRule
from envfleet.cluster.timing import Timing
from envfleet.cluster.wire.codec import Decoder, encode
from envfleet.cluster.wire.messages import FromHead, PoolPlan, Welcome
from envfleet.contract.pool_config import PoolConfig

INF = math.inf
DIVERGENCES = [None, 0.0, 0.1, INF]
RULES = [APS(), APS(threshold=0.5, max_lag=3, num_probes=7), APS(threshold=INF), EveryUpdate(), Every(5), Never()]


@pytest.mark.parametrize("rule", RULES, ids=repr)
@pytest.mark.parametrize("divergence", DIVERGENCES)
def test_who_has_the_newest_never_pulls(rule, divergence):
    assert not rule.should_pull(0, divergence)


@pytest.mark.parametrize("lag", [1, 2, 3])
@pytest.mark.parametrize(
    ("divergence", "expected"),
    [(None, True), (0.0, False), (0.25, False), (math.nextafter(0.25, 1), True), (0.3, True), (INF, True)],
)
def test_aps_pulls_above_the_threshold_or_unmeasured(lag, divergence, expected):
    assert APS(threshold=0.25, max_lag=3).should_pull(lag, divergence) is expected


@pytest.mark.parametrize(("lag", "expected"), [(1, False), (6, False), (7, True), (100, True)])
def test_aps_pulls_when_it_lags_too_much(lag, expected):
    assert APS(threshold=0.25, max_lag=6).should_pull(lag, 0.0) is expected
    assert APS(threshold=INF, max_lag=6).should_pull(lag, 0.0) is expected


@pytest.mark.parametrize("divergence", DIVERGENCES)
def test_the_other_rules_do_not_look_at_the_divergence(divergence):
    assert [EveryUpdate().should_pull(lag, divergence) for lag in range(4)] == [False, True, True, True]
    assert [Every(1).should_pull(lag, divergence) for lag in range(4)] == [False, True, True, True]
    assert [Every(3).should_pull(lag, divergence) for lag in range(6)] == [False] * 3 + [True] * 3
    assert not any(Never().should_pull(lag, divergence) for lag in (0, 1, 10**9))


def test_only_aps_wants_probes():
    assert [rule.num_probes > 0 for rule in RULES] == [True, True, True, False, False, False]
    assert APS(num_probes=9).num_probes == 9


@pytest.mark.parametrize("threshold", [0, 0.0, -1.0, math.nan, -INF])
def test_thresholds_that_are_refused(threshold):
    with pytest.raises(UsageError, match=r"threshold must be positive.*EveryUpdate"):
        APS(threshold=threshold)


@pytest.mark.parametrize("count", [0, -1, 1.5, 2.0, "3", None, True])
@pytest.mark.parametrize(
    ("name", "make"),
    [("max_lag", lambda count: APS(max_lag=count)), ("num_probes", lambda count: APS(num_probes=count)), ("k", Every)],
)
def test_counts_that_are_refused(name, make, count):
    with pytest.raises(UsageError, match=f"{name} must be a whole number of at least 1; got"):
        make(count)


@pytest.mark.parametrize("rule", RULES, ids=repr)
def test_rules_travel_in_the_welcome(rule):
    plan = PoolPlan(env=None, pool=PoolConfig(num_envs=1))
    welcome = Welcome(epoch=0, first_order=1, plan=plan, sync=rule, timing=Timing(), compression=None, attributes={})
    message, _ = Decoder(FromHead).decode([bytes(frame) for frame in encode(welcome)])
    assert type(message.sync) is type(rule) and message.sync == rule
    assert message.sync.num_probes == rule.num_probes


def test_a_rule_cannot_be_changed():
    with pytest.raises(AttributeError):
        APS().threshold = 1.0
    assert msgspec.structs.asdict(APS()).keys() == {"threshold", "max_lag", "num_probes", "measure_every"}


def test_numbers_of_numpy_travel():
    rule = APS(threshold=np.float64(0.05), max_lag=np.int64(3), num_probes=np.int32(4), measure_every=np.int64(2))
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(rule), type=SyncRule) == APS(0.05, 3, 4, 2)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(Every(np.int64(4))), type=SyncRule) == Every(4)
