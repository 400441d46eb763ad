"""Collected and Rows: what one worker has sent, a rollout or the rows of a step, after it was checked."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from envfleet.cluster.wire.rollouts.row_checks import NONE_SUSPECT, SuspectRows
from envfleet.contract.arrays import Array, Arrays
from envfleet.contract.infos.flat import FlatInfos


@dataclass(frozen=True, slots=True)
class Collected:
    """One worker's rollout, checked. A column is the rows of one env."""

    worker: int
    version: int  # of the newest column
    lag: int  # of that version, when the rollout was accepted; after taken(): then
    num_steps: int
    arrays: Arrays
    distribution: str | None = None  # the kind of that in the arrays "probe."
    suspects: SuspectRows = NONE_SUSPECT
    env_ids: Array | None = None  # [N] of its columns, counted within the worker; None: all envs
    versions: Array | None = None  # [N] of its columns; None: `version` of all
    infos: FlatInfos = field(default_factory=dict)  # [T, N, ...]
    final_infos: FlatInfos = field(default_factory=dict)  # [F, ...]

    @property
    def oldest_version(self) -> int:
        """The version of the oldest column."""
        return self.version if self.versions is None else int(self.versions.min())

    @property
    def num_columns(self) -> int:
        """N: columns of the rollout."""
        return int(self.arrays["rewards"].shape[1])

    @property
    def column_versions(self) -> Array:
        """[N] int64: the version of each column."""
        return np.full(self.num_columns, self.version) if self.versions is None else self.versions

    @property
    def column_env_ids(self) -> Array:
        """[N] int64: the env of each column, counted within the worker."""
        return np.arange(self.num_columns) if self.env_ids is None else self.env_ids

    def taken(self, newest_version: int) -> Collected:
        """The same rollout with its lag at the moment at which the learner takes it."""
        lag = newest_version - self.version
        return self if lag == self.lag else replace(self, lag=lag)


@dataclass(frozen=True, slots=True)
class Rows:
    """One worker's rows of a step or reset, checked."""

    worker: int
    info: dict[str, Any]
    arrays: Arrays
    suspects: SuspectRows = NONE_SUSPECT
