"""WorkerActor: the actor that runs one worker's command on a node of a Ray cluster."""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from envfleet.contract.exits import WorkerExit
from envfleet.contract.worker_environment import BREAKPOINT_VARIABLE, MODULE_PATH_VARIABLE
from envfleet.launchers.processes import end_of_file, kill_group

KILL_WAIT_S = 5.0
TELL_S = 3.0  # how long a failed worker's actor waits for until_end() to be called, before it fails too
ANSWER_S = 0.2  # how long it takes, at most, to send the answer of until_end()
LEAVING = frozenset(map(int, WorkerExit))


@dataclass(frozen=True, slots=True)
class ActorCommand:
    """The command of a worker.

    Args:
        python: The Python interpreter. None: the interpreter that runs the actor.
        arguments: Its arguments.
        environment: Variables to add to the actor's environment. May hold the run's secrets.
        path: Folders to import modules from. None: those of the actor.
        log_name: The name of the log file, in Ray's folder for logs.
    """

    python: str | None
    arguments: tuple[str, ...]
    environment: Mapping[str, str] = field(repr=False)
    path: tuple[str, ...] | None
    log_name: str


@dataclass(frozen=True, slots=True)
class Begun:
    """Where a worker's process was started."""

    incarnation: str  # differs each time that Ray starts the actor
    node_id: str
    host: str
    log_path: str
    pid: int

    @property
    def node(self) -> str:
        """The node's name, for people."""
        return f"{self.host} (Ray node {self.node_id[:8]})"


class WorkerActor:
    """Runs one worker's process, which ends with the actor: it reads from a pipe that only the actor holds open."""

    def __init__(self, command: ActorCommand) -> None:
        self._incarnation = secrets.token_hex(8)
        self._log_path = _log_dir() / command.log_name
        self._is_ending = False
        self._has_ended = threading.Event()
        self._was_told = threading.Event()
        self._code = 0
        argv = (command.python or sys.executable, *command.arguments, "--ends-with-stdin")
        with open(self._log_path, "ab") as log:
            self._process = subprocess.Popen(
                argv,
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                env=_environment(command),
                start_new_session=True,  # a group, to end what the worker started
            )
        threading.Thread(target=self._watch, name="envfleet-watch", daemon=True).start()

    def begun(self) -> Begun:
        """Return where the worker's process was started."""
        import ray

        node_id = str(ray.get_runtime_context().get_node_id())
        return Begun(self._incarnation, node_id, socket.gethostname(), str(self._log_path), self._process.pid)

    def until_end(self) -> tuple[str, int]:
        """Wait for the end of the worker's process, and return its incarnation and its exit code."""
        self._has_ended.wait()
        self._was_told.set()
        return self._incarnation, self._code

    def log(self, max_bytes: int) -> str:
        """Return the last `max_bytes` of the worker's log."""
        return end_of_file(self._log_path, max_bytes)

    def end(self, grace_s: float) -> None:
        """Tell the worker to leave; kill it after `grace_s` seconds."""
        self._is_ending = True
        if not self._has_ended.is_set():
            with contextlib.suppress(ProcessLookupError):
                self._process.terminate()
        if not self._has_ended.wait(grace_s):
            kill_group(self._process.pid)
            self._has_ended.wait(KILL_WAIT_S)

    def _watch(self) -> None:
        # Kill the group before the process is reaped: until then no other process or group can have its pid.
        with contextlib.suppress(ChildProcessError):
            os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOWAIT)
        kill_group(self._process.pid)
        self._code = self._process.wait()
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._has_ended.set()
        if self._code not in LEAVING and not self._is_ending:
            # Ray restarts an actor only if the actor's own process fails.
            self._was_told.wait(TELL_S)
            time.sleep(ANSWER_S)
            os._exit(1)


def is_failure(code: int) -> bool:
    """Return whether Ray restarts a worker that ended with this exit code."""
    return code not in LEAVING


def _log_dir() -> Path:
    """Return Ray's folder for logs on this node: the actor's own output goes there."""
    with contextlib.suppress(OSError):
        output = Path(os.readlink("/proc/self/fd/1"))
        if output.parent.name == "logs" and output.parent.is_dir():
            return output.parent
    return Path(tempfile.gettempdir())


def _environment(command: ActorCommand) -> dict[str, str]:
    environment = {**os.environ, **command.environment}
    environment.pop(BREAKPOINT_VARIABLE, None)  # it names Ray's debugger, which works in actors only
    if command.path is not None:
        environment[MODULE_PATH_VARIABLE] = os.pathsep.join(command.path)
    elif command.python is None:
        # The folders that Ray has unpacked for this actor, without those of Ray itself.
        import ray

        of_ray = Path(ray.__file__).parent
        environment[MODULE_PATH_VARIABLE] = os.pathsep.join(
            e for e in sys.path if e and not Path(e).is_relative_to(of_ray)
        )
    return environment
