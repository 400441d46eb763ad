"""Ray: workers are actors of a Ray cluster, which places and restarts them."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from envfleet.contract.errors import UsageError
from envfleet.contract.worker_environment import MODULE_PATH_VARIABLE
from envfleet.launchers.launcher import WorkerJob
from envfleet.launchers.owned_job import OwnedJob
from envfleet.launchers.ray import session as ray_session
from envfleet.launchers.ray.job import RayJob, Request

PLACEMENTS = ("SPREAD", "PACK", "STRICT_SPREAD", "STRICT_PACK")
NAMED_OTHERWISE = {"CPU": "cpus_per_worker", "GPU": "gpus_per_worker"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Ray:
    """Start workers as actors of a Ray cluster.

    Args:
        address: "host:port" of the cluster; this machine must be one of its nodes. "auto": the cluster that this
            process is connected to, else one that runs on this machine, else a new one that ends with the run.
        cpus_per_worker: The number of CPUs of each worker, such as 4 or 0.5.
        gpus_per_worker: The number of GPUs of each worker, such as 1 or 0.25.
        resources: Further resources of each worker, such as {"memory": 2e9, "my_resource": 1}; memory is in bytes.
        placement: The strategy of the placement group: "SPREAD" or "PACK", or "STRICT_SPREAD" or "STRICT_PACK" to wait
            until it can be kept.
        runtime_env: Ray's runtime_env, such as {"pip": ["shimmy"], "working_dir": "."}.
        head_address: Where workers find the head: "host", "host:port" or "tcp://host:port". None: this machine's
            address that is nearest to the cluster.
        queue_timeout_s: The most seconds that workers may wait for resources. None: no limit.
        python: The Python interpreter on the nodes, such as "/opt/venv/bin/python". None: the one that runs Ray there,
            and workers import modules from where this process does unless `runtime_env` says otherwise.
    """

    address: str = "auto"
    cpus_per_worker: float = 1
    gpus_per_worker: float = 0
    resources: Mapping[str, float] | None = None
    placement: str = "SPREAD"
    runtime_env: Mapping[str, Any] | None = None
    head_address: str | None = None
    queue_timeout_s: float | None = 60.0
    python: str | None = None

    is_on_this_host = False

    def __post_init__(self) -> None:
        """Raise UsageError if a setting is wrong."""
        if not self.address or self.address.startswith("ray://"):
            raise UsageError(
                f"Ray(address={self.address!r}): expected 'auto' or 'host:port' of a cluster that this machine is a "
                "node of. Ray Client (ray://) cannot watch workers: run this program on a node of the "
                "cluster, or submit it with `ray job submit`"
            )
        if not self.cpus_per_worker > 0:
            raise UsageError(f"Ray(cpus_per_worker={self.cpus_per_worker!r}): expected more than 0")
        if not self.gpus_per_worker >= 0:
            raise UsageError(f"Ray(gpus_per_worker={self.gpus_per_worker!r}): expected 0 or more")
        for name, amount in (self.resources or {}).items():
            if name in NAMED_OTHERWISE:
                raise UsageError(f"Ray(resources={{{name!r}: ...}}): give {NAMED_OTHERWISE[name]}= instead")
            if not amount > 0:
                raise UsageError(f"Ray(resources={{{name!r}: {amount!r}}}): expected more than 0")
        if self.placement not in PLACEMENTS:
            raise UsageError(f"Ray(placement={self.placement!r}): expected one of {', '.join(PLACEMENTS)}")
        if self.queue_timeout_s is not None and not self.queue_timeout_s > 0:
            raise UsageError(f"Ray(queue_timeout_s={self.queue_timeout_s!r}): expected more than 0, or None")

    def host_of_workers(self) -> str:
        """Connect to the cluster, or start one.

        Returns:
            The host of the cluster.

        Raises:
            UsageError: This process is connected to another cluster.
            ClusterError: The cluster cannot be reached or started.
            MissingExtra: Ray is not installed.
        """
        return ray_session.connect(self.address, self._runtime_env)

    def launch(self, job: WorkerJob) -> OwnedJob:
        """Ask Ray for a place and an actor for each worker, without waiting for them.

        Args:
            job: What to start.

        Returns:
            The workers; all of them are PENDING.

        Raises:
            UsageError: Ray does not understand a setting, or this process is connected to another cluster.
            ClusterError: The cluster cannot be reached or started, or refuses.
            MissingExtra: Ray is not installed.
        """
        runtime_env = self._runtime_env
        session = ray_session.hold(self.address, runtime_env)
        request = Request(
            bundle={
                "CPU": self.cpus_per_worker,
                **({"GPU": self.gpus_per_worker} if self.gpus_per_worker else {}),
                **(self.resources or {}),
            },
            placement=self.placement,
            runtime_env=None if session.brings(runtime_env) else runtime_env,
            python=self.python,
            path=self._path(),
            queue_timeout_s=self.queue_timeout_s,
        )
        try:
            return OwnedJob(RayJob(session, request, job))
        except BaseException:
            session.release()
            raise

    @property
    def _runtime_env(self) -> dict[str, Any] | None:
        return dict(self.runtime_env) if self.runtime_env else None

    def _path(self) -> tuple[str, ...] | None:
        """Return the folders that workers import modules from; None: those of their actor, which Ray has prepared."""
        if self.python is not None or set(self.runtime_env or {}) - {"env_vars"}:
            return None
        if MODULE_PATH_VARIABLE in (self.runtime_env or {}).get("env_vars", {}):
            return None
        # Workers import policies and envs by name, from where this process does.
        return tuple(os.path.abspath(entry) for entry in sys.path)
