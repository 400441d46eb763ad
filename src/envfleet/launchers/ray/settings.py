"""Ray: workers are actors of a Ray cluster, which places them and starts them again."""

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
    """Start workers on a Ray cluster: the one that runs, or one on this machine that goes with the run."""

    address: str = "auto"  # "host:port" of the cluster; "auto": this process's, or one that runs here, or a new one
    cpus_per_worker: float = 1
    gpus_per_worker: float = 0
    resources: Mapping[str, float] | None = None  # further ones for each worker: {"memory": 2e9, "my_resource": 1}
    placement: str = "SPREAD"  # strategy of the placement group
    runtime_env: Mapping[str, Any] | None = None  # as Ray's: "pip", "working_dir", "env_vars", ...
    head_address: str | None = None  # where workers find this process; None: the address on the way to the cluster
    queue_timeout_s: float | None = 60.0  # how long workers may wait for resources; None: without end
    python: str | None = None  # the interpreter on the nodes; None: the one that runs Ray there

    is_on_this_host = False

    def __post_init__(self) -> None:
        """Check all that can be checked without a cluster."""
        if not self.address or self.address.startswith("ray://"):
            raise UsageError(
                f"Ray(address={self.address!r}): expected 'auto' or 'host:port' of a cluster that this machine is a "
                "node of. Through Ray Client (ray://) workers could not be watched: run this program on a node of the "
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
        """See Launcher. Connects to the cluster, or starts one."""
        return ray_session.connect(self.address, self._runtime_env)

    def launch(self, job: WorkerJob) -> OwnedJob:
        """Ask for a place for each worker, and have them started there; does not wait for it."""
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
        """Where workers look for modules first; None: where their actor does, which Ray has prepared."""
        if self.python is not None or set(self.runtime_env or {}) - {"env_vars"}:
            return None
        if MODULE_PATH_VARIABLE in (self.runtime_env or {}).get("env_vars", {}):
            return None
        # The workers find the modules that this process finds: policies and envs given by their import path.
        return tuple(os.path.abspath(entry) for entry in sys.path)
