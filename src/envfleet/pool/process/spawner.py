"""The spawner: a small process that forks children for a pool, and says when one of them has died.

It is a fresh interpreter without threads, so forking is safe whatever the user's process does; a child
costs milliseconds instead of the start of an interpreter. The spawner ends when the pool's process does:
the connection between them is closed by the kernel. Children end with the spawner (PR_SET_PDEATHSIG).

Processes that an env started end with its child. The kernel gives them to the spawner when their parent has ended
(PR_SET_CHILD_SUBREAPER), whatever session or process group they have made for themselves; it waits for those that end,
and kills the others when their child has ended. A variable of their environment says which child that is. One that has
dropped its environment ends with the spawner.
If the spawner itself was killed, the parent finds them by another variable.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import mmap
import os
import secrets
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import numpy as np

from envfleet._native import core
from envfleet.contract.worker_environment import SPAWNER_VARIABLE, THREAD_COUNT_VARIABLES, spawner_child_variable

KILL_WAIT_S = 5.0  # until killed processes are gone


class Spawn(NamedTuple):
    """Parent -> spawner: fork a child."""

    child: int
    run: Callable[..., None]  # run(child, *args) in the new process
    args: tuple[Any, ...]


class ReportExits(NamedTuple):
    """Parent -> spawner: report deaths in these task queues, where the parent waits. The first message."""

    fd: int
    num_envs: int
    num_children: int
    batch_size: int

    def attach(self) -> core.SharedTaskQueues:
        """The task queues as far as a reporter of deaths needs it: without batches."""
        num_bytes = core.SharedTaskQueues.required_bytes(*self[1:])
        return core.SharedTaskQueues(mmap.mmap(self.fd, num_bytes), *self[1:], [])


class Signal(NamedTuple):
    """Parent -> spawner: send a signal to a child. Only the spawner knows whether its pid is still its own."""

    child: int
    signum: int


class Close(NamedTuple):
    """Parent -> spawner: the children were told to stop; kill those that have not left in time, and leave."""

    grace_s: float


class Exited(NamedTuple):
    """Spawner -> parent: a child has died."""

    child: int
    status: int  # as waitpid gives it


class Spawner:
    """The parent's end: starts the spawner process, and talks to it."""

    def __init__(self, fds: tuple[int, ...]) -> None:
        """Start the process. It and its children inherit `fds`."""
        ours, theirs = socket.socketpair()
        with theirs:
            environment = dict(os.environ)
            for name in THREAD_COUNT_VARIABLES:
                environment.setdefault(name, "1")  # children share the cores already
            environment[SPAWNER_VARIABLE] = self._mark = secrets.token_hex(16)
            environment[spawner_child_variable(self._mark)] = _number_text(0)
            self._process = subprocess.Popen(
                [
                    sys.executable,
                    "-c",
                    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
                    "from envfleet.pool.process import spawner as spawner; spawner.main(int(sys.argv[2]))",
                    json.dumps([os.path.abspath(entry) for entry in sys.path]),
                    str(theirs.fileno()),
                ],
                pass_fds=(theirs.fileno(), *fds),
                stdin=subprocess.DEVNULL,
                env=environment,
            )
        self._connection: Connection[Any, Any] = Connection(ours.detach())

    @property
    def is_alive(self) -> bool:
        """False if the process died."""
        return self._process.poll() is None

    def tell(self, message: Spawn | ReportExits | Signal | Close) -> None:
        """Send an order. If the spawner is dead, `is_alive` says so.

        Orders are small (code goes through the object channel), so that this never waits for the spawner to read.
        """
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self._connection.send(message)

    def close(self, grace_s: float = 0.0) -> None:
        """End the process and its children, who may have been told to stop by themselves."""
        self.tell(Close(grace_s))
        try:
            self._process.wait(grace_s + KILL_WAIT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(KILL_WAIT_S)
        self._connection.close()
        if self._process.returncode:  # it was killed, and could not do this itself
            _signal(_marked_pids(self._mark), signal.SIGKILL)

    def abandon(self) -> None:
        """In a fork of the parent: let go of the connection, or the spawner would outlive the real parent."""
        self._connection.close()
        self._process.returncode = 0  # not our child: there is nothing to wait for


def main(connection_fd: int) -> None:
    """What the spawner process runs, until the parent is gone or says Close."""
    core.adopt_orphans()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C
    wake_read, wake_write = os.pipe()
    os.set_blocking(wake_read, False)
    os.set_blocking(wake_write, False)
    signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    _Keeper(Connection(connection_fd), wake_read, wake_write).serve()


class _Keeper:
    """The spawner's own side: forks, reaps, reports."""

    def __init__(self, connection: Connection[Any, Any], wake_read: int, wake_write: int) -> None:
        self._connection = connection
        self._wake_read = wake_read
        self._private_fds = (connection.fileno(), wake_read, wake_write)
        self._children: dict[int, int] = {}  # pid -> child id
        self._marks: dict[int, bytes] = {}  # pid -> what the environment of processes below it has
        self._num_forks = 0
        self._task_queues: core.SharedTaskQueues | None = None
        self._has_orphans = False

    def serve(self) -> None:
        """Until the parent says so or is gone, which the kernel tells by closing the connection."""
        poll = select.poll()
        poll.register(self._connection.fileno(), select.POLLIN)
        poll.register(self._wake_read, select.POLLIN)
        try:
            is_open = True
            while is_open:
                ready = {fd for fd, _ in poll.poll()}
                if self._wake_read in ready:
                    with contextlib.suppress(BlockingIOError):
                        os.read(self._wake_read, 4096)
                exits = self._reap()
                for exited in exits:
                    if self._task_queues is not None:
                        self._task_queues.report_exit(exited.child, exited.status)
                if exits or self._has_orphans:  # their deaths wake us for those below them
                    self._has_orphans = self._end_orphans()
                if self._connection.fileno() in ready:
                    is_open = self._obey(self._connection.recv())
        except (EOFError, ConnectionResetError, BrokenPipeError):
            pass
        finally:
            _signal(list(self._children), signal.SIGKILL)
            _wait(lambda: self._reap_all() and not self._end_all_orphans(), KILL_WAIT_S)

    def _obey(self, message: Spawn | ReportExits | Signal | Close) -> bool:
        if isinstance(message, Spawn):
            self._num_forks += 1
            pid = _fork(message, self._private_fds, self._num_forks)
            self._children[pid] = message.child
            self._marks[pid] = (
                f"{spawner_child_variable(os.environ[SPAWNER_VARIABLE])}={_number_text(self._num_forks)}".encode()
            )
        elif isinstance(message, ReportExits):
            self._task_queues = message.attach()
        elif isinstance(message, Signal):
            _signal([pid for pid, child in self._children.items() if child == message.child], message.signum)
        else:
            _wait(self._reap_all, message.grace_s)
            return False
        return True

    def _reap_all(self) -> bool:
        self._reap()
        return not self._children

    def _reap(self) -> list[Exited]:
        """Wait for all processes that have ended, orphans as well; returns the children among them."""
        exits = []
        with contextlib.suppress(ChildProcessError):  # there are none left
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                pid, status = ended
                self._marks.pop(pid, None)
                if pid in self._children:
                    exits.append(Exited(self._children.pop(pid), status))
        return exits

    def _end_orphans(self) -> bool:
        """Kill processes below children that have ended. Are there more to come?"""
        name = f"{spawner_child_variable(os.environ[SPAWNER_VARIABLE])}=".encode()
        living = {*self._marks.values(), name + _number_text(0).encode()}
        more_to_come = False
        for pid in self._orphans():
            environment = _environment(pid)
            marks = [entry for entry in environment if entry.startswith(name)]
            if marks and not living.intersection(marks):
                _signal([pid], signal.SIGKILL)
                more_to_come = True
            elif not environment:  # it is about to end, and may leave processes of its own
                more_to_come = True
        return more_to_come

    def _end_all_orphans(self) -> bool:
        orphans = self._orphans()
        _signal(orphans, signal.SIGKILL)
        return bool(orphans)

    def _orphans(self) -> list[int]:
        """Processes that the kernel has given to this one."""
        me = os.getpid()
        return [pid for pid, stat in _processes("stat") if _parent_in(stat) == me and pid not in self._children]


def _fork(message: Spawn, private_fds: tuple[int, ...], number: int) -> int:
    spawner_pid = os.getpid()
    pid = os.fork()
    if pid:
        return pid
    status = 70
    try:
        core.die_with_parent(spawner_pid)
        _mark_processes_below(number)
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for fd in private_fds:
            os.close(fd)
        np.random.seed()  # or all children would draw the same numbers from NumPy's global generator
        message.run(message.child, *message.args)
        status = 0
    except SystemExit as error:
        status = error.code if isinstance(error.code, int) else 1
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(status)


def _number_text(number: int) -> str:
    return f"{number:010d}"


def _mark_processes_below(number: int) -> None:
    """All processes below this one shall have its number in their environment, as /proc shows it."""
    name, text = spawner_child_variable(os.environ[SPAWNER_VARIABLE]), _number_text(number)
    getenv = ctypes.CDLL(None).getenv
    getenv.restype = ctypes.c_void_p
    if address := getenv(name.encode()):  # written in place, for processes that fork without exec: /proc shows that
        ctypes.memmove(address, text.encode(), len(text))
    os.environ[name] = text


def _parent_in(stat: bytes) -> int:
    return int(stat.rpartition(b")")[2].split()[1])  # behind the name, which may hold anything


def _marked_pids(mark: str) -> list[int]:
    entry = f"{SPAWNER_VARIABLE}={mark}".encode()
    return [pid for pid, environ in _processes("environ") if entry in environ.split(b"\0")]


def _environment(pid: int) -> list[bytes]:
    """The variables that a process began with; none if it may not be looked at, or has ended."""
    with contextlib.suppress(OSError), open(f"/proc/{pid}/environ", "rb") as file:
        return [entry for entry in file.read().split(b"\0") if entry]
    return []


def _processes(file_name: str) -> Iterator[tuple[int, bytes]]:
    """What a file of /proc says of each process that may be looked at."""
    for name in os.listdir("/proc"):
        if name.isdigit():
            with contextlib.suppress(OSError), open(f"/proc/{name}/{file_name}", "rb") as file:
                yield int(name), file.read()


def _wait(condition: Callable[[], bool], timeout_s: float) -> None:
    deadline_s = time.monotonic() + timeout_s
    while not condition() and time.monotonic() < deadline_s:
        time.sleep(0.001)


def _signal(pids: list[int], signum: int) -> None:
    # Nearly all are unreaped children of this process, so that their pids cannot belong to anybody else.
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signum)
