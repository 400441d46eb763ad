"""take_keys: read the run's keys, and erase them from where the code of envs and policies could read them."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

from envfleet.cluster.wire.sockets import read_keys
from envfleet.contract.worker_environment import KEYS_VARIABLE


def take_keys(keys_file: Path | None) -> str | None:
    """Return the run's keys, and remove them from this process's environment.

    `os.environ` is a copy. All processes of this user can read the memory that a process was started with, as
    `/proc/PID/environ`, so that memory is overwritten too.

    Args:
        keys_file: The file with the keys. None: they are in the environment.

    Returns:
        The keys; None if there are none.

    Raises:
        ClusterError: The file cannot be read, or other users can read it.
    """
    keys = os.environ.get(KEYS_VARIABLE)
    if keys is not None:
        _overwrite(KEYS_VARIABLE)
        del os.environ[KEYS_VARIABLE]
    return keys if keys_file is None else read_keys(keys_file)


def _overwrite(name: str) -> None:
    """Fill the value of a variable with zeros, in place."""
    libc = ctypes.CDLL(None)
    libc.getenv.restype = ctypes.c_void_p
    address = libc.getenv(os.fsencode(name))
    if address is not None:
        ctypes.memset(address, 0, len(ctypes.string_at(address)))
