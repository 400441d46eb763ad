"""Spawners of process pools, forked from one prepared process, in place of an interpreter for each: see forker.py.

For tests of what envs do in processes. Tests of how these processes are started and end, or of what other processes see
of them, start interpreters.
"""

import contextlib
import fcntl
import importlib
import json
import os
import random
import subprocess
import sys

from envfleet.pool.process import spawner
from tests.support.forker import Forker, connection, prepared, serve

ABOVE_ALL = 500  # no file of a pool has a number like this


class _ForkingSubprocess:
    """The module subprocess, as spawner.py sees it; but spawners are forked."""

    def __init__(self, forker):
        self._forker = forker

    def __getattr__(self, name):
        return getattr(subprocess, name)

    def Popen(self, argv, *, pass_fds, stdin, env):
        assert argv[:2] == [sys.executable, "-c"] and stdin == subprocess.DEVNULL
        path, connection_fd = argv[3:]
        fds = [1, 2, *pass_fds]
        request = {"connection": int(connection_fd), "path": json.loads(path), "fds": fds}
        return self._forker.start({**request, "environment": dict(env), "folder": os.getcwd()}, fds)


@contextlib.contextmanager
def forked_spawners(monkeypatch, modules=()):
    """Spawners of pools in this process are forked."""
    with prepared(__name__, modules) as forker, monkeypatch.context() as patch:
        patch.setattr(spawner, "subprocess", _ForkingSubprocess(forker))
        yield


def fork_spawners_from_here():
    """The same for good, from a copy of this process, which has no threads yet. It ends with this process."""
    ours, theirs = connection()
    if os.fork() == 0:
        ours.close()
        _spawn(theirs.detach())
        os._exit(0)
    theirs.close()
    spawner.subprocess = _ForkingSubprocess(Forker(ours))


# -- in the prepared process --


def _become_spawner(request, files):
    """What a new interpreter would have been given. Returns the number of the connection."""
    above = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, ABOVE_ALL) for fd in files]
    for fd in files:
        os.close(fd)
    for fd, number in zip(above, request["fds"], strict=True):
        os.dup2(fd, number)
        os.close(fd)
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(request["environment"])
    sys.path[:] = request["path"]
    importlib.invalidate_caches()
    random.seed()
    return request["connection"]


def main():
    importlib.import_module("envfleet.pool.process.child")
    for name in sys.argv[2:]:
        importlib.import_module(name)
    _spawn(int(sys.argv[1]))


def _spawn(fd):
    """Fork spawners, until the parent closes the socket; in a new process, be one."""
    served = serve(fd)
    if served is not None:
        spawner.main(_become_spawner(*served))


if __name__ == "__main__":
    sys.exit(main())
