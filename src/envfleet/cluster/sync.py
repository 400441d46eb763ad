"""Synchronisation rules: should this worker pull the newest weights now? The worker asks before each rollout."""

from __future__ import annotations

import msgspec


class EveryUpdate(msgspec.Struct, frozen=True, tag="every_update"):
    """Pull every new version: workers act with the newest weights there are."""

    def should_pull(self, lag: int, divergence: float | None) -> bool:
        """`lag`: how many versions the worker is behind; `divergence`: None if nobody has measured it."""
        return lag > 0


SyncRule = EveryUpdate
