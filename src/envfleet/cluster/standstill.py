"""Standstill: notices a learner under APS that is held near its workers' policies, and learns nothing. Pure.

Plain PPO clips around the policy that acted. If that is an old one, the learner stays near it: the divergence grows
until the clip holds it, below the threshold, and then no worker ever pulls.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from math import isfinite
from statistics import fmean, variance

from envfleet.cluster.sync import SyncRule

NUM_MEASUREMENTS = 12  # without a pull: fewer say nothing
MOST_MEASUREMENTS = 1024  # that are kept
LEAST_SHARE = 0.2  # of the threshold: a smaller divergence is that of a learner which hardly changes
LEAST_HEIGHT = 0.75  # of the highest divergence: one that falls again is not held by anything
# From the first to the second half of the measurements since the last pull. A learner that goes its way doubles it at
# least: even at random its divergence grows in proportion to the number of versions.
MOST_GROWTH = 1.5
NUM_EPISODES = 100  # of a window of returns
LEAST_EPISODES = 20


class Standstill:
    """What was measured since the last pull of any worker, and the returns of the last episodes."""

    def __init__(self, sync: SyncRule) -> None:
        self._threshold: float | None = getattr(sync, "threshold", None)  # None: the rule measures nothing
        self._num_pulls = -1
        self._divergences: deque[float] = deque(maxlen=MOST_MEASUREMENTS)
        self._returns: deque[float] = deque(maxlen=2 * NUM_EPISODES)

    def ended(self, returns: Iterable[float]) -> None:
        """Note the returns of episodes that have ended."""
        if self._threshold is not None:
            self._returns.extend(returns)

    def measured(self, divergences: Sequence[float], num_pulls: int) -> str | None:
        """Note the divergences of workers from a new version.

        Args:
            divergences: Of all workers that were measured; at least one.
            num_pulls: Pulls of all workers since the run began.

        Returns:
            What to tell the user; None: nothing.
        """
        if self._threshold is None:
            return None
        if num_pulls != self._num_pulls or max(divergences) > self._threshold:  # a pull, or one that is to come
            self._num_pulls = num_pulls
            self._divergences.clear()
        self._divergences.append(fmean(divergences))
        if not self._is_pinned(self._threshold) or not self._returns_stay():
            return None
        return (
            f"APS stands still: no worker has pulled in the last {len(self._divergences)} measurements. The divergence "
            f"has stopped growing at {self._divergences[-1]:.2g}, below the threshold of {self._threshold:.2g}, and "
            f"the returns do not move (mean {fmean(self._returns):.4g}). Plain PPO locks up like this: it clips around "
            "the policy of the workers, so that the learner stays near it, and the threshold is never reached. Clip "
            "around the learner's own policy at the start of the update: decoupled PPO, "
            "envfleet.losses.ppo_decoupled_loss. See docs/troubleshooting.md. If the learner has converged, nothing is "
            "wrong"
        )

    def _is_pinned(self, threshold: float) -> bool:
        """Whether the divergence is below the threshold, though not far, and has stopped growing."""
        divergences = list(self._divergences)
        if len(divergences) < NUM_MEASUREMENTS or not all(map(isfinite, divergences)):
            return False
        half = len(divergences) // 2
        before, now = fmean(divergences[:half]), fmean(divergences[half:])
        is_level = LEAST_HEIGHT * max(divergences) <= now <= MOST_GROWTH * before
        return is_level and LEAST_SHARE * threshold <= now <= threshold

    def _returns_stay(self) -> bool:
        """Whether the means of the last two windows differ by no more than chance explains: two standard errors."""
        returns = list(self._returns)
        half = len(returns) // 2
        if half < LEAST_EPISODES:
            return False
        windows = returns[:half], returns[half:]
        errors = sum(variance(each) / len(each) for each in windows)
        return bool((fmean(windows[1]) - fmean(windows[0])) ** 2 <= 4 * errors)
