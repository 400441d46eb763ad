"""Waits that watch for a condition, with a deadline."""

import os
import time
from collections.abc import Callable
from pathlib import Path


def wait_until(condition: Callable[[], bool], what: str | Callable[[], str], timeout_s: float = 20.0) -> None:
    """`what` may be a function, for what is known only when the wait has failed."""
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() >= deadline_s:
            raise AssertionError(f"after {timeout_s:g} s still not true: {what if isinstance(what, str) else what()}")
        time.sleep(0.01)


def is_running(pid: int) -> bool:
    """False for a process that is gone, or is a zombie that nobody has reaped yet."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return stat.rpartition(")")[2].split()[0] not in "ZX"


def descendants(pid: int) -> list[int]:
    """All processes below `pid`."""
    parents: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                stat = (entry / "stat").read_text()
            except (FileNotFoundError, ProcessLookupError):
                continue
            parents[int(entry.name)] = int(stat.rpartition(")")[2].split()[1])
    found: list[int] = []
    layer = [pid]
    while layer:
        layer = [child for child, parent in parents.items() if parent in layer]
        found += layer
    return found


def own_children() -> set[int]:
    return {pid for pid in descendants(os.getpid()) if is_running(pid)}
