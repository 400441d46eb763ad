"""Run Slurm's programs: each with a deadline, and with Slurm's own words if it fails."""

from __future__ import annotations

import contextlib
import logging
import os
import shlex
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Generic, TypeVar

from envfleet.contract.errors import ClusterError

logger = logging.getLogger("envfleet.launchers")

FIRST_LOOK_S = 1.5
MOST_LOOK_S = 5.0  # while nothing changes: a controller has many users
ANSWER_S = 10.0


def run_slurm(
    arguments: Sequence[str], *, timeout_s: float, text: str = "", environment: Mapping[str, str] | None = None
) -> str:
    """What a program of Slurm has printed. Raises ClusterError if it is missing, fails, or takes too long."""
    try:
        done = subprocess.run(
            arguments,
            input=text,
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            env=environment,
            timeout=timeout_s,
            check=False,
            start_new_session=True,  # Ctrl-C is the head's affair
        )
    except OSError as error:
        raise _missing(arguments[0], error) from error
    except subprocess.TimeoutExpired as error:
        raise ClusterError(f"Slurm has not answered {arguments[0]} within {timeout_s:g} s: is slurmctld up?") from error
    if done.returncode != 0:
        words = done.stderr.strip() or done.stdout.strip() or f"exit code {done.returncode}"
        raise ClusterError(f"{arguments[0]} failed: {words}")
    return done.stdout


def leave_to_slurm(commands: Iterable[Sequence[str]]) -> None:
    """Run programs of Slurm one after the other, without waiting for them: they go on when this process has ended."""
    lines = "; ".join(map(shlex.join, commands))
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        subprocess.run(
            ["sh", "-c", f"{{ {lines}; }} </dev/null >/dev/null 2>&1 &"], timeout=ANSWER_S, start_new_session=True
        )


def _missing(program: str, error: OSError) -> ClusterError:
    return ClusterError(
        f"Slurm's {program} cannot be run on this machine ({error}): run this on a login node, or install Slurm's "
        f"client programs here (Debian: slurm-client)"
    )


Entry = TypeVar("Entry")


class QueueWatch(Generic[Entry]):
    """Looks at the queue now and then, without waiting for it: squeue runs beside whoever asks."""

    def __init__(self, arguments: Sequence[str], entries_of: Callable[[str], dict[str, Entry]]) -> None:
        """Watch what these arguments of squeue show; `entries_of` reads it."""
        self.entries: dict[str, Entry] = {}
        self.before: dict[str, Entry] = {}  # at the look before that
        self.seen_s = float("-inf")  # the queue was at least as new as this
        self._arguments = arguments
        self._entries_of = entries_of
        self._squeue: subprocess.Popen[str] | None = None
        self._answer = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")  # noqa: SIM115 - until close()
        self._begun_s = 0.0
        self._next_s = 0.0
        self._every_s = FIRST_LOOK_S
        self._is_silent = False

    def look_soon(self) -> None:
        """Something has changed."""
        self._every_s, self._next_s = FIRST_LOOK_S, 0.0

    def look(self) -> None:
        """Take an answer that has come, and ask again when it is time."""
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
        """Ask no more."""
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
                logger.warning("Slurm does not say how its jobs are; asked again until it does: %s", answer.strip())
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


def environment_outside_jobs() -> dict[str, str]:
    """The environment of this process, without what Slurm says of the job in which it may run."""
    return {name: value for name, value in os.environ.items() if not name.startswith(_OF_A_JOB)}


_OF_A_JOB = (
    *(f"SLURM_{name}" for name in ("ARRAY_", "CPU", "DISTRIBUTION", "EXPORT", "GPU", "GTIDS", "JOB", "LAUNCH_NODE")),
    *(f"SLURM_{name}" for name in ("LOCALID", "MEM_", "NNODES", "NODE", "NPROCS", "NTASKS", "OPEN_MODE", "PRIO")),
    *(f"SLURM_{name}" for name in ("PROCID", "RESTART", "SRUN", "STEP", "SUBMIT", "TASK", "THREADS", "TOPOLOGY")),
    "SLURMD_",
)
