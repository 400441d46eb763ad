"""HeadConfig: what the head must know; it checks itself."""

from __future__ import annotations

from dataclasses import dataclass

from envfleet.cluster.sync import SyncRule
from envfleet.cluster.wire.messages import PoolPlan
from envfleet.contract.checks import positive
from envfleet.contract.errors import UsageError

MOST_SECONDS = 1e6  # of any setting: twelve days


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadConfig:
    """What the head must know."""

    plans: tuple[PoolPlan, ...]  # one for each worker
    env_pickles: tuple[bytes | None, ...]
    sync: SyncRule
    max_worker_restarts: int  # in a row, without an accepted answer
    join_timeout_s: float
    heartbeat_s: float
    silence_s: float  # ZeroMQ closes a connection whose other end has not answered for so long
    reconnect_s: float  # a worker whose connection has been closed for so long is lost
    resend_s: float
    compression: str | None
    weights_dtype: str | None

    def __post_init__(self) -> None:
        """Refuse what cannot work."""
        for name in ("join_timeout_s", "heartbeat_s", "silence_s", "reconnect_s", "resend_s"):
            if positive(name, getattr(self, name)) > MOST_SECONDS:
                raise UsageError(f"{name} must be at most {MOST_SECONDS:,.0f}; got {getattr(self, name)!r}")
        if self.max_worker_restarts < 0:
            raise UsageError(f"max_worker_restarts must not be negative; got {self.max_worker_restarts}")
        if self.compression not in (None, "zstd"):
            raise UsageError(f"compression must be None or 'zstd'; got {self.compression!r}")
        if self.weights_dtype not in (None, "bfloat16"):
            raise UsageError(f"weights_dtype must be None or 'bfloat16'; got {self.weights_dtype!r}")
        if not isinstance(self.sync, SyncRule):
            raise UsageError(
                f"sync must be a rule such as APS(), EveryUpdate(), Every(k) or Never(); got {self.sync!r}"
            )
