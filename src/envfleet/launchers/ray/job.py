"""RayJob: workers that run as actors of a Ray cluster, each in its bundle of a placement group."""

from __future__ import annotations

import contextlib
import logging
import secrets
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from envfleet.contract.errors import ClusterError, UsageError
from envfleet.contract.worker_environment import NUM_CPUS_VARIABLE
from envfleet.launchers.launcher import WorkerJob, WorkerState, WorkerStatus
from envfleet.launchers.processes import end_of_file, how_it_ended
from envfleet.launchers.ray.actor import ActorCommand, Begun, WorkerActor, is_failure
from envfleet.launchers.ray.places import Group, Places, Shortage
from envfleet.launchers.ray.session import NoAnswer, Session, import_ray, in_time

logger = logging.getLogger("envfleet.ray")

LOOK_S = 0.3
ASK_AGAIN_S = 0.5
LOG_S = 3.0
KILL_WAIT_S = 5.0
START_S = 10.0  # for one actor to be asked for, not for it to run
LEAVE_S = 1.0  # for workers that are not needed any more
THREADS_OF_ACTOR = 8  # one of them waits for the end of the worker


@dataclass(frozen=True, slots=True)
class Request:
    """What is asked of Ray for each worker."""

    bundle: Mapping[str, float]
    placement: str
    runtime_env: dict[str, Any] | None
    python: str | None
    path: tuple[str, ...] | None
    queue_timeout_s: float | None


@dataclass(slots=True)
class _Post:
    """One worker: its place, its actor, and what is known of it."""

    group: Group
    bundle: int
    actor: Any
    question: Any  # the call whose answer is waited for: begun() or until_end(); None: none is
    status: WorkerStatus
    begun: Begun | None = None
    incarnations: set[str] = field(default_factory=set)
    failed_incarnation: str = ""
    ask_again_s: float | None = None  # the actor is being started again: when to ask it once more


class RayJob:
    """A Job of actors."""

    def __init__(self, session: Session, request: Request, job: WorkerJob) -> None:
        """Ask for all places, and for an actor in each."""
        self._session = session
        self._request = request
        self._job = job
        self._run_name = f"envfleet-{secrets.token_hex(4)}"
        self._posts: dict[int, _Post] = {}
        self._left: dict[int, Begun] = {}  # where workers were whose post is gone
        self._next_look_s = 0.0
        self._places = Places(session, request.bundle, request.placement)
        try:
            self.resize(job.num_workers)
        except BaseException:
            self._end_all(self._posts, 0.0)
            self._places.close()
            raise

    @property
    def revives(self) -> bool:
        """See Job."""
        return True

    def status(self, worker: int) -> WorkerStatus:
        """See Job."""
        if worker not in self._posts:
            return WorkerStatus(WorkerState.ENDED, "it was not started")
        if not self._session.is_alive:
            return WorkerStatus(WorkerState.REFUSED, "ray.shutdown() was called in this process")
        self._look()
        post = self._posts[worker]
        if post.status.state is WorkerState.PENDING and (shortage := self._places.shortage(post.group)) is not None:
            return self._status_in(shortage, post)
        return post.status

    def log(self, worker: int, max_bytes: int = 4000) -> str:
        """See Job."""
        post = self._posts.get(worker)
        reason = "its actor does not run"
        if post is not None and post.status.state is not WorkerState.PENDING and self._session.is_alive:
            ray = import_ray()
            try:
                return str(ray.get(post.actor.log.remote(max_bytes), timeout=LOG_S))
            except ray.exceptions.RayError as error:
                reason = _first_line(error)
        begun = self._begun(worker)
        if begun is not None and Path(begun.log_path).is_file():  # on a node that is this machine
            return end_of_file(Path(begun.log_path), max_bytes)
        return "" if begun is None else f"(its log, {self.log_place(worker)}, cannot be read: {reason})"

    def log_place(self, worker: int) -> str:
        """See Job."""
        begun = self._begun(worker)
        if begun is None:
            return f"{self._log_name(worker)} in Ray's folder for logs on its node, once it has one"
        return f"{begun.log_path} on {begun.node}"

    def restart(self, worker: int) -> None:
        """See Job. It gets its old place; if that node is gone, Ray has another one for it, or waits for one."""
        self._require_session()
        post = self._posts.pop(worker, None)
        num_failures = 0
        if post is not None:
            num_failures = post.status.num_failures
            self._kill([post])
            self._free(worker, post)
            self._places.forget_if_removed(post.group)
        self._start([worker], num_failures)

    def resize(self, num_workers: int) -> None:
        """See Job. Those that go have been told so; they are ended now."""
        self._require_session()
        surplus = {worker: post for worker, post in self._posts.items() if worker >= num_workers}
        self._end_all(surplus, LEAVE_S)
        for worker, post in surplus.items():
            del self._posts[worker]
            self._free(worker, post)
        self._places.remove_empty()
        self._start([worker for worker in range(num_workers) if worker not in self._posts])

    def cancel(self, grace_s: float) -> None:
        """See Job."""
        try:
            if self._session.is_alive:
                self._end_all(self._posts, grace_s)
        finally:
            for worker, post in self._posts.items():
                self._free(worker, post)
            self._posts.clear()
            self._places.close()
            self._session.release()

    def _require_session(self) -> None:
        if not self._session.is_alive:
            raise ClusterError("ray.shutdown() was called in this process: workers cannot be started any more")

    def _begun(self, worker: int) -> Begun | None:
        post = self._posts.get(worker)
        return self._left.get(worker) if post is None or post.begun is None else post.begun

    def _free(self, worker: int, post: _Post) -> None:
        self._places.give_back(post.group, post.bundle)
        if post.begun is not None:
            self._left[worker] = post.begun

    def _log_name(self, worker: int) -> str:
        return f"{self._run_name}-worker-{worker}.log"

    # -- starting --

    def _start(self, workers: list[int], num_failures: int = 0) -> None:
        """All of them; if Ray refuses one, none."""
        ray = import_ray()
        places: list[tuple[Group, int]] = []
        try:
            places = self._places.take(len(workers))
            started = [self._actor(worker, *place) for worker, place in zip(workers, places, strict=True)]
        except BaseException as error:
            for place in places:
                self._places.give_back(*place)
            self._places.remove_empty()  # what was started there is ended with its place
            if isinstance(error, TypeError | ValueError):  # what Ray says of settings that it does not understand
                raise UsageError(f"Ray refuses to start workers: {type(error).__name__}: {error}") from error
            if isinstance(error, ray.exceptions.RayError | ConnectionError | RuntimeError):
                raise ClusterError(f"Ray cannot start workers: {type(error).__name__}: {error}") from error
            raise
        status = WorkerStatus(WorkerState.PENDING, "Ray was asked to start it", num_failures)
        for worker, (group, bundle), actor in zip(workers, places, started, strict=True):
            self._posts[worker] = _Post(group, bundle, actor, actor.begun.remote(), status)

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
        # One that comes too late is ended by Ray: nobody has a handle on it.
        return in_time(lambda: actor_class.remote(command), "the request for an actor", START_S)

    # -- looking --

    def _look(self) -> None:
        """Take the answers that have come. All of this is in memory: nobody waits for the cluster here."""
        now_s = time.monotonic()
        if now_s < self._next_look_s:
            return
        self._next_look_s = now_s + LOOK_S
        ray = import_ray()
        for post in self._posts.values():
            if post.ask_again_s is not None and now_s >= post.ask_again_s:
                post.ask_again_s, post.question = None, post.actor.begun.remote()
        asked = {post.question: post for post in self._posts.values() if post.question is not None}
        if asked:
            for answer in ray.wait(list(asked), num_returns=len(asked), timeout=0)[0]:
                self._take(asked[answer], answer)
        self._places.watch(post.group for post in self._posts.values() if post.status.state is WorkerState.PENDING)

    def _take(self, post: _Post, question: Any) -> None:
        ray = import_ray()
        num_failures = post.status.num_failures
        try:
            answer = ray.get(question, timeout=LOOK_S)
        except ray.exceptions.ActorUnavailableError as error:
            # Its process is gone, or only the connection to it: the next answer says.
            _ask_again(post)
            if post.status.state is not WorkerState.PENDING:
                detail = f"Ray starts it again: {_first_line(error)}"
                post.status = WorkerStatus(WorkerState.PENDING, detail, num_failures)
        except ray.exceptions.GetTimeoutError:
            return
        except ray.exceptions.RayError as error:
            post.question = None
            post.status = WorkerStatus(WorkerState.ENDED, f"Ray: {_in_one_line(error)}", num_failures)
        else:
            if isinstance(answer, Begun):
                self._take_begun(post, answer)
            else:
                self._take_end(post, *answer)

    def _take_begun(self, post: _Post, begun: Begun) -> None:
        if begun.incarnation == post.failed_incarnation:  # not gone yet
            _ask_again(post)
            return
        is_another = post.begun is not None and begun.incarnation not in post.incarnations
        post.begun = begun
        post.incarnations.add(begun.incarnation)
        post.question = post.actor.until_end.remote()
        num_failures = post.status.num_failures + is_another
        detail = f"Ray actor on {begun.node}, process {begun.pid}"
        if is_another:
            detail += f"; before: {post.status.detail}"
        post.status = WorkerStatus(WorkerState.RUNNING, detail, num_failures)

    def _take_end(self, post: _Post, incarnation: str, code: int) -> None:
        words = f"{how_it_ended(code)} on {post.begun.node if post.begun is not None else 'its node'}"
        if is_failure(code):
            post.failed_incarnation = incarnation
            _ask_again(post)
            post.status = WorkerStatus(WorkerState.PENDING, f"Ray starts it again: {words}", post.status.num_failures)
        else:
            post.question = None
            post.status = WorkerStatus(WorkerState.ENDED, words, post.status.num_failures)

    def _status_in(self, shortage: Shortage, post: _Post) -> WorkerStatus:
        if shortage.is_removed:
            return WorkerStatus(WorkerState.ENDED, "its placement group was removed from Ray", post.status.num_failures)
        timeout_s = self._request.queue_timeout_s
        is_hopeless = timeout_s is not None and shortage.infeasible_s > timeout_s
        state = WorkerState.REFUSED if is_hopeless else WorkerState.PENDING
        return WorkerStatus(state, shortage.detail, post.status.num_failures)

    # -- ending --

    def _end_all(self, posts: Mapping[int, _Post], grace_s: float) -> None:
        """Workers leave, or are killed; then their actors."""
        ray = import_ray()
        try:
            running = [post for post in posts.values() if post.status.state is WorkerState.RUNNING]
            leaving = [post.actor.end.remote(grace_s) for post in running]
            if leaving:
                # One that does not answer is ended with its actor.
                ray.wait(leaving, num_returns=len(leaving), timeout=grace_s + 1.0)
        finally:
            self._kill(posts.values())

    def _kill(self, posts: Iterable[_Post]) -> None:
        """End actors, and with each its worker. Waits for Ray to say that they are dead, but not for long."""
        ray = import_ray()
        actors = [post.actor for post in posts]
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


def _ask_again(post: _Post) -> None:
    """Soon. Ray could wait for the actor by itself, but says so on the user's screen."""
    post.question, post.ask_again_s = None, time.monotonic() + ASK_AGAIN_S


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0]


def _in_one_line(error: BaseException) -> str:
    return " ".join(str(error).split())
