"""The folder of one run: its socket and logs. A lock in it, held by the head, tells others whether the head lives."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import stat
import tempfile
from pathlib import Path

logger = logging.getLogger("envfleet.cluster")

RUN_FOLDER_PREFIX = "envfleet-"
LOCK = "lock"
CONTENTS = ("head", "keys", "worker-*.log")

# (device, inode) of each lock that this process holds -> its pid, since a fork has this dictionary too, and the file.
# A POSIX lock belongs to a process: it ends with the head even if a fork lives on. It is also released when the
# process closes *any* file descriptor of the locked file, and does not stop the process itself: never open our own.
_locks: dict[tuple[int, int], tuple[int, int]] = {}


def make_run_folder() -> Path:
    """Make a folder for one run, closed to all other users, and remove those whose heads are dead."""
    parent = Path(tempfile.gettempdir())
    with contextlib.suppress(OSError):
        for folder in parent.glob(f"{RUN_FOLDER_PREFIX}*"):
            remove_if_abandoned(folder)
    folder = Path(tempfile.mkdtemp(prefix=RUN_FOLDER_PREFIX))
    try:
        _hold_lock(folder)
    except OSError as error:
        logger.warning("%s cannot be locked (%s): if this process is killed, nobody will remove it", folder, error)
        (folder / f"{LOCK}.new").unlink(missing_ok=True)
    return folder


def remove_run_folder(folder: Path) -> None:
    """Remove the folder of a run of this process."""
    identity = _identity(folder / LOCK)
    _remove(folder)
    pid, file = (0, 0) if identity is None else _locks.pop(identity, (0, 0))
    if pid == os.getpid():
        os.close(file)


def remove_if_abandoned(folder: Path) -> None:
    """Remove the folder of a run whose head is dead. One without a lock is not ours to judge, and stays."""
    identity = _identity(folder / LOCK)
    if identity is None or _locks.get(identity, (0, 0))[0] == os.getpid() or not _is_private(folder):
        return
    try:
        file = os.open(folder / LOCK, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if _identity(folder / LOCK) == identity:  # nobody else has removed it meanwhile
            _remove(folder)
    except OSError:
        pass  # its head lives, or somebody else is removing it
    finally:
        os.close(file)


def _hold_lock(folder: Path) -> None:
    """The file has its name only when it is locked: no one can find it unlocked while its head lives."""
    new = folder / f"{LOCK}.new"
    file = os.open(new, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    status = os.fstat(file)
    identity = status.st_dev, status.st_ino
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        _locks[identity] = os.getpid(), file
        new.rename(folder / LOCK)
    except BaseException:
        _locks.pop(identity, None)
        os.close(file)
        raise


def _remove(folder: Path) -> None:
    """Only a folder that we made, and only what we put there."""
    if not folder.name.startswith(RUN_FOLDER_PREFIX):
        return
    for pattern in (*CONTENTS, LOCK):
        for path in folder.glob(pattern):
            path.unlink(missing_ok=True)
    with contextlib.suppress(OSError):  # somebody has put something else there
        folder.rmdir()


def _identity(path: Path) -> tuple[int, int] | None:
    try:
        status = os.lstat(path)
    except OSError:
        return None
    return (status.st_dev, status.st_ino) if stat.S_ISREG(status.st_mode) else None


def _is_private(folder: Path) -> bool:
    try:
        status = os.lstat(folder)
    except OSError:
        return False
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid() and stat.S_IMODE(status.st_mode) == 0o700
