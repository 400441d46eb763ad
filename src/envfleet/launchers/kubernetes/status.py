"""What Jobs, pods and events mean for a worker, in words that the user can act on. Pure."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass

from envfleet.launchers.kubernetes.manifest import WORKER_LABEL
from envfleet.launchers.kubernetes.objects import (
    Object,
    age_order,
    created,
    disruption_words,
    end_words,
    has_ended,
    image_of,
    is_cut_off,
    is_half_ended,
    is_in,
    is_leaving,
    is_started,
    is_suspended,
    job_end,
    last_end_words,
    name_of,
    node_words,
    owner_of,
    phase_of,
    scheduling_words,
    uid_of,
    waiting_of,
    warning_words,
    worker_of,
)
from envfleet.launchers.launcher import WorkerState

IMAGE_PATIENCE_S = 30.0  # a registry may be unreachable for a moment
REVIVAL_S = 60.0  # the Job controller waits at most 40 s before it replaces a pod
SLOW_START_S = 10.0  # the warnings about a pod that takes longer to start are read

IMAGE_REASONS = frozenset(("ErrImagePull", "ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull"))
START_REASONS = frozenset(("CreateContainerConfigError", "CreateContainerError", "RunContainerError"))


class Kind(enum.Enum):
    """The situation of a worker. Its WorkerState depends on this and on how long it has lasted."""

    QUEUED = "queued"  # the pod waits for a node, or is being made ready
    STUCK = "stuck"  # the pod cannot start, for a reason that seldom goes away
    RUNNING = "running"
    FAILED = "failed"  # the pod has failed; its Job makes another
    NO_POD = "no pod"  # its Job will make one
    HALF_ENDED = "half ended"  # the worker has ended; its pod has other containers, which still run
    CUT_OFF = "cut off"  # its node is silent; the worker is replaced unless its connection is open
    ENDED = "ended"  # no Job will make another pod


@dataclass(frozen=True, slots=True)
class Situation:
    """The situation of one worker at one moment.

    Args:
        kind: What it is.
        words: What to tell the user.
        about: The uid of the pod or Job that `words` is about.
        is_hopeless: Only with STUCK: waiting does not help.
    """

    kind: Kind
    words: str
    about: str = ""
    is_hopeless: bool = False


class RunObjects:
    """All objects of a run, as the API server listed them at one moment.

    Args:
        jobs: All Jobs of the run.
        pods: All pods of the run.
        warnings: Warnings about some of them; they are read only when something is wrong.
    """

    def __init__(self, jobs: Sequence[Object], pods: Sequence[Object], warnings: Sequence[Object] = ()) -> None:
        self.jobs = jobs
        self.pods = pods
        self.warnings = warnings
        self._pods: dict[int, list[Object]] = {}
        for pod in sorted(pods, key=age_order):
            worker = worker_of(pod)
            if worker is not None:
                self._pods.setdefault(worker, []).append(pod)

    def job(self, name: str) -> Object | None:
        """Return the Job of this name; None if there is none."""
        return next((job for job in self.jobs if name_of(job) == name), None)

    def pods_of(self, worker: int) -> list[Object]:
        """Return all pods of a worker, the newest last."""
        return self._pods.get(worker, [])

    def pod(self, worker: int) -> Object | None:
        """Return the newest pod of a worker; None if it has none."""
        pods = self.pods_of(worker)
        return pods[-1] if pods else None

    def jobs_of(self, worker: int) -> list[Object]:
        """Return the Jobs that may make pods of a worker, the newest last."""

        def order(job: Object) -> tuple[str, bool, bool]:
            return (created(job), _is_replacement(job), not is_leaving(job))

        return sorted((job for job in self.jobs if _is_for(job, worker)), key=order)

    def situation(self, worker: int) -> Situation:
        """Return the situation of a worker."""
        jobs, pod = self.jobs_of(worker), self.pod(worker)
        if jobs:
            newest = jobs[-1]
            is_younger = pod is not None and _is_replacement(newest) and created(newest) >= created(pod)
            if pod is None or (is_younger and owner_of(pod) != uid_of(newest)):
                return _without_pod(newest, worker, self.warnings)
        if pod is None:
            return Situation(Kind.ENDED, "its Job is gone: it was deleted by others", "gone")
        job = next((job for job in self.jobs if uid_of(job) == owner_of(pod)), None)
        return _with_pod(pod, job, worker, self.warnings)


def state_of(situation: Situation, age_s: float) -> WorkerState:
    """Return the state of a worker whose situation has lasted for `age_s` seconds."""
    kind = situation.kind
    if kind is Kind.RUNNING:
        return WorkerState.RUNNING
    if kind is Kind.STUCK and (situation.is_hopeless or age_s >= IMAGE_PATIENCE_S):
        return WorkerState.REFUSED
    if kind in (Kind.ENDED, Kind.HALF_ENDED, Kind.CUT_OFF):
        return WorkerState.ENDED
    if kind in (Kind.FAILED, Kind.NO_POD) and is_overdue(age_s):
        return WorkerState.ENDED
    return WorkerState.PENDING


def is_overdue(age_s: float) -> bool:
    """Return whether the Job controller should have made another pod after `age_s` seconds."""
    return age_s >= REVIVAL_S


def needs_warnings(situation: Situation, age_s: float) -> bool:
    """Return whether the warnings should be read, to explain a situation that has lasted for `age_s` seconds."""
    is_slow = situation.kind in (Kind.QUEUED, Kind.STUCK) and age_s > SLOW_START_S
    return situation.kind is Kind.NO_POD or is_slow


def _without_pod(job: Object, worker: int, warnings: Sequence[Object]) -> Situation:
    if _is_paused(job):
        return _paused(job)
    end = _end_for(job, worker)
    if end is not None:
        return Situation(Kind.ENDED, end, uid_of(job))
    words = warning_words(warnings, uid_of(job), ("FailedCreate",))
    if not words:
        return Situation(Kind.NO_POD, f"Job {name_of(job)} has not made its pod yet", uid_of(job))
    text = f"Job {name_of(job)} cannot make its pod: {words}"
    if "violates PodSecurity" in words:
        text += " (set run_as_user= to a user other than root, or run_as_non_root=True if the image has one)"
    is_waiting = "exceeded quota" in words  # until another pod of the namespace ends
    return Situation(Kind.QUEUED if is_waiting else Kind.STUCK, text, uid_of(job))


def _with_pod(pod: Object, job: Object | None, worker: int, warnings: Sequence[Object]) -> Situation:
    uid, where = uid_of(pod), f"pod {name_of(pod)}{node_words(pod)}"
    if job is not None and _is_paused(job) and (has_ended(pod) or is_leaving(pod)):
        return _paused(job)
    if has_ended(pod):
        return _with_ended_pod(pod, f"{where} {end_words(pod)}", job, worker)
    where += f" is being deleted{disruption_words(pod)}" if is_leaving(pod) else ""
    if is_cut_off(pod):
        return Situation(Kind.CUT_OFF, f"{where}: its node does not report", uid)
    waiting = waiting_of(pod)
    if waiting is not None and not is_leaving(pod):
        return _starting(pod, where, waiting, warnings)
    if is_leaving(pod) or is_started(pod):
        return Situation(Kind.RUNNING, where, uid)
    if phase_of(pod) == "Unknown":
        return Situation(Kind.RUNNING, f"{where}: its node does not report", uid)
    return Situation(Kind.QUEUED, f"{where}: {scheduling_words(pod)}", uid)


def _with_ended_pod(pod: Object, words: str, job: Object | None, worker: int) -> Situation:
    uid = uid_of(pod)
    if is_half_ended(pod) and not is_leaving(pod):
        return Situation(Kind.HALF_ENDED, f"{words}, and other containers of its pod still run", uid)
    if job is None:
        return Situation(Kind.ENDED, words, uid)
    end = _end_for(job, worker)
    if end is not None:
        is_own_end = phase_of(pod) == "Succeeded"
        return Situation(Kind.ENDED, words if is_own_end else f"{words}; {end}", uid)
    if phase_of(pod) == "Succeeded":  # left over from before the number of workers was reduced and raised again
        return Situation(Kind.NO_POD, words, uid)
    return Situation(Kind.FAILED, f"{words}; Job {name_of(job)} makes another", uid)


def _starting(pod: Object, where: str, waiting: Object, warnings: Sequence[Object]) -> Situation:
    reason, message = str(waiting.get("reason") or "waiting"), str(waiting.get("message") or "").strip()
    words = f"{where}: {reason}{f': {message}' if message else ''}"
    if reason in IMAGE_REASONS:
        fix = "check the image's name, and image_pull_secrets= if its registry needs a login"
        return Situation(
            Kind.STUCK, f"{words} (image {image_of(pod)}; {fix})", uid_of(pod), reason == "InvalidImageName"
        )
    if reason in START_REASONS:
        return Situation(Kind.STUCK, f"{words} (image {image_of(pod)})", uid_of(pod))
    if reason == "CrashLoopBackOff":
        return Situation(Kind.FAILED, f"{words}{last_end_words(pod)}", uid_of(pod))
    if reason == "ContainerCreating" or not message:
        about = warning_words(warnings, uid_of(pod), None)
        words += f": {about}" if about else ""
    return Situation(Kind.QUEUED, words, uid_of(pod))


def _is_paused(job: Object) -> bool:
    """Return whether a Job is suspended and not over: its workers wait, also those that have failed too often."""
    return is_suspended(job) and job_end(job) is None


def _paused(job: Object) -> Situation:
    words = "is suspended: its workers wait until it is resumed (by Kueue, when there is room)"
    return Situation(Kind.QUEUED, f"Job {name_of(job)} {words}", uid_of(job))


def _end_for(job: Object, worker: int) -> str | None:
    """Return why a Job makes no more pods of a worker; None if it does."""
    end = job_end(job)
    if end is not None or _is_replacement(job):
        return end
    status = job.get("status") or {}
    if is_in(status.get("failedIndexes"), worker):
        return f"Job {name_of(job)} makes no more pods of it: it has failed too often"
    if is_in(status.get("completedIndexes"), worker):
        return f"Job {name_of(job)} counts it as completed"
    return None


def _is_for(job: Object, worker: int) -> bool:
    if _is_replacement(job):
        return bool(job["metadata"]["labels"][WORKER_LABEL] == str(worker))
    return worker < int((job.get("spec") or {}).get("completions") or 0)


def _is_replacement(job: Object) -> bool:
    return WORKER_LABEL in ((job.get("metadata") or {}).get("labels") or {})
