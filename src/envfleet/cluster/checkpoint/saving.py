"""What workers say for a checkpoint: asked for beside whatever else they do."""

from __future__ import annotations

import logging
import math
import time

from envfleet.cluster.head.answers import Answered
from envfleet.cluster.head.socket import MOST_EXTENSION
from envfleet.cluster.run.run import Run
from envfleet.cluster.wire.messages import OrderFailed, SaveState
from envfleet.cluster.wire.orders import Order
from envfleet.cluster.wire.worker_states import SavedState
from envfleet.contract.errors import ClusterTimeout

logger = logging.getLogger("envfleet.cluster")

GIVEN_UP = "Nothing was written: a checkpoint that was there before stays as it was"
WAIT_S = 0.5


class StatesOfWorkers:
    """Asks all workers that are ready, and logs once what their states do not have."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._head = run.head
        self._fleet = run.head.fleet
        self._told: set[str] = set()

    def ask(self, timeout_s: float | None) -> dict[int, SavedState]:
        """The state of each worker that is ready; one that is lost meanwhile has none.

        Raises:
            ClusterTimeout: They have not answered after `timeout_s`; None: no limit.
        """
        timeout_s = math.inf if timeout_s is None else timeout_s
        activity = self._run.activity  # a stream must not be collected meanwhile: that would cancel all orders
        order = Order(SaveState(version=self._head.versions.version))
        ready = [record.worker for record in self._fleet if record.is_ready]
        waited_for = self._head.issue(dict.fromkeys(ready, order))
        states: dict[int, SavedState] = {}
        members = {worker: self._fleet[worker].member for worker in ready}
        try:
            begun_s = time.monotonic()
            while waited_for:
                self._head.wait(lambda: any(map(self._has_news, waited_for)), min(WAIT_S, timeout_s))
                for worker in [worker for worker in waited_for if self._has_news(worker)]:
                    answer = self._taken(worker, waited_for[worker])
                    if isinstance(answer, SavedState):
                        states[worker] = answer
                    if answer is not None:
                        del waited_for[worker]
                    elif not self._fleet[worker].is_ready:  # lost: its replacement need not answer
                        self._head.cancel_aside(worker, waited_for.pop(worker))
                moved_s = min(self._fleet.last_progress_s(waited_for), begun_s + (MOST_EXTENSION - 1) * timeout_s)
                if waited_for and time.monotonic() - max(begun_s, moved_s) > timeout_s:
                    late = self._run.about(waited_for)
                    raise ClusterTimeout(f"no answer to save() within {timeout_s:g} s: {late}.\n{GIVEN_UP}")
        finally:
            for worker, number in waited_for.items():
                self._head.cancel_aside(worker, number)
            del activity
        # A process that has come meanwhile begins anew: what another one was does not fit it.
        states = {worker: each for worker, each in states.items() if self._fleet[worker].member is members[worker]}
        self._tell(states)
        return states

    def _has_news(self, worker: int) -> bool:
        return bool(self._fleet[worker].asides) or not self._fleet[worker].is_ready

    def _taken(self, worker: int, number: int) -> SavedState | OrderFailed | None:
        """Its answer; None: there is none."""
        asides = self._fleet[worker].asides
        while asides:
            answer: Answered = asides.popleft()
            if answer.order == number and isinstance(answer.result, SavedState | OrderFailed):
                if isinstance(answer.result, OrderFailed):
                    logger.warning(
                        "%s has no state for the checkpoint, and begins anew if the run is resumed from it: %s",
                        answer.member,
                        answer.result.error,
                    )
                return answer.result
        return None

    def _tell(self, states: dict[int, SavedState]) -> None:
        for worker, state in states.items():
            for each in state.left_out:
                if each not in self._told and len(self._told) < 64:
                    self._told.add(each)
                    logger.warning("the checkpoint lacks a part of %s: %s", self._fleet[worker], ascii(each)[1:-1])
