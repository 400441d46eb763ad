"""KubernetesJob: the pods of one run. An Indexed Job makes them; Jobs of one worker replace those that it gives up."""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from envfleet.contract.errors import ClusterError, EnvFleetError
from envfleet.launchers.kubernetes.api import Forbidden, KubernetesApi, Unreachable
from envfleet.launchers.kubernetes.deadline import renewed_deadline
from envfleet.launchers.kubernetes.manifest import (
    CONTAINER,
    LEAVE_S,
    RUN_LABEL,
    WORKER_LABEL,
    Manifest,
    fleet_manifest,
    owner_reference,
    secret_manifest,
    size_of,
    worker_manifest,
)
from envfleet.launchers.kubernetes.objects import (
    end_words,
    is_failure,
    is_leaving,
    job_end,
    last_words,
    name_of,
    uid_of,
)
from envfleet.launchers.kubernetes.status import Kind, RunObjects, Situation, is_overdue, needs_warnings, state_of
from envfleet.launchers.launcher import WorkerJob, WorkerState, WorkerStatus

if TYPE_CHECKING:
    from envfleet.launchers.kubernetes.settings import Kubernetes

logger = logging.getLogger("envfleet.launchers")

LOOK_EVERY_S = 2.0  # seconds between two lists of Jobs and pods
LOOK_SOON_S = 0.5  # the same, after something was changed
LOOK_AGAIN_S = 5.0  # the same, after the API server did not answer
WARNINGS_EVERY_S = 5.0  # seconds between two readings of warnings
MOST_QUESTIONS = 4  # about single pods in one look, so that it stays short when all workers fail at once
WORKERS_PER_LOOK = 200  # with more workers than this, lists are asked for less often
LOG_BYTES = 4000


class KubernetesJob:
    """A Job (see launcher.py) of pods.

    Args:
        settings: The user's settings.
        job: What to start.

    Raises:
        UsageError: There is no Kubernetes configuration, or the API server refuses a field.
        ClusterError: The API server refuses, or does not answer.
    """

    def __init__(self, settings: Kubernetes, job: WorkerJob) -> None:
        self._settings = settings
        self._job = job
        self._run = f"envfleet-{secrets.token_hex(4)}"
        self._selector = f"{RUN_LABEL}={self._run}"
        self._api = KubernetesApi(settings.namespace, settings.context)
        self._num_workers = job.num_workers
        self._created: list[str] = []  # names of Jobs, each with a Secret of the same name
        self._created_s: dict[str, float] = {}  # when each Job was created, by the clock of _since_boot_s()
        self._head_pod: list[Manifest] = []  # owner of the Jobs, if the head is a pod: they are deleted with it
        self._num_replacements = 0
        self._objects = RunObjects((), ())
        self._statuses: dict[int, WorkerStatus] = {}
        self._since: dict[int, tuple[Kind, str, float]] = {}  # situation of each worker, and since when
        # By worker and uid of the failed pod: how it ended, and its last lines.
        self._failures: dict[int, dict[str, tuple[str, str]]] = {}
        self._last_logs: dict[int, str] = {}  # of the last failed pod of each worker, which may be deleted
        self._read_logs: dict[int, tuple[float, str]] = {}
        self._next_look_s = 0.0
        self._next_warnings_s = 0.0
        self._is_unreachable = False
        self._is_unrenewed = False
        try:
            pod = self._api.own_pod()
            self._head_pod = [] if pod is None else [owner_reference(pod, "v1", "Pod")]
            self._create(self._run, lambda name: fleet_manifest(settings, job, self._run, name))
            self._look()  # raises now if the user has no right to list pods
            self._next_look_s = time.monotonic() + LOOK_SOON_S
        except BaseException as error:
            is_hopeless = isinstance(error, Unreachable)
            self._clear_up(time.monotonic() + (0.0 if is_hopeless else LEAVE_S))
            raise
        logger.info("Kubernetes: Job %s in namespace %s", self._run, settings.namespace)

    @property
    def revives(self) -> bool:
        """Whether the engine restarts failed workers by itself."""
        return True

    def status(self, worker: int) -> WorkerStatus:
        """Return the state of one worker."""
        if time.monotonic() >= self._next_look_s:
            self._try_to_look()
        return self._statuses.get(worker, WorkerStatus(WorkerState.PENDING, f"Job {self._run} is new"))

    def log(self, worker: int, max_bytes: int = LOG_BYTES) -> str:
        """See Job. The log of the newest pod, or of the last one that failed."""
        pod = self._objects.pod(worker)
        read_s, text = self._read_logs.get(worker, (-LOOK_EVERY_S, ""))
        if pod is not None and time.monotonic() - read_s >= LOOK_EVERY_S:
            try:
                text = self._api.pod_log(name_of(pod), CONTAINER, max(max_bytes, LOG_BYTES))
            except (Forbidden, Unreachable) as error:
                text = f"(its log cannot be read: {error})"
            except EnvFleetError:  # the pod has not started yet, or is gone
                text = ""
            self._read_logs[worker] = (time.monotonic(), text)
        return (text or self._last_logs.get(worker, ""))[-max_bytes:]

    def log_place(self, worker: int) -> str:
        """Return where the whole log of a worker is."""
        pod, context = self._objects.pod(worker), self._settings.context
        of_context = f" --context {context}" if context else ""
        what = name_of(pod) if pod is not None else f"-l {self._selector}"
        return f"kubectl{of_context} -n {self._settings.namespace} logs {what} -c {CONTAINER}"

    def restart(self, worker: int) -> None:
        """See Job. Does nothing while the Job controller is about to replace the pod by itself."""
        self._look()
        situation, pod = self._objects.situation(worker), self._objects.pod(worker)
        is_recent = not is_overdue(self._age_s(worker, situation))
        if situation.kind is Kind.ENDED:
            self._replace(worker)
        elif situation.kind in (Kind.FAILED, Kind.NO_POD):
            if not is_recent:
                self._replace(worker)
        elif pod is not None and situation.about == uid_of(pod):
            is_stuck = is_leaving(pod) or situation.kind is Kind.CUT_OFF
            if not is_leaving(pod):
                self._api.delete_pod(name_of(pod))
            if is_stuck:  # if its node is gone, the pod is never deleted, and its Job waits for it
                self._replace(worker)
        self._judge()
        self._next_look_s = time.monotonic() + LOOK_SOON_S

    def resize(self, num_workers: int) -> None:
        """Start workers up to this number, or end those from this number on."""
        if num_workers == self._num_workers:
            return
        self._look()
        fleet = self._objects.job(self._run)
        is_alive = fleet is not None and job_end(fleet) is None
        if is_alive:
            self._api.patch_job(self._run, size_of(num_workers))
        first_new, self._num_workers = self._num_workers, num_workers
        for job in self._objects.jobs:
            worker = job["metadata"].get("labels", {}).get(WORKER_LABEL)
            if worker is not None and int(worker) >= num_workers:
                self._api.delete_job(name_of(job))
        for worker in range(num_workers, first_new):
            for kept in (self._since, self._failures, self._last_logs, self._read_logs, self._statuses):
                kept.pop(worker, None)
        if not is_alive:
            for worker in range(first_new, num_workers):
                self._replace(worker)
        self._try_to_look()
        self._next_look_s = time.monotonic() + LOOK_SOON_S

    def cancel(self, grace_s: float) -> None:
        """End all workers; they have `grace_s` seconds to leave by themselves."""
        self._clear_up(time.monotonic() + grace_s + LEAVE_S)
        self._objects = RunObjects((), ())  # log() has no pod to ask for

    def _clear_up(self, deadline_s: float) -> None:
        self._api.answer_until(deadline_s)
        try:
            if not self._created:
                return
            self._insist(lambda: self._delete(self._created), deadline_s)
            while names := self._insist(self._left, deadline_s):
                if time.monotonic() > deadline_s:
                    raise ClusterError(f"{', '.join(names)} are still being deleted")
                time.sleep(0.1)
        except EnvFleetError as error:
            logger.warning(
                "Kubernetes: objects of run %s may be left (%s); see kubectl -n %s get jobs,pods,secrets -l %s",
                *(self._run, str(error), self._settings.namespace, self._selector),
            )
        finally:
            self._api.close()

    def _delete(self, names: Iterable[str]) -> None:
        """Delete Jobs and their Secrets. A refusal does not stop it; a server that does not answer does."""
        first_error: EnvFleetError | None = None
        for name in names:
            for call in (self._api.delete_job, self._api.delete_secret):
                try:
                    call(name)
                except Unreachable:
                    raise
                except EnvFleetError as error:
                    first_error = first_error or error
        if first_error is not None:
            raise first_error

    def _left(self) -> list[str]:
        """Return the names of what is left; also delete Jobs that a call has created whose answer was lost."""
        pods, jobs = self._api.pods(self._selector), self._api.jobs(self._selector)
        self._delete(name_of(job) for job in jobs if not is_leaving(job))
        return [name_of(each) for each in (*jobs, *pods)]

    def _insist(self, call: Callable[[], Any], deadline_s: float) -> Any:
        """Repeat a call until the API server answers, or the deadline has passed."""
        while True:
            try:
                return call()
            except Unreachable:
                if time.monotonic() > deadline_s:
                    raise
                time.sleep(0.5)

    def _create(self, name: str, manifest_of: Callable[[str], Manifest]) -> None:
        """Create a Secret and a Job that uses it; the Secret is deleted with the Job."""
        self._created.append(name)  # first, so that _clear_up() deletes it whatever happens
        try:
            self._api.create_secret(secret_manifest(self._settings, self._job, self._run, name))
        except EnvFleetError as error:
            if not isinstance(error, Unreachable):  # the Secret was not created
                self._created.remove(name)
            raise
        manifest = manifest_of(name)
        if self._head_pod:
            manifest["metadata"]["ownerReferences"] = self._head_pod
        # Before the call: if its answer is lost, the Job may exist, and its deadline must be moved on.
        self._created_s[name] = _since_boot_s()
        job = self._api.create_job(manifest)
        self._api.own_secret(name, owner_reference(job, "batch/v1", "Job"))
        self._objects = RunObjects((*self._objects.jobs, job), self._objects.pods, self._objects.warnings)

    def _replace(self, worker: int) -> None:
        """Create a Job for this worker alone, in place of an earlier one."""
        for job in self._objects.jobs_of(worker):
            if name_of(job) != self._run:
                self._api.delete_job(name_of(job))
        self._num_replacements += 1
        name = f"{self._run}-w{worker}-{self._num_replacements}"
        self._create(name, lambda name: worker_manifest(self._settings, self._job, self._run, name, worker))

    def _try_to_look(self) -> None:
        try:
            self._look()
        except EnvFleetError as error:
            self._next_look_s = time.monotonic() + LOOK_AGAIN_S
            if not self._is_unreachable:
                logger.warning(
                    "Kubernetes: the states of workers cannot be read, and are taken as unchanged: %s", str(error)
                )
            self._is_unreachable = True

    def _look(self) -> None:
        self._next_look_s = time.monotonic() + LOOK_EVERY_S * max(1.0, self._num_workers / WORKERS_PER_LOOK)
        jobs, pods = self._api.jobs(self._selector), self._api.pods(self._selector)
        if self._is_unreachable:
            logger.info("Kubernetes: the API server answers again")
        self._is_unreachable = False
        self._objects = RunObjects(jobs, pods, self._objects.warnings)
        self._judge()
        self._renew()
        situations = {worker: self._objects.situation(worker) for worker in range(self._num_workers)}
        amiss = [each.about for worker, each in situations.items() if needs_warnings(each, self._age_s(worker, each))]
        if amiss and time.monotonic() >= self._next_warnings_s:
            self._next_warnings_s = time.monotonic() + WARNINGS_EVERY_S
            self._objects = RunObjects(jobs, pods, self._warnings(list(dict.fromkeys(amiss))[:MOST_QUESTIONS]))
            self._judge()

    def _renew(self) -> None:
        """Move the deadlines of Jobs on, which Kubernetes would end otherwise."""
        for job in self._objects.jobs:
            created_s = self._created_s.get(name_of(job))
            if created_s is None or job_end(job) is not None:
                continue
            change = renewed_deadline(job, _since_boot_s() - created_s, self._settings.head_timeout_s)
            if change is None:
                continue
            try:
                self._api.patch_job(name_of(job), change)
                self._is_unrenewed = False
            except EnvFleetError as error:
                if not self._is_unrenewed:
                    words = (
                        "Kubernetes: Job %s will end head_timeout_s=%g s after its last renewal; this one failed: %s"
                    )
                    logger.warning(words, name_of(job), self._settings.head_timeout_s, str(error))
                self._is_unrenewed = True
                return  # the next look tries again

    def _judge(self) -> None:
        num_logs = MOST_QUESTIONS
        for worker in range(self._num_workers):
            num_logs -= self._remember_failures(worker, num_logs)
            situation = self._objects.situation(worker)
            state = state_of(situation, self._age_s(worker, situation))
            failures = self._failures.get(worker, {})
            detail = situation.words
            if situation.about in failures:
                detail += failures[situation.about][1]
            elif failures:
                end, said = list(failures.values())[-1]
                detail += f"; before it {end}{said}"
            self._statuses[worker] = WorkerStatus(state, detail, len(failures))

    def _remember_failures(self, worker: int, most_logs: int) -> int:
        """Keep the last lines of failed pods before they are deleted. Returns the number of logs that were read."""
        failures, num_logs = self._failures.setdefault(worker, {}), 0
        for pod in self._objects.pods_of(worker):
            if is_failure(pod) and uid_of(pod) not in failures:
                log = ""
                if num_logs < most_logs:
                    num_logs += 1
                    try:
                        log = self._last_logs[worker] = self._api.pod_log(name_of(pod), CONTAINER, LOG_BYTES)
                    except EnvFleetError:
                        num_logs = most_logs  # a log that cannot be read may take seconds
                end = f"pod {name_of(pod)} {end_words(pod)}"
                failures[uid_of(pod)] = (end, last_words(log, is_first=not failures))
        return num_logs

    def _age_s(self, worker: int, situation: Situation) -> float:
        """Return the seconds since a worker's situation last changed."""
        kind, about, since_s = self._since.get(worker, (None, "", 0.0))
        if (kind, about) != (situation.kind, situation.about):
            since_s = time.monotonic()
            self._since[worker] = (situation.kind, situation.about, since_s)
        return time.monotonic() - since_s

    def _warnings(self, uids: Iterable[str]) -> list[Any]:
        try:
            return [event for uid in uids for event in self._api.warnings(uid)]
        except EnvFleetError as error:
            logger.debug("Kubernetes: no warnings: %s", str(error))
            return []


def _since_boot_s() -> float:
    """Return the seconds since this machine booted, including those that it was suspended.

    The age of a Job is measured with it: the deadline of a Job runs on while the head's machine is suspended, but the
    monotonic clock stops. All waits of the head itself use the monotonic clock.
    """
    return time.clock_gettime(time.CLOCK_BOOTTIME)
