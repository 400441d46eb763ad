"""Checkpoint: what the learner gets back of a checkpoint; and how one is read and written as a whole."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from envfleet.cluster.checkpoint.content import SavedRun
from envfleet.cluster.checkpoint.file import Path_, read_file, write_file
from envfleet.cluster.checkpoint.tree import packed, unpacked
from envfleet.contract.arrays import Array, Arrays
from envfleet.contract.errors import CheckpointError, UsageError

PackedExtra = tuple[Any, Sequence[Array]]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Checkpoint:
    """What a checkpoint has for the learner."""

    version: int  # of the newest policy that was published; 0: none
    weights: Arrays  # of that version, by name
    extra: Any  # what the learner gave to save(); tensors are on the CPU
    num_steps: int  # env steps that the head had accepted
    num_rollouts: int
    num_workers: int
    num_envs_per_worker: int
    seed: int | None
    has_env_states: bool  # all envs can go on where they were
    saved_s: float  # when it was written, in seconds since 1970
    envfleet_version: str  # that wrote it

    def __repr__(self) -> str:
        """Return it in one line, without the arrays."""
        return f"Checkpoint(version={self.version}, num_steps={self.num_steps}, num_workers={self.num_workers})"


def load_checkpoint(path: Path_) -> Checkpoint:
    """Read a checkpoint without starting a cluster.

    Args:
        path: Of a file that `ClusterEnv.save()` has written.

    Returns:
        The version and its weights, what the learner added, and counters.

    Raises:
        CheckpointError: There is no such file, it is no checkpoint, is damaged, or is of a newer version.
        MissingExtra: It has tensors of torch, which is not installed.
    """
    return read_checkpoint(path)[0]


def read_checkpoint(path: Path_) -> tuple[Checkpoint, SavedRun]:
    """What a checkpoint has for the learner, and for the cluster. Raises as load_checkpoint() does."""
    if not isinstance(path, str | os.PathLike):
        raise UsageError(f"a checkpoint is named by its path; got {path!r}")
    content, arrays = read_file(path)
    try:
        num_extra = content["num_extra"]
        extra = unpacked(content["extra"], arrays[:num_extra])
        tree = unpacked(content["run"], arrays[num_extra:])
    except (KeyError, TypeError) as error:
        raise CheckpointError(f"{os.fspath(path)} lacks parts that were expected: {error}") from None
    saved = SavedRun.of_tree(tree)
    workers = saved.head.workers
    checkpoint = Checkpoint(
        version=saved.head.version,
        weights=saved.head.weights.get(saved.head.version, {}),
        extra=extra,
        num_steps=sum(each.counters.get("num_steps", 0) for each in workers),
        num_rollouts=sum(each.counters.get("num_rollouts", 0) for each in workers),
        num_workers=len(workers),
        num_envs_per_worker=saved.form.num_envs_per_worker,
        seed=saved.seed,
        has_env_states=saved.has_all_env_states,
        saved_s=saved.saved_s,
        envfleet_version=saved.envfleet_version,
    )
    return checkpoint, saved


def write_checkpoint(path: Path_, saved: SavedRun, extra: PackedExtra) -> None:
    """Write a checkpoint atomically; `extra` is what packed() made of the learner's values. Raises CheckpointError."""
    plain, arrays = packed(saved.tree(), "run")
    write_file(path, {"extra": extra[0], "num_extra": len(extra[1]), "run": plain}, [*extra[1], *arrays])
