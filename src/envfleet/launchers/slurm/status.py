"""What squeue and sinfo are asked, and what squeue's answer means for a worker. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass

from envfleet.launchers.launcher import WorkerState
from envfleet.launchers.slurm.script import given_options

QUEUE_FORMAT = "%i|%T|%N|%r"


def squeue_arguments(name: str, user_id: int) -> list[str]:
    """Return the squeue command that lists all elements of a run's job arrays, also those that ended recently."""
    # The controller filters by user; squeue itself filters by name, after the answer was sent.
    filters = [f"--user={user_id}", f"--name={name}", "--states=all"]
    return ["squeue", "--noheader", "--array", *filters, f"--format={QUEUE_FORMAT}"]


@dataclass(frozen=True, slots=True)
class Element:
    """One element of a job array, as squeue shows it."""

    element_id: str  # "12_3"
    state: str  # "RUNNING"
    node: str  # "" while it waits for one
    reason: str  # why it waits, or has failed

    @property
    def worker_state(self) -> WorkerState:
        """What the element's state means for its worker."""
        if self.state == "PENDING" and _NEVER.search(self.reason):
            return WorkerState.REFUSED
        if self.state == "PENDING" and "launch" in self.reason.lower():
            return WorkerState.ENDED  # Slurm failed to start it and holds it for good: a new element may succeed
        if self.state in _WAITING:
            return WorkerState.PENDING
        return WorkerState.ENDED if self.state in _OVER else WorkerState.RUNNING

    @property
    def is_over(self) -> bool:
        """Whether the element has left the queue."""
        return self.state in _OVER

    def __str__(self) -> str:
        """Describe the element to the user."""
        place = f" on {self.node}" if self.node else ""
        reason = f" ({self.reason})" if self.reason not in ("", "None") and self.state != "RUNNING" else ""
        hint = f"; to release it: scontrol release {self.element_id}" if self.reason.startswith("JobHeld") else ""
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
# Reasons that hold until the user changes the request, or an administrator the limits of the cluster. Limits on what a
# user, group or account uses at one time are not among them, nor are held jobs: such jobs can still run.
_NEVER = re.compile(
    "BadConstraints|InvalidAccount|InvalidQOS|AccountNotAllowed|QOSNotAllowed|DependencyNeverSatisfied"
    "|PartitionConfig|PartitionNodeLimit|PartitionTimeLimit|PerJob|MinCpuNotSatisfied|MinGRES|MinMemory|MaxCpuPerNode|MaxMemPerLimit"
)


def elements_of(lines: str) -> dict[str, Element]:
    """Read what squeue has printed, by element id. Pending elements that share a line, "12_[0-3]", are separated."""
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
    """Return the sinfo command that lists the addresses of a partition's nodes, or of these nodes."""
    return ["sinfo", "--noheader", "--Node", "--format=%o", *given_options(("partition", partition), ("nodes", nodes))]


def step_queue_arguments(job_id: str) -> list[str]:
    """Return the squeue command that lists all steps of a job."""
    return ["squeue", "--noheader", "--steps", f"--jobs={job_id}", "--format=%i|%j"]


def steps_of(lines: str) -> dict[str, str]:
    """Read what squeue has printed about steps: the ids of steps, by name."""
    pairs = (line.strip().partition("|") for line in lines.splitlines())
    return {name: step_id for step_id, bar, name in pairs if bar}
