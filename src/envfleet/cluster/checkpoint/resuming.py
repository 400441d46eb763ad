"""Resumption: a checkpoint from which a cluster goes on, read and compared before anything is started."""

from __future__ import annotations

import logging
from dataclasses import replace

from envfleet.cluster.checkpoint.checkpoint import Checkpoint, read_checkpoint
from envfleet.cluster.checkpoint.content import SavedForm, SavedRun
from envfleet.cluster.checkpoint.file import Path_
from envfleet.contract.errors import CheckpointError

logger = logging.getLogger("envfleet.cluster")


class Resumption:
    """A checkpoint that fits a cluster."""

    def __init__(self, path: Path_, form: SavedForm, num_workers: int) -> None:
        """Read the checkpoint.

        Raises:
            CheckpointError: It cannot be read, or is of another run; the text says what differs.
        """
        self.checkpoint: Checkpoint
        self.saved: SavedRun
        self.checkpoint, self.saved = read_checkpoint(path)
        if differences := self.saved.form.differences(form):
            raise CheckpointError(f"{path} is of another run: {'; '.join(differences)}")
        num_before = len(self.saved.head.workers)
        if num_before != num_workers:
            logger.warning(
                "%s is of a run with %d workers, this one has %d: all envs begin new episodes, with new seeds",
                path,
                num_before,
                num_workers,
            )
            self.saved = self.saved.with_workers(num_workers)
        elif not self.saved.has_all_env_states:
            logger.warning("%s has no states of some envs: these begin new episodes, with new seeds", path)
        if not self.saved.has_all_env_states:
            self.saved = replace(self.saved, was_reset=False)
