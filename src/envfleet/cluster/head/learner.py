"""Learner: the agent as the cluster sees it. Publishes its weights, and measures how far the workers are from it."""

from __future__ import annotations

import logging
import time
from typing import Any

from envfleet.cluster.head.divergence import (
    Probes,
    ShownForm,
    added,
    difference,
    form_of,
    has_probabilities,
    measured,
    probes_of,
)
from envfleet.cluster.head.head import Head
from envfleet.cluster.head.worker_record import WorkerRecord
from envfleet.cluster.standstill import Standstill
from envfleet.cluster.sync import Measurement, SyncRule
from envfleet.cluster.wire.rollouts import Collected, RolloutForm
from envfleet.contract.errors import UsageError, WorkerFailed
from envfleet.contract.policy import Policy, PolicyCode
from envfleet.contract.rollout import Rollout
from envfleet.policies.adapting import as_policy, code_of, weights_of
from envfleet.policies.by_path import PolicySpec

logger = logging.getLogger("envfleet.cluster")

MANY_AGENTS = 3


class Learner:
    """The agent that the caller published last."""

    def __init__(self, head: Head, form: RolloutForm, sync: SyncRule) -> None:
        self._head = head
        self._fleet = head.fleet
        self._versions = head.versions
        self._form = form
        self._sync = sync
        self._agent: Any = None
        self._code: PolicyCode | None = None
        self._first_version = 0  # of this code: what workers did with another cannot be compared with it
        self._policy: Policy | None = None  # made when it is needed
        self._shown_form: ShownForm | None = None  # of that policy, learned when it is needed
        self._has_probabilities = False  # a worker has shown some of that policy
        self._num_short_lived = 0  # agents of which there was one version only, one after the other
        self._standstill = Standstill(sync)
        self._has_warned = False
        self._is_resumed = False  # the next agent is that of the checkpoint: its workers know it

    @property
    def first_version(self) -> int:
        """The first version of the present policy, for a checkpoint."""
        return self._first_version

    def restore(self, first_version: int) -> None:
        """Go on from a checkpoint, which has the policy's weights, and not its code."""
        self._first_version, self._is_resumed = first_version, self._versions.version > 0

    def publish(self, agent: Any) -> int:
        """Make the agent's present weights the newest version, and tell workers that are at work."""
        head = self._head
        if agent is not self._agent:
            code = code_of(agent)
            if self._is_resumed:
                head.adopt_code(code, weights_of(agent))
                self._code, self._is_resumed = code, False
            elif code != self._code:
                self._set_code(code)
            self._agent, self._policy, self._shown_form, self._has_probabilities = agent, None, None, False
        # Workers that wait for an order will hear of it with that.
        if head.publish(weights_of(agent)) and head.has_open_orders:
            self.measure()
            head.announce()
        return self._versions.version

    def _set_code(self, code: PolicyCode) -> None:
        newest = self._versions.version
        self._num_short_lived = self._num_short_lived + 1 if newest and newest == self._first_version else 0
        if self._num_short_lived == MANY_AGENTS:
            logger.warning(
                "the agent is another object with every call, so that each time all workers build it anew and pull all "
                "weights: make it once, a wrapper such as TorchPolicy(module) too, and pass the same object each time"
            )
        self._head.set_code(code)
        self._code, self._first_version = code, newest + 1

    def measure(self) -> None:
        """Measure how far the workers' policies are from the version that was published last."""
        newest, due = self._versions.version, []
        for record in self._fleet:
            probes = record.probes
            if probes is None or not self._first_version <= probes.version < newest:
                continue
            if self._sync.should_measure(newest, probes.version, record.measured):
                due.append((record, probes))
            elif record.measured.version == probes.version:
                self._warn_if_late(record, newest)
        if not due:
            return
        started_s = time.perf_counter()
        found = self._measured(due)
        for (record, probes), divergence in zip(due, found, strict=True):
            record.measured = Measurement(divergence, probes.version, newest)
            self._warn_if_late(record, newest)
        self._head.count_measurement(time.perf_counter() - started_s)
        self._warn(self._standstill.measured(found, sum(record.num_pulls for record in self._fleet)))

    def _measured(self, due: list[tuple[WorkerRecord, Probes]]) -> list[float]:
        try:
            return measured(self._present_policy(), [probes for *_, probes in due], self._form.obs, self._form.actions)
        except UsageError:
            raise  # as long as the policy is what it is
        except BaseException:
            for record, _ in due:  # or the same rows would fail again with every measurement
                record.probes = None
            raise

    def keep_probes(self, parts: list[Collected], rollout: Rollout) -> None:
        """Keep the rows of each worker's rollout on which its divergence will be measured.

        Args:
            parts: The rollouts of single workers.
            rollout: All of them, side by side.

        Raises:
            WorkerFailed: A worker's policy has another distribution or state than the learner's.
        """
        num_probes, first = self._sync.num_probes, 0
        if not num_probes:
            return
        self._standstill.ended(rollout.episode_returns.tolist())
        obs, actions = self._form.obs.flatten(rollout.obs), self._form.actions.flatten(rollout.actions)
        own_parts = [part for part in parts if part.version >= self._first_version]  # others are of another policy
        self._has_probabilities |= any(map(has_probabilities, own_parts))
        for part in parts:
            own = slice(first, first + part.num_columns)
            first = own.stop
            record = self._fleet[part.worker]
            new = probes_of(
                part,
                [leaf[:, own] for leaf in obs],
                [leaf[:, own] for leaf in actions],
                part.arrays.get("log_probs"),
                num_probes,
            )
            if part.version >= self._first_version:
                self._require_alike(new, part)
            record.probes = added(record.probes, new, num_probes)

    def _require_alike(self, probes: Probes, part: Collected) -> None:
        """Refuse probes that cannot be compared: every later measurement would fail."""
        if self._shown_form is None:
            num_rows = len(probes.actions[0])
            obs = self._form.obs.unflatten(list(probes.obs))
            self._shown_form = form_of(self._present_policy(), obs, num_rows, probes.action_mask)
        problem = difference(probes, self._shown_form)
        if self._has_probabilities and not has_probabilities(part):
            problem = "it has neither log_probs nor a distribution, which others of this policy have"
        if problem is not None:
            self._head.refuse_answer(part.worker, problem)
            raise WorkerFailed(f"{self._fleet[part.worker]}: its answer is malformed: {problem}")

    def _present_policy(self) -> Policy:
        """The learner's own policy, which shares its weights with the agent."""
        if self._policy is None:
            self._policy = as_policy(self._agent)
        elif isinstance(self._agent, PolicySpec) and self._agent.weights is not None:
            self._policy.set_weights(weights_of(self._agent))  # it was built here, and shares nothing
        return self._policy

    def _warn_if_late(self, record: WorkerRecord, newest: int) -> None:
        measured = record.measured
        self._warn(self._sync.warning(str(record), newest - measured.version, measured.divergence))

    def _warn(self, warning: str | None) -> None:
        """Once in a run: both warnings are of the same trap."""
        if warning is not None and not self._has_warned:
            self._has_warned = True
            logger.warning("%s", warning)
