"""Progress: one line for people who wait: rewritten on a terminal; in a log, a new one when something has changed."""

from __future__ import annotations

import contextlib
import shutil
import sys
import time

FIRST_S = 2.0  # what takes no longer needs no line
AGAIN_S = 0.5  # on a terminal
NEXT_LINE_S = 10.0  # in a log


class Progress:
    """Of one wait."""

    def __init__(self) -> None:
        """The wait begins."""
        self._started_s = time.monotonic()
        self._next_s = self._started_s + FIRST_S
        self._last = ""

    def show(self, text: str, *, is_news: bool) -> None:
        """How it stands. What is no news to somebody who reads a log is shown on terminals only."""
        now_s = time.monotonic()
        if now_s < self._next_s or sys.stderr is None:
            return
        with contextlib.suppress(OSError, ValueError):  # nobody to tell: a closed or full stderr
            if sys.stderr.isatty():
                line = f"envfleet: {text} ({now_s - self._started_s:.0f} s)"
                sys.stderr.write("\r\x1b[K" + line[: shutil.get_terminal_size().columns - 1])
                self._last, self._next_s = text, now_s + AGAIN_S
            elif is_news and text != self._last:
                sys.stderr.write(f"envfleet: {text}\n")
                self._last, self._next_s = text, now_s + NEXT_LINE_S
            sys.stderr.flush()

    def close(self) -> None:
        """The wait is over: the line goes."""
        with contextlib.suppress(OSError, ValueError):
            if self._last and sys.stderr is not None and sys.stderr.isatty():
                sys.stderr.write("\r\x1b[K")
                sys.stderr.flush()
