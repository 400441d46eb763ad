"""Forker: a prepared process that has imported what others need, and forks them: a tenth of the CPU time to start one.

Run as `python -m PROGRAM FD MODULE...`, the program imports the modules, and calls `serve` with the socket FD.
"""

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading

from envfleet.launchers.processes import kill_group
from tests.support.scripts import script_environment

START_S = 100.0  # for the prepared process to import all modules on a busy machine
MOST_BYTES = 1 << 17  # of a request
MOST_FILES = 32


class Forked:
    """A process that was forked. Has what is asked of a Popen."""

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
            raise subprocess.TimeoutExpired(f"process {self.pid}", timeout_s)
        return self.returncode

    def terminate(self):
        self._send(signal.SIGTERM)

    def kill(self):
        self._send(signal.SIGKILL)

    def _send(self, number):
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)


class Forker:
    """The prepared process, as its parent sees it, at the other end of a socket."""

    def __init__(self, connection):
        self._socket = connection
        self._lock = threading.Lock()
        self._codes = {}  # of processes that have ended, by pid

    def start(self, request, fds):
        """Fork a process, and give it a request and files."""
        with self._lock:
            socket.send_fds(self._socket, [json.dumps(request).encode()], fds)
            while (told := self._told(START_S)) is not None:
                if "started" in told:
                    self._codes.pop(told["started"], None)  # of an earlier process with this pid
                    return Forked(told["started"], self)
        raise AssertionError(f"no process was forked in {START_S:g} s")

    def code_of(self, pid, timeout_s):
        """The return code of a process; None: it has not ended."""
        with self._lock:
            while pid not in self._codes and self._told(timeout_s) is not None:
                pass
            return self._codes.get(pid)

    def _told(self, timeout_s):
        """What the prepared process says next; None: nothing in this time."""
        if not select.select([self._socket], [], [], timeout_s)[0]:
            return None
        message = self._socket.recv(MOST_BYTES)
        assert message, "the process that forks others has died"
        told = json.loads(message)
        if "ended" in told:
            self._codes[told["ended"]] = told["code"]
        return told


@contextlib.contextmanager
def prepared(program, modules):
    """A Forker of `program`, a module of tests, which imports `modules`."""
    ours, theirs = connection()
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-m", program, str(theirs.fileno()), *modules],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            env=script_environment(OMP_NUM_THREADS="1", OPENBLAS_NUM_THREADS="1", MKL_NUM_THREADS="1"),
        )
    try:
        yield Forker(ours)
    finally:
        ours.close()
        process.wait(20.0)


def connection():
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


# -- in the prepared process --


def serve(fd):
    """Fork processes until the parent closes the socket. Returns (request, files) in a new one, None in this one."""
    with socket.socket(fileno=fd) as parent:
        return _serve(parent)


def _serve(parent):
    woken, wakes = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wakes, warn_on_full_buffer=False)
    while True:
        ready = select.select([parent, woken], [], [])[0]
        if woken in ready:
            os.read(woken, 4096)
        _report_ended(parent)
        if parent in ready:
            message, fds, _, _ = socket.recv_fds(parent, MOST_BYTES, MOST_FILES)
            if not message:
                return None
            if (pid := os.fork()) == 0:
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                for fd in (woken, wakes):
                    os.close(fd)
                return json.loads(message), fds
            for fd in fds:
                os.close(fd)
            parent.send(json.dumps({"started": pid}).encode())


def _report_ended(parent):
    """As Processes does: what a worker has left behind in its group ends with it, before its pid can be another's."""
    with contextlib.suppress(ChildProcessError, BrokenPipeError):
        while (ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)) is not None:
            kill_group(ended.si_pid)
            _, status = os.waitpid(ended.si_pid, 0)
            parent.send(json.dumps({"ended": ended.si_pid, "code": os.waitstatus_to_exitcode(status)}).encode())
