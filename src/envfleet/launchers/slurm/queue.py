"""What Slurm's squeue and sinfo are asked, and what their answers mean for workers. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass

from envfleet.launchers.launcher import WorkerState
from envfleet.launchers.slurm.script import given_options

QUEUE_FORMAT = "%i|%T|%N|%r"


def squeue_arguments(name: str, user_id: int) -> list[str]:
    """All jobs of a run, one line for each element, also those that have ended not long ago."""
    # The controller picks out a user's jobs itself; a name is looked for in what it has sent.
    filters = [f"--user={user_id}", f"--name={name}", "--states=all"]
    return ["squeue", "--noheader", "--array", *filters, f"--format={QUEUE_FORMAT}"]


@dataclass(frozen=True, slots=True)
class Element:
    """One element of a job array, as squeue shows it."""

    element_id: str  # "12_3"
    state: str  # "RUNNING"
    node: str  # "" while it has none
    reason: str  # why it waits, or has failed

    @property
    def worker_state(self) -> WorkerState:
        """What that means for its worker."""
        if self.state == "PENDING" and _NEVER.search(self.reason):
            return WorkerState.REFUSED
        if self.state == "PENDING" and "launch" in self.reason.lower():
            return WorkerState.ENDED  # Slurm failed to start it, and holds it for good: a new one may have more luck
        if self.state in _WAITING:
            return WorkerState.PENDING
        return WorkerState.ENDED if self.state in _OVER else WorkerState.RUNNING

    @property
    def is_over(self) -> bool:
        """It is out of the queue."""
        return self.state in _OVER

    def __str__(self) -> str:
        """In words, for the user."""
        place = f" on {self.node}" if self.node else ""
        reason = f" ({self.reason})" if self.reason not in ("", "None") and self.state != "RUNNING" else ""
        hint = f"; to let it go on: scontrol release {self.element_id}" if self.reason.startswith("JobHeld") else ""
        return f"Slurm job {self.element_id}{place}: {self.state}{reason}{hint}"


_WAITING = frozenset(
    (
        "PENDING",
        "CONFIGURING",
        "REQUEUED",
        "REQUEUE_FED",
        "REQUEUE_HOLD",
        "RESV_DEL_HOLD",
        "SPECIAL_EXIT",
        "STOPPED",
        "SUSPENDED",
    )
)
_OVER = frozenset(
    (
        "BOOT_FAIL",
        "CANCELLED",
        "COMPLETED",
        "DEADLINE",
        "FAILED",
        "LAUNCH_FAILED",
        "NODE_FAIL",
        "OUT_OF_MEMORY",
        "PREEMPTED",
        "RECONFIG_FAIL",
        "REVOKED",
        "TIMEOUT",
    )
)
# Reasons that stay as long as the request stays as it is: somebody must change it, or the limits of the cluster.
# Limits of what a user, group or account has at one time are none of these, nor are jobs that somebody holds.
_NEVER = re.compile(
    "BadConstraints|InvalidAccount|InvalidQOS|AccountNotAllowed|QOSNotAllowed|DependencyNeverSatisfied"
    "|PartitionConfig|PartitionNodeLimit|PartitionTimeLimit|PerJob|MinCpuNotSatisfied|MinGRES|MinMemory|MaxCpuPerNode|MaxMemPerLimit"
)


def elements_of(lines: str) -> dict[str, Element]:
    """What squeue has printed, by element id. Pending elements that it wrote as one, "12_[0-3]", are taken apart."""
    elements: dict[str, Element] = {}
    for line in lines.splitlines():
        parts = line.strip().split("|", 3)
        if len(parts) == 4:
            for element_id in _element_ids(parts[0]):
                elements[element_id] = Element(element_id, *parts[1:])
    return elements


def _element_ids(text: str) -> list[str]:
    job_id, bracket, numbers = text.partition("_[")
    if not bracket:
        return [text]
    spans = (span.partition("-") for span in numbers.rstrip("]").partition("%")[0].split(","))
    return [f"{job_id}_{number}" for low, _, high in spans for number in range(int(low), int(high or low) + 1)]


def node_addresses_arguments(partition: str | None, nodes: str | None) -> list[str]:
    """Ask for the addresses of a partition's nodes, or of these nodes."""
    return ["sinfo", "--noheader", "--Node", "--format=%o", *given_options(("partition", partition), ("nodes", nodes))]
