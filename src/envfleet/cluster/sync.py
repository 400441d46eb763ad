"""Synchronisation rules: should this worker pull the newest weights now? The worker asks before each rollout.

`lag` says how many versions it is behind. `divergence` says how far its policy is from the newest: KL(worker ||
learner), the mean over observations of its own; None if nobody has measured it. The head measures for rules that want
probes: it keeps so many rows of a worker's last rollouts.
"""

from __future__ import annotations

from functools import lru_cache
from typing import ClassVar

import msgspec
import numpy as np

from envfleet.contract.arrays import Array
from envfleet.contract.checks import positive, whole_number


class APS(msgspec.Struct, frozen=True, tag="aps"):
    """Adaptive Policy Synchronization: pull once the policy has drifted too far from the learner's, or lags too much.

    Learn with decoupled PPO, V-trace or off-policy: plain PPO's clip holds the learner near the worker's old policy,
    so that the divergence need never reach the threshold, and nothing is learned until `max_lag` is.
    """

    threshold: float = 0.05  # in nats for each action
    max_lag: int = 64
    num_probes: int = 64  # rows of each worker on which the divergence is measured
    measure_every: int = 1  # versions: more where updates are many and small, and measuring would take its time

    def __post_init__(self) -> None:
        """Refuse what cannot work."""
        threshold = float(positive("threshold", self.threshold, ". To pull always: EveryUpdate()"))
        msgspec.structs.force_setattr(self, "threshold", threshold)  # a number of NumPy's cannot travel
        for name in ("max_lag", "num_probes", "measure_every"):
            msgspec.structs.force_setattr(self, name, whole_number(name, getattr(self, name)))

    def should_pull(self, lag: int, divergence: float | None) -> bool:
        """See above."""
        return lag > 0 and (divergence is None or divergence > self.threshold or lag > self.max_lag)


class EveryUpdate(msgspec.Struct, frozen=True, tag="every_update"):
    """Pull every new version: workers act with the newest weights there are."""

    num_probes: ClassVar[int] = 0

    def should_pull(self, lag: int, divergence: float | None) -> bool:
        """See above."""
        return lag > 0


class Every(msgspec.Struct, frozen=True, tag="every"):
    """Pull every k-th version."""

    num_probes: ClassVar[int] = 0
    k: int

    def __post_init__(self) -> None:
        """Refuse what cannot work."""
        msgspec.structs.force_setattr(self, "k", whole_number("k", self.k))

    def should_pull(self, lag: int, divergence: float | None) -> bool:
        """See above."""
        return lag >= self.k


class Never(msgspec.Struct, frozen=True, tag="never"):
    """Keep the first weights for good. A worker that is replaced gets the newest: the head keeps no older ones."""

    num_probes: ClassVar[int] = 0

    def should_pull(self, lag: int, divergence: float | None) -> bool:
        """See above."""
        return False


SyncRule = APS | EveryUpdate | Every | Never


@lru_cache(maxsize=64)
def probe_rows(num_steps: int, num_envs: int, num_probes: int) -> Array:
    """Which rows of a rollout are looked at, counted t * num_envs + n, in that order.

    Head and worker must choose the same ones. Spread at random: with a fixed distance they could all be of one env.
    """
    num_rows = num_steps * num_envs
    rows = np.sort(np.random.default_rng(0).permutation(num_rows)[:num_probes])
    rows.flags.writeable = False
    return rows
