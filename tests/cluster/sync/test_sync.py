"""Synchronisation rules: pure functions of lag and divergence, which travel to the workers as they are."""

import math

import msgspec
import numpy as np
import pytest

from envfleet import UsageError
from envfleet.cluster.sync import APS, Every, EveryUpdate, Measurement, Never, News, SyncRule
from envfleet.cluster.timing import Timing
from envfleet.cluster.wire.codec import Decoder, encode
from envfleet.cluster.wire.messages import Announce, Collect, FromHead, PoolPlan, Welcome
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


def announce(version, divergence=None, measured_version=-1):
    return Announce(version=version, divergence=divergence, measured_version=measured_version)


def test_an_announcement_that_was_overtaken_does_not_count():
    news = News().after_announcement(announce(3, 0.5, 1))
    assert news == News(3, 0.5, 1)
    assert news.after_announcement(announce(2, 9.0, 1)) is news
    assert news.after_announcement(announce(3, 0.7, 2)) == News(3, 0.7, 2)  # measured again
    assert news.after_announcement(announce(4)) == News(4, None, -1)


def test_an_order_counts_if_its_version_is_newer_than_what_was_announced():
    def order(version):
        return Collect(num_steps=1, code_id=1, version=version, divergence=0.1, measured_version=2)

    news = News(3, 0.5, 1)
    assert news.after_order(order(2)) is news
    assert news.after_order(order(3)) is news  # what was announced may have been measured later
    assert news.after_order(order(4)) == News(4, 0.1, 2)


@pytest.mark.parametrize(
    ("news", "expected"),
    [
        (News(3, 0.5, 2), True),  # the policy that it holds was measured: too far
        (News(3, 0.1, 2), False),
        (News(3, 0.5, 1), False),  # the policy before its last pull was measured: it is nearer now
        (News(3, None, -1), True),  # nothing was measured
        (News(2, 0.5, 2), False),  # it holds the newest
        (News(20, 0.5, 1), True),  # it lags too much
    ],
)
def test_a_measurement_counts_for_the_version_that_was_measured(news, expected):
    assert news.should_pull(APS(threshold=0.25, max_lag=3), 2) is expected


@pytest.mark.parametrize("rule", RULES, ids=repr)
def test_news_are_judged_by_the_rule(rule):
    assert News(4, 0.2, 2).should_pull(rule, 2) is rule.should_pull(2, 0.2)


def test_aps_measures_every_so_many_versions():
    rule = APS(measure_every=3)
    first = Measurement()
    assert [rule.should_measure(newest, 5, first) for newest in range(5, 10)] == [False, True, True, True, True]
    last = Measurement(0.1, 5, 6)  # versions 5 and 6 were compared
    assert [rule.should_measure(newest, 5, last) for newest in range(6, 11)] == [False, False, False, True, True]
    # A rollout of a newer version came in: what was measured of the older one says nothing of it until it is due.
    assert [rule.should_measure(newest, 8, last) for newest in range(8, 13)] == [False, False, False, True, True]
    assert [APS().should_measure(newest, 5, last) for newest in (6, 7)] == [False, True]
    assert not any(rule.should_measure(100, 1, first) for rule in RULES if not rule.num_probes)


def test_aps_warns_of_a_learner_that_is_held_near_its_workers():
    rule = APS(threshold=0.25, max_lag=3)
    text = rule.warning("worker 1", 4, 0.125)
    for part in ("worker 1 ", "4 versions", "max_lag=3", "0.12", "0.25", "decoupled PPO"):
        assert part in text
    assert rule.warning("worker 1", 3, 0.125) is None
    assert rule.warning("worker 1", 4, 0.5) is None  # it pulls because of its divergence
    assert rule.warning("worker 1", 4, None) is None
    assert not any(rule.warning("worker 1", 10**9, 0.0) for rule in RULES if not rule.num_probes)
