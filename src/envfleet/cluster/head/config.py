"""HeadConfig: what the head must know."""

from __future__ import annotations

from dataclasses import dataclass

from envfleet.cluster.network import Network
from envfleet.cluster.sync import SyncRule
from envfleet.cluster.timing import Timing
from envfleet.cluster.wire.messages import PoolPlan
from envfleet.contract.errors import UsageError


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadConfig:
    """What the head must know. The values have checked themselves."""

    plans: tuple[PoolPlan, ...]  # one for each worker
    env_pickles: tuple[bytes | None, ...]
    sync: SyncRule
    timing: Timing
    network: Network
    worker_device: str | None = None  # on which the workers' copies of the policy act; None: the CPU

    def __post_init__(self) -> None:
        """Refuse what cannot work."""
        if not isinstance(self.sync, SyncRule):
            raise UsageError(
                f"sync must be a rule such as APS(), EveryUpdate(), Every(k) or Never(); got {self.sync!r}"
            )
