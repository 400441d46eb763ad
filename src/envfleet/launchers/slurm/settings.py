"""Slurm: workers are elements of a job array, or steps of the Slurm job that the head runs in."""

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
from envfleet.launchers.launcher import WorkerJob
from envfleet.launchers.loopback import is_loopback
from envfleet.launchers.owned_job import OwnedJob
from envfleet.launchers.slurm.commands import run_slurm
from envfleet.launchers.slurm.job import ArrayJob, StepsJob
from envfleet.launchers.slurm.script import seconds_of
from envfleet.launchers.slurm.status import node_addresses_arguments

ASK_S = 10.0  # the most that a question to Slurm may take
MOST_NODES_ASKED = 8  # of which the addresses are resolved, to find one that is not this machine

# Options that extra_sbatch must not have: EnvFleet sets them (None), or Slurm() has a setting of this name.
_OWN_OPTIONS = {
    **dict.fromkeys(("array", "nodes", "ntasks", "output", "error", "open-mode", "export", "export-file")),
    **dict.fromkeys(("requeue", "no-requeue", "signal", "parsable", "wrap", "wait", "test-only", "hold")),
    **{"partition": "partition", "time": "time_limit", "cpus-per-task": "cpus_per_worker", "mem": "mem_per_worker"},
    **{"gres": "gpus_per_worker", "account": "account", "qos": "qos", "constraint": "constraint"},
    **{"exclusive": "exclusive", "job-name": "job_name"},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Slurm:
    """Submit workers to Slurm with sbatch, one element of a job array for each worker.

    In a process that runs inside a Slurm job, workers are steps of that job, started with srun, unless `allocation`
    says otherwise. None leaves a setting to the cluster's default.

    Args:
        partition: The partition, or several: "gpu", "short,long".
        time_limit: The time limit of each worker: "30" minutes, "2:00:00" hours, "1-12:00" days-hours. Shortly before
            it, the worker leaves and a new one takes its place.
        signal_lead_s: Seconds before the time limit at which a worker leaves, and a learner that runs inside the job
            saves and stops. Slurm may be up to 60 s early. None: 60, or for limits under five minutes a fifth.
        cpus_per_worker: The number of CPUs of each worker.
        mem_per_worker: The memory of each worker: "4G", or a number of megabytes.
        gpus_per_worker: The number of GPUs of each worker: 2, or with their type "a100:2".
        account: The account to charge.
        qos: The quality of service.
        constraint: Features that the nodes must have, such as "skylake&ib".
        exclusive: Give each worker a node of its own.
        setup: Lines of shell that run before a worker starts, such as "module load cuda".
        extra_sbatch: Further options of sbatch without their dashes, such as {"exclude": "node7"}. The value None is
            for an option without a value.
        python: The Python interpreter on the nodes, such as "/home/me/venv/bin/python". None: the path of this
            process's interpreter, and workers import modules from where this process does.
        log_dir: The folder for the files `worker-0.log`, `worker-1.log`, ..., on a file system that the nodes share.
            None: a folder `envfleet-logs/<time of the run>` in the working directory.
        head_address: Where workers find the head: "host", "host:port" or "tcp://host:port". None: this machine's
            address that is nearest to the nodes.
        queue_timeout_s: The most seconds that workers may wait in the queue. None: no limit.
        job_name: The beginning of the name of the run's jobs and steps: "walker" makes "walker-20261118-093000-5d1f2a".
            The rest is different for each run, because jobs are found and ended by their name.
        allocation: "current": run workers as steps of the Slurm job that this process runs in. "new": submit them as a
            job array. None: "current" inside a Slurm job, "new" outside.
    """

    partition: str | None = None
    time_limit: str | None = None
    signal_lead_s: int | None = None
    cpus_per_worker: int = 1
    mem_per_worker: str | int | None = None
    gpus_per_worker: int | str = 0
    account: str | None = None
    qos: str | None = None
    constraint: str | None = None
    exclusive: bool = False
    setup: Sequence[str] = ()
    extra_sbatch: Mapping[str, str | int | None] = field(default_factory=dict)
    python: str | None = None
    log_dir: str | os.PathLike[str] | None = None
    head_address: str | None = None
    queue_timeout_s: float | None = None
    job_name: str = "envfleet"
    allocation: Literal["current", "new"] | None = None

    is_on_this_host = False

    def __post_init__(self) -> None:
        """Raise UsageError if a setting is wrong."""
        object.__setattr__(self, "setup", _lines(self.setup))
        object.__setattr__(self, "extra_sbatch", _options(self.extra_sbatch))
        for name in ("partition", "account", "qos"):
            _check(name, getattr(self, name), r"[\w.,@+:][\w.,@+:-]*", "a name, or several with commas between them")
        _check("job_name", self.job_name or "", r"\w[\w.+-]{0,63}", "1 to 64 letters, digits and '_', '.', '+', '-'")
        _check("constraint", self.constraint, r"[\w.,&|*()\[\]:@+!=-]+", "features of nodes, as sbatch takes them")
        _check("mem_per_worker", self.mem_per_worker, r"\d+[KMGT]?", "a size such as '4G', or megabytes")
        _check("gpus_per_worker", self.gpus_per_worker, r"\d+|[\w.-]+:\d+", "a number, or 'type:number'")
        object.__setattr__(self, "cpus_per_worker", whole_number("cpus_per_worker", self.cpus_per_worker))
        if self.time_limit is not None:
            try:
                seconds_of(self.time_limit)
            except (TypeError, ValueError) as error:
                raise UsageError(f"time_limit: {error}") from error
        if self.signal_lead_s is not None:
            # Slurm takes at most 65535.
            object.__setattr__(self, "signal_lead_s", whole_number("signal_lead_s", self.signal_lead_s, 1, 65535))
        if self.log_dir is not None and not str(self.log_dir).isprintable():
            raise UsageError(
                f"log_dir must be one line of printable text, because it stands in a script; got {str(self.log_dir)!r}"
            )
        positive_or_none("queue_timeout_s", self.queue_timeout_s)
        if self.allocation not in (None, "current", "new"):
            raise UsageError(f"allocation must be 'current', 'new' or None; got {self.allocation!r}")

    @property
    def interpreter(self) -> str:
        """The Python interpreter on the nodes."""
        return self.python or sys.executable

    def log_dir_of(self, name: str) -> Path:
        """Return the folder with the logs of a run.

        Args:
            name: The name of the run.

        Returns:
            Its absolute path.
        """
        folder = Path("envfleet-logs", name.removeprefix("envfleet-")) if self.log_dir is None else Path(self.log_dir)
        return folder.absolute()

    def host_of_workers(self) -> str | None:
        """Return the address of a node.

        Returns:
            The controller's address if Slurm reports no nodes; None if Slurm does not answer.
        """
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
        # A node on this machine may have a loopback address, which other nodes cannot use.
        others = (each for each in addresses[:MOST_NODES_ASKED] if not is_loopback(each))
        return next(others, addresses[0] if addresses else None)

    def launch(self, job: WorkerJob) -> OwnedJob:
        """Submit all workers.

        Args:
            job: What to start.

        Returns:
            The submitted workers; most of them are PENDING.

        Raises:
            UsageError: log_dir cannot be created, or allocation="current" is used outside a Slurm job.
            ClusterError: sbatch refuses, in its words, or does not answer.
        """
        name = f"{self.job_name}-{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(3)}"
        # Absolute: the working directory may have changed when a worker is submitted again.
        settings = replace(self, log_dir=self.log_dir_of(name))
        return OwnedJob(StepsJob(settings, job, name) if self._is_inside else ArrayJob(settings, job, name))

    @property
    def _is_inside(self) -> bool:
        is_in_job = bool(os.environ.get("SLURM_JOB_ID"))
        if self.allocation == "current" and not is_in_job:
            raise UsageError(
                "allocation='current' needs a process inside a Slurm job, and SLURM_JOB_ID is not set: run it "
                "with sbatch or salloc, or use allocation=None to submit workers as a job of their own"
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
