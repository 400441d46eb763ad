"""How long Jobs outlive their head: an `activeDeadlineSeconds` that the head moves on. Pure. Why: ADR 20."""

from __future__ import annotations

import math
from collections.abc import Mapping
from datetime import datetime
from typing import Any

RENEW_PART = 6  # a deadline is moved on when a sixth of head_timeout_s has passed


def first_deadline(head_timeout_s: float | None) -> dict[str, int]:
    """The part of a new Job's spec that ends it when no head moves its deadline on."""
    return {} if head_timeout_s is None else {"activeDeadlineSeconds": math.ceil(head_timeout_s)}


def renewed_deadline(job: Mapping[str, Any], age_s: float, head_timeout_s: float | None) -> dict[str, int] | None:
    """The part of a Job's spec to patch now; None: its deadline is right.

    Args:
        job: The Job as the API server returned it.
        age_s: Seconds since the Job was created, by the head's own clock.
        head_timeout_s: The Job is to end this many seconds after the last renewal.
    """
    active_s = _active_s(job, age_s)
    deadline_s = (job.get("spec") or {}).get("activeDeadlineSeconds")
    if head_timeout_s is None or active_s is None or deadline_s is None:
        return None
    if abs(deadline_s - active_s - head_timeout_s) < head_timeout_s / RENEW_PART:
        return None
    return {"activeDeadlineSeconds": math.ceil(active_s + head_timeout_s)}


def _active_s(job: Mapping[str, Any], age_s: float) -> float | None:
    """Seconds that count against the deadline: those since the Job's start, which a suspension takes back."""
    started = (job.get("status") or {}).get("startTime")
    created = (job.get("metadata") or {}).get("creationTimestamp")
    if not started or not created:
        return None
    # Both times are the cluster's: the head's clock may be wrong.
    waited_s = (datetime.fromisoformat(started) - datetime.fromisoformat(created)).total_seconds()
    return max(0.0, age_s - waited_s)
