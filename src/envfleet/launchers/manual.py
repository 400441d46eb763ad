"""Manual: a person starts the workers; the commands for that are printed."""

from __future__ import annotations

import contextlib
import os
import shlex
import stat
from dataclasses import dataclass
from pathlib import Path

from envfleet.contract.checks import positive_or_none
from envfleet.contract.errors import ClusterError, UsageError
from envfleet.launchers.launcher import WorkerJob, WorkerState, WorkerStatus
from envfleet.launchers.owned_job import OwnedJob


@dataclass(frozen=True, slots=True, kw_only=True)
class Manual:
    """Print the command of each worker, and wait. Whoever has the file with the run's keys may join."""

    key_file: str | os.PathLike[str] | None = None  # where to put the keys; None: into the run's temporary folder
    head_address: str | None = None
    queue_timeout_s: float | None = None  # people take their time
    python: str = "python"  # as it is to stand in the commands

    is_on_this_host = False

    def __post_init__(self) -> None:
        """Check it."""
        if not self.python:
            raise UsageError('python must be the interpreter of the workers, such as "python3"; got an empty text')
        positive_or_none("queue_timeout_s", self.queue_timeout_s)

    def host_of_workers(self) -> None:
        """See Launcher: there is no telling."""
        return None

    def launch(self, job: WorkerJob) -> OwnedJob:
        """Write the keys, and print the commands."""
        key_file = job.run_dir / "keys" if self.key_file is None else Path(self.key_file).expanduser().absolute()
        return OwnedJob(ManualJob(job, key_file, self.python))


class ManualJob:
    """A Job of workers that people start. Only the head knows who is there."""

    def __init__(self, job: WorkerJob, key_file: Path, python: str) -> None:
        """Print the commands."""
        self._job = job
        self._key_file = key_file
        self._python = python
        self._num_workers = job.num_workers
        # A worker takes its keys from one variable, or from one file.
        self._keys = "\n".join(job.environment.values()) + "\n"
        write_keys(key_file, self._keys)
        try:
            _show(
                f"EnvFleet waits for {job.num_workers} workers. Start each by hand, on a machine that can reach this "
                f"one; it needs a copy of {key_file} that only you can read (chmod 600):\n"
                f"{self._commands(0, job.num_workers)}"
            )
        except BaseException:
            self.cancel(0.0)
            raise

    @property
    def revives(self) -> bool:
        """See Job: people start a worker again, but they must be told."""
        return False

    def status(self, worker: int) -> WorkerStatus:
        """See Job."""
        if worker >= self._num_workers:
            return WorkerStatus(WorkerState.ENDED, "it is not wanted any more")
        return WorkerStatus(WorkerState.PENDING, f"to be started by hand: {self.command(worker)}")

    def log(self, worker: int, max_bytes: int = 4000) -> str:
        """See Job."""
        return ""

    def log_place(self, worker: int) -> str:
        """See Job."""
        return "where it was started by hand"

    def restart(self, worker: int) -> None:
        """See Job. The process that is started last is the worker; the head sends an older one away."""
        _show(f"Worker {worker} is needed again:\n{self._commands(worker, worker + 1)}")

    def resize(self, num_workers: int) -> None:
        """See Job. Workers that go were told so by the head."""
        if num_workers > self._num_workers:
            _show(f"EnvFleet waits for more workers:\n{self._commands(self._num_workers, num_workers)}")
        self._num_workers = num_workers

    def cancel(self, grace_s: float) -> None:
        """See Job. Workers leave by themselves; nobody can join any more."""
        with contextlib.suppress(OSError, UnicodeDecodeError):  # gone, or another's by now
            if self._key_file.read_text() == self._keys:
                self._key_file.unlink()

    def command(self, worker: int) -> str:
        """What to type for a worker."""
        return f"{self._python} {shlex.join((*self._job.arguments(worker), '--keys-file', str(self._key_file)))}"

    def _commands(self, first: int, end: int) -> str:
        return "\n".join(f"  {self.command(worker)}" for worker in range(first, end))


def write_keys(path: Path, keys: str) -> None:
    """Into a file that only this user can read; one that is there must be such a file already."""
    try:
        # Not through a link, which somebody else may have put there.
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise UsageError(f"key_file {str(path)!r} cannot be written: {error}") from error
    with open(file, "w") as opened:
        status = os.fstat(file)
        if not stat.S_ISREG(status.st_mode) or status.st_uid != os.getuid() or stat.S_IMODE(status.st_mode) & 0o077:
            raise UsageError(f"key_file {str(path)!r} is there already, and others could read it: remove it")
        try:
            os.ftruncate(file, 0)
            opened.write(keys)
            opened.flush()
        except OSError as error:
            path.unlink()
            raise UsageError(f"key_file {str(path)!r} cannot be written: {error}") from error


def _show(text: str) -> None:
    """On the standard output: to be read, and pasted elsewhere, is what these words are for."""
    try:
        print(text, flush=True)
    except (OSError, ValueError) as error:  # a full disk, a pipe without a reader, a file that was closed
        raise ClusterError(f"Manual cannot print the commands of workers on the standard output: {error}") from error
