"""CPU seconds of a process and all its descendants, from /proc: what a contender costs, wherever it does its work."""

from __future__ import annotations

import os
from collections import defaultdict
from pathlib import Path

TICK_S = 1.0 / os.sysconf("SC_CLK_TCK")


def tree_cpu_s(root_pid: int, without: frozenset[int] = frozenset()) -> float:
    """User and system time so far, with children that have ended and been waited for; `without` cuts whole branches.

    The kernel tells it in ticks of 10 ms for each process: measure seconds, not milliseconds.
    """
    children: dict[int, list[int]] = defaultdict(list)
    ticks: dict[int, int] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            # After the name, which is in brackets and may hold anything.
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            continue
        pid = int(folder.name)
        children[int(fields[1])].append(pid)
        ticks[pid] = sum(map(int, fields[11:15]))
    total, pending = 0, [root_pid]
    while pending:
        pid = pending.pop()
        if pid not in without:
            total += ticks.get(pid, 0)
            pending += children[pid]
    return total * TICK_S
