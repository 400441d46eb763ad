"""RunStats: the sums, and the line."""

import pytest

from envfleet.contract.stats import RunStats, WorkerStats


def worker(**changes):
    fields = {
        "worker": 0,
        "stage": "present",
        "host": "node1",
        "pid": 7,
        "num_steps": 1000,
        "steps_per_s": 250.4,
        "version": 3,
        "lag": 1,
        "divergence": None,
        "num_rollouts": 4,
        "num_pulls": 2,
        "code_bytes": 700,
        "weight_bytes": 1500,
        "rollout_bytes": 2_000_000,
        "announcement_bytes": 40,
        "num_restarts": 0,
        "problem": "",
    }
    return WorkerStats(**{**fields, **changes})


def test_one_line():
    stats = RunStats((worker(), worker(stage="lost", num_steps=234, lag=3, num_restarts=2)), 4, {})
    assert stats.num_steps == 1234
    assert (
        str(stats)
        == stats.summary
        == (
            "1/2 workers, 501 steps/s, 1,234 steps, version 4, lag 3, 4 pulls, 3 kB of weights, 4 MB of rollouts, "
            "2 restarts"
        )
    )


def test_nobody_is_there():
    line = str(RunStats((), 0, {}))
    assert "\n" not in line and line.startswith("0/0 workers, 0 steps/s, 0 steps, version 0, lag 0")


@pytest.mark.parametrize(
    ("number", "text"),
    [(0, "0 B"), (999, "999 B"), (1000, "1 kB"), (1234, "1.23 kB"), (5 * 10**6, "5 MB"), (7 * 10**9, "7 GB"),
     (12345 * 10**9, "12.3 TB"), (12345 * 10**12, "12,345 TB")],
)  # fmt: skip
def test_bytes_are_readable(number, text):
    assert f", {text} of weights" in RunStats((worker(weight_bytes=number),), 1, {}).summary


def test_999_and_a_half_kilobytes():
    """Three digits must not become an exponent where the number rounds up to the next unit."""
    assert "e+" not in RunStats((worker(weight_bytes=999_999),), 1, {}).summary


def test_bytes_that_were_sent_again_are_shown_if_there_are_any():
    assert "sent again" not in RunStats((worker(),), 1, {}).summary
    line = RunStats((worker(resent_bytes=1_500_000), worker(resent_bytes=500_000)), 1, {}).summary
    assert ", 2 MB sent again, " in line
