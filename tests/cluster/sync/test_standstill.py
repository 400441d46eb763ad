"""A learner that is held near its workers is noticed: from series of divergences, and from real PPO on two workers."""

import logging

import numpy as np
import pytest

from envfleet.cluster.standstill import Standstill
from envfleet.cluster.sync import APS, EveryUpdate
from tests.support.scripts import EXAMPLES

FORKED_WITH = ("torch", "rich.live", "rich.progress")

# Measured: plain PPO on CartPole-v1 (seed 1) under APS(0.05), and decoupled PPO after its last pull (seed 2).
PLAIN = [0.0078, 0.0081, 0.0074, 0.0116, 0.0150, 0.0156, 0.0155, 0.0157, 0.0180, 0.0168, 0.0169, 0.0167, 0.0182, 0.0159]
DECOUPLED = [0.0149, 0.0108, 0.0210, 0.0182, 0.0127, 0.0093, 0.0101, 0.0105, 0.0110, 0.0120, 0.0105, 0.0110]
RANDOM = np.random.default_rng(0)
SAME = RANDOM.normal(22.0, 10.0, 200).tolist()


def warnings_of(divergences, returns=SAME, num_pulls=None, rule=None):
    """What is said after each measurement."""
    standstill = Standstill(APS(threshold=0.05) if rule is None else rule)
    standstill.ended(returns)
    num_pulls = [2] * len(divergences) if num_pulls is None else num_pulls
    return [standstill.measured([each, each], pulls) for each, pulls in zip(divergences, num_pulls, strict=True)]


def test_a_divergence_that_is_pinned_below_the_threshold():
    *before, last = warnings_of(PLAIN)
    assert before == [None] * len(before)
    for part in ("14 measurements", "0.016", "0.05", "mean 22", "Plain PPO", "envfleet.losses.ppo_decoupled_loss"):
        assert part in last
    assert "docs/troubleshooting.md" in last and "decoupled PPO" in last


@pytest.mark.parametrize(
    "divergences",
    [
        np.linspace(0.001, 0.049, 40),  # a random walk
        np.linspace(0.01, 0.22, 40) ** 2,  # a straight way
        PLAIN[:11],  # too few to say
        np.array(PLAIN) / 10,  # it hardly changes
        DECOUPLED,  # it falls again
        [*PLAIN[:13], 0.06, 0.016, 0.016],  # a pull is to come
        [np.inf] * 20,
    ],
    ids=["walk", "way", "few", "small", "falling", "above", "infinite"],
)
def test_divergences_that_are_not_pinned(divergences):
    assert not any(warnings_of(divergences))


def test_after_a_pull_it_begins_anew():
    assert not any(warnings_of(PLAIN, num_pulls=[2] * 7 + [3] * 7))
    assert any(warnings_of([0.03, *PLAIN], num_pulls=[1] + [2] * len(PLAIN)))


def test_returns_that_move():
    assert not any(warnings_of(PLAIN, returns=[*RANDOM.normal(22.0, 10.0, 100), *RANDOM.normal(30.0, 10.0, 100)]))
    assert not any(warnings_of(PLAIN, returns=SAME[:30])), "too few episodes to say"
    assert any(warnings_of(PLAIN, returns=[*RANDOM.normal(99.0, 10.0, 500), *SAME])), "the last ones count"


def test_rules_that_measure_nothing():
    assert not any(warnings_of(PLAIN, rule=EveryUpdate()))


@pytest.mark.slow
@pytest.mark.usefixtures("quick_workers")
@pytest.mark.filterwarnings("ignore:plain PPO met data")
@pytest.mark.parametrize("is_plain", [True, False], ids=["plain", "decoupled"])
def test_plain_ppo_locks_up_and_is_warned_of(is_plain, monkeypatch, caplog):
    monkeypatch.syspath_prepend(str(EXAMPLES))
    import ppo

    num_updates = 24
    settings = ppo.Settings(
        plain=is_plain, threshold=0.05, max_lag=64, num_rollout_steps=64, total_steps=num_updates * 2 * 8 * 64
    )
    with caplog.at_level(logging.WARNING, "envfleet.cluster"):
        training = ppo.train(settings)
    assert training.num_updates == num_updates
    assert max(training.pulls[-1]) == 1 if is_plain else min(training.pulls[-1]) > 1
    texts = [record.getMessage() for record in caplog.records]
    assert ["APS stands still" in text for text in texts] == ([True] if is_plain else [])
