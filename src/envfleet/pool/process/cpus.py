"""CPUs: how many this process may use (so that limits of Slurm and Kubernetes hold), and which belong to a child."""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Sequence
from pathlib import Path

from envfleet.contract.worker_environment import NUM_CPUS_VARIABLE


def usable_cpus(proc: Path = Path("/proc/self"), cgroup_root: Path = Path("/sys/fs/cgroup")) -> int:
    """The number of CPUs this process may keep busy, at least 1."""
    cpus = len(os.sched_getaffinity(0))
    quota = _cgroup_quota(proc, cgroup_root)
    if quota is not None:
        cpus = min(cpus, math.floor(quota))
    reserved = os.environ.get(NUM_CPUS_VARIABLE, "")
    if reserved.isdecimal():
        cpus = min(cpus, int(reserved))
    return max(1, cpus)


def share_of(cpus: Sequence[int], child: int, num_children: int) -> Sequence[int]:
    """The CPUs of one child: contiguous blocks of nearly equal size; all of them if there are too few to divide."""
    if num_children > len(cpus):
        return cpus
    return cpus[child * len(cpus) // num_children : (child + 1) * len(cpus) // num_children]


def keep_to_share(child: int, num_children: int) -> None:
    """Bind this process to its share, or the kernel may leave children that wake each other on one CPU."""
    with contextlib.suppress(OSError):  # a CPU may have been taken away meanwhile
        os.sched_setaffinity(0, share_of(sorted(os.sched_getaffinity(0)), child, num_children))


def _cgroup_quota(proc: Path, root: Path) -> float | None:
    """The tightest CPU quota on the way from this process's cgroup up to the root, in CPUs."""
    quotas: list[float] = []
    for line in _read(proc / "cgroup").splitlines():
        _, controllers, path = [*line.split(":", 2), "", ""][:3]
        if not path:
            continue
        if controllers == "":  # version 2, alone or beside version 1
            mounts = [root, root / "unified"]
        elif "cpu" in controllers.split(","):
            mounts = [root / "cpu", root / controllers]
        else:
            continue
        for mount in mounts:
            folder = mount / path.lstrip("/")
            for place in (folder, *folder.parents):
                quota = _quota_at(place)
                if quota is not None:
                    quotas.append(quota)
                if place == mount:
                    break
    return min(quotas, default=None)


def _quota_at(folder: Path) -> float | None:
    version_2 = _read(folder / "cpu.max").split()
    if len(version_2) == 2 and version_2[0] != "max":
        return int(version_2[0]) / int(version_2[1])
    quota_us, period_us = _read(folder / "cpu.cfs_quota_us"), _read(folder / "cpu.cfs_period_us")
    if quota_us and period_us and int(quota_us) > 0:
        return int(quota_us) / int(period_us)
    return None


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
