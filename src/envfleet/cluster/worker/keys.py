"""take_keys: a worker takes the run's keys, and leaves none where the code of its envs and policies could find them."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

from envfleet.cluster.wire.sockets import read_keys
from envfleet.contract.worker_environment import KEYS_VARIABLE


def take_keys(keys_file: Path | None) -> str | None:
    """The keys in `keys_file`, or those in the environment, from which they are removed in any case.

    `os.environ` is a copy: the kernel shows the memory that a process was started with as `/proc/PID/environ`, to all
    processes of this user. So that memory is overwritten, too.
    """
    keys = os.environ.get(KEYS_VARIABLE)
    if keys is not None:
        _overwrite(KEYS_VARIABLE)
        del os.environ[KEYS_VARIABLE]
    return keys if keys_file is None else read_keys(keys_file)


def _overwrite(name: str) -> None:
    """Fill the value of a variable with zeros, where it is."""
    libc = ctypes.CDLL(None)
    libc.getenv.restype = ctypes.c_void_p
    address = libc.getenv(os.fsencode(name))
    if address is not None:
        ctypes.memset(address, 0, len(ctypes.string_at(address)))
