"""WorkerActor: what runs on a node of a Ray cluster. Starts one worker's command, and stands for it."""

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
TELL_S = 3.0  # for whoever waits for the end of a worker to ask how it failed, before the actor fails too
ANSWER_S = 0.2  # for the answer to be sent
LEAVING = frozenset(map(int, WorkerExit))


@dataclass(frozen=True, slots=True)
class ActorCommand:
    """What an actor is to run."""

    python: str | None  # None: the interpreter that runs the actor
    arguments: tuple[str, ...]
    environment: Mapping[str, str] = field(repr=False)  # added to the actor's own; has the run's secrets
    path: tuple[str, ...] | None  # where modules are looked for; None: where the actor does
    log_name: str


@dataclass(frozen=True, slots=True)
class Begun:
    """Where a worker runs."""

    incarnation: str  # another one each time that Ray starts the actor
    node_id: str
    host: str
    log_path: str
    pid: int

    @property
    def node(self) -> str:
        """For people."""
        return f"{self.host} (Ray node {self.node_id[:8]})"


class WorkerActor:
    """One worker's process. It ends when this one does: it reads from a pipe that only this process holds open."""

    def __init__(self, command: ActorCommand) -> None:
        """Start the worker."""
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
                start_new_session=True,  # what a worker starts is ended with it
            )
        threading.Thread(target=self._watch, name="envfleet-watch", daemon=True).start()

    def begun(self) -> Begun:
        """Where it runs."""
        import ray

        node_id = str(ray.get_runtime_context().get_node_id())
        return Begun(self._incarnation, node_id, socket.gethostname(), str(self._log_path), self._process.pid)

    def until_end(self) -> tuple[str, int]:
        """Wait for the end of the worker's process: which one, and its exit code."""
        self._has_ended.wait()
        self._was_told.set()
        return self._incarnation, self._code

    def log(self, max_bytes: int) -> str:
        """The end of what it has printed, on this node."""
        return end_of_file(self._log_path, max_bytes)

    def end(self, grace_s: float) -> None:
        """Have the worker leave; kill it if it has not after `grace_s`."""
        self._is_ending = True
        if not self._has_ended.is_set():
            with contextlib.suppress(ProcessLookupError):
                self._process.terminate()
        if not self._has_ended.wait(grace_s):
            kill_group(self._process.pid)
            self._has_ended.wait(KILL_WAIT_S)

    def _watch(self) -> None:
        # Not reaped before its group is ended: so long its pid, and so the group's, cannot belong to anybody else.
        with contextlib.suppress(ChildProcessError):
            os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOWAIT)
        kill_group(self._process.pid)
        self._code = self._process.wait()
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._has_ended.set()
        if self._code not in LEAVING and not self._is_ending:
            # Ray starts an actor again whose process has failed, and no other.
            self._was_told.wait(TELL_S)
            time.sleep(ANSWER_S)
            os._exit(1)


def is_failure(code: int) -> bool:
    """Whether Ray will start a worker again that has ended with this code."""
    return code not in LEAVING


def _log_dir() -> Path:
    """Ray's folder for logs on this node: where the output of this actor goes."""
    with contextlib.suppress(OSError):
        output = Path(os.readlink("/proc/self/fd/1"))
        if output.parent.name == "logs" and output.parent.is_dir():
            return output.parent
    return Path(tempfile.gettempdir())


def _environment(command: ActorCommand) -> dict[str, str]:
    environment = {**os.environ, **command.environment}
    environment.pop(BREAKPOINT_VARIABLE, None)  # of Ray's debugger, which knows nothing of our processes
    if command.path is not None:
        environment[MODULE_PATH_VARIABLE] = os.pathsep.join(command.path)
    elif command.python is None:
        # What Ray has unpacked for this actor, without the folders of Ray's own parts.
        import ray

        of_ray = Path(ray.__file__).parent
        environment[MODULE_PATH_VARIABLE] = os.pathsep.join(
            e for e in sys.path if e and not Path(e).is_relative_to(of_ray)
        )
    return environment
