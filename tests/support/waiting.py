"""Waits that watch for a condition, with a deadline."""

import os
import time
from collections.abc import Callable


def wait_until(condition: Callable[[], bool], what: str | Callable[[], str], timeout_s: float = 20.0) -> None:
    """`what` may be a function, for what is known only when the wait has failed."""
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() >= deadline_s:
            raise AssertionError(f"after {timeout_s:g} s still not true: {what if isinstance(what, str) else what()}")
        time.sleep(0.01)


def is_running(pid: int) -> bool:
    """False for a process that is gone, or is a zombie that nobody has reaped yet."""
    stat = _stat(pid)
    return stat is not None and stat[0] not in (b"Z", b"X")


def descendants(pid: int) -> list[int]:
    """All processes below `pid`."""
    parents: dict[int, int] = {}
    for name in os.listdir("/proc"):
        if name.isdigit() and (stat := _stat(int(name))) is not None:
            parents[int(name)] = int(stat[1])
    found: list[int] = []
    layer = [pid]
    while layer:
        layer = [child for child, parent in parents.items() if parent in layer]
        found += layer
    return found


def own_children() -> set[int]:
    return {pid for pid in descendants(os.getpid()) if is_running(pid)}


def _stat(pid: int) -> list[bytes] | None:
    """A process's state, its parent and what follows; None if it is gone. Every test reads this of every process."""
    try:
        with open(f"/proc/{pid}/stat", "rb", buffering=0) as file:
            return file.read(1024).rpartition(b")")[2].split(None, 2)
    except (FileNotFoundError, ProcessLookupError):
        return None
