"""The output of a process that runs envs, when it cannot be written: a full disk must not stop an env that prints."""

from __future__ import annotations

import sys
from typing import Any


class TolerantStream:
    """A text stream that loses what cannot be written, instead of raising."""

    def __init__(self, stream: Any) -> None:
        """`stream` is what it writes to."""
        self._stream = stream

    def write(self, text: str) -> int:
        """As any stream's, but never raises OSError."""
        try:
            self._stream.write(text)
            self._stream.flush()
        except OSError:
            pass
        return len(text)

    def flush(self) -> None:
        """Nothing to do: write() has flushed already."""

    def __getattr__(self, name: str) -> Any:
        """All else is the stream's own."""
        return getattr(self._stream, name)


def tolerate_full_disk() -> None:
    """Of this process's own output."""
    sys.stdout = TolerantStream(sys.stdout)
    sys.stderr = TolerantStream(sys.stderr)
