"""ActorRecord: one worker's actor, and what its answers mean for the worker. No call of Ray but through the actor."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from envfleet.launchers.launcher import WorkerState, WorkerStatus
from envfleet.launchers.processes import how_it_ended
from envfleet.launchers.ray.actor import Begun, is_failure
from envfleet.launchers.ray.places import Group, Shortage

ASK_AGAIN_S = 0.5  # after this, an actor that Ray restarts is asked where it runs


@dataclass(slots=True)
class ActorRecord:
    """One worker: its place, its actor, and what is known of it."""

    group: Group
    bundle: int
    actor: Any
    question: Any  # the call whose answer is awaited: begun() or until_end(); None: none
    status: WorkerStatus
    begun: Begun | None = None  # where it ran last
    incarnations: set[str] = field(default_factory=set)
    failed_incarnation: str = ""
    ask_again_s: float | None = None  # when to call begun() again, while Ray restarts the actor

    def ask_if_due(self, now_s: float) -> None:
        """Call begun() again if it is time."""
        if self.ask_again_s is not None and now_s >= self.ask_again_s:
            self.ask_again_s, self.question = None, self.actor.begun.remote()

    def take_begun(self, begun: Begun, now_s: float) -> None:
        """Take the answer of begun(): the worker's process was started."""
        if begun.incarnation == self.failed_incarnation:  # Ray has not ended the failed actor yet
            self._ask_again(now_s)
            return
        is_another = self.begun is not None and begun.incarnation not in self.incarnations
        self.begun = begun
        self.incarnations.add(begun.incarnation)
        self.question = self.actor.until_end.remote()
        detail = f"Ray actor on {begun.node}, process {begun.pid}"
        if is_another:
            detail += f"; before: {self.status.detail}"
        self.status = WorkerStatus(WorkerState.RUNNING, detail, self.status.num_failures + is_another)

    def take_end(self, incarnation: str, code: int, now_s: float) -> None:
        """Take the answer of until_end(): the worker's process has ended with this exit code."""
        words = f"{how_it_ended(code)} on {self.begun.node if self.begun is not None else 'its node'}"
        if is_failure(code):
            self.failed_incarnation = incarnation
            self._ask_again(now_s)
            self._set(WorkerState.PENDING, f"Ray starts it again: {words}")
        else:
            self.question = None
            self._set(WorkerState.ENDED, words)

    def take_unavailable(self, words: str, now_s: float) -> None:
        """Take the news that Ray cannot reach the actor: it has ended, or only the connection to it; ask again."""
        self._ask_again(now_s)
        if self.status.state is not WorkerState.PENDING:
            self._set(WorkerState.PENDING, f"Ray starts it again: {words}")

    def take_error(self, words: str) -> None:
        """Take the news that the actor is gone for good."""
        self.question = None
        self._set(WorkerState.ENDED, f"Ray: {words}")

    def status_in(self, shortage: Shortage, queue_timeout_s: float | None) -> WorkerStatus:
        """Return the worker's status while its place is not reserved."""
        if shortage.is_removed:
            state, detail = WorkerState.ENDED, "its placement group was removed from Ray"
        else:
            is_hopeless = queue_timeout_s is not None and shortage.infeasible_s > queue_timeout_s
            state, detail = WorkerState.REFUSED if is_hopeless else WorkerState.PENDING, shortage.detail
        return WorkerStatus(state, detail, self.status.num_failures)

    def _ask_again(self, now_s: float) -> None:
        # Ray could wait for the actor by itself, but would print that on the user's screen.
        self.question, self.ask_again_s = None, now_s + ASK_AGAIN_S

    def _set(self, state: WorkerState, detail: str) -> None:
        self.status = WorkerStatus(state, detail, self.status.num_failures)
