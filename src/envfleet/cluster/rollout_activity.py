"""RolloutActivity and RolloutStream: rollouts with the policy on the workers, of all workers or as they come."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import count
from typing import Any

from envfleet.cluster.head.answers import PendingAnswers
from envfleet.cluster.head.head import Head
from envfleet.cluster.head.learner import Learner
from envfleet.cluster.run.run import Run
from envfleet.cluster.stepping import StepResult
from envfleet.cluster.wire.rollouts import Collected, RolloutForm
from envfleet.contract.infos import Infos, InfoTable
from envfleet.contract.rollout import Rollout

SAME_CALL_GOES_ON = "Nothing is lost: the same call goes on waiting for this rollout"
NEXT_GOES_ON = "Nothing is lost: next() of this stream goes on waiting"
BEGINS_ANEW = "This rollout is dropped, of all workers: the same call begins a new one"
_stream_numbers = count(1)
ONE_IS_DROPPED = "This worker's rollout is dropped: next() of this stream gives the next one"


class RolloutActivity:
    """One rollout of all workers. See Activity."""

    def __init__(self, run: Run, form: RolloutForm, learner: Learner) -> None:
        self._run = run
        self._head = run.head
        self._learner = learner
        self._form = form
        self._num_steps = 0
        self._agent: Any = None
        self._held: PendingAnswers | None = None

    def is_begun(self, agent: Any, num_steps: int) -> bool:
        """Whether this very rollout was begun and not returned, because an error was raised instead."""
        return self._run.is_doing(self) and self._num_steps == num_steps and self._agent is agent

    @property
    def is_under_way(self) -> bool:
        """Whether a rollout was begun and not returned."""
        return self._run.is_doing(self) and self._num_steps > 0

    def drop(self) -> None:
        """See Activity."""
        self._num_steps = 0
        self._agent = None
        self._held = None

    def resized(self, num_workers_before: int) -> None:
        """See Activity. Nothing is resized while a rollout is under way."""

    def begin(self, agent: Any, num_steps: int) -> None:
        """Issue an order to each worker to collect with this agent, which was published."""
        self._run.begin(None)
        self._run.begin(self)
        self._learner.measure()
        _issue(self._head, range(self._run.num_workers), num_steps)
        self._agent, self._num_steps = agent, num_steps  # last: it is begun only if no order failed

    def finish(self, timeout_s: float) -> Rollout:
        """Wait for the rollout that was begun. After an error the same call goes on with it."""
        if self._held is None:
            workers = range(self._run.num_workers)
            self._run.wait_for_answers(workers, timeout_s, SAME_CALL_GOES_ON)
            self._held = self._run.take(workers, BEGINS_ANEW)
            if self._held.is_incomplete:
                held = self._held
                self._run.begin(None)
                held.take()
        answers = self._held.take()
        self._run.begin(None)
        parts = [each.result for each in answers if isinstance(each.result, Collected)]
        rollout = self._form.join_rollouts(parts)
        self._learner.keep_probes(parts, rollout)
        return rollout

    def as_step(self, rollout: Rollout) -> StepResult:
        """A rollout of one step in the form of step(); actions, log_probs and extras are in the info."""
        info: Infos = {"actions": _first(rollout.actions), "log_probs": _first(rollout.log_probs)}
        info |= {name: _first(values) for name, values in rollout.extras.items()}
        ended = rollout.terminations[0] | rollout.truncations[0]
        if ended.any():
            final_obs = self._form.obs.each_row(rollout.final_obs, range(len(rollout.final_envs)))
            InfoTable(len(ended), info).add_finals(rollout.final_envs, final_obs)
        return rollout.next_obs, rollout.rewards[0], rollout.terminations[0], rollout.truncations[0], info


class RolloutStream(Iterator[Rollout]):
    """Rollouts of single workers in the order in which they come, until it is closed or collected. See Activity.

    An error does not end it: `next()` goes on.
    """

    def __init__(
        self,
        owner: object,
        run: Run,
        form: RolloutForm,
        learner: Learner,
        num_steps: int,
        credit: int,
        timeout_s: float,
    ) -> None:
        """Issue the first orders.

        Args:
            owner: Closes the run when it is collected: kept alive by the stream.
            run: The run.
            form: Shapes of rollouts.
            learner: The agent was published with it.
            num_steps: Steps of each rollout.
            credit: Rollouts that a worker may collect before the learner takes the first of them.
            timeout_s: The longest wait of `next()`.
        """
        self._owner = owner
        self._run = run
        self._head = run.head
        self._form = form
        self._learner = learner
        self._num_steps = num_steps
        self._credit = credit
        self._timeout_s = timeout_s
        self._held: PendingAnswers | None = None
        self._number = next(_stream_numbers)
        run.begin(self)
        learner.measure()
        self._begin_with(range(run.num_workers))

    def _begin_with(self, workers: Iterable[int]) -> None:
        for _ in range(self._credit):
            _issue(self._head, workers, self._num_steps, self._number)

    def __iter__(self) -> RolloutStream:
        """Return the stream."""
        return self

    def __next__(self) -> Rollout:
        """Wait for the next rollout of any worker."""
        while self._run.is_doing(self):
            if self._held is None:
                self._run.wait_for_any(self._timeout_s, NEXT_GOES_ON)
                worker = self._run.first_ready(range(self._run.num_workers))[0]
                self._held = self._run.take([worker], ONE_IS_DROPPED)
                _issue(self._head, [worker], self._num_steps, self._number)
            held = self._held
            if held.is_incomplete:
                self._held = None
            answer = held.take()[0]
            self._held = None
            assert isinstance(answer.result, Collected)
            rollout = self._form.join_rollouts([answer.result])
            self._learner.keep_probes([answer.result], rollout)
            return rollout
        raise StopIteration

    def drop(self) -> None:
        """See Activity."""
        self._held = None

    def resized(self, num_workers_before: int) -> None:
        """See Activity. New workers collect as soon as they have joined."""
        if self._held is not None and self._held.workers[0] >= self._run.num_workers:
            self._held = None
        self._begin_with(range(num_workers_before, self._run.num_workers))

    def close(self) -> None:
        """End the stream; rollouts that were not taken are dropped."""
        if self._run.is_doing(self):
            self._run.begin(None)

    def __del__(self) -> None:
        """End the stream when it is collected: the loop was left."""
        self.close()


def _first(tree: Any) -> Any:
    """The first step of a tree of [T, ...] arrays."""
    if isinstance(tree, Mapping):
        return {key: _first(part) for key, part in tree.items()}
    if isinstance(tree, tuple):
        return tuple(map(_first, tree))
    return None if tree is None else tree[0]


def _issue(head: Head, workers: Iterable[int], num_steps: int, stream: int = 0) -> None:
    head.issue({worker: head.collect(worker, num_steps, stream) for worker in workers})
