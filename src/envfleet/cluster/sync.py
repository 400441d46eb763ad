"""Synchronisation rules: what the head measures, which announcement counts, and when a worker pulls new weights.

The head measures the divergence of each worker's policy from the newest version: KL(worker || learner), the mean over
`num_probes` rows of that worker's last rollouts. It tells the worker with an announcement or an order. The worker asks
its rule before each rollout. `lag` is the number of versions that its policy is behind the newest. How a divergence is
calculated is in `head/divergence.py`; everything else about the rules is here.
"""

from __future__ import annotations

from functools import lru_cache
from typing import ClassVar, Protocol

import msgspec
import numpy as np

from envfleet.contract.arrays import Array
from envfleet.contract.checks import positive, whole_number


class Measurement(msgspec.Struct, frozen=True):
    """The divergence of one worker's policy, and of which two versions it is."""

    divergence: float | None = None  # None: not measured
    version: int = -1  # of the worker's policy; -1: not measured
    newest_version: int = 0  # of the learner's policy


class Announcement(Protocol):
    """A message that tells a worker of the newest version: Announce and Collect."""

    @property
    def version(self) -> int:
        """The newest version that the head has announced."""

    @property
    def divergence(self) -> float | None:
        """How far the worker's policy is from it; None: not measured."""

    @property
    def measured_version(self) -> int:
        """The version of the worker's policy that was measured; -1: none."""


class News(msgspec.Struct, frozen=True):
    """What a worker knows of the newest version. Announcements may overtake each other: older ones do not count."""

    version: int = 0
    divergence: float | None = None
    measured_version: int = -1

    def after_announcement(self, said: Announcement) -> News:
        """What the worker knows after an announcement; one of the same version replaces the one before it."""
        return self if said.version < self.version else _news(said)

    def after_order(self, said: Announcement) -> News:
        """What the worker knows once it begins an order; an announcement of the same version counts more."""
        return self if said.version <= self.version else _news(said)

    def should_pull(self, rule: SyncRule, held_version: int, max_lag: int | None = None) -> bool:
        """Whether a worker that acts with `held_version` pulls under this rule, or because it lags more than `max_lag`.

        Args:
            rule: The rule of the cluster.
            held_version: The version of the worker's policy.
            max_lag: The largest lag that the order allows; None: any.
        """
        if max_lag is not None and self.version - held_version > max_lag:
            return True
        # A divergence measured before the last pull was that of an older policy: the one held now is nearer.
        divergence = self.divergence if self.measured_version in (-1, held_version) else 0.0
        return rule.should_pull(self.version - held_version, divergence)


def _news(said: Announcement) -> News:
    return News(said.version, said.divergence, said.measured_version)


class APS(msgspec.Struct, frozen=True, tag="aps"):
    """Adaptive Policy Synchronization: pull once the policy has drifted too far from the learner's, or lags too much.

    Learn with decoupled PPO, V-trace or off-policy: plain PPO's clip holds the learner near the worker's old policy,
    so that the divergence need never reach the threshold, and nothing is learned until `max_lag` is.
    """

    threshold: float = 0.05  # in nats for each action
    max_lag: int = 64
    num_probes: int = 64  # rows of each worker on which the divergence is measured
    measure_every: int = 1  # versions between two measurements; raise it where updates are many and small

    def __post_init__(self) -> None:
        """Raise UsageError if a setting is wrong."""
        threshold = float(positive("threshold", self.threshold, ". To pull always: EveryUpdate()"))
        msgspec.structs.force_setattr(self, "threshold", threshold)  # a number of NumPy's cannot travel
        for name in ("max_lag", "num_probes", "measure_every"):
            msgspec.structs.force_setattr(self, name, whole_number(name, getattr(self, name)))

    def should_pull(self, lag: int, divergence: float | None) -> bool:
        """Whether a worker pulls: the divergence is not known or above `threshold`, or the lag is above `max_lag`.

        Args:
            lag: How many versions the worker is behind.
            divergence: How far the worker's policy is from the learner's; None: not measured.

        Returns:
            Whether it pulls.
        """
        return lag > 0 and (divergence is None or divergence > self.threshold or lag > self.max_lag)

    def should_measure(self, newest_version: int, probed_version: int, last: Measurement) -> bool:
        """Whether the head measures a worker now.

        Args:
            newest_version: Of the learner's policy.
            probed_version: Of the worker's policy, in the rows that the head keeps.
            last: The last measurement of this worker.

        Returns:
            Whether it measures.
        """
        since = max(probed_version, last.newest_version)
        return newest_version >= since + self.measure_every or (last.divergence is None and newest_version > since)

    def warning(self, worker: str, lag: int, divergence: float | None) -> str | None:
        """What to tell the user if a worker pulls although its divergence is low.

        Args:
            worker: The worker, as logs name it.
            lag: How many versions the worker is behind.
            divergence: How far the worker's policy is from the learner's; None: not measured.

        Returns:
            The text of the warning; None: there is nothing to say.
        """
        if lag <= self.max_lag or divergence is None or divergence > self.threshold:
            return None
        return (
            f"{worker} pulls because its policy is {lag} versions old, more than max_lag={self.max_lag}; its "
            f"divergence is only {divergence:.2g}, below the threshold of {self.threshold:.2g}. If the learner clips "
            "against the probabilities of the worker's policy, as plain PPO does, it is held near that policy and "
            "learns nothing new: clip against its own policy at the start of the update (decoupled PPO: "
            "envfleet.losses.ppo_decoupled_loss). If it makes many small updates, raise max_lag"
        )


class _LagRule(msgspec.Struct, frozen=True):
    """A rule that does not look at the divergence: nothing is measured."""

    num_probes: ClassVar[int] = 0

    def should_measure(self, newest_version: int, probed_version: int, last: Measurement) -> bool:
        """Whether the head measures a worker now: never.

        Args:
            newest_version: Not used.
            probed_version: Not used.
            last: Not used.

        Returns:
            False
        """
        return False

    def warning(self, worker: str, lag: int, divergence: float | None) -> str | None:
        """What to tell the user if a worker pulls: nothing.

        Args:
            worker: Not used.
            lag: Not used.
            divergence: Not used.

        Returns:
            None
        """
        return None


class EveryUpdate(_LagRule, frozen=True, tag="every_update"):
    """Pull every new version: workers act with the newest weights there are."""

    def should_pull(self, lag: int, divergence: float | None) -> bool:
        """Whether a worker pulls: whenever there is a newer version.

        Args:
            lag: How many versions the worker is behind.
            divergence: How far the worker's policy is from the learner's; None: not measured. Not used.

        Returns:
            Whether it pulls.
        """
        return lag > 0


class Every(_LagRule, frozen=True, tag="every"):
    """Pull every k-th version."""

    k: int

    def __post_init__(self) -> None:
        """Raise UsageError if a setting is wrong."""
        msgspec.structs.force_setattr(self, "k", whole_number("k", self.k))

    def should_pull(self, lag: int, divergence: float | None) -> bool:
        """Whether a worker pulls: once its policy is `k` versions behind.

        Args:
            lag: How many versions the worker is behind.
            divergence: How far the worker's policy is from the learner's; None: not measured. Not used.

        Returns:
            Whether it pulls.
        """
        return lag >= self.k


class Never(_LagRule, frozen=True, tag="never"):
    """Keep the first weights for good. A worker that is replaced gets the newest: the head keeps no older ones."""

    def should_pull(self, lag: int, divergence: float | None) -> bool:
        """Whether a worker pulls: never.

        Args:
            lag: How many versions the worker is behind. Not used.
            divergence: How far the worker's policy is from the learner's; None: not measured. Not used.

        Returns:
            Whether it pulls.
        """
        return False


SyncRule = APS | EveryUpdate | Every | Never


def probe_places(num_steps: int, versions: Array, num_probes: int) -> tuple[Array, Array]:
    """The rows of a rollout that are measured: the step and the column of each.

    Args:
        num_steps: Steps of the rollout.
        versions: [N], of each column. Only columns of the newest version are measured.
        num_probes: Rows to choose; all, if there are fewer.
    """
    columns = np.flatnonzero(versions == versions.max())
    steps, positions = np.divmod(probe_rows(num_steps, len(columns), num_probes), len(columns))
    return steps, columns[positions]


@lru_cache(maxsize=64)
def probe_rows(num_steps: int, num_envs: int, num_probes: int) -> Array:
    """The rows of a rollout that are measured, as indices t * num_envs + n, in ascending order.

    Head and worker must choose the same rows. They are drawn at random: at equal distances all could be of one env.
    """
    num_rows = num_steps * num_envs
    rows = np.sort(np.random.default_rng(0).permutation(num_rows)[:num_probes])
    rows.flags.writeable = False
    return rows
