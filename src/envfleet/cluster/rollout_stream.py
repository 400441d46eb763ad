"""RolloutStream: rollouts with the policy on the workers, as they come, one by one or in batches, none too old."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import count
from typing import Literal, get_args

from envfleet.cluster.head.answers import PendingAnswers
from envfleet.cluster.head.learner import Learner
from envfleet.cluster.info_choice import InfoChoice
from envfleet.cluster.pace import Pace
from envfleet.cluster.run.run import Run
from envfleet.cluster.wire.rollouts.collected import Collected
from envfleet.cluster.wire.rollouts.joining import join_rollouts
from envfleet.cluster.wire.rollouts.rollout_form import RolloutForm
from envfleet.contract.checks import whole_number
from envfleet.contract.errors import UsageError
from envfleet.contract.rollout import Rollout
from envfleet.contract.settings import keep_plain_numbers

NEXT_GOES_ON = "Nothing is lost: next() of this stream goes on waiting"
ONE_IS_DROPPED = "This worker's rollout is dropped: next() of this stream gives the next one"

_stream_numbers = count(1)

OnStale = Literal["pace", "drop"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamSettings:
    """What a stream gives. See ClusterEnv.stream()."""

    num_steps: int  # of each env in a rollout
    infos: InfoChoice  # what rollouts carry of the envs' infos
    credit: int  # rollouts that a worker may collect before the learner takes the first of them
    timeout_s: float | None  # for each rollout; None: no limit
    num_rollouts: int = 1  # that next() returns side by side
    max_lag: int | None = None  # of a rollout when it is taken
    on_stale: OnStale = "pace"

    def __post_init__(self) -> None:
        """Refuse what cannot work."""
        keep_plain_numbers(self)
        whole_number("num_steps", self.num_steps)
        whole_number("num_rollouts", self.num_rollouts)
        if self.max_lag is not None:
            whole_number("max_lag", self.max_lag, at_least=0)
        if self.on_stale not in get_args(OnStale):
            raise UsageError(f"on_stale must be 'pace' or 'drop'; got {self.on_stale!r}")
        if self.on_stale == "drop" and self.max_lag is None:
            raise UsageError("on_stale='drop' drops rollouts that are older than max_lag: say max_lag, too")


class RolloutStream(Iterator[Rollout]):
    """Rollouts of single workers in the order in which they come, until it is closed or collected. See Activity.

    An error does not end it: `next()` goes on.
    """

    def __init__(self, owner: object, run: Run, form: RolloutForm, learner: Learner, settings: StreamSettings) -> None:
        """Issue the first orders.

        Args:
            owner: Closes the run when it is collected: kept alive by the stream.
            run: The run.
            form: Shapes of rollouts.
            learner: The agent was published with it.
            settings: What the stream gives.
        """
        self._owner = owner
        self._run = run
        self._head = run.head
        self._form = form
        self._learner = learner
        self._settings = settings
        self._number = next(_stream_numbers)
        self._pace: Pace | None = None
        if settings.max_lag is not None and settings.on_stale == "pace":
            self._pace = Pace(settings.max_lag, settings.num_rollouts)
        self._last_orders: dict[int, int] = {}  # with a pace: when each worker got its last order, as a count
        self._last_version: int | None = None  # the newest when the last batch was returned
        self._held: PendingAnswers | None = None
        self._parts: list[Collected] = []  # of the batch that is being gathered
        run.begin(self)
        self._learner.measure()
        self._begin_with(range(run.num_workers))

    def __iter__(self) -> RolloutStream:
        """Return this stream: it can be iterated once."""
        return self

    def __next__(self) -> Rollout:
        """Wait for the next rollout of any worker, or for the next `num_rollouts` of them."""
        if self._run.is_doing(self):
            self._begin_batch()
        while self._run.is_doing(self):
            if len(self._parts) == self._settings.num_rollouts:
                return self._take_batch()
            self._gather_one()
        raise StopIteration

    def drop(self) -> None:
        """Forget what was begun: another activity begins."""
        self._held = None
        self._parts = []

    def resized(self, num_workers_before: int) -> None:
        """See Activity. New workers collect as soon as they have joined."""
        num_workers = self._run.num_workers
        if self._held is not None and self._held.workers[0] >= num_workers:
            self._held = None
        self._parts = [part for part in self._parts if part.worker < num_workers]
        self._begin_with(range(num_workers_before, num_workers))

    def close(self) -> None:
        """End the stream; rollouts that were not taken are dropped."""
        if self._run.is_doing(self):
            self._run.begin(None)

    def __del__(self) -> None:
        """End the stream when it is collected: the loop was left."""
        self.close()

    # -- a batch --

    @property
    def _newest(self) -> int:
        return self._head.versions.version

    def _begin_batch(self) -> None:
        """Look at what was published since the last call."""
        self._parts = [part for part in self._parts if self._is_kept(part)]  # there are some after an error
        if self._pace is not None:
            if self._last_version is not None:
                self._pace.learned(self._newest - self._last_version)
                self._last_version = None
            self._learner.measure()  # publish() does not, if no order was open
            self._issue_paced(self._pace)

    def _take_batch(self) -> Rollout:
        parts, self._parts = [part.taken(self._newest) for part in self._parts], []
        self._last_version = self._newest
        rollout = join_rollouts(self._form, parts)
        self._learner.keep_probes(parts, rollout)
        return rollout

    def _gather_one(self) -> None:
        """Wait for a rollout, and add it to the batch if it is not too old."""
        if self._held is None:
            worker = self._wait_for_one()
            if worker is None:
                return
            self._held = self._run.take([worker], ONE_IS_DROPPED)
            if self._pace is None:
                self._issue([worker])
        held = self._held
        if held.is_incomplete:
            self._held = None
        answer = held.take()[0]
        self._held = None
        assert isinstance(answer.result, Collected)
        if self._is_kept(answer.result):
            self._parts.append(answer.result)
        if self._pace is not None:
            self._issue_paced(self._pace)

    def _is_kept(self, part: Collected) -> bool:
        """Whether a rollout is not too old; if it is, it is dropped and counted."""
        max_lag = self._settings.max_lag
        if max_lag is None or self._newest - part.oldest_version <= max_lag:
            return True
        self._head.fleet[part.worker].drop(part)
        return False

    def _wait_for_one(self) -> int | None:
        """A worker whose rollout is there and may be taken; None: look again, orders were issued."""
        run, pace = self._run, self._pace
        if pace is None:
            run.wait_for_any(self._settings.timeout_s, NEXT_GOES_ON)
            return run.first_ready(range(run.num_workers))[0]
        run.wait_for_any(
            self._settings.timeout_s,
            NEXT_GOES_ON,
            lambda: bool(self._takeable(pace)) or self._next_paced(pace) is not None,
        )
        takeable = self._takeable(pace)
        if takeable:
            return takeable[0]
        self._issue_paced(pace)  # a worker was lost, or has joined
        return None

    # -- orders --

    def _begin_with(self, workers: Iterable[int]) -> None:
        if self._pace is not None:
            return self._issue_paced(self._pace)
        for _ in range(self._settings.credit):
            self._issue(workers)

    def _issue(self, workers: Iterable[int], most_lag: int | None = None) -> None:
        """Order a rollout of each worker. A policy may be old when it begins, but no more than half of what is allowed.

        The other half is for the versions that are published until the rollout is taken.
        """
        max_lag = None if self._settings.max_lag is None else self._settings.max_lag // 2
        if max_lag is not None and most_lag is not None:
            max_lag = min(max_lag, most_lag)
        head, settings = self._head, self._settings
        arguments = settings.num_steps, settings.infos, max_lag, self._number
        head.issue({worker: head.collect(worker, *arguments) for worker in workers})

    def _issue_paced(self, pace: Pace) -> None:
        while (found := self._next_paced(pace)) is not None:
            worker, spare_lag = found
            self._last_orders[worker] = max(self._last_orders.values(), default=0) + 1
            self._issue([worker], spare_lag)

    def _next_paced(self, pace: Pace) -> tuple[int, int] | None:
        """The worker that gets the next order, and how old its policy may be; None: nobody gets one now.

        Workers take turns. One that is not ready gets none: its order would wait in the place of another's.
        """
        out, fleet = self._head.rollouts_out(), self._head.fleet
        num_gathered = len(self._parts) + (self._held is not None)
        spare_lag = pace.spare_lag(sum(map(len, out.values())), num_gathered)
        free = [worker for worker, lags in out.items() if len(lags) < self._settings.credit and fleet[worker].is_ready]
        if spare_lag < 0 or not free:
            return None
        return min(free, key=lambda worker: (len(out[worker]), self._last_orders.get(worker, 0))), spare_lag

    def _takeable(self, pace: Pace) -> list[int]:
        """Workers whose rollouts are there and may be taken, in the order in which they came."""
        return self._run.first_ready(pace.takeable(self._head.rollouts_out(), len(self._parts)))
