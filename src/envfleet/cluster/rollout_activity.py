"""RolloutActivity: one rollout of all workers, with the policy on the workers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from envfleet.cluster.head.answers import PendingAnswers
from envfleet.cluster.head.head import Head
from envfleet.cluster.head.learner import Learner
from envfleet.cluster.info_choice import InfoChoice
from envfleet.cluster.run.run import Run
from envfleet.cluster.stepping import StepResult
from envfleet.cluster.wire.rollouts.collected import Collected
from envfleet.cluster.wire.rollouts.joining import join_rollouts
from envfleet.cluster.wire.rollouts.rollout_form import RolloutForm
from envfleet.contract.infos.flat import as_table
from envfleet.contract.infos.table import InfoTable
from envfleet.contract.rollout import Rollout

SAME_CALL_GOES_ON = "Nothing is lost: the same call goes on waiting for this rollout"
BEGINS_ANEW = "This rollout is dropped, of all workers: the same call begins a new one"


class RolloutActivity:
    """One rollout of all workers. See Activity."""

    def __init__(self, run: Run, form: RolloutForm, learner: Learner) -> None:
        self._run = run
        self._head = run.head
        self._learner = learner
        self._form = form
        self._num_steps = 0
        self._agent: Any = None
        self._infos = InfoChoice()
        self._held: PendingAnswers | None = None

    def is_begun(self, agent: Any, num_steps: int, infos: InfoChoice) -> bool:
        """Whether this very rollout was begun and not returned, because an error was raised instead."""
        is_same = self._num_steps == num_steps and self._agent is agent and self._infos == infos
        return self._run.is_doing(self) and is_same

    @property
    def is_under_way(self) -> bool:
        """Whether a rollout was begun and not returned."""
        return self._run.is_doing(self) and self._num_steps > 0

    def drop(self) -> None:
        """Forget what was begun: another activity begins."""
        self._num_steps = 0
        self._agent = None
        self._held = None

    def resized(self, num_workers_before: int) -> None:
        """See Activity. Nothing is resized while a rollout is under way."""

    def begin(self, agent: Any, num_steps: int, infos: InfoChoice) -> None:
        """Issue an order to each worker to collect with this agent, which was published."""
        self._run.begin(None)
        self._run.begin(self)
        self._learner.measure()
        _issue(self._head, range(self._run.num_workers), num_steps, infos)
        self._agent, self._num_steps, self._infos = agent, num_steps, infos  # last: begun only if no order failed

    def finish(self, timeout_s: float | None) -> Rollout:
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
        newest = self._head.versions.version
        parts = [each.result.taken(newest) for each in answers if isinstance(each.result, Collected)]
        rollout = join_rollouts(self._form, parts)
        self._learner.keep_probes(parts, rollout)
        return rollout

    def as_step(self, rollout: Rollout) -> StepResult:
        """A rollout of one step in the form of step(): infos as Gymnasium's vector envs return them in same-step mode.

        Beside them are actions, log_probs and extras of the policy, and statistics of the episodes that ended, as
        Gymnasium's RecordEpisodeStatistics writes them.
        """
        num_envs, ended = rollout.num_envs, rollout.terminations[0] | rollout.truncations[0]
        table = as_table(rollout.infos, num_envs, step=0)
        if ended.any():
            rows = rollout.final_envs
            final_obs = self._form.obs.each_row(rollout.final_obs, range(len(rows)))
            finals = as_table(rollout.final_infos, len(rows))
            table.add_finals(rows, final_obs, InfoTable(num_envs).put_rows(rows, finals) if finals.columns else None)
            assert rollout.episode_seconds is not None
            table.add_episodes(rows, rollout.episode_returns, rollout.episode_lengths, rollout.episode_seconds)
        info = table.columns
        info |= {"actions": _first(rollout.actions), "log_probs": _first(rollout.log_probs)}
        info |= {name: _first(values) for name, values in rollout.extras.items()}
        return rollout.next_obs, rollout.rewards[0], rollout.terminations[0], rollout.truncations[0], info


def _first(tree: Any) -> Any:
    """The first step of a tree of [T, ...] arrays."""
    if isinstance(tree, Mapping):
        return {key: _first(part) for key, part in tree.items()}
    if isinstance(tree, tuple):
        return tuple(map(_first, tree))
    return None if tree is None else tree[0]


def _issue(head: Head, workers: Iterable[int], num_steps: int, infos: InfoChoice) -> None:
    head.issue({worker: head.collect(worker, num_steps, infos) for worker in workers})
