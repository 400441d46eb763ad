"""Pace: which rollouts may be ordered and taken, so that none is older than `max_lag` when the learner takes it. Pure.

The learner takes `num_rollouts` rollouts with each batch, then publishes. With it the lag of all rollouts that were
ordered and not taken grows. In the order of their age, the j-th of them is taken with batch j // num_rollouts from now:
it comes in time if its lag, and the versions published before that batch, are together at most `max_lag`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence

NUM_REMEMBERED = 16  # batches whose number of published versions counts


class Pace:
    """The rule of `stream(max_lag=..., on_stale="pace")`."""

    def __init__(self, max_lag: int, num_rollouts: int) -> None:
        """Set the largest lag of a rollout that is taken, and the number of rollouts of a batch."""
        self._max_lag = max_lag
        self._num_rollouts = num_rollouts
        self._published: deque[int] = deque([1], maxlen=NUM_REMEMBERED)

    def learned(self, num_versions: int) -> None:
        """Note that the learner has published `num_versions` versions after a batch."""
        self._published.append(num_versions)

    def spare_lag(self, num_out: int, num_gathered: int) -> int:
        """The lag that one more rollout may have when it is begun; below 0: it must not be ordered now.

        Args:
            num_out: Rollouts that were ordered and not taken; all of them may be taken before this one.
            num_gathered: Rollouts of the batch that is being gathered.
        """
        return self._max_lag - self._num_versions_before(num_out, num_gathered)

    def takeable(self, rollouts_out: Mapping[int, Sequence[int]], num_gathered: int) -> list[int]:
        """The workers whose oldest rollout may be taken next: without it all others still come in time.

        The oldest of all may always be taken, and so may those that are too old: they are dropped.

        Args:
            rollouts_out: For each worker the lags of its rollouts that were ordered and not taken, oldest first.
            num_gathered: Rollouts of the batch that is being gathered.
        """
        lags = sorted((lag for each in rollouts_out.values() for lag in each if lag <= self._max_lag), reverse=True)

        def may_be_taken(lag: int) -> bool:
            if not lags or lag >= lags[0]:
                return True
            position = lags.index(lag)
            return self._come_in_time(lags[:position] + lags[position + 1 :], num_gathered + 1)

        return [worker for worker, its_lags in rollouts_out.items() if its_lags and may_be_taken(its_lags[0])]

    def _come_in_time(self, lags: Iterable[int], num_gathered: int) -> bool:
        return all(
            lag + self._num_versions_before(position, num_gathered) <= self._max_lag
            for position, lag in enumerate(lags)
        )

    def _num_versions_before(self, position: int, num_gathered: int) -> int:
        """The versions that are published before the rollout at this position is taken."""
        return (num_gathered + position) // self._num_rollouts * max(1, *self._published)
