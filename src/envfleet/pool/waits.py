"""Waits for envs: they are made in slices, so that they can be broken off, and the log says what long ones wait for."""

from __future__ import annotations

import logging
import math
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

WAIT_SLICE_S = 0.2  # how often a wait looks at all that does not wake it
SAME_THREAD = (  # why an env cannot be given up
    "these envs run in the calling thread, where nothing can interrupt them: choose backend='process' for envs "
    "that may hang"
)
HEARTBEAT_S = 60.0  # between two lines of the log about one wait, and before the first

HOW_TO_RAISE = {  # by the setting that has ended a wait
    "timeout_s": "If they need longer: make(..., timeout_s=...), on a cluster pool=PoolSettings(timeout_s=...); "
    "None: no limit",
    "start_timeout_s": "If constructors need longer: make(..., start_timeout_s=...), on a cluster "
    "timing=Timing(start_timeout_s=...); None: no limit",
}


def deadline_in(timeout_s: float | None) -> float:
    """When a wait that begins now must end; None: never."""
    return math.inf if timeout_s is None else time.monotonic() + timeout_s


def slice_s(deadline_s: float) -> float:
    """Seconds that a single wait lasts, before the deadline and all else is looked at."""
    return max(0.0, min(WAIT_SLICE_S, deadline_s - time.monotonic()))


def limit_text(name: str, seconds: float | None) -> str:
    """A setting and its value, for a text."""
    return f"{name}=None" if seconds is None else f"{name}={seconds:g} s"


class WaitLog:
    """The lines about one wait. Time is an argument."""

    def __init__(self, logger: logging.Logger, begun_s: float) -> None:
        self._logger = logger
        self._begun_s = begun_s
        self._next_s = begun_s + HEARTBEAT_S

    def look(self, now_s: float, what: Callable[[], str]) -> None:
        """Log a line if one is due; `what` says what is waited for."""
        if now_s >= self._next_s:
            self._next_s = now_s + HEARTBEAT_S
            self._logger.warning("waiting for %.0f s: %s", now_s - self._begun_s, what())


class CallWatch:
    """The lines about envs that work in the caller's own thread, written by another one."""

    def __init__(self, owner: object, logger: logging.Logger) -> None:
        """Watch until `owner` is gone, or close() is called. The thread starts with the first call."""
        self._logger = logger
        self._call: tuple[str, WaitLog] | None = None
        self._is_over = threading.Event()
        self._thread: threading.Thread | None = None
        self.close = weakref.finalize(owner, self._is_over.set)

    @contextmanager
    def during(self, what: str) -> Iterator[None]:
        """Watch a call of an env; `what` says which."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._watch, name="envfleet-watch", daemon=True)
            self._thread.start()
        self._call = what, WaitLog(self._logger, time.monotonic())
        try:
            yield
        finally:
            self._call = None

    def _watch(self) -> None:
        while not self._is_over.wait(HEARTBEAT_S / 4):
            call = self._call
            if call is not None:
                what, log = call
                log.look(time.monotonic(), partial(str, what))
