"""Workers in another network: the head finds its address by the routing table, and listens nowhere else."""

import contextlib
import os
import shutil
import socket
import struct
import subprocess
from pathlib import Path

import pytest

from envfleet import ClusterEnv, FunctionPolicy
from envfleet.launchers.ssh import SSH
from tests.launchers.ssh.sshd import run, running_sshd
from tests.support.waiting import is_running, wait_until

AGENT = FunctionPolicy(lambda obs: (obs[:, 0] > 0).astype(int))
SUBNET = f"10.203.{os.getpid() % 250}"
HEAD, HOST = f"{SUBNET}.1", f"{SUBNET}.2"


@contextlib.contextmanager
def network():
    """A network namespace with one cable to it. Its name is given."""
    if os.getuid() or shutil.which("ip") is None:
        pytest.skip("network namespaces need root, and ip: apt-get install iproute2")
    name = f"ef{os.getpid()}"
    added = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True, timeout=20)
    if added.returncode:
        pytest.skip(f"no network namespaces here: {added.stderr.strip()}")
    try:
        run("ip", "link", "add", f"{name}h", "type", "veth", "peer", "name", f"{name}w", "netns", name)
        try:
            run("ip", "addr", "add", f"{HEAD}/30", "dev", f"{name}h")
            run("ip", "link", "set", f"{name}h", "up")
            run("ip", "-n", name, "addr", "add", f"{HOST}/30", "dev", f"{name}w")
            run("ip", "-n", name, "link", "set", f"{name}w", "up")
            run("ip", "-n", name, "link", "set", "lo", "up")
            yield name
        finally:
            run("ip", "link", "del", f"{name}h")
    finally:
        run("ip", "netns", "del", name)


@pytest.fixture
def other_network(tmp_path, monkeypatch):
    """An sshd in another network; the name of that."""
    with network() as name, running_sshd(tmp_path, address=HOST, prefix=("ip", "netns", "exec", name)) as server:
        monkeypatch.setenv("PATH", f"{server.folder}/bin:{os.environ['PATH']}")
        yield name


def listening():
    """The addresses at which this process listens."""
    inodes = set()
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            inodes.add(str(entry.readlink()).removeprefix("socket:[").removesuffix("]"))
    found = set()
    for path in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in Path(path).read_text().splitlines()[1:]:
            words = line.split()
            if words[3] == "0A" and words[9] in inodes:
                address = words[1].split(":")[0]
                found.add(socket.inet_ntoa(struct.pack("=I", int(address, 16))) if len(address) == 8 else address)
    return found


def test_the_head_listens_where_workers_reach_it_and_nowhere_else(other_network):
    with ClusterEnv("CartPole-v1", 2, 1, launcher=SSH(["node1"]), backend="serial") as cluster:
        for worker in cluster.stats().workers:
            assert Path(f"/proc/{worker.pid}/ns/net").readlink() != Path("/proc/self/ns/net").readlink()
        assert listening() == {HEAD}
        assert cluster.rollout(AGENT, 4).num_steps == 4


def test_the_address_can_be_given(other_network):
    launcher = SSH(["node1"], head_address=HEAD)
    with ClusterEnv("CartPole-v1", 1, 1, launcher=launcher, backend="serial"):
        assert listening() == {HEAD}


def test_the_cable_is_cut_and_mended(other_network):
    """ssh sees a dead link by itself; the worker does, too, and leaves."""
    options = ["ServerAliveInterval=1", "ServerAliveCountMax=1", "ConnectTimeout=1"]
    cable = ("ip", "-n", other_network, "link", "set", f"{other_network}w")
    launcher = SSH(["node1"], ssh_options=options)
    with ClusterEnv("CartPole-v1", 1, 1, launcher=launcher, backend="serial", timing={"silence_s": 2.0}) as cluster:
        old = cluster.stats().workers[0].pid
        run(*cable, "down")
        wait_until(
            lambda: "ssh has no connection to node1" in cluster.stats().workers[0].problem, "the link is dead", 40
        )
        wait_until(lambda: not is_running(old), "the worker that nobody can reach has left", 40)
        run(*cable, "up")
        wait_until(lambda: cluster.stats().workers[0].stage == "present", "a worker is there again", 40)
        assert cluster.stats().workers[0].pid != old
        assert cluster.rollout(AGENT, 4).num_steps == 4
