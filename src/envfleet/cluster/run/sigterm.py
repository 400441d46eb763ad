"""Exit in order on SIGTERM, which by default ends Python without any cleanup: jobs elsewhere would stay."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable

_lock = threading.Lock()
_closes: dict[int, Callable[[], None]] = {}  # of the runs that want it; guarded by _lock
_is_registered = False
_was_told = False


def exit_on_sigterm(close: Callable[[], None]) -> Callable[[], None]:
    """Have SIGTERM raise SystemExit, and call `close` then. Returns a function that undoes it.

    A handler that the user has set is kept. Only the main thread may set one: in others nothing happens.
    """
    if threading.current_thread() is not threading.main_thread():
        return lambda: None
    if signal.getsignal(signal.SIGTERM) not in (signal.SIG_DFL, _exit):
        return lambda: None
    number = id(close)
    with _lock:
        _closes[number] = close
    _close_before_threads_are_waited_for()
    signal.signal(signal.SIGTERM, _exit)

    def forget() -> None:
        with _lock:
            _closes.pop(number, None)
            is_last = not _closes
        is_main = threading.current_thread() is threading.main_thread()  # another may not change handlers
        if is_last and is_main and signal.getsignal(signal.SIGTERM) is _exit:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)

    return forget


def _exit(number: int, frame: object) -> None:
    global _was_told
    _was_told = True
    sys.exit(128 + number)


def _close_before_threads_are_waited_for() -> None:
    """Register earlier than atexit, which waits for all threads: some never end, and jobs would stay."""
    global _is_registered
    register = getattr(threading, "_register_atexit", None)  # what concurrent.futures uses
    if register is not None and not _is_registered:
        _is_registered = True
        register(_close_all)


def _close_all() -> None:
    if _was_told:  # else threads that still work with their cluster may finish
        with _lock:
            closes = list(_closes.values())
        for close in closes:
            close()
