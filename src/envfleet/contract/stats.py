"""RunStats: counters of a cluster."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class WorkerStats:
    """What one worker has done so far. The head counts the bytes of arrays and headers."""

    worker: int
    stage: str  # "starting", "present", "lost", "given up"
    host: str
    pid: int | None
    num_steps: int  # env steps that the head accepted
    steps_per_s: float  # over its last ten answers, counting only the time in which it collected or stepped
    version: int  # of the policy in its last rollout
    lag: int  # of that rollout when it was accepted
    divergence: float | None  # the last one that was measured; None: not measured
    num_rollouts: int
    num_pulls: int
    code_bytes: int  # of the policy's code, with the first weights of a pickled module
    weight_bytes: int
    rollout_bytes: int
    announcement_bytes: int  # with the orders to collect, which announce new versions too
    num_restarts: int
    problem: str  # the last one; empty: none
    resent_bytes: int = 0  # sent more than once in either direction, because a connection was lost
    num_nan_rows: int = 0  # env steps and resets with NaN in the observation or the reward
    num_out_of_bounds_rows: int = 0  # env steps and resets whose observation is outside the observation space
    num_dropped_rollouts: int = 0  # of those accepted: older than `max_lag` of stream() when their turn came
    num_dropped_steps: int = 0  # env steps in them


@dataclass(frozen=True, slots=True)
class RunStats:
    """The counters of a cluster at one moment."""

    workers: tuple[WorkerStats, ...]
    version: int  # of the newest policy
    num_refused: Mapping[str, int]  # messages that were dropped, by reason
    num_measurements: int = 0  # of divergences; one measures all workers
    measure_s: float = 0.0  # seconds of the learner's time that the measurements took
    # Means over the last 100 episodes of rollouts: "episode_return", "episode_length", and each number in the infos of
    # their last steps that the rollouts carry ("sim/clock" for one inside a dictionary). Empty: no episode has ended.
    metrics: Mapping[str, float] = field(default_factory=dict)

    @property
    def num_steps(self) -> int:
        """Env steps that the head has accepted."""
        return sum(each.num_steps for each in self.workers)

    @property
    def summary(self) -> str:
        """The counters in one line."""
        present = sum(each.stage == "present" for each in self.workers)
        weights, rollouts = (
            sum(each.weight_bytes for each in self.workers),
            sum(each.rollout_bytes for each in self.workers),
        )
        lag = max((each.lag for each in self.workers), default=0)
        divergences = [each.divergence for each in self.workers if each.divergence is not None]
        divergence = f", divergence {max(divergences):.2g}" if divergences else ""
        num_nan_rows = sum(each.num_nan_rows for each in self.workers)
        nan_rows = f", {num_nan_rows:,} rows with NaN" if num_nan_rows else ""
        num_dropped = sum(each.num_dropped_rollouts for each in self.workers)
        dropped_steps = sum(each.num_dropped_steps for each in self.workers)
        dropped = f", {num_dropped:,} rollouts ({dropped_steps:,} steps) dropped as too old" if num_dropped else ""
        resent = sum(each.resent_bytes for each in self.workers)
        again = f", {_bytes(resent)} sent again" if resent else ""
        return (
            f"{present}/{len(self.workers)} workers, {sum(each.steps_per_s for each in self.workers):,.0f} steps/s, "
            f"{self.num_steps:,} steps, version {self.version}, lag {lag}{divergence}, "
            f"{sum(each.num_pulls for each in self.workers)} pulls, {_bytes(weights)} of weights, "
            f"{_bytes(rollouts)} of rollouts{again}, "
            f"{sum(each.num_restarts for each in self.workers)} restarts{nan_rows}{dropped}"
        )

    def __str__(self) -> str:
        """Return the summary of the run in one line."""
        return self.summary


def _bytes(number: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if number < 999.5:
            return f"{number:.3g} {unit}"
        number /= 1000
    return f"{number:,.0f} TB" if number >= 99.5 else f"{number:.3g} TB"
