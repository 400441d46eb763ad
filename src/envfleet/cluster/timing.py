"""Timing: how long a cluster waits, and how often it tries again."""

from __future__ import annotations

from dataclasses import dataclass

from envfleet.contract.checks import positive, positive_or_none, whole_number
from envfleet.contract.errors import UsageError
from envfleet.contract.pool_config import MOST_RESTARTS
from envfleet.contract.settings import keep_plain_numbers

MOST_SECONDS = 1e6  # of any of BOUNDED: twelve days
BOUNDED = ("join_timeout_s", "heartbeat_s", "silence_s", "reconnect_s", "resend_s")


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """How long a cluster waits, and how often it tries again.

    Attributes:
        timeout_s: Seconds that a call waits for workers before ClusterTimeout; default 300. Time in which large
            messages make progress over a slow network does not count. None: no limit; the log says once a minute
            which workers are late. How long a step of one env may take is `PoolSettings(timeout_s=...)`.
        start_timeout_s: Seconds until all workers must be ready, and until each of them must have built its pool;
            default 300; None: no limit. Time in the queue of Slurm or Kubernetes does not count: see the launcher's
            `queue_timeout_s`.
        min_workers: Number of workers that the constructor waits for; the others join as they come. Default None: all.
        join_timeout_s: Seconds after which a worker that runs but has not joined is restarted; default 60.
        max_worker_restarts: Number of losses in a row, without an accepted answer between them, after which a worker
            is given up; default 10.
        heartbeat_s: Seconds between two heartbeats of a worker; default 1.
        silence_s: Seconds without an answer after which a connection is closed; default 30. Large messages that were
            under way continue on the next connection.
        reconnect_s: Seconds after which a worker whose connection stays closed is lost; default 5.
        resend_s: Seconds after which a message that is not known to have arrived is sent again; default 5.
    """

    timeout_s: float | None = 300.0  # seconds that a call waits for workers; None: no limit
    start_timeout_s: float | None = 300.0  # seconds until all workers must be ready, their pools built; None: no limit
    min_workers: int | None = None  # number of workers that the constructor waits for; None: all
    join_timeout_s: float = 60.0  # seconds until a worker that runs must have joined
    max_worker_restarts: int = 10  # losses in a row, without an accepted answer, until a worker is given up
    heartbeat_s: float = 1.0  # seconds between two heartbeats of a worker
    silence_s: float = 30.0  # seconds without an answer until a connection is closed
    reconnect_s: float = 5.0  # seconds without a connection until a worker is lost
    resend_s: float = 5.0  # seconds without a receipt until a message is sent again

    def __post_init__(self) -> None:
        """Refuse what cannot work."""
        keep_plain_numbers(self)
        for name in ("timeout_s", "start_timeout_s"):
            positive_or_none(name, getattr(self, name))
        for name in BOUNDED:
            positive(name, getattr(self, name))
            if getattr(self, name) > MOST_SECONDS:
                raise UsageError(f"{name} must be at most {MOST_SECONDS:,.0f}; got {getattr(self, name)!r}")
        whole_number("max_worker_restarts", self.max_worker_restarts, 0, MOST_RESTARTS)
        if self.min_workers is not None:
            whole_number("min_workers", self.min_workers)
