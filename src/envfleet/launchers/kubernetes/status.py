"""What the API server says of Jobs, pods and events -> how it is with a worker, in words to act on. Pure."""

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

IMAGE_PATIENCE_S = 30.0  # a registry may be away for a moment
REVIVAL_S = 60.0  # the Job controller's third back-off is 40 s
SLOW_START_S = 10.0  # a pod that takes longer to start is worth a look at its warnings

IMAGE_REASONS = frozenset(("ErrImagePull", "ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull"))
START_REASONS = frozenset(("CreateContainerConfigError", "CreateContainerError", "RunContainerError"))


class Kind(enum.Enum):
    """What a worker's situation is; how long it has been so decides what that means."""

    QUEUED = "queued"  # the pod waits for a node, or is being made ready
    STUCK = "stuck"  # the pod cannot start, for a reason that seldom goes away
    RUNNING = "running"
    FAILED = "failed"  # the pod has failed; its Job makes another
    NO_POD = "no pod"  # its Job is about to make one
    HALF_ENDED = "half ended"  # the worker has ended; its pod has other containers, which still run
    CUT_OFF = "cut off"  # its node is silent; if its connection is open it works on, and if not it is replaced
    ENDED = "ended"  # nobody makes another pod


@dataclass(frozen=True, slots=True)
class Situation:
    """Of one worker, at one moment."""

    kind: Kind
    words: str
    about: str = ""  # uid of the pod, or of the Job, that this is about
    is_hopeless: bool = False  # STUCK only: nobody's waiting helps


class Picture:
    """A run's objects, as the API server listed them. Warnings are asked for only when something is amiss."""

    def __init__(self, jobs: Sequence[Object], pods: Sequence[Object], warnings: Sequence[Object] = ()) -> None:
        """Sort them by worker, once: each of many workers is asked about."""
        self.jobs = jobs
        self.pods = pods
        self.warnings = warnings
        self._pods: dict[int, list[Object]] = {}
        for pod in sorted(pods, key=age_order):
            worker = worker_of(pod)
            if worker is not None:
                self._pods.setdefault(worker, []).append(pod)

    def job(self, name: str) -> Object | None:
        """The Job of this name."""
        return next((job for job in self.jobs if name_of(job) == name), None)

    def pods_of(self, worker: int) -> list[Object]:
        """All pods of a worker, the newest last."""
        return self._pods.get(worker, [])

    def pod(self, worker: int) -> Object | None:
        """The newest pod of a worker: the one that counts."""
        pods = self.pods_of(worker)
        return pods[-1] if pods else None

    def jobs_of(self, worker: int) -> list[Object]:
        """Jobs that may make pods of a worker, the newest last; replacements come after the Job of all."""

        def order(job: Object) -> tuple[str, bool, bool]:
            return (created(job), _is_replacement(job), not is_leaving(job))

        return sorted((job for job in self.jobs if _is_for(job, worker)), key=order)

    def situation(self, worker: int) -> Situation:
        """How it is with a worker."""
        jobs, pod = self.jobs_of(worker), self.pod(worker)
        if jobs:
            newest = jobs[-1]
            is_younger = pod is not None and _is_replacement(newest) and created(newest) >= created(pod)
            if pod is None or (is_younger and owner_of(pod) != uid_of(newest)):
                return _without_pod(newest, worker, self.warnings)
        if pod is None:
            return Situation(Kind.ENDED, "its Job is gone: somebody has deleted it", "gone")
        job = next((job for job in self.jobs if uid_of(job) == owner_of(pod)), None)
        return _with_pod(pod, job, worker, self.warnings)


def verdict(situation: Situation, age_s: float) -> WorkerState:
    """What a situation that has lasted so long means."""
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
    """Should the Job controller have made another pod by now?"""
    return age_s >= REVIVAL_S


def is_amiss(situation: Situation, age_s: float) -> bool:
    """Would the API server's warnings explain this?"""
    is_slow = situation.kind in (Kind.QUEUED, Kind.STUCK) and age_s > SLOW_START_S
    return situation.kind is Kind.NO_POD or is_slow


def _without_pod(job: Object, worker: int, warnings: Sequence[Object]) -> Situation:
    if _is_held(job):
        return _held(job)
    end = _end_for(job, worker)
    if end is not None:
        return Situation(Kind.ENDED, end, uid_of(job))
    words = warning_words(warnings, uid_of(job), ("FailedCreate",))
    if not words:
        return Situation(Kind.NO_POD, f"Job {name_of(job)} has not made its pod yet", uid_of(job))
    text = f"Job {name_of(job)} cannot make its pod: {words}"
    if "violates PodSecurity" in words:
        text += " (set run_as_user= to a user other than root, or run_as_non_root=True if the image has one)"
    is_waiting = "exceeded quota" in words  # until another's pod ends
    return Situation(Kind.QUEUED if is_waiting else Kind.STUCK, text, uid_of(job))


def _with_pod(pod: Object, job: Object | None, worker: int, warnings: Sequence[Object]) -> Situation:
    uid, where = uid_of(pod), f"pod {name_of(pod)}{node_words(pod)}"
    if job is not None and _is_held(job) and (has_ended(pod) or is_leaving(pod)):
        return _held(job)
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
    if phase_of(pod) == "Succeeded":  # of a worker that was there before the fleet shrank, and grew again
        return Situation(Kind.NO_POD, words, uid)
    return Situation(Kind.FAILED, f"{words}; Job {name_of(job)} makes another", uid)


def _starting(pod: Object, where: str, waiting: Object, warnings: Sequence[Object]) -> Situation:
    reason, message = str(waiting.get("reason") or "waiting"), str(waiting.get("message") or "").strip()
    words = f"{where}: {reason}{f': {message}' if message else ''}"
    if reason in IMAGE_REASONS:
        fix = "check the image's name, and image_pull_secrets= if its registry wants a login"
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


def _is_held(job: Object) -> bool:
    """Is it suspended, so that its workers wait, also those that have failed too often?"""
    return is_suspended(job) and job_end(job) is None


def _held(job: Object) -> Situation:
    words = "is suspended: its workers wait until it is resumed (by Kueue, when there is room)"
    return Situation(Kind.QUEUED, f"Job {name_of(job)} {words}", uid_of(job))


def _end_for(job: Object, worker: int) -> str | None:
    """Why a Job makes no more pods of a worker; None: it does."""
    end = job_end(job)
    if end is not None or _is_replacement(job):
        return end
    status = job.get("status") or {}
    if is_in(status.get("failedIndexes"), worker):
        return f"Job {name_of(job)} makes no more pods of it: it has failed too often"
    if is_in(status.get("completedIndexes"), worker):
        return f"Job {name_of(job)} has it as completed"
    return None


def _is_for(job: Object, worker: int) -> bool:
    if _is_replacement(job):
        return bool(job["metadata"]["labels"][WORKER_LABEL] == str(worker))
    return worker < int((job.get("spec") or {}).get("completions") or 0)


def _is_replacement(job: Object) -> bool:
    return WORKER_LABEL in ((job.get("metadata") or {}).get("labels") or {})
