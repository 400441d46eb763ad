"""Rows of a batch: writing one env's transition, reading one env's action, and a whole batch from its rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from envfleet.contract.arrays import Array
from envfleet.contract.batch import StepBatch
from envfleet.contract.episode import Transition
from envfleet.contract.spaces import SpaceTree
from envfleet.pool.batch_layout import BatchArrays
from envfleet.pool.guard import Failure, GuardedEpisode
from envfleet.pool.process.info_columns import InfoColumns

NO_INFO_COLUMNS = InfoColumns({})


class Extras(NamedTuple):
    """What a row has besides arrays."""

    info: dict[str, Any]
    final_info: dict[str, Any] | None  # set where an episode ended in the same step
    objects: list[Any] | None  # leaves of the observation that are no arrays
    final_objects: list[Any] | None
    failure: Failure | None
    left_out: tuple[str, ...] = ()  # parts of the info that cannot be pickled


class RowWriter:
    """Writes transitions of one space into the rows of a batch."""

    def __init__(self, tree: SpaceTree, info_columns: InfoColumns = NO_INFO_COLUMNS) -> None:
        """The writer for one observation space, and for what an env has declared of its infos."""
        self._tree = tree
        self._info_columns = info_columns
        self._one_array = tree.is_one_array
        self._is_plain = tree.is_one_array and not info_columns.layout

    def extras(self, episode: GuardedEpisode, transition: Transition) -> Extras | None:
        """What the row will have besides arrays."""
        has_objects = self._tree.object_leaves
        info = self._info_columns.rest_of(transition.info)
        if not (info or transition.has_final or has_objects or episode.failure):
            return None
        final_info = self._info_columns.rest_of(transition.final_info or {}) if transition.has_final else None
        objects = self._objects(transition.obs) if has_objects else None
        final_objects = self._objects(transition.final_obs) if has_objects and transition.has_final else None
        return Extras(info, final_info, objects, final_objects, episode.failure)

    def write(self, episode: GuardedEpisode, transition: Transition, arrays: BatchArrays, row: int) -> Transition:
        """Write the arrays. Returns the transition that was written: another one if this one cannot be."""
        try:
            if self._is_plain and not transition.has_final:  # nearly always
                arrays.obs[0][row] = transition.obs
            else:
                self._write_both(transition, arrays, row)
        except Exception as error:  # rare: observations were checked already, declared infos were not
            transition = episode.refuse(error)
            try:
                self._write_both(transition, arrays, row)
            except Exception as second:
                transition = episode.give_up(second)
                self._write_both(transition, arrays, row)
        return transition

    def _write_both(self, transition: Transition, arrays: BatchArrays, row: int) -> None:
        self._info_columns.write(transition.info, arrays.infos, row)
        self._write_obs(transition.obs, arrays.obs, row)
        if transition.has_final:
            self._info_columns.write(transition.final_info or {}, arrays.final_infos, row)
            self._write_obs(transition.final_obs, arrays.final_obs, row)

    def _write_obs(self, obs: Any, columns: Sequence[Array], row: int) -> None:
        if self._one_array:
            columns[0][row] = obs
            return
        values = self._tree.flatten(obs)
        for column, leaf in zip(columns, self._tree.array_leaves, strict=True):
            column[row] = values[leaf]

    def _objects(self, obs: Any) -> list[Any]:
        values = self._tree.flatten(obs)
        return [values[leaf] for leaf in self._tree.object_leaves]


def action_reader(tree: SpaceTree, columns: Sequence[Any]) -> Callable[[int], Any]:
    """A function from a row to its action, for actions given by leaves. Arrays are copied: the env may keep them."""
    if not tree.is_one_array:
        return lambda row: tree.unflatten([_owned(column[row]) for column in columns])
    column = columns[0]
    if tree.leaves[0].shape == ():
        return lambda row: column[row]
    return lambda row: column[row].copy()


def _owned(value: Any) -> Any:
    return value.copy() if isinstance(value, np.ndarray) else value


def assemble_batch(
    tree: SpaceTree, arrays: BatchArrays, extras: Mapping[int, Extras], info_columns: InfoColumns = NO_INFO_COLUMNS
) -> StepBatch:
    """A batch from its arrays and the extras of its rows."""
    num_rows = len(arrays.env_ids)
    objects = {row: extra.objects for row, extra in extras.items() if extra.objects}
    obs = _join(tree, arrays.obs, objects, num_rows)
    infos = info_columns.read(arrays.infos, num_rows)
    infos.add_rows({row: extra.info for row, extra in extras.items() if extra.info})
    final_infos = {row: extras[row].final_info or {} for row in sorted(extras) if extras[row].final_info is not None}
    if final_infos:
        final_rows = np.array(list(final_infos), np.intp)
        final_objects = {row: extra.final_objects for row, extra in extras.items() if extra.final_objects}
        final_obs = _join(tree, arrays.final_obs, final_objects, num_rows)
        # Rows of other envs hold what was written there in an earlier batch.
        finals = info_columns.read(arrays.final_infos, num_rows).only(final_rows)
        finals.add_rows(final_infos)
        infos.add_finals(final_rows, tree.each_row(final_obs, final_infos), finals)
    return StepBatch(arrays.env_ids, obs, arrays.rewards, arrays.terminated, arrays.truncated, infos.columns)


def _join(tree: SpaceTree, columns: Sequence[Array], objects: Mapping[int, list[Any]], num_rows: int) -> Any:
    if tree.is_one_array:
        return columns[0]
    values: list[Any] = [None] * len(tree.leaves)
    for leaf, column in zip(tree.array_leaves, columns, strict=True):
        values[leaf] = column
    for i, leaf in enumerate(tree.object_leaves):
        values[leaf] = tuple(objects[row][i] if row in objects else None for row in range(num_rows))
    return tree.unflatten(values)
