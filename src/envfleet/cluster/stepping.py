"""Stepping: resets and steps of remote envs, with actions that the learner chooses; of all workers or some."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from envfleet.cluster.head.answers import PendingAnswers
from envfleet.cluster.run.run import Run
from envfleet.cluster.wire.messages import Reset, Step
from envfleet.cluster.wire.orders import Order
from envfleet.cluster.wire.rollouts import RolloutForm, Rows
from envfleet.contract.arrays import Array
from envfleet.contract.checks import whole_number
from envfleet.contract.errors import RECV_GOES_ON, EnvBusy, NothingToReceive, NotReset, UsageError
from envfleet.pool.batch_rows import rows_of_result

StepResult = tuple[Any, Array, Array, Array, dict[str, Any]]

MUST_RESET = "There is no batch: the rows of all workers are dropped. Call reset() for all envs before the next step()"


class Stepping:
    """Steps that were begun and not received. See Activity."""

    def __init__(self, run: Run, form: RolloutForm) -> None:
        self._run = run
        self._head = run.head
        self._form = form
        self._held: PendingAnswers | None = None
        self.in_flight: set[int] = set()  # workers
        self._autoreset = ""
        self.was_reset = False
        self._is_whole = False  # the next batch is that of reset(): it has the rows of all workers
        self.last_env_ids: Array = np.empty(0, np.int32)  # of each row of the batch that was returned last
        self._sent: list[Array] = []  # envs of the next batch in the order sent, if that is the order of its rows

    @property
    def _num_envs(self) -> int:
        return self._run.num_workers * self._run.num_envs_per_worker

    @property
    def has_results_to_come(self) -> bool:
        """Whether something was sent and not received."""
        return bool(self.in_flight) or self.is_held

    @property
    def is_held(self) -> bool:
        """Whether a batch has come whose errors the caller has not heard to the end."""
        return self._held is not None

    def drop(self) -> None:
        """Forget what was begun: another activity begins."""
        self._is_whole = False
        self.in_flight.clear()
        self._sent = []
        self._held = None
        self.was_reset = False

    @property
    def autoreset(self) -> str:
        """The mode of the steps, for a checkpoint; empty: there were none."""
        return self._autoreset

    def restore(self, autoreset: str) -> None:
        """Go on from a checkpoint, in which all envs were reset."""
        self._autoreset, self.was_reset = autoreset, True

    def resized(self, num_workers_before: int) -> None:
        """See Activity. Rows are no longer what they were: all envs must be reset."""
        self.drop()

    def send_reset(
        self, autoreset: str, seeds: list[int | None], options: Any, mask: Array | None, is_whole: bool
    ) -> None:
        """Begin to reset all envs, or those in `mask`. Results that were not received are dropped.

        Args:
            autoreset: The mode of the steps that follow.
            seeds: One for each env.
            options: As plain values.
            mask: The envs to reset; None: all.
            is_whole: The rows of all workers are one batch, whatever the batch size.
        """
        if mask is not None and self.has_results_to_come:
            raise EnvBusy(f"workers {sorted(self.in_flight)} have results to come: receive them before resetting some")
        if mask is not None and not self.was_reset and not mask.all():
            raise NotReset("the first reset() must reset all envs: call it without reset_mask")
        if self.has_results_to_come:
            self._run.begin(None)
        self._run.begin(self)
        self._autoreset = autoreset
        orders = {}
        for worker in range(self._run.num_workers):
            rows = self.rows_of(worker)
            its_mask = None if mask is None else mask[rows].tolist()
            orders[worker] = Order(Reset(autoreset=autoreset, seeds=seeds[rows], options=options, mask=its_mask))
        self._issue(orders)
        self.was_reset, self._is_whole = True, is_whole

    def send(self, actions: Any, env_ids: Array | None, keeps_order: bool) -> None:
        """Begin one step of all envs, or of those in `env_ids`: all envs of some workers.

        With `keeps_order` the next batch has a row for each env that was sent, in the order sent.
        """
        if not self.was_reset:
            raise NotReset("call reset() or async_reset() before the first step() or send()")
        if self._held is not None:
            raise EnvBusy("a batch has not been received since an error was raised for it: call recv() first")
        rows: Mapping[int, Any]
        if env_ids is None:
            rows = {worker: self.rows_of(worker) for worker in range(self._run.num_workers)}
        else:
            rows = workers_of(env_ids, self._run.num_workers, self._run.num_envs_per_worker)
        busy = sorted(self.in_flight & rows.keys())
        if busy:
            raise EnvBusy(f"the envs of workers {busy} have results to come: receive them before sending again")
        leaves = [
            np.array(values, leaf.dtype, order="C")  # a copy: the caller may change its own before it is sent
            for values, leaf in zip(
                self._form.actions.require_batch(actions, len(rows) * self._run.num_envs_per_worker, "actions"),
                self._form.actions.leaves,
                strict=True,
            )
        ]
        self._run.begin(self)
        step = Step(autoreset=self._autoreset)
        self._issue(
            {
                worker: Order(step, {f"action.{index}": leaf[its_rows] for index, leaf in enumerate(leaves)})
                for worker, its_rows in rows.items()
            }
        )
        if env_ids is not None and keeps_order:
            self._sent.append(env_ids.astype(np.int32))

    def _issue(self, orders: Mapping[int, Order]) -> None:
        try:
            self._head.issue(orders)
            self.in_flight.update(orders)
        except BaseException:
            self._run.begin(None)  # or the answers would be taken for those of later orders
            raise

    def require_batch(self, batch_size: int, num_more_workers: int = 0) -> None:
        """Raise NothingToReceive if too few workers are in flight for a batch, with those that are to be sent now."""
        num_envs = (len(self.in_flight) + num_more_workers) * self._run.num_envs_per_worker
        if num_envs < batch_size < self._num_envs:
            raise NothingToReceive(
                f"a batch has {batch_size} rows, but only {num_envs} envs are in flight: send() more"
            )

    def recv(self, batch_size: int, timeout_s: float) -> StepResult:
        """Wait for the workers that were sent; with fewer rows than all envs, for the first that are ready.

        The batch of reset() has the rows of all workers.
        """
        if self._held is None:
            is_first_ready = batch_size < self._num_envs and not self._is_whole
            num_workers = batch_size // self._run.num_envs_per_worker if is_first_ready else len(self.in_flight)
            self._run.wait_for_some(self.in_flight, num_workers, timeout_s, RECV_GOES_ON)
            workers = sorted(self._run.first_ready(self.in_flight)[:num_workers])
            self.in_flight.difference_update(workers)
            self._is_whole = False
            self._held = self._run.take(workers, MUST_RESET)
            env_ids = np.arange(self._num_envs, dtype=np.int32)
            self.last_env_ids = np.concatenate([env_ids[self.rows_of(worker)] for worker in workers])
            if self._held.is_incomplete:
                held = self._held
                self._run.begin(None)
                held.take()
        answers = self._held.take()
        self._held = None
        result = self._form.join_rows([each.result for each in answers if isinstance(each.result, Rows)])
        if not self._sent:
            return result
        sent, self._sent = np.concatenate(self._sent), []
        rows = np.searchsorted(self.last_env_ids, sent)
        self.last_env_ids = sent
        return rows_of_result(self._form.obs, result, rows)

    def rows_of(self, worker: int) -> slice:
        """The rows that belong to the envs of a worker."""
        return slice(worker * self._run.num_envs_per_worker, (worker + 1) * self._run.num_envs_per_worker)


def rows_of_batch(given: int | None, num_envs: int, num_envs_per_worker: int) -> int:
    """The rows of a batch: those of some workers, or of all if none are given."""
    size = num_envs if given is None else whole_number("batch_size", given)
    if size > num_envs or size % num_envs_per_worker:
        raise UsageError(
            f"batch_size must be a multiple of num_envs_per_worker={num_envs_per_worker}, at most {num_envs}; "
            f"got {given}"
        )
    return size


def workers_of(env_ids: Array, num_workers: int, num_envs_per_worker: int) -> dict[int, Array]:
    """The rows of the caller's arrays that are for each worker. All envs of a worker must be chosen together."""
    num_envs = num_workers * num_envs_per_worker
    if env_ids.ndim != 1 or env_ids.dtype.kind not in "iu" or not len(env_ids):
        got = f"shape {env_ids.shape}, dtype {env_ids.dtype}"
        raise UsageError(f"env_id must be a vector of env indices; got {got}")
    if env_ids.min() < 0 or env_ids.max() >= num_envs:
        raise UsageError(f"env_id must be between 0 and {num_envs - 1}; got {env_ids.tolist()}")
    workers = env_ids // num_envs_per_worker
    order = np.argsort(env_ids, kind="stable")
    rows: dict[int, Array] = {}
    for worker in np.unique(workers).tolist():
        its_rows = order[workers[order] == worker]
        its_envs = np.arange(num_envs)[worker * num_envs_per_worker :][:num_envs_per_worker]
        if not np.array_equal(env_ids[its_rows], its_envs):
            raise UsageError(
                f"env_id must name all envs of a worker, each once: envs {its_envs[0]} to {its_envs[-1]} of "
                f"worker {worker}; got {env_ids[its_rows].tolist()}"
            )
        rows[worker] = its_rows
    return rows
