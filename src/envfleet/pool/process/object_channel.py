"""ObjectChannel: the slower way between our own processes, for what is no array: infos, texts, graphs, requests."""

from __future__ import annotations

import os
import pickle
import struct
from typing import Any

from envfleet.contract.errors import EnvFleetError
from envfleet.pool.pickling import pickled, pickled_code

_LENGTH = struct.Struct("<Q")
_WINDOW_BYTES = 1 << 32  # the file is sparse: a window takes only the pages that were written


class FileClosed(EnvFleetError):
    """The file descriptor of a channel was closed by code that did not open it."""


class ObjectChannel:
    """Windows of a memory file, each holding one pickled object.

    A window has one writer and one reader who take turns (an env's result is read before its next task is
    sent), so nothing queues, nothing blocks, and a writer that is killed leaves only a window that nobody
    will read. Both ends are processes of one pool, so pickles are trusted.
    """

    def __init__(self, fd: int) -> None:
        """Use the memory file `fd`, which somebody else closes."""
        self._fd = fd
        self._file = _file_of(fd)

    def require_file(self) -> None:
        """Raise FileClosed if the descriptor is closed, or means another file by now, which must not be touched."""
        if _file_of(self._fd) != self._file:
            raise FileClosed(
                f"file descriptor {self._fd} of this process was closed by code that did not open it (os.closerange?); "
                "it carries what envs say to their pool"
            )

    def reopen(self, pid: int) -> None:
        """Open the file again if it was closed: process `pid` has it under the same number, or this raises OSError."""
        if _file_of(self._fd) == self._file:
            return
        fd = os.open(f"/proc/{pid}/fd/{self._fd}", os.O_RDWR | os.O_CLOEXEC)
        if _file_of(fd) != self._file:
            os.close(fd)
            raise FileNotFoundError(f"process {pid} has another file as descriptor {self._fd}")
        self._fd = fd

    def put(self, window: int, value: Any) -> None:
        """Write `value`. What pickle refuses (a lambda, a class of a notebook) goes by value."""
        self._put_bytes(window, pickled(value))

    def put_code(self, window: int, value: Any, name: str = "env") -> None:
        """Write what the caller gave under this name, and what is defined in `__main__` by value."""
        self._put_bytes(window, pickled_code(value, name))

    def _put_bytes(self, window: int, blob: bytes) -> None:
        if len(blob) > _WINDOW_BYTES - _LENGTH.size:
            raise ValueError(f"an object of {len(blob)} bytes is too large to pass between processes (limit: 4 GiB)")
        self.require_file()
        view = memoryview(_LENGTH.pack(len(blob)) + blob)
        offset = window * _WINDOW_BYTES
        while view:
            written = os.pwrite(self._fd, view, offset)
            view, offset = view[written:], offset + written

    def is_empty(self, window: int) -> bool:
        """Has nothing been put yet?"""
        return not any(os.pread(self._fd, _LENGTH.size, window * _WINDOW_BYTES))

    def get(self, window: int) -> Any:
        """Read the object that was put last."""
        self.require_file()
        offset = window * _WINDOW_BYTES
        head = os.pread(self._fd, 4096, offset)  # one call for a small object
        (length,) = _LENGTH.unpack_from(head)
        blob = bytearray(head[_LENGTH.size : _LENGTH.size + length])
        while len(blob) < length:
            more = os.pread(self._fd, length - len(blob), offset + _LENGTH.size + len(blob))
            if not more:
                raise EOFError(f"window {window} has {len(blob)} of {length} bytes: its writer died while it wrote")
            blob += more
        return pickle.loads(blob)


def _file_of(fd: int) -> tuple[int, int] | None:
    """Which file a descriptor means; None if it is closed."""
    try:
        status = os.fstat(fd)
    except OSError:
        return None
    return status.st_dev, status.st_ino


class Windows:
    """Which window belongs to whom, in a pool of N envs."""

    def __init__(self, num_envs: int) -> None:
        self._num_envs = num_envs

    options = 0  # options of the reset under way; parent to all children
    traits = 1  # of env 0; its child to parent
    step_times = 2  # of the first steps of child 0; to parent

    def action(self, env_id: int) -> int:
        """Parts of an env's action that are no arrays; parent to child."""
        return 3 + env_id

    def result(self, env_id: int) -> int:
        """Extras of an env's result; child to parent."""
        return 3 + self._num_envs + env_id

    def request(self, child: int) -> int:
        """What the parent asks of a child; parent to child."""
        return 3 + 2 * self._num_envs + 2 * child

    def reply(self, child: int) -> int:
        """A child's reply to it."""
        return self.request(child) + 1
