"""Workers forked from one prepared process, in place of an interpreter for each: a tenth of the CPU time to start one.

For tests of what workers do once they run. They are real processes with the code of real workers, and die of real
signals. Tests of how workers are started, or of what other processes see of them, start interpreters.

Run as `python -m tests.support.cluster.forked_workers FD MODULE...`: imports the modules, then forks a worker for each
request that comes through the socket FD, and reports those that have ended.
"""

import contextlib
import importlib
import json
import os
import random
import select
import signal
import socket
import subprocess
import sys
import threading

from envfleet.contract.worker_environment import MODULE_PATH_VARIABLE
from envfleet.launchers import processes
from tests.support.scripts import script_environment

WORKER = "envfleet.cluster.worker"
START_S = 100.0  # for the prepared process to import all modules on a busy machine
MOST_BYTES = 1 << 17  # of a request


class Forked:
    """A worker's process. Has what Processes asks of a Popen."""

    stdin = None

    def __init__(self, pid, forker):
        self.pid = pid
        self.returncode = None
        self._forker = forker

    def poll(self):
        self.returncode = self._forker.code_of(self.pid, 0.0)
        return self.returncode

    def wait(self, timeout_s):
        self.returncode = self._forker.code_of(self.pid, timeout_s)
        if self.returncode is None:
            raise subprocess.TimeoutExpired(WORKER, timeout_s)
        return self.returncode

    def terminate(self):
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGTERM)


class Forker:
    """The prepared process, as its parent sees it."""

    def __init__(self, modules=()):
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", __name__, str(theirs.fileno()), *modules],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                env=script_environment(OMP_NUM_THREADS="1", OPENBLAS_NUM_THREADS="1", MKL_NUM_THREADS="1"),
            )
        self._lock = threading.Lock()
        self._codes = {}  # of processes that have ended, by pid

    def start(self, arguments, environment, log):
        """Fork a worker that writes to the file `log`."""
        request = json.dumps({"arguments": arguments, "environment": dict(environment)})
        with self._lock:
            socket.send_fds(self._socket, [request.encode()], [log.fileno()])
            while (told := self._told(START_S)) is not None:
                if "started" in told:
                    self._codes.pop(told["started"], None)  # of an earlier process with this pid
                    return Forked(told["started"], self)
        raise AssertionError(f"no worker was forked in {START_S:g} s")

    def code_of(self, pid, timeout_s):
        """The return code of a process; None: it has not ended."""
        with self._lock:
            while pid not in self._codes and self._told(timeout_s) is not None:
                pass
            return self._codes.get(pid)

    def close(self):
        self._socket.close()
        self._process.wait(20.0)

    def _told(self, timeout_s):
        """What the prepared process says next; None: nothing in this time."""
        if not select.select([self._socket], [], [], timeout_s)[0]:
            return None
        message = self._socket.recv(MOST_BYTES)
        assert message, "the process that forks workers has died"
        told = json.loads(message)
        if "ended" in told:
            self._codes[told["ended"]] = told["code"]
        return told


class _ForkingSubprocess:
    """The module subprocess, as launchers/processes.py sees it; but workers of this interpreter are forked."""

    def __init__(self, forker):
        self._forker = forker

    def __getattr__(self, name):
        return getattr(subprocess, name)

    def Popen(self, argv, *, stdin, stdout, env, **settings):
        if tuple(argv[:3]) != (sys.executable, "-m", WORKER) or stdin != subprocess.DEVNULL:
            return subprocess.Popen(argv, stdin=stdin, stdout=stdout, env=env, **settings)
        return self._forker.start(argv[3:], env, stdout)


@contextlib.contextmanager
def forked_workers(monkeypatch, modules=()):
    """Local's workers are forked, unless they run another interpreter."""
    forker = Forker(modules)
    has_ended = processes._has_ended

    def has_forked_ended(process):
        return process.poll() is not None if isinstance(process, Forked) else has_ended(process)

    monkeypatch.setattr(processes, "subprocess", _ForkingSubprocess(forker))
    monkeypatch.setattr(processes, "_has_ended", has_forked_ended)
    try:
        yield
    finally:
        monkeypatch.undo()
        forker.close()


# -- in the prepared process --


def _serve(parent):
    """Fork workers until the parent closes the socket. Returns the request in a new worker, None in this process."""
    woken, wakes = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wakes, warn_on_full_buffer=False)
    while True:
        ready = select.select([parent, woken], [], [])[0]
        if woken in ready:
            os.read(woken, 4096)
        _report_ended(parent)
        if parent in ready:
            message, fds, _, _ = socket.recv_fds(parent, MOST_BYTES, 1)
            if not message:
                return None
            if (pid := os.fork()) == 0:
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                for fd in (woken, wakes):
                    os.close(fd)
                return json.loads(message), fds[0]
            os.close(fds[0])
            parent.send(json.dumps({"started": pid}).encode())


def _report_ended(parent):
    """As Processes does: what a worker has left behind in its group ends with it, before its pid can be another's."""
    with contextlib.suppress(ChildProcessError, BrokenPipeError):
        while (ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)) is not None:
            processes.kill_group(ended.si_pid)
            _, status = os.waitpid(ended.si_pid, 0)
            parent.send(json.dumps({"ended": ended.si_pid, "code": os.waitstatus_to_exitcode(status)}).encode())


def _become_worker(request, log_fd):
    """What a new interpreter would have been given."""
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
    with socket.socket(fileno=int(sys.argv[1])) as parent:
        served = _serve(parent)
    return 0 if served is None else work(_become_worker(*served))


if __name__ == "__main__":
    sys.exit(main())
