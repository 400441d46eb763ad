"""Slurm: workers are elements of a job array, or steps of the job in which the head runs."""

from __future__ import annotations

import os
import re
import secrets
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from envfleet.contract.checks import positive_or_none, whole_number
from envfleet.contract.errors import ClusterError, UsageError
from envfleet.launchers.hosts import is_loopback
from envfleet.launchers.launcher import WorkerJob
from envfleet.launchers.owned_job import OwnedJob
from envfleet.launchers.slurm.commands import run_slurm
from envfleet.launchers.slurm.job import ArrayJob, StepsJob
from envfleet.launchers.slurm.queue import node_addresses_arguments
from envfleet.launchers.slurm.script import seconds_of

ASK_S = 10.0
MOST_NODES_ASKED = 8

# What this launcher sets itself, or has a setting for.
_OWN_OPTIONS = {
    **dict.fromkeys(("job-name", "array", "nodes", "ntasks", "output", "error", "open-mode", "export", "export-file")),
    **dict.fromkeys(("requeue", "no-requeue", "signal", "parsable", "wrap", "wait", "test-only", "hold")),
    **{"partition": "partition", "time": "time_limit", "cpus-per-task": "cpus_per_worker", "mem": "mem_per_worker"},
    **{"gres": "gpus_per_worker", "account": "account", "qos": "qos", "constraint": "constraint"},
    **{"exclusive": "exclusive"},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Slurm:
    """Submit workers to Slurm with sbatch, one element of a job array for each.

    In a process that runs inside a Slurm job they are steps of that job, started with srun, unless `allocation` says
    otherwise. Names and quantities are written as sbatch wants them; None leaves them to the cluster's defaults.
    """

    partition: str | None = None
    time_limit: str | None = None  # of each worker: "30" minutes, "2:00:00", "1-12:00"; then a new one takes its place
    cpus_per_worker: int = 1
    mem_per_worker: str | int | None = None  # "4G"; a number alone: megabytes
    gpus_per_worker: int | str = 0  # or with their type, "a100:2"
    account: str | None = None
    qos: str | None = None
    constraint: str | None = None
    exclusive: bool = False  # a whole node for each worker
    setup: Sequence[str] = ()  # lines of shell that run before a worker starts: "module load cuda"
    extra_sbatch: Mapping[str, str | int | None] = field(default_factory=dict)  # {"exclude": "node7"}; None: a flag
    python: str | None = None  # the interpreter on the nodes; None: this one, with the modules that this process finds
    log_dir: str | os.PathLike[str] | None = None  # seen by all nodes; None: ./envfleet-logs/ and the time of the run
    head_address: str | None = None  # where workers find the head, if not at the address that is nearest to the nodes
    queue_timeout_s: float | None = None  # how long workers may wait in the queue; None: without end
    allocation: Literal["current", "new"] | None = None  # None: the current one if this process runs inside a job

    is_on_this_host = False

    def __post_init__(self) -> None:
        """Refuse what cannot work."""
        object.__setattr__(self, "setup", _lines(self.setup))
        object.__setattr__(self, "extra_sbatch", _options(self.extra_sbatch))
        for name in ("partition", "account", "qos"):
            _check(name, getattr(self, name), r"[\w.,@+:][\w.,@+:-]*", "a name, or several with commas between them")
        _check("constraint", self.constraint, r"[\w.,&|*()\[\]:@+!=-]+", "features of nodes, as sbatch takes them")
        _check("mem_per_worker", self.mem_per_worker, r"\d+[KMGT]?", "a size such as '4G', or megabytes")
        _check("gpus_per_worker", self.gpus_per_worker, r"\d+|[\w.-]+:\d+", "a number, or 'type:number'")
        object.__setattr__(self, "cpus_per_worker", whole_number("cpus_per_worker", self.cpus_per_worker))
        if self.time_limit is not None:
            try:
                seconds_of(self.time_limit)
            except (TypeError, ValueError) as error:
                raise UsageError(f"time_limit: {error}") from error
        if self.log_dir is not None and not str(self.log_dir).isprintable():
            raise UsageError(f"log_dir must be printable: Slurm reads it from a script; got {str(self.log_dir)!r}")
        positive_or_none("queue_timeout_s", self.queue_timeout_s)
        if self.allocation not in (None, "current", "new"):
            raise UsageError(f"allocation must be 'current', 'new' or None; got {self.allocation!r}")

    @property
    def interpreter(self) -> str:
        """Runs the workers."""
        return self.python or sys.executable

    def log_dir_of(self, name: str) -> Path:
        """Where the logs of a run of this name are."""
        folder = Path("envfleet-logs", name.removeprefix("envfleet-")) if self.log_dir is None else Path(self.log_dir)
        return folder.absolute()

    def host_of_workers(self) -> str | None:
        """See Launcher. One of the nodes; if Slurm does not tell, the machine of its controller."""
        nodes = os.environ.get("SLURM_JOB_NODELIST") if self._is_inside else None
        try:
            arguments = node_addresses_arguments(None if self._is_inside else self.partition, nodes)
            addresses = list(dict.fromkeys(run_slurm(arguments, timeout_s=ASK_S).split()))
            if not addresses:
                config = run_slurm(["scontrol", "show", "config"], timeout_s=ASK_S)
                hosts = re.finditer(r"^SlurmctldHost\[\d+\]\s*=\s*(?:\S+\((\S+)\)|(\S+))", config, re.MULTILINE)
                addresses = [host[1] or host[2] for host in hosts]
        except ClusterError:
            return None  # launch() will say why
        # A node on this machine may be known by its loopback address, which is of no use to the others.
        others = (each for each in addresses[:MOST_NODES_ASKED] if not is_loopback(each))
        return next(others, addresses[0] if addresses else None)

    def launch(self, job: WorkerJob) -> OwnedJob:
        """Submit all workers. What sbatch refuses is raised as ClusterError, in its words."""
        name = f"envfleet-{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(3)}"
        # The working directory may be another one when a worker is submitted anew.
        settings = replace(self, log_dir=self.log_dir_of(name))
        return OwnedJob(StepsJob(settings, job, name) if self._is_inside else ArrayJob(settings, job, name))

    @property
    def _is_inside(self) -> bool:
        is_in_job = bool(os.environ.get("SLURM_JOB_ID"))
        if self.allocation == "current" and not is_in_job:
            raise UsageError(
                "allocation='current' is for a process inside a Slurm job, and there is no SLURM_JOB_ID here: run it "
                "with sbatch or salloc, or leave allocation=None to submit workers as a job of their own"
            )
        return is_in_job and self.allocation != "new"


def _check(name: str, value: object, pattern: str, meaning: str) -> None:
    if value is not None and (isinstance(value, bool) or re.fullmatch(pattern, str(value), re.ASCII) is None):
        raise UsageError(f"{name} must be {meaning}; got {value!r}")


def _lines(setup: Sequence[str]) -> tuple[str, ...]:
    if isinstance(setup, str):
        raise UsageError(f"setup must be a list of lines of shell; got one string: write setup=[{setup!r}]")
    for line in setup:
        if not isinstance(line, str) or "\0" in line:
            raise UsageError(f"setup must be a list of lines of shell; got {line!r} in it")
    return tuple(setup)


def _options(extra: Mapping[str, str | int | None]) -> dict[str, str | int | None]:
    for name, value in extra.items():
        if not isinstance(name, str) or re.fullmatch(r"[a-z][a-z0-9-]+", name, re.ASCII) is None:
            raise UsageError(
                f"extra_sbatch: keys are long options of sbatch without their dashes, such as 'exclude'; got {name!r}"
            )
        if name in _OWN_OPTIONS:
            instead = f"use Slurm({_OWN_OPTIONS[name]}=...)" if _OWN_OPTIONS[name] else "EnvFleet sets it itself"
            raise UsageError(f"extra_sbatch: --{name} cannot be given here: {instead}")
        if value is not None and not str(value).isprintable():
            raise UsageError(f"extra_sbatch: the value of {name!r} must be one line of text; got {value!r}")
    return dict(extra)
