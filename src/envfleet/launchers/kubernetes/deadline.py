"""The deadline of a Job: Kubernetes ends the Job unless the head moves `activeDeadlineSeconds` on. Pure. See ADR 20."""

from __future__ import annotations

import math
from collections.abc import Mapping
from datetime import datetime
from typing import Any

RENEW_PART = 6  # a deadline is moved on after a sixth of head_timeout_s


def first_deadline(head_timeout_s: float | None) -> dict[str, int]:
    """Return the part of a new Job's spec with its deadline; empty if `head_timeout_s` is None."""
    return {} if head_timeout_s is None else {"activeDeadlineSeconds": math.ceil(head_timeout_s)}


def renewed_deadline(job: Mapping[str, Any], age_s: float, head_timeout_s: float | None) -> dict[str, int] | None:
    """Return the part of a Job's spec to patch now; None if its deadline is right.

    Args:
        job: The Job as the API server returned it.
        age_s: Seconds since the Job was created, by the head's clock; seconds in suspend count.
        head_timeout_s: The Job is to end this many seconds after the last renewal. None: never.
    """
    active_s = _active_s(job, age_s)
    deadline_s = (job.get("spec") or {}).get("activeDeadlineSeconds")
    if head_timeout_s is None or active_s is None or deadline_s is None:
        return None
    if abs(deadline_s - active_s - head_timeout_s) < head_timeout_s / RENEW_PART:
        return None
    return {"activeDeadlineSeconds": math.ceil(active_s + head_timeout_s)}


def _active_s(job: Mapping[str, Any], age_s: float) -> float | None:
    """Return the seconds that count against the deadline: those since startTime. A suspended Job has no startTime."""
    started = (job.get("status") or {}).get("startTime")
    created = (job.get("metadata") or {}).get("creationTimestamp")
    if not started or not created:
        return None
    # Both times are by the cluster's clock; they are not compared with the head's, which may be wrong.
    waited_s = (datetime.fromisoformat(started) - datetime.fromisoformat(created)).total_seconds()
    return max(0.0, age_s - waited_s)
