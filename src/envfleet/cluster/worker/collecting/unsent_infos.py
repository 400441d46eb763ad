"""UnsentInfos: the infos of rows that belong to columns which are not full yet, kept until these columns are sent."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from envfleet.cluster.info_choice import MOST_INFO_BYTES, InfoChoice
from envfleet.cluster.wire.messages import RolloutInfos
from envfleet.cluster.worker.collecting.info_recorder import InfoRecorder
from envfleet.contract.arrays import Array
from envfleet.contract.infos.table import Infos, InfoTable, mask_key

SENT = -1  # in place of a column
FINAL_INFO = "final_info"
NOT_KEPT = ("final_obs", FINAL_INFO)  # observations are kept elsewhere, final infos by themselves


@dataclass(slots=True)
class _Batch:
    """The infos of one batch, and where its rows belong."""

    table: InfoTable
    steps: Array  # [B]
    columns: Array  # [B]; SENT: the row is not kept any more
    has_ended: Array  # [B] bool


class UnsentInfos:
    """Infos in the order in which they came. Memory: that of the batches some of whose rows are not sent."""

    def __init__(self, choice: InfoChoice, num_steps: int, num_columns: int) -> None:
        self._choice = choice
        self._num_steps = num_steps
        self._num_columns = num_columns
        self._batches: list[_Batch] = []

    def add(self, steps: Array, columns: Array, has_ended: Array, infos: Infos) -> None:
        """Keep a copy of the infos of a batch; row i belongs to `steps[i]` of `columns[i]`."""
        kept = self._chosen(infos)
        if FINAL_INFO in infos:
            kept |= {FINAL_INFO: self._chosen(infos[FINAL_INFO]), mask_key(FINAL_INFO): infos[mask_key(FINAL_INFO)]}
        if self._choice.keys != () and (kept or has_ended.any()):  # ends are counted here, with infos or without
            table = InfoTable(len(steps), kept).copy()  # the pool uses its arrays again when nobody holds them
            self._batches.append(_Batch(table, steps, columns.copy(), has_ended))

    def _chosen(self, infos: Infos) -> Infos:
        """The columns that may be sent, and their masks."""
        return {
            each: infos[each]
            for key in infos
            if mask_key(key) in infos and key not in NOT_KEPT and self._may_be_sent(key, infos[key])
            for each in (key, mask_key(key))
        }

    def _may_be_sent(self, key: str, column: Any) -> bool:
        if self._choice.keys is not None and key not in self._choice.keys:
            return False
        if self._choice.has_objects or isinstance(column, dict):
            return True
        return column.dtype.kind in "biuf" and column[:1].nbytes * self._num_steps <= MOST_INFO_BYTES

    def take(self, columns: Array) -> tuple[RolloutInfos, dict[str, Array]]:
        """What to send of these columns, in their order; it is not kept any more."""
        recorder = InfoRecorder(self._choice, self._num_steps, len(columns))
        position = np.full(self._num_columns + 1, SENT)  # the last place is that of SENT
        position[columns] = np.arange(len(columns))
        ends: list[tuple[int, int]] = []
        for batch in self._batches:
            rows = np.flatnonzero(position[batch.columns] != SENT)
            if not len(rows):
                continue
            infos, own = batch.table.select(rows).columns, position[batch.columns[rows]]
            recorder.write(batch.steps[rows], own, infos)
            ended = np.flatnonzero(batch.has_ended[rows])
            recorder.write_finals(ended, infos)
            ends += zip(batch.steps[rows][ended].tolist(), own[ended].tolist(), strict=True)
            batch.columns[rows] = SENT
        self._batches = [batch for batch in self._batches if (batch.columns != SENT).any()]
        order = np.array(sorted(range(len(ends)), key=ends.__getitem__), np.int64)
        return recorder.packed(order)
