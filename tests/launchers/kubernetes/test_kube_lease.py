"""When a Job's deadline is moved on, and to which value. Times are the cluster's; the head brings the Job's age."""

import pytest

from envfleet.launchers.kubernetes.deadline import first_deadline, renewed_deadline


def job(deadline_s=3600, started="2026-01-01T00:00:00Z", created="2026-01-01T00:00:00Z"):
    spec = {} if deadline_s is None else {"activeDeadlineSeconds": deadline_s}
    return {"metadata": {"creationTimestamp": created}, "spec": spec, "status": {"startTime": started}}


@pytest.mark.parametrize(
    ("one", "age_s", "expected"),
    [
        (job(), 0.0, None),
        (job(), 599.0, None),
        (job(), 601.0, 4201),
        (job(), 3000.5, 6601),
        (job(4201), 1100.0, None),
        (job(started=None), 1e6, None),  # suspended, or not begun
        (job(None), 1e6, None),  # made without a deadline, or somebody has removed it
        (job(started="2026-01-01T10:00:00Z"), 36000.0 + 601.0, 4201),  # it was suspended for ten hours
        (job(40000, started="2026-01-01T10:00:00Z"), 36000.0 + 1.0, 3601),  # moved back after that
        (job(started="2025-12-31T23:59:58Z"), 0.0, None),  # clocks of two servers
    ],
)
def test_renewal(one, age_s, expected):
    change = renewed_deadline(one, age_s, 3600.0)
    assert change == (None if expected is None else {"activeDeadlineSeconds": expected})


def test_no_timeout():
    assert first_deadline(None) == {} and first_deadline(3600.5) == {"activeDeadlineSeconds": 3601}
    assert renewed_deadline(job(), 1e6, None) is None
