"""PoolStepping: resets and steps that the head orders -> a row for each env, also after a loss."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any

import msgspec
import numpy as np

from envfleet.cluster.wire.messages import Reset, RowsReady, Step
from envfleet.cluster.wire.plain_values import from_plain
from envfleet.cluster.wire.rollouts.rollout_form import FIXED
from envfleet.cluster.worker.plain_answers import plain_parts
from envfleet.cluster.worker.pool_place import BEGUN, Episodes
from envfleet.cluster.worker.worker_pool import HUNG, WorkerPool, received
from envfleet.contract.arrays import Array, Arrays
from envfleet.contract.episode import Autoreset
from envfleet.contract.errors import EnvFailed, PoolTimeout, StepOnEndedEpisode
from envfleet.contract.infos.table import Infos, InfoTable

logger = logging.getLogger("envfleet.worker")

LOST = "the worker that ran it was lost"


class PoolStepping:
    """Steps a worker's pool with the actions of the learner."""

    def __init__(self, pool: WorkerPool) -> None:
        self._pool = pool
        self._place = pool.place

    def reset(self, order: Reset) -> tuple[RowsReady, Arrays]:
        """Reset all envs, or those in the mask; the result has a row for each env."""
        pool, place = self._pool, self._place
        pool.require_idle(Autoreset(order.autoreset))
        place.untold.clear()
        options = from_plain(order.options)
        is_begun = place.episodes in BEGUN
        is_partial = order.mask is not None and is_begun
        # The head resets all envs first: some of them only, in a new pool, means that another process has been lost.
        is_after_loss = order.mask is not None and not all(order.mask) and place.episodes is Episodes.NONE
        hung, place.hung = place.hung, None
        if is_partial and not any(order.mask or ()):
            return self._rows(order.order, place.last_obs, _zeros(pool.envs.num_envs), {}, [])
        if is_partial:
            options = {**(options or {}), "reset_mask": np.array(order.mask)}
        failures: list[Exception] = []
        seeds = order.seeds
        if place.episodes is Episodes.NONE and not any(seed is not None for seed in seeds):
            # So that a rollout, which may need another pool, can begin with the very same episodes.
            # Consecutive numbers, since some vector envs take one number only.
            first, place.seed = place.seed, None
            if first is None:
                first = int(np.random.SeedSequence().generate_state(1)[0]) >> 1
            seeds = [first + i for i in range(len(seeds))]
        arguments = {"seed": seeds, "options": options}
        result = received(lambda: pool.envs.reset(**arguments), pool.envs, failures)
        obs, info = result[0], result[-1]
        fixed = _zeros(pool.envs.num_envs) if len(result) == 2 else dict(zip(FIXED, result[1:4], strict=True))
        # An env whose reset has failed has no episode with which a rollout could begin.
        place.episodes = Episodes.RUNNING if is_partial or failures else Episodes.FRESH
        place.reset_arguments, place.collector = arguments, None
        place.reset_infos = dict(info)
        place.has_ended &= False if order.mask is None else ~np.array(order.mask)
        if is_after_loss:
            lost = ~np.array(order.mask)
            reason = LOST if hung is None else HUNG
            InfoTable(len(lost), info).add_errors(np.flatnonzero(lost), reason)
            failures += self._told_of(hung)
        ready, arrays = self._rows(order.order, obs, fixed, info, failures)
        return msgspec.structs.replace(ready, is_after_loss=is_after_loss and hung is None), arrays

    def step(self, order: Step, arrays: Arrays) -> tuple[RowsReady, Arrays]:
        """A row for each env. Those of a pool that hangs are truncated, and another one takes its place."""
        pool, place = self._pool, self._place
        pool.require_idle(Autoreset(order.autoreset))
        place.untold.clear()
        if place.episodes is Episodes.NONE:
            return self._rows_after_loss(order.order)
        failures: list[Exception] = []
        if place.episodes is Episodes.CUT_SHORT:
            return self._rows_after_cut(order.order, failures)
        place.episodes, place.collector = Episodes.RUNNING, None
        actions = pool.actions.unflatten([arrays[f"action.{index}"] for index in range(len(pool.actions.leaves))])
        try:
            result = received(lambda: pool.envs.step_all(actions), pool.envs, failures)
        except PoolTimeout as error:
            logger.warning("%s", pool.give_up(error))
            pool.require_open()
            return self._rows_after_loss(order.order, failures)
        obs, rewards, terminated, truncated, info = result
        ended = terminated | truncated
        if ended.any():
            place.num_hung = 0
        if place.autoreset is Autoreset.DISABLED:
            place.has_ended |= ended
        else:
            place.has_ended = ended & (place.autoreset is Autoreset.NEXT_STEP)
        fixed = {"rewards": rewards, "terminated": terminated, "truncated": truncated}
        return self._rows(order.order, obs, fixed, info, failures)

    def _told_of(self, hung: EnvFailed | None) -> list[Exception]:
        """What the head hears of a pool that hung; with restarts on, only if there were too many."""
        pool, place = self._pool, self._place
        restarts = pool.plan.pool.env_restarts
        is_told = restarts is None or place.num_hung > restarts
        return [hung] if hung is not None and is_told else []

    def _rows_after_cut(self, order: int, failures: list[Exception]) -> tuple[RowsReady, Arrays]:
        """The head was told that the episodes have ended."""
        pool, place = self._pool, self._place
        nothing = _zeros(pool.envs.num_envs)
        if place.autoreset is Autoreset.DISABLED:
            failures.append(
                StepOnEndedEpisode(
                    f"the episodes of this worker's {pool.envs.num_envs} envs were cut short: call recv() for the rows "
                    "of the others, then reset these envs before their next step()"
                )
            )
            return self._rows(order, place.last_obs, nothing, {}, failures)
        result = received(pool.first_reset, pool.envs, failures)
        place.episodes = Episodes.RUNNING
        return self._rows(order, result[0], nothing, result[-1], failures)

    def _rows_after_loss(self, order: int, failures: Iterable[Exception] = ()) -> tuple[RowsReady, Arrays]:
        """The order was for a process or pool that is lost, and its episodes with it: they are cut short here."""
        pool, place = self._pool, self._place
        num_envs = pool.envs.num_envs
        hung, place.hung = place.hung, None
        failures = [*failures, *self._told_of(hung)]
        leaves = [np.zeros((num_envs, *leaf.shape), leaf.dtype) for leaf in pool.obs.leaves]
        if hung and place.last_obs is not None:
            leaves = pool.obs.flatten(place.last_obs)
        obs, infos, final_obs = pool.obs.unflatten(leaves), InfoTable(num_envs), None
        if place.autoreset is Autoreset.SAME_STEP:
            final_obs = pool.obs.each_row(obs, range(num_envs))
            result = received(pool.first_reset, pool.envs, failures)
            obs, infos = result[0], InfoTable(num_envs, result[-1])
        place.episodes = Episodes.CUT_SHORT if final_obs is None else Episodes.RUNNING
        infos.add_errors(np.arange(num_envs), HUNG if hung else LOST, final_obs)
        fixed = _zeros(num_envs) | {"truncated": np.ones(num_envs, np.bool_)}
        ready, arrays = self._rows(order, obs, fixed, infos.columns, failures)
        return msgspec.structs.replace(ready, is_after_loss=hung is None), arrays

    def _rows(
        self, order: int, obs: Any, fixed: Arrays, info: Infos, failures: list[Exception]
    ) -> tuple[RowsReady, Arrays]:
        pool, place = self._pool, self._place
        place.last_obs = obs
        place.changes.see(info)
        arrays = {f"obs.{index}": leaf for index, leaf in enumerate(pool.obs.flatten(obs))}
        told = [pool.failure(each) for each in failures]
        return RowsReady(order=order, info=plain_parts(info, "info"), failures=told), {**arrays, **fixed}


def _zeros(num_envs: int) -> dict[str, Array]:
    return {name: np.zeros(num_envs, dtype) for name, dtype in FIXED.items()}
