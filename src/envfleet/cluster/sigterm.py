"""SIGTERM ends a Python process without a word to anybody: a run with workers elsewhere has it exit in order."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable

_num_runs = 0  # that want it; changed by the main thread only


def exit_on_sigterm() -> Callable[[], None]:
    """From now on SIGTERM raises SystemExit, so that runs are closed. Returns what undoes it.

    Whoever has set a handler of his own knows better; and only the main thread may set any.
    """
    global _num_runs
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGTERM) not in (signal.SIG_DFL, _exit):
        return lambda: None
    _num_runs += 1
    signal.signal(signal.SIGTERM, _exit)
    return _forget


def _forget() -> None:
    global _num_runs
    if threading.current_thread() is not threading.main_thread():
        return
    _num_runs -= 1
    if _num_runs == 0 and signal.getsignal(signal.SIGTERM) is _exit:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _exit(number: int, frame: object) -> None:
    sys.exit(128 + number)
