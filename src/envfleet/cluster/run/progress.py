"""Progress: one line about a wait, rewritten on a terminal; in a log, a new line when something has changed."""

from __future__ import annotations

import contextlib
import shutil
import sys
import time

FIRST_S = 2.0  # shorter waits show no line
AGAIN_S = 0.5  # on a terminal
NEXT_LINE_S = 10.0  # in a log


class Progress:
    """The progress of one wait, on standard error."""

    def __init__(self) -> None:
        self._started_s = time.monotonic()
        self._next_s = self._started_s + FIRST_S
        self._last = ""

    def show(self, text: str, *, is_news: bool) -> None:
        """Show how the wait stands. Without `is_news` it is shown on terminals only, not in logs."""
        now_s = time.monotonic()
        if now_s < self._next_s or sys.stderr is None:
            return
        with contextlib.suppress(OSError, ValueError):  # a closed or full stderr
            if sys.stderr.isatty():
                line = f"envfleet: {text} ({now_s - self._started_s:.0f} s)"
                sys.stderr.write("\r\x1b[K" + line[: shutil.get_terminal_size().columns - 1])
                self._last, self._next_s = text, now_s + AGAIN_S
            elif is_news and text != self._last:
                sys.stderr.write(f"envfleet: {text}\n")
                self._last, self._next_s = text, now_s + NEXT_LINE_S
            sys.stderr.flush()

    def close(self) -> None:
        """End the wait: remove the line."""
        with contextlib.suppress(OSError, ValueError):
            if self._last and sys.stderr is not None and sys.stderr.isatty():
                sys.stderr.write("\r\x1b[K")
                sys.stderr.flush()
