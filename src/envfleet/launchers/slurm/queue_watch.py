"""QueueWatch: asks squeue for the state of a run's jobs now and then, without making its caller wait."""

from __future__ import annotations

import contextlib
import logging
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from envfleet.launchers.slurm.commands import ANSWER_S

logger = logging.getLogger("envfleet.launchers")

FIRST_LOOK_S = 1.5  # seconds between two questions, after something has changed
MOST_LOOK_S = 5.0  # seconds between two questions while nothing changes: a controller has many users

Entry = TypeVar("Entry")


class QueueWatch(Generic[Entry]):
    """Runs squeue in the background, again and again, and keeps its last answer.

    Args:
        arguments: The command line of squeue.
        entries_of: Reads what squeue has printed.

    Attributes:
        entries: The last answer, by identity.
        before: The answer before the last.
        seen_s: When the question for the last answer was asked, by the monotonic clock.
    """

    def __init__(self, arguments: Sequence[str], entries_of: Callable[[str], dict[str, Entry]]) -> None:
        self.entries: dict[str, Entry] = {}
        self.before: dict[str, Entry] = {}
        self.seen_s = float("-inf")
        self._arguments = arguments
        self._entries_of = entries_of
        self._squeue: subprocess.Popen[str] | None = None
        self._answer = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")  # noqa: SIM115 - until close()
        self._begun_s = 0.0
        self._next_s = 0.0
        self._every_s = FIRST_LOOK_S
        self._is_silent = False

    def look_soon(self) -> None:
        """Ask at the next look(): something has changed."""
        self._every_s, self._next_s = FIRST_LOOK_S, 0.0

    def look(self) -> None:
        """Take an answer that has arrived, and ask again if it is time. Does not block."""
        now_s = time.monotonic()
        if self._squeue is None:
            if now_s >= self._next_s:
                self._ask(now_s)
        elif self._squeue.poll() is not None:
            code, self._squeue = self._squeue.returncode, None
            self._answer.seek(0)
            self._take(code, self._answer.read())
        elif now_s - self._begun_s > ANSWER_S:
            self._end_squeue()
            self._take(1, f"no answer within {ANSWER_S:g} s")

    def close(self) -> None:
        """End a running squeue; ask no more."""
        self._end_squeue()
        self._answer.close()

    def _ask(self, now_s: float) -> None:
        self._begun_s = now_s
        self._answer.seek(0)
        self._answer.truncate()
        try:
            self._squeue = subprocess.Popen(
                self._arguments,
                stdin=subprocess.DEVNULL,
                stdout=self._answer,
                stderr=subprocess.STDOUT,
                text=True,
                start_new_session=True,
            )
        except OSError as error:
            self._take(1, str(error))

    def _take(self, code: int, answer: str) -> None:
        self._next_s = time.monotonic() + self._every_s
        if code != 0:
            if not self._is_silent:
                logger.warning(
                    "Slurm does not report the state of its jobs; it is asked again until it does: %s", answer.strip()
                )
            self._is_silent = True
            return
        if self._is_silent:
            logger.warning("Slurm answers again")
            self._is_silent = False
        entries = self._entries_of(answer)
        self._every_s = min(MOST_LOOK_S, self._every_s * 1.3) if entries == self.entries else FIRST_LOOK_S
        self._next_s = time.monotonic() + self._every_s
        self.before, self.entries, self.seen_s = self.entries, entries, self._begun_s

    def _end_squeue(self) -> None:
        if self._squeue is not None:
            with contextlib.suppress(ProcessLookupError):
                self._squeue.kill()
            self._squeue.wait(5.0)
            self._squeue = None
