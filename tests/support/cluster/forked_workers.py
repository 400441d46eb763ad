"""Workers forked from one prepared process, in place of an interpreter for each: see tests/support/forker.py.

For tests of what workers do once they run. They are real processes with the code of real workers, and die of real
signals. Tests of how workers are started, or of what other processes see of them, start interpreters.
"""

import contextlib
import importlib
import os
import random
import subprocess
import sys

from envfleet.contract.worker_environment import MODULE_PATH_VARIABLE
from envfleet.launchers import processes
from tests.support.forked_spawners import fork_spawners_from_here
from tests.support.forker import Forked, prepared, serve

WORKER = "envfleet.cluster.worker"


class _ForkingSubprocess:
    """The module subprocess, as launchers/processes.py sees it; but workers of this interpreter are forked."""

    def __init__(self, forker):
        self._forker = forker

    def __getattr__(self, name):
        return getattr(subprocess, name)

    def Popen(self, argv, *, stdin, stdout, env, **settings):
        if tuple(argv[:3]) != (sys.executable, "-m", WORKER) or stdin != subprocess.DEVNULL:
            return subprocess.Popen(argv, stdin=stdin, stdout=stdout, env=env, **settings)
        return self._forker.start({"arguments": argv[3:], "environment": dict(env)}, [stdout.fileno()])


@contextlib.contextmanager
def forked_workers(monkeypatch, modules=()):
    """Local's workers are forked, unless they run another interpreter."""
    has_ended = processes._has_ended

    def has_forked_ended(process):
        return process.poll() is not None if isinstance(process, Forked) else has_ended(process)

    with prepared(__name__, modules) as forker, monkeypatch.context() as patch:
        patch.setattr(processes, "subprocess", _ForkingSubprocess(forker))
        patch.setattr(processes, "_has_ended", has_forked_ended)
        yield


# -- in the prepared process --


def _become_worker(request, files):
    """What a new interpreter would have been given."""
    (log_fd,) = files
    os.setsid()
    nothing = os.open(os.devnull, os.O_RDONLY)
    for fd, place in ((nothing, 0), (log_fd, 1), (log_fd, 2)):
        os.dup2(fd, place)
    os.close(nothing)
    os.close(log_fd)
    os.environ.clear()
    os.environ.update(request["environment"])
    sys.path[:] = request["environment"][MODULE_PATH_VARIABLE].split(os.pathsep)
    importlib.invalidate_caches()
    random.seed()
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed()
    if torch := sys.modules.get("torch"):
        torch.seed()
    return request["arguments"]


def main():
    from envfleet.cluster.worker.worker import main as work

    for name in sys.argv[2:]:
        importlib.import_module(name)
    served = serve(int(sys.argv[1]))
    if served is None:
        return 0
    arguments = _become_worker(*served)
    fork_spawners_from_here()
    return work(arguments)


if __name__ == "__main__":
    sys.exit(main())
