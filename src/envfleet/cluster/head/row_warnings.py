"""RowWarnings: the log says once in a run what is odd in the rows of workers, and which infos rollouts lack."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from envfleet.cluster.head.worker_record import WorkerRecord
from envfleet.cluster.info_choice import MOST_INFO_BYTES
from envfleet.cluster.wire.rollouts.row_checks import SuspectRows

logger = logging.getLogger("envfleet.cluster")

MOST_LEFT_OUT = 1024  # infos of which the log says that they are left out


class RowWarnings:
    """What the log has said already. Envs that return odd rows do it often."""

    def __init__(self) -> None:
        self._kinds: set[str] = set()  # of suspect rows
        self._left_out: set[str] = set()  # infos that rollouts do not carry

    def warn_of_suspects(self, suspects: SuspectRows, record: WorkerRecord, num_envs: int) -> None:
        """Log each kind of suspect rows once. `num_envs` of each worker."""
        worker = record.worker
        for what, env, counter in (
            ("NaN in its observation or reward", suspects.nan_env, "num_nan_rows"),
            ("an observation outside its space", suspects.out_of_bounds_env, "num_out_of_bounds_rows"),
        ):
            if env is not None and what not in self._kinds:
                self._kinds.add(what)
                text = "env %d of %s gave %s. Such rows are passed on, and counted in stats().workers[%d].%s"
                logger.warning(text, worker * num_envs + env, record, what, worker, counter)

    def warn_of_left_out(self, left_out: Sequence[str], record: WorkerRecord) -> None:
        """Log each info that a rollout does not carry once."""
        new = [each for each in left_out if each not in self._left_out]
        if new and len(self._left_out) < MOST_LEFT_OUT:
            self._left_out.update(new)
            logger.warning(
                "the rollouts of %s come without the infos %s. If no keys are chosen, at most %d MiB of numbers are "
                "sent; rollout(..., infos=('key', ...)) and stream(..., infos=...) send the keys that you choose, of "
                "any size, and infos=() sends none",
                record,
                ", ".join(map(ascii, new)),
                MOST_INFO_BYTES >> 20,
            )
