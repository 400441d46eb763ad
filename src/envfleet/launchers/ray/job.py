"""RayJob: one actor of a Ray cluster for each worker, each in its bundle of a placement group."""

from __future__ import annotations

import contextlib
import logging
import secrets
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from envfleet.contract.errors import ClusterError, UsageError
from envfleet.contract.worker_environment import NUM_CPUS_VARIABLE
from envfleet.launchers.launcher import WorkerJob, WorkerState, WorkerStatus
from envfleet.launchers.processes import end_of_file
from envfleet.launchers.ray.actor import ActorCommand, Begun, WorkerActor
from envfleet.launchers.ray.places import Group, Places
from envfleet.launchers.ray.session import NoAnswer, Session, import_ray, in_time
from envfleet.launchers.ray.status import ActorRecord

logger = logging.getLogger("envfleet.ray")

LOOK_S = 0.3  # seconds between two looks at the answers of actors
LOG_S = 3.0  # the most that an actor may take to return its log
KILL_WAIT_S = 5.0
START_S = 10.0  # the most that Ray may take to accept one actor, not to start it
LEAVE_S = 1.0  # for surplus workers to leave
THREADS_OF_ACTOR = 8  # one of them waits for the end of the worker


@dataclass(frozen=True, slots=True)
class Request:
    """What is asked of Ray for each worker.

    Args:
        bundle: Its resources, by Ray's names: {"CPU": 1}.
        placement: The strategy of the placement group.
        runtime_env: The runtime_env of its actor. None: that of the connection.
        python: Its interpreter. None: the one that runs the actor.
        path: Folders that it imports modules from. None: those of the actor.
        queue_timeout_s: It is REFUSED if no node has been large enough for this many seconds. None: never.
    """

    bundle: Mapping[str, float]
    placement: str
    runtime_env: dict[str, Any] | None
    python: str | None
    path: tuple[str, ...] | None
    queue_timeout_s: float | None


class RayJob:
    """A Job of actors.

    Args:
        session: The connection to Ray; cancel() releases it.
        request: What is asked of Ray for each worker.
        job: What to start.

    Raises:
        UsageError: Ray does not understand a setting.
        ClusterError: Ray refuses, or does not answer.
    """

    def __init__(self, session: Session, request: Request, job: WorkerJob) -> None:
        self._session = session
        self._request = request
        self._job = job
        self._run_name = f"envfleet-{secrets.token_hex(4)}"
        self._actors: dict[int, ActorRecord] = {}
        self._left: dict[int, Begun] = {}  # where workers ran that have no actor any more
        self._next_look_s = 0.0
        self._places = Places(session, request.bundle, request.placement)
        try:
            self.resize(job.num_workers)
        except BaseException:
            self._end_all(self._actors, 0.0)
            self._places.close()
            raise

    @property
    def revives(self) -> bool:
        """Whether the engine restarts failed workers by itself."""
        return True

    def status(self, worker: int) -> WorkerStatus:
        """Return the state of one worker."""
        if worker not in self._actors:
            return WorkerStatus(WorkerState.ENDED, "it was not started")
        if not self._session.is_alive:
            return WorkerStatus(WorkerState.REFUSED, "ray.shutdown() was called in this process")
        self._look()
        record = self._actors[worker]
        if record.status.state is WorkerState.PENDING and (shortage := self._places.shortage(record.group)) is not None:
            return record.status_in(shortage, self._request.queue_timeout_s)
        return record.status

    def log(self, worker: int, max_bytes: int = 4000) -> str:
        """Return the end of what a worker has printed."""
        record = self._actors.get(worker)
        reason = "its actor does not run"
        if record is not None and record.status.state is not WorkerState.PENDING and self._session.is_alive:
            ray = import_ray()
            try:
                return str(ray.get(record.actor.log.remote(max_bytes), timeout=LOG_S))
            except ray.exceptions.RayError as error:
                reason = _first_line(error)
        begun = self._begun(worker)
        if begun is not None and Path(begun.log_path).is_file():  # on a node that is this machine
            return end_of_file(Path(begun.log_path), max_bytes)
        return "" if begun is None else f"(its log, {self.log_place(worker)}, cannot be read: {reason})"

    def log_place(self, worker: int) -> str:
        """Return where the whole log of a worker is."""
        begun = self._begun(worker)
        if begun is None:
            return f"{self._log_name(worker)} in Ray's folder for logs on its node, once it has one"
        return f"{begun.log_path} on {begun.node}"

    def restart(self, worker: int) -> None:
        """See Job. The worker keeps its bundle; if that node is gone, Ray reserves another, now or later."""
        self._require_session()
        record = self._actors.pop(worker, None)
        num_failures = 0
        if record is not None:
            num_failures = record.status.num_failures
            self._kill([record])
            self._free(worker, record)
            self._places.forget_if_removed(record.group)
        self._start([worker], num_failures)

    def resize(self, num_workers: int) -> None:
        """See Job. The head has told surplus workers to leave; they are ended now."""
        self._require_session()
        surplus = {worker: record for worker, record in self._actors.items() if worker >= num_workers}
        self._end_all(surplus, LEAVE_S)
        for worker, record in surplus.items():
            del self._actors[worker]
            self._free(worker, record)
        self._places.remove_empty()
        self._start([worker for worker in range(num_workers) if worker not in self._actors])

    def cancel(self, grace_s: float) -> None:
        """End all workers; they have `grace_s` seconds to leave by themselves."""
        try:
            if self._session.is_alive:
                self._end_all(self._actors, grace_s)
        finally:
            for worker, record in self._actors.items():
                self._free(worker, record)
            self._actors.clear()
            self._places.close()
            self._session.release()

    def _require_session(self) -> None:
        if not self._session.is_alive:
            raise ClusterError("ray.shutdown() was called in this process: workers can no longer be started")

    def _begun(self, worker: int) -> Begun | None:
        record = self._actors.get(worker)
        return self._left.get(worker) if record is None or record.begun is None else record.begun

    def _free(self, worker: int, record: ActorRecord) -> None:
        self._places.give_back(record.group, record.bundle)
        if record.begun is not None:
            self._left[worker] = record.begun

    def _log_name(self, worker: int) -> str:
        return f"{self._run_name}-worker-{worker}.log"

    # -- starting --

    def _start(self, workers: list[int], num_failures: int = 0) -> None:
        """Start actors for these workers; if Ray refuses one, for none."""
        ray = import_ray()
        places: list[tuple[Group, int]] = []
        try:
            places = self._places.take(len(workers))
            started = [self._actor(worker, *place) for worker, place in zip(workers, places, strict=True)]
        except BaseException as error:
            for place in places:
                self._places.give_back(*place)
            self._places.remove_empty()  # Ray ends the actors of a removed group
            if isinstance(error, TypeError | ValueError):  # raised by Ray for settings that it does not understand
                raise UsageError(f"Ray refuses to start workers: {type(error).__name__}: {error}") from error
            if isinstance(error, ray.exceptions.RayError | ConnectionError | RuntimeError):
                raise ClusterError(f"Ray cannot start workers: {type(error).__name__}: {error}") from error
            raise
        status = WorkerStatus(WorkerState.PENDING, "Ray was asked to start it", num_failures)
        for worker, (group, bundle), actor in zip(workers, places, started, strict=True):
            self._actors[worker] = ActorRecord(group, bundle, actor, actor.begun.remote(), status)

    def _actor(self, worker: int, group: Group, bundle: int) -> Any:
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        request = self._request
        resources = dict(request.bundle)
        num_cpus = resources.pop("CPU")
        settings = {
            "num_cpus": num_cpus,
            "num_gpus": resources.pop("GPU", 0),
            "memory": resources.pop("memory", None),
            "resources": resources,
            "runtime_env": request.runtime_env,
            "max_restarts": -1,
            "max_concurrency": THREADS_OF_ACTOR,
            "scheduling_strategy": PlacementGroupSchedulingStrategy(
                group.placement_group, placement_group_bundle_index=bundle
            ),
        }
        command = ActorCommand(
            python=request.python,
            arguments=self._job.arguments(worker),
            environment={**self._job.environment, NUM_CPUS_VARIABLE: str(max(1, int(num_cpus)))},
            path=request.path,
            log_name=self._log_name(worker),
        )
        actor_class = import_ray().remote(WorkerActor).options(**settings)
        # Ray ends an actor that starts too late: no handle on it is left.
        return in_time(lambda: actor_class.remote(command), "the request for an actor", START_S)

    # -- looking --

    def _look(self) -> None:
        """Take the answers that have arrived. Does not wait for the cluster."""
        now_s = time.monotonic()
        if now_s < self._next_look_s:
            return
        self._next_look_s = now_s + LOOK_S
        ray = import_ray()
        for record in self._actors.values():
            record.ask_if_due(now_s)
        asked = {record.question: record for record in self._actors.values() if record.question is not None}
        if asked:
            for answer in ray.wait(list(asked), num_returns=len(asked), timeout=0)[0]:
                _take(asked[answer], answer)
        self._places.watch(
            record.group for record in self._actors.values() if record.status.state is WorkerState.PENDING
        )

    # -- ending --

    def _end_all(self, records: Mapping[int, ActorRecord], grace_s: float) -> None:
        """Tell workers to leave, kill them after `grace_s` seconds, and then end their actors."""
        ray = import_ray()
        try:
            running = [record for record in records.values() if record.status.state is WorkerState.RUNNING]
            leaving = [record.actor.end.remote(grace_s) for record in running]
            if leaving:
                # A worker whose actor does not answer is ended with the actor.
                ray.wait(leaving, num_returns=len(leaving), timeout=grace_s + 1.0)
        finally:
            self._kill(records.values())

    def _kill(self, records: Iterable[ActorRecord]) -> None:
        """End actors, and with each its worker. Waits until Ray reports their death, at most KILL_WAIT_S."""
        ray = import_ray()
        actors = [record.actor for record in records]
        asked: list[Any] = []

        def kill() -> None:
            for actor in actors:
                with contextlib.suppress(ValueError, RuntimeError, ray.exceptions.RayError):
                    ray.kill(actor, no_restart=True)
                    asked.append(actor.begun.remote())

        try:
            in_time(kill, "kill()", KILL_WAIT_S)
        except NoAnswer as error:
            logger.warning("%s", error)
        else:
            if asked:
                ray.wait(asked, num_returns=len(asked), timeout=KILL_WAIT_S)


def _take(record: ActorRecord, question: Any) -> None:
    """Take the answer of an actor, which has arrived."""
    ray = import_ray()
    try:
        answer = ray.get(question, timeout=LOOK_S)
    except ray.exceptions.ActorUnavailableError as error:
        record.take_unavailable(_first_line(error), time.monotonic())
    except ray.exceptions.GetTimeoutError:
        return
    except ray.exceptions.RayError as error:
        record.take_error(" ".join(str(error).split()))
    else:
        if isinstance(answer, Begun):
            record.take_begun(answer, time.monotonic())
        else:
            incarnation, code = answer
            record.take_end(incarnation, code, time.monotonic())


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0]
