"""Manual: a person starts the workers, with commands that are printed."""

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
    """Print the command of each worker and wait for the workers. A worker needs a copy of the file with the run's keys.

    Args:
        key_file: Where to write the run's keys, such as "~/fleet.keys"; the file is removed when the run ends. None:
            `keys` in the run's temporary folder.
        head_address: Where workers find the head: "host", "host:port" or "tcp://host:port". None: this machine's
            address on its default route.
        queue_timeout_s: The most seconds to wait for a worker to be started. None: no limit.
        python: The Python interpreter to write into the commands.
    """

    key_file: str | os.PathLike[str] | None = None
    head_address: str | None = None
    queue_timeout_s: float | None = None
    python: str = "python"

    is_on_this_host = False

    def __post_init__(self) -> None:
        """Raise UsageError if a setting is wrong."""
        if not self.python:
            raise UsageError('python must name the interpreter of the workers, such as "python3"; got an empty text')
        positive_or_none("queue_timeout_s", self.queue_timeout_s)

    def host_of_workers(self) -> None:
        """Return None: where workers will be started is not known."""
        return None

    def launch(self, job: WorkerJob) -> OwnedJob:
        """Write the keys to a file and print the command of each worker.

        Args:
            job: What a person is to start.

        Returns:
            The workers, all of them PENDING: the head knows which have joined.

        Raises:
            UsageError: The key file cannot be written, or other users can read it.
            ClusterError: The commands cannot be printed.
        """
        key_file = job.run_dir / "keys" if self.key_file is None else Path(self.key_file).expanduser().absolute()
        return OwnedJob(ManualJob(job, key_file, self.python))


class ManualJob:
    """A Job of workers that people start. Only the head knows which of them run."""

    def __init__(self, job: WorkerJob, key_file: Path, python: str) -> None:
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
        """See Job. People restart a worker only if they are asked to."""
        return False

    def status(self, worker: int) -> WorkerStatus:
        """Return the state of one worker."""
        if worker >= self._num_workers:
            return WorkerStatus(WorkerState.ENDED, "it is no longer needed")
        return WorkerStatus(WorkerState.PENDING, f"to be started by hand: {self.command(worker)}")

    def log(self, worker: int, max_bytes: int = 4000) -> str:
        """Return the end of what a worker has printed."""
        return ""

    def log_place(self, worker: int) -> str:
        """Return where the whole log of a worker is."""
        return "where it was started by hand"

    def restart(self, worker: int) -> None:
        """See Job. Prints the command again. If the old process still runs, the head refuses it."""
        _show(f"Worker {worker} is needed again:\n{self._commands(worker, worker + 1)}")

    def resize(self, num_workers: int) -> None:
        """See Job. Prints commands of new workers. The head tells surplus workers to leave."""
        if num_workers > self._num_workers:
            _show(f"EnvFleet waits for more workers:\n{self._commands(self._num_workers, num_workers)}")
        self._num_workers = num_workers

    def cancel(self, grace_s: float) -> None:
        """See Job. Removes the keys, so that no worker can join; running workers leave by themselves."""
        with contextlib.suppress(OSError, UnicodeDecodeError):  # it is gone, or belongs to another run by now
            if self._key_file.read_text() == self._keys:
                self._key_file.unlink()

    def command(self, worker: int) -> str:
        """Return the command line that starts a worker."""
        return f"{self._python} {shlex.join((*self._job.arguments(worker), '--keys-file', str(self._key_file)))}"

    def _commands(self, first: int, end: int) -> str:
        return "\n".join(f"  {self.command(worker)}" for worker in range(first, end))


def write_keys(path: Path, keys: str) -> None:
    """Write keys to a file that only this user can read.

    Raises:
        UsageError: It cannot be written, it is a link, or a file is there that others can read.
    """
    try:
        # O_NOFOLLOW: another user may have put a link there.
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise UsageError(f"key_file {str(path)!r} cannot be written: {error}") from error
    with open(file, "w") as opened:
        status = os.fstat(file)
        if not stat.S_ISREG(status.st_mode) or status.st_uid != os.getuid() or stat.S_IMODE(status.st_mode) & 0o077:
            raise UsageError(f"key_file {str(path)!r} exists, and others could read it: remove it")
        try:
            os.ftruncate(file, 0)
            opened.write(keys)
            opened.flush()
        except OSError as error:
            path.unlink()
            raise UsageError(f"key_file {str(path)!r} cannot be written: {error}") from error


def _show(text: str) -> None:
    """Print text on the standard output: a person copies commands from it, so it is no log message."""
    try:
        print(text, flush=True)
    except (OSError, ValueError) as error:  # a full disk, a pipe without a reader, a file that was closed
        raise ClusterError(f"Manual cannot print the commands of workers on the standard output: {error}") from error
