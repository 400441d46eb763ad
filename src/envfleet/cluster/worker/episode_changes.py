"""EpisodeChanges: with which change the running episode of each env was begun, and so each row of a rollout."""

from __future__ import annotations

import numpy as np

from envfleet.contract.arrays import Array
from envfleet.contract.infos import Infos
from envfleet.contract.live_changes import LIVE_CHANGE


class EpisodeChanges:
    """Reads the infos of resets. Costs nothing until the first change."""

    def __init__(self, num_envs: int) -> None:
        self._numbers: Array = np.zeros(num_envs, np.int64)  # [N]: of the running episodes
        self.begin_rollout()

    @property
    def saved(self) -> Array:
        """For a checkpoint: the numbers of the running episodes."""
        return self._numbers.copy()

    def restore(self, numbers: Array) -> None:
        """Go on from a checkpoint."""
        self._numbers = numbers.copy()
        self.begin_rollout()

    def begin_rollout(self) -> None:
        """The rows of a rollout begin with the episodes that run now."""
        self._first = self._numbers.copy()  # before step 0
        self._resets: list[tuple[Array, Array, Array]] = []  # steps, envs, numbers

    def see(self, infos: Infos, steps: Array | int = -1, env_ids: Array | None = None) -> None:
        """Look for resets in the infos of a reset or step.

        Args:
            infos: Of a batch.
            steps: The step of the rollout that gave each row of the batch, or all of them.
            env_ids: The env of each row; None: row i is env i.
        """
        numbers = infos.get(LIVE_CHANGE)
        if numbers is None:
            return
        rows = np.flatnonzero(infos[f"_{LIVE_CHANGE}"])
        envs = rows if env_ids is None else env_ids[rows]
        self._numbers[envs] = numbers[rows]
        if not isinstance(steps, int) or steps >= 0:  # otherwise there is no rollout that asks for it
            self._resets.append((np.broadcast_to(steps, numbers.shape)[rows], envs, numbers[rows]))

    def of(self, env_ids: Array) -> Array:
        """The change with which the running episode of each of these envs was begun."""
        numbers: Array = self._numbers[env_ids]
        return numbers

    def rows(self, num_steps: int) -> Array | None:
        """[T, N] int64: the change with which the episode of each row was begun; None: there was none."""
        if not self._resets and not self._first.any():
            return None
        rows = np.tile(self._first, (num_steps, 1))
        for steps, envs, numbers in self._resets:
            for step, env, number in zip(steps.tolist(), envs.tolist(), numbers.tolist(), strict=True):
                rows[step + 1 :, env] = number
        return rows
