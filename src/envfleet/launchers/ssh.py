"""SSH: workers are processes of other machines, each at the end of an `ssh` that this machine runs."""

from __future__ import annotations

import itertools
import os
import random
import re
import shlex
import shutil
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from pathlib import Path

from envfleet.contract.checks import positive_or_none, whole_number
from envfleet.contract.errors import ClusterError, UsageError
from envfleet.contract.worker_environment import NUM_CPUS_VARIABLE, THREAD_COUNT_VARIABLES
from envfleet.launchers.hosts import is_loopback
from envfleet.launchers.launcher import WorkerJob, WorkerState, WorkerStatus
from envfleet.launchers.owned_job import OwnedJob
from envfleet.launchers.processes import Command, Processes

CONNECT_TIMEOUT_S = 10
ALIVE_S, NUM_ALIVE = 5, 3  # a link that is dead for 15 s ends its ssh
DEFAULT_PYTHON = "python3"
SSH_FAILED = 255  # ssh's own exit code; all others are those of the command
SIGNALLED = 128  # the shell adds the number of the signal
SETUP_FAILED = 78  # ours, from the script
NOT_FOUND = (126, 127)  # the shell's: no such program, or none that can be run
LOG_END_BYTES = 4000
LOG_BEGIN_BYTES = 16000  # a host may greet at length
BEGUN = "envfleet: ssh has come through"  # the script's first words: all that follow are the host's, or the worker's
RESOLVE_S = 10.0
LEAVE_S = 1.0  # for workers that were told to leave; the others leave when their ssh has ended
END_S = 1.0
AGAIN_S = (0.5, 2.0)  # after so long a host that was busy is asked again: not by all workers at once

# Given after the user's, and before those of ~/.ssh/config: the first value that ssh sees is the one that holds.
OPTIONS = (
    "BatchMode=yes",  # nobody is there to type a password
    f"ConnectTimeout={CONNECT_TIMEOUT_S}",
    f"ServerAliveInterval={ALIVE_S}",
    f"ServerAliveCountMax={NUM_ALIVE}",
    "ClearAllForwardings=yes",  # only the first of many could have the user's ports
    "ControlMaster=no",  # one that is there is used; none is left behind
)

# Lines of ssh itself if it is no use to try again, and what the user can do.
_HOPELESS = {
    r"Warning: Identity file .* not accessible": "see identity_file=",
    r"\S+: Permission denied \(": "ssh must get in without a password: put your public key on the host (ssh-copy-id)",
    r"Received disconnect\b.*: Too many authentication failures": "name the right key with identity_file=",
    r"Host key verification failed": "connect once by hand, and look at the host's key",
    r"ssh: .*: Name or service not known": "no host has this name",
    r"\S.*: line \d+: Bad configuration option": "see ssh_options= and ~/.ssh/config",
}
# Its sshd takes only so many at once (MaxStartups): a host for many workers is asked again, and again.
_BUSY = re.compile(r"^(kex_exchange_identification|ssh_exchange_identification|banner exchange): |MaxStartups")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


@dataclass(frozen=True, slots=True)
class SSH:
    """Start workers over the system's `ssh`: worker w runs on `hosts[w % len(hosts)]`.

    A worker ends when its ssh does, and that ends with the head. The keys of the run travel through ssh, encrypted.
    """

    hosts: Sequence[str]  # "host", "user@host" or a name from ~/.ssh/config
    _: KW_ONLY
    python: str | None = None  # the interpreter on the hosts; None: "python3"
    cpus_per_worker: int | None = None  # None: all that the host has
    user: str | None = None
    port: int | None = None
    identity_file: str | os.PathLike[str] | None = None
    ssh_options: Sequence[str] = ()  # as in ~/.ssh/config: "ProxyJump=gate"
    setup: Sequence[str] = ()  # commands that the host's shell runs before: "cd project", ". venv/bin/activate"
    env: Mapping[str, str] | None = None  # further variables of the workers; no secrets: all users can read them
    log_dir: str | os.PathLike[str] | None = None  # on this machine; None: a temporary folder that goes with the run
    head_address: str | None = None
    queue_timeout_s: float | None = 60.0

    is_on_this_host = False

    def __post_init__(self) -> None:
        """Check all of it: what is wrong should not come to light on another machine."""
        for name in ("hosts", "ssh_options", "setup"):
            object.__setattr__(self, name, _texts(name, getattr(self, name)))
        if not self.hosts:
            raise UsageError('hosts must name at least one host: SSH(["node1", "node2"])')
        for host in self.hosts:
            if host.startswith("-") or re.search(r"\s", host):
                raise UsageError(f'a host must be "host" or "user@host"; got {host!r}')
        for name, most in (("cpus_per_worker", 1_000_000), ("port", 65535)):
            if getattr(self, name) is not None:
                object.__setattr__(self, name, whole_number(name, getattr(self, name), at_most=most))
        for variable, value in (self.env or {}).items():
            if not _VARIABLE.fullmatch(variable) or not isinstance(value, str):
                raise UsageError(f"env must have names of variables and texts; got {variable!r}: {value!r}")
        positive_or_none("queue_timeout_s", self.queue_timeout_s)

    def host_of_workers(self) -> str | None:
        """See Launcher. The first host that is not this machine, as ~/.ssh/config has it; None if it is behind another.

        Raises ClusterError if ssh does not understand its settings.
        """
        first = self._real_name(self.hosts[0])
        others = (self._real_name(host) for host in dict.fromkeys(self.hosts[1:]))
        names = itertools.chain([first], others)
        return next((name for name in names if name is None or not is_loopback(name)), first)

    def launch(self, job: WorkerJob) -> OwnedJob:
        """Start all workers."""
        _require_ssh()
        return OwnedJob(SshJob(self, job))

    def host_of(self, worker: int) -> str:
        """Where a worker runs."""
        return self.hosts[worker % len(self.hosts)]

    def ssh_argv(self, host: str) -> tuple[str, ...]:
        """The ssh that reaches a host, without the command that it is to run there."""
        words = ["ssh", "-T"]
        if self.identity_file is not None:
            words += ["-i", os.fspath(self.identity_file), "-o", "IdentitiesOnly=yes"]
        if self.port is not None:
            words += ["-p", str(self.port)]
        if self.user is not None and "@" not in host:
            words += ["-l", self.user]
        options = (word for option in (*self.ssh_options, *OPTIONS) for word in ("-o", option))
        return (*words, *options, "--", host)

    def _real_name(self, host: str) -> str | None:
        _require_ssh()
        argv = [*self.ssh_argv(host)[:-2], "-G", "--", host]
        try:
            done = subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=RESOLVE_S)
        except (OSError, subprocess.TimeoutExpired) as error:
            raise ClusterError(f"SSH: the settings for host {host!r} cannot be read: {error}") from error
        if done.returncode:
            raise ClusterError(f"SSH: the settings for host {host!r} are wrong: {done.stderr.strip()}")
        settings = dict(line.split(" ", 1) for line in done.stdout.splitlines() if " " in line)
        if any(settings.get(name, "none") != "none" for name in ("proxyjump", "proxycommand")):
            return None
        return settings.get("hostname", host.rpartition("@")[2])


def remote_script(launcher: SSH, job: WorkerJob, worker: int) -> str:
    """What the host's shell, which may be any POSIX shell, is to run: text, so that a test can read it.

    Secrets come on the first lines of the standard input: here are only their names.
    """
    lines = [f"echo {shlex.quote(BEGUN)} >&2", *(f"IFS= read -r {name}" for name in sorted(job.environment))]
    for command in launcher.setup:
        note = shlex.quote(f"envfleet: this setup command failed: {command}")
        # The standard input is the worker's: no other command may take from it.
        lines.append(f"{{ {command}\n}} </dev/null || {{ echo {note} >&2; exit {SETUP_FAILED}; }}")
    if launcher.cpus_per_worker is not None:
        lines.append(f"export {NUM_CPUS_VARIABLE}={launcher.cpus_per_worker}")
        lines += [f'export {name}="${{{name}:-{launcher.cpus_per_worker}}}"' for name in THREAD_COUNT_VARIABLES]
    lines += [f"export {name}={shlex.quote(value)}" for name, value in (launcher.env or {}).items()]
    lines += [f"export {name}" for name in sorted(job.environment)]
    lines.append(f"{_program(launcher.python)} {shlex.join((*job.arguments(worker), '--ends-with-stdin'))}")
    lines.append("exit $?")  # the shell stays: ssh would not tell by which signal a worker was killed
    return "\n".join(lines)


def _program(python: str | None) -> str:
    """As a word for the shell, which finds the home folder."""
    if python is not None and python.startswith("~/"):
        return f'"$HOME"/{shlex.quote(python[2:])}'
    return shlex.quote(python or DEFAULT_PYTHON)


class SshJob:
    """A Job: one ssh for each worker. What it ended with is told in the words of ssh, or of the host."""

    def __init__(self, launcher: SSH, job: WorkerJob) -> None:
        """Start them."""
        self._launcher = launcher
        self._job = job
        self._log_dir = job.run_dir if launcher.log_dir is None else Path(launcher.log_dir)
        self._log_starts: dict[int, int] = {}  # where the present process of a worker began to write
        self._ends: dict[int, WorkerStatus] = {}
        self._again_s: dict[int, float] = {}
        self._num_workers = job.num_workers
        self._processes = Processes(job.num_workers, self._log_dir, self._command_of, f"SSH({launcher.hosts!r})")

    @property
    def revives(self) -> bool:
        """See Job."""
        return False

    def status(self, worker: int) -> WorkerStatus:
        """See Job."""
        status = self._processes.status(worker)
        host = self._launcher.host_of(worker)
        if status.state is WorkerState.RUNNING:
            return WorkerStatus(WorkerState.RUNNING, f"on {host}")
        if worker not in self._ends:
            self._again_s[worker] = time.monotonic() + random.uniform(*AGAIN_S)
            self._ends[worker] = end_of(status, host, self._own_log(worker), self._launcher.python or DEFAULT_PYTHON)
        end = self._ends[worker]
        if end.state is not WorkerState.PENDING:
            return end
        if worker >= self._num_workers:
            return WorkerStatus(WorkerState.ENDED, end.detail)
        if time.monotonic() > self._again_s[worker]:
            self._processes.restart(worker)
        return end

    def log(self, worker: int, max_bytes: int = 4000) -> str:
        """See Job."""
        return self._processes.log(worker, max_bytes)

    def log_place(self, worker: int) -> str:
        """See Job."""
        return self._processes.log_place(worker)

    def restart(self, worker: int) -> None:
        """See Job."""
        self._processes.restart(worker)

    def resize(self, num_workers: int) -> None:
        """See Job."""
        self._processes.resize(num_workers)
        self._num_workers = num_workers

    def cancel(self, grace_s: float) -> None:
        """See Job. When an ssh ends by itself, its worker has ended; it is best to wait for that, a little."""
        deadline_s = time.monotonic() + min(grace_s, LEAVE_S)
        while self._has_running() and time.monotonic() < deadline_s:
            time.sleep(0.01)
        self._processes.cancel(END_S)

    def _has_running(self) -> bool:
        return any(self._processes.status(worker).state is WorkerState.RUNNING for worker in self._log_starts)

    def _command_of(self, worker: int) -> Command:
        log = self._log_dir / f"worker-{worker}.log"
        self._log_starts[worker] = log.stat().st_size if log.exists() else 0
        self._ends.pop(worker, None)
        argv = (
            *self._launcher.ssh_argv(self._launcher.host_of(worker)),
            remote_script(self._launcher, self._job, worker),
        )
        secrets = "".join(f"{self._job.environment[name]}\n" for name in sorted(self._job.environment))
        return Command(argv, dict(os.environ), secrets.encode())

    def _own_log(self, worker: int) -> str:
        """Beginning and end of what its present process has written."""
        start = self._log_starts.get(worker, 0)
        try:
            with open(self._processes.log_place(worker), "rb") as log:
                log.seek(start)
                begin = log.read(LOG_BEGIN_BYTES)
                end_start = max(start + len(begin), log.seek(0, os.SEEK_END) - LOG_END_BYTES)
                log.seek(end_start)
                gap = b"\n" if end_start > start + len(begin) else b""
                return (begin + gap + log.read(LOG_END_BYTES)).decode(errors="replace")
        except OSError:
            return ""


def end_of(status: WorkerStatus, host: str, log: str, python: str) -> WorkerStatus:
    """What is to be said of an ssh that has ended, `log` being beginning and end of what it has written. Pure."""
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    has_begun = any(line.endswith(BEGUN) for line in lines)
    lines = [line for line in lines if line != BEGUN]
    last = lines[-1] if lines else "it has said nothing"
    ended = re.fullmatch(r"its process ended with exit code (\d+)", status.detail)
    if ended is None:
        return WorkerStatus(status.state, f"on {host}: of its ssh: {status.detail}")
    code = int(ended.group(1))
    if code == SSH_FAILED and has_begun:
        what = f"ssh has lost it, or its process ended with exit code {code}"
        text = f"on {host}: {what}; {f'the last that it said: {last}' if lines else last}"
    elif code == SSH_FAILED:
        return _failure_of_ssh(host, lines[-5:], last)
    elif code in NOT_FOUND:
        text = f"{host} has no program {python!r}: {last} - see python= and setup="
    elif code == SETUP_FAILED:
        text = f"on {host}: {last}"
    elif code > SIGNALLED and code - SIGNALLED in set(signal.Signals):
        text = f"on {host}: its process was killed by {signal.Signals(code - SIGNALLED).name}"
    elif re.search(r"No module named '?envfleet", last):
        text = f"on {host} EnvFleet is not installed for {python!r}: {last} - see python= and setup="
    else:
        text = f"on {host}: {status.detail}"
    return WorkerStatus(WorkerState.ENDED, text)


def _failure_of_ssh(host: str, lines: Sequence[str], last: str) -> WorkerStatus:
    for pattern, advice in _HOPELESS.items():
        for line in reversed(lines):
            if re.match(pattern, line):
                return WorkerStatus(WorkerState.REFUSED, f"ssh cannot use host {host}: {line} - {advice}")
    if any(_BUSY.search(line) for line in lines):
        return WorkerStatus(WorkerState.PENDING, f"host {host} takes no more connections now: {last}")
    return WorkerStatus(WorkerState.ENDED, f"ssh has no connection to {host}: {last}", is_unreachable=True)


def _texts(name: str, given: Sequence[str]) -> tuple[str, ...]:
    if isinstance(given, str) or not all(isinstance(each, str) and each for each in given):
        raise UsageError(f"{name} must be a list of texts; got {given!r}")
    return tuple(given)


def _require_ssh() -> None:
    if shutil.which("ssh") is None:
        raise UsageError("SSH needs the program ssh on this machine, and it is not there: install openssh-client")
