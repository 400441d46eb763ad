"""A real Slurm on this machine: munged, slurmctld and four slurmd, for the tests; all of it is ended by its pid."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from tests.support.waiting import is_running, wait_until

NUM_NODES = 4
CPUS_PER_NODE = 4  # that Slurm believes in
PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "ip", "nsenter", "unshare")
HOW_TO_ENABLE = "as root: apt-get install --no-install-recommends slurmctld slurmd slurm-client munge iproute2"


def why_not() -> str | None:
    """What a real Slurm lacks here."""
    missing = [name for name in PROGRAMS if shutil.which(name) is None]
    if os.getuid() != 0 or missing:
        lack = f"{', '.join(missing)} not installed" if missing else "not root"
        return f"no real Slurm here ({lack}); to enable, {HOW_TO_ENABLE}"
    return None


class SlurmCluster:
    """Its daemons and, if nodes have networks of their own, its namespaces.

    With `has_networks` each node is a network namespace with its own address and host name, on a bridge of this
    machine; otherwise all are on the loopback interface, each with its port.
    """

    def __init__(self, has_networks: bool, folder: Path | None = None) -> None:
        """`folder` is that of a cluster which is there already."""
        self.has_networks = has_networks
        self.folder = folder or Path(tempfile.mkdtemp(prefix="efs-"))
        self.nodes = [f"node{number}" for number in range(1, NUM_NODES + 1)]
        self._tag = self.folder.name[-6:]  # in the names of what does not lie in the folder
        self._bridge = f"efbr{self._tag}"
        self._network = _free_network() if has_networks else "127.0.0"
        self.head_host = f"{self._network}.1"
        self._port = _free_ports(NUM_NODES + 1)
        self._pids = {pid for file in self.folder.glob("*/*.pid") if (pid := _pid_in(file)) is not None}
        self.conf = self.folder / "slurm.conf"
        self.environment = {**os.environ, "SLURM_CONF": str(self.conf)}

    # -- up and down --

    @classmethod
    def end_forgotten(cls) -> None:
        """End clusters whose tests were killed, and could not do it themselves."""
        for file in Path(tempfile.gettempdir()).glob("efs-*/owner.pid"):
            owner = _pid_in(file)
            if owner is not None and not is_running(owner):
                cls(has_networks=True, folder=file.parent)._end_all()

    def start(self) -> None:
        for name in ("log", "run", "state", "spool", "munge"):
            (self.folder / name).mkdir(mode=0o700 if name == "state" else 0o755)
        self.folder.chmod(0o755)
        (self.folder / "owner.pid").write_text(str(os.getpid()))
        key = self.folder / "munge" / "key"
        key.write_bytes(secrets.token_bytes(128))
        key.chmod(0o400)
        self.conf.write_text(self._configuration())
        (self.folder / "cgroup.conf").write_text("ConstrainCores=no\n")  # slurmd wants one that is not empty
        gpus = "".join(f"Name=gpu Type=toy File=/dev/{file}\n" for file in ("null", "zero"))  # any device file will do
        (self.folder / "gres.conf").write_text(f"AutoDetect=off\n{gpus}")
        if self.has_networks:
            self._make_networks()
        munge = self.folder / "munge"
        files = {
            "key-file": "key",
            "socket": "socket",
            "pid-file": "munged.pid",
            "log-file": "log",
            "seed-file": "seed",
        }
        options = [f"--{option}={munge}/{name}" for option, name in files.items()]
        self._daemon(["munged", "--force", *options], munge / "munged.pid")
        self.start_controller()
        for node in self.nodes:
            self.start_node(node)
        wait_until(lambda: len(self.idle_nodes()) == NUM_NODES, f"all nodes are idle; see {self.folder}/log", 60.0)

    def start_controller(self) -> int:
        return self._daemon(["slurmctld", "-f", str(self.conf)], self.folder / "run" / "slurmctld.pid")

    def start_node(self, node: str) -> int:
        (self.folder / "spool" / node).mkdir(exist_ok=True)
        command = ["slurmd", "-N", node, "-f", str(self.conf)]
        if self.has_networks:
            # Not "ip netns exec", which mounts another /sys, in which slurmd misses its control groups.
            inside = ["nsenter", f"--net=/run/netns/{self._namespace(node)}", "unshare", "--uts"]
            command = [*inside, "sh", "-c", 'hostname "$1" && shift && exec "$@"', "sh", node, *command]
        return self._daemon(command, self.folder / "run" / f"slurmd.{node}.pid")

    def stop_controller(self, number: int = signal.SIGKILL) -> None:
        pid = _pid_in(self.folder / "run" / "slurmctld.pid")
        os.kill(pid, number)
        wait_until(lambda: not is_running(pid), "slurmctld has ended")
        self._pids.discard(pid)

    def stop(self) -> None:
        """Whatever has happened: nothing is left."""
        with contextlib.suppress(subprocess.SubprocessError, AssertionError):
            for node in self.nodes:
                self.heal(node)
            self.empty()
        self._end_all()

    def _end_all(self) -> None:
        own = {pid for pid in self._pids if self._is_own(pid)}
        munged = {pid for pid in own if "munged" in _command_line(pid)}
        for pids in (own - munged, munged):  # the others need munged
            _end(pids)
        _end(set(self._others()))  # slurmstepd and what it runs, if Slurm did not end them
        if self.has_networks:
            for node in self.nodes:
                subprocess.run(["ip", "link", "del", self._link(node)], capture_output=True)
                subprocess.run(["ip", "netns", "del", self._namespace(node)], capture_output=True)
            subprocess.run(["ip", "link", "del", self._bridge], capture_output=True)
        shutil.rmtree(self.folder, ignore_errors=True)

    def _daemon(self, command: list[str], pid_file: Path) -> int:
        """Start a daemon; it puts itself into the background. Returns its pid."""
        before = _pid_in(pid_file)
        with (self.folder / "log" / "start.log").open("ab") as log:
            subprocess.run(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd="/",
                env=self.environment,
                timeout=30.0,
                check=True,
                start_new_session=True,
            )
        wait_until(lambda: _pid_in(pid_file) not in (None, before), f"{command[0]} has written {pid_file}")
        pid = _pid_in(pid_file)
        self._pids.add(pid)
        return pid

    def _is_own(self, pid: int) -> bool:
        return is_running(pid) and str(self.folder) in _command_line(pid)

    def _others(self) -> list[int]:
        """Processes that were started by the daemons, as their environments tell."""
        mark = f"SLURM_CONF={self.conf}".encode()
        found = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit() and int(entry.name) != os.getpid():
                with contextlib.suppress(OSError):
                    if mark in (entry / "environ").read_bytes():
                        found.append(int(entry.name))
        return found

    # -- networks --

    def _namespace(self, node: str) -> str:
        return f"ef{self._tag}{node}"

    def _link(self, node: str) -> str:
        return f"ef{self._tag}v{node.removeprefix('node')}"

    def _make_networks(self) -> None:
        _ip("link", "add", self._bridge, "type", "bridge")
        _ip("addr", "add", f"{self.head_host}/24", "dev", self._bridge)
        _ip("link", "set", self._bridge, "up")
        for node in self.nodes:
            namespace, link = self._namespace(node), self._link(node)
            _ip("netns", "add", namespace)
            _ip("link", "add", link, "type", "veth", "peer", "name", "eth0", "netns", namespace)
            _ip("link", "set", link, "master", self._bridge, "up")
            _ip("-n", namespace, "addr", "add", f"{self.address(node)}/24", "dev", "eth0")
            _ip("-n", namespace, "link", "set", "eth0", "up")
            _ip("-n", namespace, "link", "set", "lo", "up")

    def address(self, node: str) -> str:
        return f"{self._network}.{10 + self.nodes.index(node)}" if self.has_networks else "127.0.0.1"

    def cut(self, node: str) -> None:
        """Nothing gets to the node or comes from it."""
        _ip("link", "set", self._link(node), "down")

    def heal(self, node: str) -> None:
        if self.has_networks:
            _ip("link", "set", self._link(node), "up")

    # -- what its users do --

    def run(self, *command: str, timeout_s: float = 30.0, check: bool = True) -> str:
        done = subprocess.run(
            command, capture_output=True, text=True, env=self.environment, timeout=timeout_s, start_new_session=True
        )
        assert not check or done.returncode == 0, f"{' '.join(command)}: {done.stdout}{done.stderr}"
        return done.stdout

    def queue(self, *options: str) -> list[str]:
        """Lines "12_3 RUNNING node2", of what has not ended."""
        return self.run("squeue", "-h", "-r", "-o", "%i %T %N", *options).splitlines()

    def idle_nodes(self) -> list[str]:
        lines = self.run("sinfo", "-h", "-N", "-p", "main", "-o", "%N %t", check=False).splitlines()
        return [line.split()[0] for line in lines if line.endswith(" idle")]

    def empty(self) -> None:
        """End all jobs; wake all nodes."""
        self.run("scancel", "--user=root", check=False)
        for node in self.nodes:
            self.run("scontrol", "update", f"NodeName={node}", "State=RESUME", check=False)
        wait_until(lambda: not self.run("squeue", "-h", check=False).strip(), "the queue is empty", 30.0)

    @contextlib.contextmanager
    def configured(self, line: str) -> Iterator[None]:
        """With one more line in its configuration, meanwhile."""
        before = self.conf.read_text()
        try:
            self.conf.write_text(f"{before}{line}\n")
            self.run("scontrol", "reconfigure")
            yield
        finally:
            self.conf.write_text(before)
            self.run("scontrol", "reconfigure")

    def _configuration(self) -> str:
        folder = self.folder
        host = socket.gethostname().partition(".")[0]
        if self.has_networks:
            nodes = "\n".join(
                f"NodeName={node} NodeHostname={node} NodeAddr={self.address(node)} Port={self._port + 1} "
                f"CPUs={CPUS_PER_NODE} RealMemory=4000 Gres=gpu:toy:2"
                for node in self.nodes
            )
            listening = ""
        else:
            nodes = (
                f"NodeName=node[1-{NUM_NODES}] NodeHostname={host} NodeAddr=127.0.0.1 "
                f"Port=[{self._port + 1}-{self._port + NUM_NODES}] CPUs={CPUS_PER_NODE} RealMemory=4000 Gres=gpu:toy:2"
            )
            listening = "CommunicationParameters=NoInAddrAny,NoCtldInAddrAny"
        return f"""
ClusterName=envfleet
SlurmctldHost={host}({self.head_host})
SlurmctldPort={self._port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
# A requeued job may not start again before cred_expire is over; less than 5 would be taken for the default, 120.
AuthInfo=socket={folder}/munge/socket,cred_expire=5
CredType=cred/munge
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
MpiDefault=none
SwitchType=switch/none
{listening}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool/%n
SlurmctldPidFile={folder}/run/slurmctld.pid
SlurmdPidFile={folder}/run/slurmd.%n.pid
SlurmctldLogFile={folder}/log/slurmctld.log
SlurmdLogFile={folder}/log/slurmd.%n.log
SchedulerType=sched/backfill
SchedulerParameters=sched_interval=1,bf_interval=1,batch_sched_delay=0,sched_min_interval=0
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU_Memory
DefMemPerCPU=100
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
KillWait=3
SlurmdTimeout=10
SlurmctldTimeout=10
InactiveLimit=0
MinJobAge=300
CompleteWait=0
JobRequeue=1
ReturnToService=1
MaxArraySize=1001
TCPTimeout=2
MessageTimeout=10
SlurmdParameters=config_overrides
GresTypes=gpu
{nodes}
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE DefaultTime=60 State=UP PriorityTier=10 PreemptMode=OFF
PartitionName=low Nodes=ALL MaxTime=INFINITE DefaultTime=60 State=UP PriorityTier=1 PreemptMode=REQUEUE
PartitionName=grace Nodes=ALL MaxTime=INFINITE DefaultTime=60 State=UP PriorityTier=1 PreemptMode=REQUEUE GraceTime=60
PartitionName=high Nodes=ALL MaxTime=INFINITE DefaultTime=60 State=UP PriorityTier=20 PreemptMode=OFF
"""


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, timeout=10.0)


def _free_network() -> str:
    """Three numbers of an address range that nobody uses here."""
    addresses = subprocess.run(["ip", "-o", "addr"], check=True, capture_output=True, text=True).stdout
    routes = subprocess.run(["ip", "route"], check=True, capture_output=True, text=True).stdout
    free = (f"10.83.{number}" for number in range(1, 255))
    return next(each for each in free if f"{each}." not in addresses + routes)


def _free_ports(number: int) -> int:
    """The first of so many ports in a row that are free, below those which the system hands out."""
    for first in range(17000 + secrets.randbelow(1000) * 10, 32000, 10):
        with contextlib.ExitStack() as stack, contextlib.suppress(OSError):
            for port in range(first, first + number):
                stack.enter_context(socket.socket()).bind(("127.0.0.1", port))
            return first
    raise RuntimeError("no free ports")


def _pid_in(file: Path) -> int | None:
    try:
        return int(file.read_text())
    except (FileNotFoundError, ValueError):
        return None


def _command_line(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return ""


def _end(pids: set[int]) -> None:
    """Politely, then not."""
    for number, patience_s in ((signal.SIGTERM, 15.0), (signal.SIGKILL, 5.0)):
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
        deadline_s = time.monotonic() + patience_s
        while any(map(is_running, pids)) and time.monotonic() < deadline_s:
            time.sleep(0.05)
        pids = {pid for pid in pids if is_running(pid)}
