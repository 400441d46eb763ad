"""SSH: workers are processes of other machines; this machine runs one `ssh` for each."""

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
from envfleet.launchers.launcher import WorkerJob, WorkerState, WorkerStatus
from envfleet.launchers.loopback import is_loopback
from envfleet.launchers.owned_job import OwnedJob
from envfleet.launchers.processes import Command, Processes

CONNECT_TIMEOUT_S = 10
ALIVE_S, NUM_ALIVE = 5, 3  # ssh ends when its connection has been dead for 5 s x 3
DEFAULT_PYTHON = "python3"
SSH_FAILED = 255  # ssh's own exit code; all others are those of the command
SIGNALLED = 128  # exit codes of the shell: this plus the number of the signal that killed the command
SETUP_FAILED = 78  # exit code of our script
NOT_FOUND = (126, 127)  # exit codes of the shell: no such program, or it cannot be executed
LOG_END_BYTES = 4000
LOG_BEGIN_BYTES = 16000  # a host may print a long greeting
BEGUN = "envfleet: ssh has come through"  # our script prints this first; what ssh itself prints comes before it
RESOLVE_S = 10.0  # the most that `ssh -G` may take
LEAVE_S = 1.0  # for workers that were told to leave; the others leave when their ssh has ended
END_S = 1.0  # between SIGTERM and SIGKILL of an ssh
AGAIN_S = (0.5, 2.0)  # a busy host is asked again after a random time in this range: not by all workers at once

# They follow the user's ssh_options, and ssh uses the first value that it sees; ~/.ssh/config comes last.
OPTIONS = (
    "BatchMode=yes",  # no person is there to type a password
    f"ConnectTimeout={CONNECT_TIMEOUT_S}",
    f"ServerAliveInterval={ALIVE_S}",
    f"ServerAliveCountMax={NUM_ALIVE}",
    "ClearAllForwardings=yes",  # only the first ssh of several could open the user's forwarded ports
    "ControlMaster=no",  # an existing shared connection is used, but none is left behind
)

# Messages of ssh after which trying again does not help, and what the user can do.
_HOPELESS = {
    r"Warning: Identity file .* not accessible": "see identity_file=",
    r"\S+: Permission denied \(": "ssh must get in without a password: put your public key on the host (ssh-copy-id)",
    r"Received disconnect\b.*: Too many authentication failures": "name the right key with identity_file=",
    r"Host key verification failed": "connect once by hand, and look at the host's key",
    r"ssh: .*: Name or service not known": "no host has this name",
    r"\S.*: line \d+: Bad configuration option": "see ssh_options= and ~/.ssh/config",
}
# sshd limits the number of connections that are being set up (MaxStartups): a host of many workers is asked again.
_BUSY = re.compile(r"^(kex_exchange_identification|ssh_exchange_identification|banner exchange): |MaxStartups")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


@dataclass(frozen=True, slots=True)
class SSH:
    """Start workers with the system's `ssh`: worker w runs on `hosts[w % len(hosts)]`.

    A worker ends when its ssh ends, and all ssh end with the head. The keys of the run travel through ssh, encrypted.

    Args:
        hosts: The hosts, each as "host", "user@host" or a name from ~/.ssh/config.
        python: The Python interpreter on the hosts, such as "~/venv/bin/python". None: "python3".
        cpus_per_worker: The number of CPUs that a worker uses. None: all CPUs of its host.
        user: The user to log in as, for hosts without "user@". None: as ~/.ssh/config says.
        port: The port of the hosts' sshd. None: as ~/.ssh/config says.
        identity_file: The file with the private key, such as "~/.ssh/id_ed25519"; no other key is tried. None: as
            ~/.ssh/config says.
        ssh_options: Options as in ~/.ssh/config, such as "ProxyJump=gate".
        setup: Commands that the host's shell runs before the worker, such as "cd project" or ". venv/bin/activate".
        env: Further environment variables of the workers. No secrets: they stand on a command line.
        log_dir: The folder on this machine for the files `worker-0.log`, `worker-1.log`, ... None: a temporary folder
            that is removed when the run ends.
        head_address: Where workers find the head: "host", "host:port" or "tcp://host:port". None: this machine's
            address that is nearest to the hosts.
        queue_timeout_s: The most seconds to wait for a host that takes no more connections. None: no limit.
    """

    hosts: Sequence[str]
    _: KW_ONLY
    python: str | None = None
    cpus_per_worker: int | None = None
    user: str | None = None
    port: int | None = None
    identity_file: str | os.PathLike[str] | None = None
    ssh_options: Sequence[str] = ()
    setup: Sequence[str] = ()
    env: Mapping[str, str] | None = None
    log_dir: str | os.PathLike[str] | None = None
    head_address: str | None = None
    queue_timeout_s: float | None = 60.0

    is_on_this_host = False

    def __post_init__(self) -> None:
        """Raise UsageError if a setting is wrong, before another machine does."""
        for name in ("hosts", "ssh_options", "setup"):
            object.__setattr__(self, name, _texts(name, getattr(self, name)))
        if not self.hosts:
            raise UsageError('hosts must name at least one host: SSH(["node1", "node2"])')
        for host in self.hosts:
            if host.startswith("-") or re.search(r"[\s,]", host):
                raise UsageError(f'a host must be one "host" or "user@host"; got {host!r}')
        for name, most in (("cpus_per_worker", 1_000_000), ("port", 65535)):
            if getattr(self, name) is not None:
                object.__setattr__(self, name, whole_number(name, getattr(self, name), at_most=most))
        for variable, value in (self.env or {}).items():
            if not _VARIABLE.fullmatch(variable) or not isinstance(value, str):
                raise UsageError(f"env must map names of variables to text; got {variable!r}: {value!r}")
        positive_or_none("queue_timeout_s", self.queue_timeout_s)

    def host_of_workers(self) -> str | None:
        """Return the first host that is not this machine, by its name or address in ~/.ssh/config.

        Returns:
            The host; None if it is reached through another one (ProxyJump, ProxyCommand).

        Raises:
            UsageError: This machine has no ssh.
            ClusterError: ssh does not understand its settings.
        """
        first = self._real_name(self.hosts[0])
        others = (self._real_name(host) for host in dict.fromkeys(self.hosts[1:]))
        names = itertools.chain([first], others)
        return next((name for name in names if name is None or not is_loopback(name)), first)

    def launch(self, job: WorkerJob) -> OwnedJob:
        """Start an ssh for each worker.

        Args:
            job: What to start.

        Returns:
            The workers.

        Raises:
            UsageError: This machine has no ssh, or log_dir cannot be created.
        """
        _require_ssh()
        return OwnedJob(SshJob(self, job))

    def host_of(self, worker: int) -> str:
        """Return the host of a worker.

        Args:
            worker: The worker's number.

        Returns:
            The host, as `hosts` names it.
        """
        return self.hosts[worker % len(self.hosts)]

    def ssh_argv(self, host: str) -> tuple[str, ...]:
        """Return the ssh command line that reaches a host.

        Args:
            host: The host, as `hosts` names it.

        Returns:
            The words of the command line, without the command to run there.
        """
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
    """Return the script that the host's shell runs for a worker. Any POSIX shell can run it.

    It reads the run's secrets from the first lines of its standard input; the text has only the names of the variables.

    Args:
        launcher: The user's settings.
        job: What to start.
        worker: The number of the worker.
    """
    lines = [f"echo {shlex.quote(BEGUN)} >&2", *(f"IFS= read -r {name}" for name in sorted(job.environment))]
    for command in launcher.setup:
        note = shlex.quote(f"envfleet: this setup command failed: {command}")
        # Setup commands must not read from the standard input: it belongs to the worker.
        lines.append(f"{{ {command}\n}} </dev/null || {{ echo {note} >&2; exit {SETUP_FAILED}; }}")
    if launcher.cpus_per_worker is not None:
        lines.append(f"export {NUM_CPUS_VARIABLE}={launcher.cpus_per_worker}")
        lines += [f'export {name}="${{{name}:-{launcher.cpus_per_worker}}}"' for name in THREAD_COUNT_VARIABLES]
    lines += [f"export {name}={shlex.quote(value)}" for name, value in (launcher.env or {}).items()]
    lines += [f"export {name}" for name in sorted(job.environment)]
    lines.append(f"{_program(launcher.python)} {shlex.join((*job.arguments(worker), '--ends-with-stdin'))}")
    lines.append("exit $?")  # no exec: the shell reports a signal as an exit code, which ssh would not
    return "\n".join(lines)


def _program(python: str | None) -> str:
    """Quote the interpreter for the shell, which expands "~/"."""
    if python is not None and python.startswith("~/"):
        return f'"$HOME"/{shlex.quote(python[2:])}'
    return shlex.quote(python or DEFAULT_PYTHON)


class SshJob:
    """A Job of one ssh for each worker. Its status repeats what ssh, or the host, has printed."""

    def __init__(self, launcher: SSH, job: WorkerJob) -> None:
        self._launcher = launcher
        self._job = job
        self._log_dir = job.run_dir if launcher.log_dir is None else Path(launcher.log_dir)
        self._log_starts: dict[int, int] = {}  # offset in the log at which a worker's present process began
        self._ends: dict[int, WorkerStatus] = {}
        self._again_s: dict[int, float] = {}
        self._num_workers = job.num_workers
        self._processes = Processes(job.num_workers, self._log_dir, self._command_of, f"SSH({launcher.hosts!r})")

    @property
    def revives(self) -> bool:
        """Whether the engine restarts failed workers by itself."""
        return False

    def status(self, worker: int) -> WorkerStatus:
        """Return the state of one worker."""
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
        """Return the end of what a worker has printed."""
        return self._processes.log(worker, max_bytes)

    def log_place(self, worker: int) -> str:
        """Return where the whole log of a worker is."""
        return self._processes.log_place(worker)

    def restart(self, worker: int) -> None:
        """End what is left of a worker and start it again."""
        self._processes.restart(worker)

    def resize(self, num_workers: int) -> None:
        """Start workers up to this number, or end those from this number on."""
        self._processes.resize(num_workers)
        self._num_workers = num_workers

    def cancel(self, grace_s: float) -> None:
        """See Job. Waits up to LEAVE_S for workers that leave by themselves: their ssh ends with them."""
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
        """Return the beginning and the end of what the present process of a worker has printed."""
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
    """Return the status of a worker whose ssh has ended. Pure.

    Args:
        status: How the ssh process ended.
        host: The worker's host.
        log: The beginning and the end of what ssh and the worker have printed.
        python: The interpreter that was to run.
    """
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    has_begun = any(line.endswith(BEGUN) for line in lines)
    lines = [line for line in lines if line != BEGUN]
    last = lines[-1] if lines else "it has printed nothing"
    ended = re.fullmatch(r"its process ended with exit code (\d+)", status.detail)
    if ended is None:
        return WorkerStatus(status.state, f"on {host}: ssh: {status.detail}")
    code = int(ended.group(1))
    if code == SSH_FAILED and has_begun:
        what = f"ssh lost the connection, or its process ended with exit code {code}"
        text = f"on {host}: {what}; {f'its last line: {last}' if lines else last}"
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
        raise UsageError(f"{name} must be a list of strings; got {given!r}")
    return tuple(given)


def _require_ssh() -> None:
    if shutil.which("ssh") is None:
        raise UsageError("SSH needs the program ssh, which this machine does not have: install openssh-client")
