"""Read Jobs, pods and events: plain dicts, as the API server writes them. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from envfleet.contract.exits import WorkerExit
from envfleet.launchers.kubernetes.manifest import CONTAINER, INDEX, WORKER_LABEL
from envfleet.launchers.processes import signal_name

Object = Mapping[str, Any]

# Reasons that a kubelet gives for a pod that is not ready. The node controller, which marks the pods of a silent node
# as not ready, gives none.
KUBELET_REASONS = frozenset(("ContainersNotReady", "ReadinessGatesNotReady", "PodCompleted", "PodFailed"))


def worker_of(pod: Object) -> int | None:
    """Return the number of the worker that a pod runs; None if it runs none."""
    metadata = pod.get("metadata") or {}
    labels, annotations = metadata.get("labels") or {}, metadata.get("annotations") or {}
    number = str(labels.get(WORKER_LABEL) or annotations.get(INDEX) or labels.get(INDEX) or "")
    return int(number) if number.isdecimal() else None


def name_of(thing: Object) -> str:
    """Return the name of an object."""
    return str((thing.get("metadata") or {}).get("name", ""))


def uid_of(thing: Object) -> str:
    """Return the uid of an object."""
    return str((thing.get("metadata") or {}).get("uid", ""))


def is_leaving(thing: Object) -> bool:
    """Return whether an object is being deleted."""
    return bool((thing.get("metadata") or {}).get("deletionTimestamp"))


def has_ended(pod: Object) -> bool:
    """Return whether the worker's container has ended, or never will start. Other containers may still run."""
    return _terminated(pod) is not None or is_over(pod)


def is_over(pod: Object) -> bool:
    """Return whether the whole pod has ended, so that its Job replaces it."""
    return phase_of(pod) in ("Failed", "Succeeded")


def is_half_ended(pod: Object) -> bool:
    """Return whether the worker has ended, but a sidecar that the cluster has added keeps the pod running."""
    states = [status.get("state") or {} for status in (pod.get("status") or {}).get("containerStatuses") or ()]
    return _terminated(pod) is not None and not is_over(pod) and any("terminated" not in state for state in states)


def is_started(pod: Object) -> bool:
    """Return whether the worker runs. Its pod may be Pending meanwhile, until all its containers have started."""
    return phase_of(pod) == "Running" or _container_state(pod, "running") is not None


def is_cut_off(pod: Object) -> bool:
    """Return whether the pod's node is silent: the node controller has set the pod's Ready condition to false.

    A pod that its own kubelet reports as not ready has one of KUBELET_REASONS: a container or a gate is not ready.
    """
    ready = _condition(pod, "Ready")
    is_unready = ready is not None and ready.get("status") == "False"
    return is_unready and (ready or {}).get("reason") not in KUBELET_REASONS and is_started(pod)


def is_suspended(job: Object) -> bool:
    """Return whether the Job is suspended and makes no pods. Kueue suspends Jobs until it admits them."""
    return bool((job.get("spec") or {}).get("suspend"))


def is_failure(pod: Object) -> bool:
    """Return whether a pod has failed by itself: it was not told to leave, and not disrupted by the cluster."""
    ended = _terminated(pod) or {}
    is_told = ended.get("exitCode") in (WorkerExit.TOLD_TO_LEAVE, WorkerExit.OUT_OF_TIME)
    return phase_of(pod) == "Failed" and not is_told and not disruption_words(pod) and not is_leaving(pod)


def job_end(job: Object) -> str | None:
    """Return why a Job makes no more pods; None if it does."""
    if _condition_words(job, "Complete", "True") is not None:
        return f"Job {name_of(job)} is complete"
    for kind in ("Failed", "FailureTarget"):  # FailureTarget: it is about to be marked as failed
        words = _condition_words(job, kind, "True")
        if words is not None:
            return f"Job {name_of(job)} has failed: {words}"
    return f"Job {name_of(job)} is being deleted" if is_leaving(job) else None


def is_in(intervals: str | None, index: int) -> bool:
    """Return whether an index is in a list of intervals as the API writes it: "1,3-5,7"."""
    for part in filter(None, (intervals or "").split(",")):
        first, _, last = part.partition("-")
        if int(first) <= index <= int(last or first):
            return True
    return False


def end_words(pod: Object) -> str:
    """Describe how a pod ended."""
    status = pod.get("status") or {}
    parts = []
    ended = _terminated(pod)
    if ended is not None:
        parts.append(_exit_words(ended))
    elif phase_of(pod) == "Succeeded":
        parts.append("has ended")
    else:
        parts.append("has failed")
    if status.get("reason"):
        parts.append(": ".join(filter(None, (status["reason"], status.get("message")))))
    return ", ".join(parts) + disruption_words(pod)


def _exit_words(ended: Object) -> str:
    code, reason = ended.get("exitCode"), str(ended.get("reason") or "")
    message = str(ended.get("message") or "").strip()
    tail = f": {message}" if message else ""
    if reason == "OOMKilled":
        return f"was killed because it used more memory than it may (OOMKilled): raise memory_per_worker{tail}"
    if isinstance(code, int) and code > 128 and reason in ("", "Error"):
        return f"was killed by {signal_name(code - 128)}{tail}"
    named = f" ({reason})" if reason not in ("", "Error", "Completed") else ""
    return f"ended with exit code {code}{named}{tail}"


def last_end_words(pod: Object) -> str:
    """Describe how the container ended before it was restarted inside its pod; "" if it was not."""
    status = _container_status(pod)
    ended = (status.get("lastState") or {}).get("terminated")
    return f"; it {_exit_words(ended)}, {status.get('restartCount', 0)} restarts" if ended else ""


def disruption_words(pod: Object) -> str:
    """Return why the cluster has evicted a pod; "" if it has not."""
    words = _condition_words(pod, "DisruptionTarget", "True")
    return "" if words is None else f" (disrupted: {words})"


def scheduling_words(pod: Object) -> str:
    """Return why a pod has no node, in the scheduler's words."""
    return _condition_words(pod, "PodScheduled", "False") or "waits to be started"


def warning_words(warnings: Iterable[Object], uid: str, reasons: tuple[str, ...] | None) -> str:
    """Return the newest warning about an object; "" if there is none.

    Args:
        warnings: Events of type Warning.
        uid: The object that the warning is about.
        reasons: Reasons to consider. None: all.
    """
    about = [
        event
        for event in warnings
        if (event.get("involvedObject") or {}).get("uid") == uid and (reasons is None or event.get("reason") in reasons)
    ]
    if not about:
        return ""
    newest = max(about, key=lambda event: str(event.get("lastTimestamp") or event.get("eventTime") or ""))
    return f"{newest.get('reason')}: {newest.get('message')}"


def created(thing: Object) -> str:
    """Return when an object was created, as text that sorts by time."""
    return str((thing.get("metadata") or {}).get("creationTimestamp") or "")


def owner_of(pod: Object) -> str:
    """Return the uid of the Job that made a pod."""
    owners = (pod.get("metadata") or {}).get("ownerReferences") or ()
    return str(next((owner.get("uid") for owner in owners if owner.get("kind") == "Job"), ""))


def phase_of(pod: Object) -> str:
    """Return the phase of a pod: Pending, Running, Succeeded, Failed or Unknown."""
    return str((pod.get("status") or {}).get("phase") or "Pending")


def _terminated(pod: Object) -> Object | None:
    return _container_state(pod, "terminated")


def waiting_of(pod: Object) -> Object | None:
    """Return what the worker's container waits for, with `reason` and `message`; None if it does not wait."""
    return _container_state(pod, "waiting")


def _condition_words(thing: Object, kind: str, status: str) -> str | None:
    """Return reason and message of a condition; None if it does not have this status."""
    condition = _condition(thing, kind)
    if condition is None or condition.get("status") != status:
        return None
    return ": ".join(filter(None, (condition.get("reason"), condition.get("message"))))


def _condition(thing: Object, kind: str) -> Object | None:
    conditions: Sequence[Object] = (thing.get("status") or {}).get("conditions") or ()
    return next((each for each in conditions if each.get("type") == kind), None)


def _container_state(pod: Object, state: str) -> Object | None:
    found: Object | None = (_container_status(pod).get("state") or {}).get(state)
    return found


def _container_status(pod: Object) -> Object:
    """Return the status of the worker's container. The cluster may have added others to the pod."""
    return _worker_container((pod.get("status") or {}).get("containerStatuses") or ())


def _worker_container(containers: Sequence[Object]) -> Object:
    return next((each for each in containers if each.get("name") == CONTAINER), {})


def image_of(pod: Object) -> str:
    """Return the name of the worker's image, in quotes."""
    return repr(_worker_container((pod.get("spec") or {}).get("containers") or ()).get("image", ""))


def node_words(pod: Object) -> str:
    """Return " on node NAME", or "" if the pod has no node."""
    node = (pod.get("spec") or {}).get("nodeName")
    return f" on node {node}" if node else ""


def last_words(log: str, is_first: bool) -> str:
    """Quote the last line of a failed pod's log, or its last ten lines if it was not the first that failed."""
    plain = re.sub(r"\x1b\[[0-9;]*m", "", log)  # without escape sequences for colours
    lines = [line.rstrip() for line in plain.splitlines() if line.strip()][-1 if is_first else -10 :]
    if not lines:
        return ""
    return f"; its last line: {lines[0]}" if is_first else "; its last lines:\n  " + "\n  ".join(lines)


def age_order(pod: Object) -> tuple[str, bool, str]:
    """Return a key that sorts pods by age. Times have whole seconds: of two in one second the running one is newer."""
    return (created(pod), not has_ended(pod), name_of(pod))
