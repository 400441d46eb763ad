"""ExplicitResets: envs that reset themselves, for libraries that reset each env by hand.

Such a library shows the last observation of an episode first, and asks for the first one of the next episode later. The
envs have reset themselves in the same step already: their first observations are kept here until they are asked for. So
a reset costs no second round trip, and trajectories are those of envs that are reset by hand, bit for bit.

A library may step some envs while the others stand still. The envs of one worker of a cluster, and those of a vector
env of another library, can only step together. Envs that nobody asked for then step with the others, and run on from
what the caller knows of them: they must be reset before they are stepped again, and an error says so if they are not.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from envfleet.adapters.vector_source import SourceStep, VectorSource, take_what_is_left
from envfleet.contract.arrays import Array, BoolArray, FloatArray
from envfleet.contract.errors import EnvFailed, StepOnEndedEpisode, UsageError
from envfleet.contract.infos.table import Info, InfoTable
from envfleet.contract.spaces import SpaceTree
from envfleet.pool.arguments import some_env_ids
from envfleet.pool.batch_rows import StepResult, rows_of_result


@dataclass(frozen=True, slots=True)
class ShownStep:
    """One step of B envs, as one sees it who resets them by hand."""

    obs: Any  # rows of [B, ...]: the last observation of the episode where one has ended
    rewards: FloatArray  # [B] float64
    terminated: BoolArray  # [B]
    truncated: BoolArray  # [B]
    step: SourceStep

    def infos(self) -> list[Info]:
        """The info of each env's step."""
        return self.step.infos(np.flatnonzero(self.step.ended).tolist())


class ExplicitResets:
    """Steps and resets of all envs or some, each env by itself."""

    def __init__(self, source: VectorSource) -> None:
        self._source = source
        self._envs: Any = source.envs
        self._obs = SpaceTree(source.single_observation_space)
        self._actions = SpaceTree(source.single_action_space)
        self._num_together = _num_envs_that_step_together(source.envs)
        self._firsts: dict[int, tuple[list[Any], Info]] = {}  # leaves and info of envs that have reset themselves
        self._ran_on: set[int] = set()  # envs that have stepped without being asked for
        self._lost: set[int] = set()  # envs whose last step nobody has seen, or whose reset has failed

    @property
    def must_reset(self) -> set[int]:
        """The envs that must be reset before their next step."""
        return {*self._firsts, *self._ran_on, *self._lost}

    def step(self, actions: Any, env_ids: Sequence[int] | Array | None = None) -> ShownStep:
        """Step all envs, or some; a row for each of them, in their order.

        Raises:
            StepOnEndedEpisode: The episode of an env has ended, and it was not reset.
            UsageError: An env has run on since its last step, or `env_ids` is wrong.
            EnvFailed: An env raised; all envs of this step must be reset.
        """
        ids = self._some(env_ids)
        self._require_reset(range(self._source.num_envs) if ids is None else ids)
        try:
            result: StepResult = self._envs.step(actions) if ids is None else self._step_some(actions, ids)
        except EnvFailed:
            self._lost.update(range(self._source.num_envs) if ids is None else self._stepped_with(ids))
            take_what_is_left(self._envs)
            raise
        obs, rewards, terminated, truncated, infos = result
        step = SourceStep(obs, rewards, terminated, truncated, InfoTable(len(rewards), infos))
        for row in np.flatnonzero(step.ended).tolist():
            if not step.was_reset(row):
                self._lost.add(row if ids is None else ids[row])
                continue
            first = [
                np.copy(leaf[row]) if isinstance(leaf, np.ndarray) else leaf[row] for leaf in self._obs.flatten(obs)
            ]
            self._firsts[row if ids is None else ids[row]] = first, step.reset_info(row)
        return ShownStep(self._source.next_obs(step), rewards, terminated, truncated, step)

    def reset(
        self,
        env_ids: Sequence[int] | Array | None = None,
        seeds: Sequence[int | None] | None = None,
        options: dict[str, Any] | None = None,
    ) -> tuple[Any, list[Info]]:
        """Reset all envs, or some; a row for each of them, in their order, and their infos.

        Envs that have just reset themselves show what they began with, unless `seeds`, one for each of these envs, or
        `options` are given.

        Raises:
            NotReset: The first reset() leaves envs out.
        """
        given = self._some(env_ids)
        ids = list(range(self._source.num_envs)) if given is None else given
        begins_anew = seeds is not None or bool(options)
        fresh = [env_id for env_id in ids if begins_anew or env_id not in self._firsts]
        obs, table = self._reset_envs(fresh, None if seeds is None else dict(zip(ids, seeds, strict=True)), options)
        kept = {env_id: self._firsts.pop(env_id) for env_id in ids if env_id in self._firsts}
        self._ran_on.difference_update(ids)
        self._lost.difference_update(ids)
        if len(fresh) == self._source.num_envs and given is None:
            return obs, table.rows()
        leaves = [] if obs is None else self._obs.flatten(obs)
        rows = [[leaf[env_id] for leaf in leaves] if env_id in fresh else kept[env_id][0] for env_id in ids]
        infos = [table.row(env_id) if env_id in fresh else kept[env_id][1] for env_id in ids]
        columns = zip(*rows, strict=True)
        batch = [
            tuple(column) if leaf.dtype is None else np.array(column, leaf.dtype)
            for leaf, column in zip(self._obs.leaves, columns, strict=True)
        ]
        return self._obs.unflatten(batch), infos

    def _some(self, env_ids: Sequence[int] | Array | None) -> list[int] | None:
        """The envs, checked; None: all, in their order."""
        if env_ids is None:
            return None
        ids = some_env_ids(env_ids, self._source.num_envs)
        return None if ids == list(range(self._source.num_envs)) else ids

    def _require_reset(self, env_ids: Sequence[int]) -> None:
        if not self._firsts and not self._ran_on and not self._lost:
            return
        ended = [env_id for env_id in env_ids if env_id in self._firsts]
        if ended:
            raise StepOnEndedEpisode(f"the episodes of envs {ended} have ended: reset these envs before you step them")
        lost = [env_id for env_id in env_ids if env_id in self._lost]
        if lost:
            raise StepOnEndedEpisode(f"envs {lost} have failed, or were stepped with one that has: reset them first")
        ran_on = [env_id for env_id in env_ids if env_id in self._ran_on]
        if ran_on:
            raise UsageError(
                f"envs {ran_on} have run on, because {self._num_together} envs step together here, and others of them "
                "were stepped: reset these envs before you step them. Envs of a pool on this machine, and of a cluster "
                "with num_envs_per_worker=1, stand still meanwhile"
            )

    def _step_some(self, actions: Any, env_ids: list[int]) -> StepResult:
        if self._num_together == 1:
            result: StepResult = self._envs.step(actions, env_ids)
            return result
        stepped = self._stepped_with(env_ids)
        rows = np.searchsorted(stepped, env_ids)
        leaves = self._actions.require_batch(actions, len(env_ids), "actions")
        spread = self._actions.unflatten([_spread(leaf, rows, len(stepped)) for leaf in leaves])
        is_all = len(stepped) == self._source.num_envs
        result = self._envs.step(spread) if is_all else self._envs.step(spread, stepped)
        others = set(stepped).difference(env_ids)
        self._ran_on |= others
        for env_id in others & self._firsts.keys():
            del self._firsts[env_id]
        return rows_of_result(self._obs, result, rows)

    def _stepped_with(self, env_ids: list[int]) -> list[int]:
        """These envs and all that step together with them, in their order."""
        groups = sorted({env_id // self._num_together for env_id in env_ids})
        return [group * self._num_together + index for group in groups for index in range(self._num_together)]

    def _reset_envs(
        self, env_ids: list[int], seeds: dict[int, int | None] | None, options: dict[str, Any] | None
    ) -> tuple[Any, InfoTable]:
        num_envs = self._source.num_envs
        if not env_ids:
            return None, InfoTable(num_envs)
        options = None if options is None else dict(options)
        if len(env_ids) < num_envs:
            mask = np.zeros(num_envs, np.bool_)
            mask[env_ids] = True
            options = {**(options or {}), "reset_mask": mask}
        seed = None if seeds is None else [seeds.get(env_id) for env_id in range(num_envs)]
        return self._source.reset(seed, options)


def _num_envs_that_step_together(envs: Any) -> int:
    """Envs of a cluster step with all others of their worker, vector envs of other libraries all together."""
    if hasattr(envs, "num_envs_per_worker"):
        return int(envs.num_envs_per_worker)
    return 1 if envs.steps_some else int(envs.num_envs)


def _spread(leaf: Any, rows: Array, num_rows: int) -> Any:
    """Actions for `num_rows` envs: those of `rows` are given, the others take the first of them."""
    if not isinstance(leaf, np.ndarray):
        return [dict(zip(rows.tolist(), leaf, strict=True)).get(row, leaf[0]) for row in range(num_rows)]
    spread = np.repeat(leaf[:1], num_rows, axis=0)
    spread[rows] = leaf
    return spread
