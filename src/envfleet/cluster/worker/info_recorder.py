"""InfoRecorder: what of the envs' infos one rollout carries, while it is collected."""

from __future__ import annotations

from envfleet.cluster.info_choice import MOST_INFO_BYTES, InfoChoice
from envfleet.cluster.wire.info_arrays import packed
from envfleet.cluster.wire.messages import RolloutInfos
from envfleet.contract.arrays import Array
from envfleet.contract.info_store import NOT_INFOS, InfoBudget, InfoStore
from envfleet.contract.infos import Infos, InfoTable

FIRST_NUM_FINALS = 16  # room for the ends of episodes; it grows


class InfoRecorder:
    """The columns of a rollout's infos: [T, N, ...] of the steps, [F, ...] of the last steps of episodes."""

    def __init__(self, choice: InfoChoice, num_steps: int, num_envs: int) -> None:
        self._shape = (num_steps, num_envs)
        self._is_off = choice.keys == ()
        budget = InfoBudget(None if choice.has_objects else MOST_INFO_BYTES)
        self._steps = InfoStore(num_steps * num_envs, budget, choice.keys, choice.has_objects)
        self._finals = InfoStore(FIRST_NUM_FINALS, budget, choice.keys, choice.has_objects)
        self._num_finals = 0

    def write(self, steps: int | Array, rows: Array | None, infos: Infos) -> None:
        """Write the infos of one batch.

        Args:
            steps: The step that each row is of; one number: the same for all rows.
            rows: [B] int: the env of each row of the batch; None: all envs in their order.
            infos: Columns of B rows, and their masks.
        """
        if self._is_off or infos.keys() <= NOT_INFOS:  # of most envs: empty, or what is left of ended episodes
            return
        num_envs = self._shape[1]
        if rows is None:
            first = int(steps) * num_envs
            self._steps.write(slice(first, first + num_envs), infos)
        else:
            self._steps.write(steps * num_envs + rows, infos)

    def write_finals(self, rows: Array, infos: Infos) -> None:
        """Write the infos of the last steps of episodes.

        Args:
            rows: The rows of the batch in which episodes ended: each becomes a row of the final infos.
            infos: Columns of the batch, and their masks; the final infos are among them.
        """
        first, self._num_finals = self._num_finals, self._num_finals + len(rows)
        final_infos = InfoTable(0, infos).final_infos.columns
        if not self._is_off and final_infos:
            self._finals.grow(self._num_finals)
            self._finals.write(slice(first, self._num_finals), final_infos, rows)

    def packed(self, final_order: Array | None = None) -> tuple[RolloutInfos, dict[str, Array]]:
        """What to send.

        Args:
            final_order: Which of the rows of write_finals() each row of the final infos shall be; None: as they came.

        Returns:
            The keys, for the message, and the arrays.
        """
        self._finals.grow(self._num_finals)
        left_out = self._steps.left_out | self._finals.left_out
        finals = self._finals.flat((self._num_finals,), final_order) if self._num_finals else {}
        return packed(self._steps.flat(self._shape), finals, left_out)
