"""Where the head listens, and where workers find it. The routing table is the kernel's own."""

import contextlib
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from envfleet.cluster.run.addressing import address_towards, advertised_address, listening_address, split
from envfleet.contract.errors import ClusterError, UsageError


class Somewhere:
    """A launcher whose workers are elsewhere."""

    is_on_this_host = False

    def __init__(self, host="127.0.0.1"):
        self._host = host

    def host_of_workers(self):
        return self._host


class Here(Somewhere):
    is_on_this_host = True


FOLDER = Path("/run/somewhere")


@pytest.mark.parametrize(
    ("address", "head_address", "launcher", "listens"),
    [
        (None, None, Here(), "ipc:///run/somewhere/head"),
        ("ipc", None, Here(), "ipc:///run/somewhere/head"),
        (None, "ipc:///run/wire", Here(), "ipc:///run/somewhere/head"),
        ("tcp://127.0.0.1", None, Here(), "tcp://127.0.0.1:0"),
        (None, None, Somewhere(), "tcp://127.0.0.1:0"),
        (None, None, Somewhere("::1"), "tcp://[::1]:0"),
        ("tcp://0.0.0.0:5555", None, Somewhere(), "tcp://0.0.0.0:5555"),
        (None, "127.0.0.1:5555", Somewhere(), "tcp://127.0.0.1:5555"),
        (None, "tcp://127.0.0.1", Somewhere(), "tcp://127.0.0.1:0"),
        (None, "203.0.113.9:5555", Somewhere(), "tcp://0.0.0.0:5555"),  # of a gateway, not of this machine
        (None, "envfleet-head:5555", Somewhere(), "tcp://0.0.0.0:5555"),
        (None, "[2001:db8::7]:5555", Somewhere(), "tcp://[::]:5555"),
        ("tcp://127.0.0.1:7", "203.0.113.9:5555", Somewhere(), "tcp://127.0.0.1:7"),
    ],
)
def test_where_the_head_listens(address, head_address, launcher, listens):
    if "::1" in listens and not has_version_6():
        pytest.skip("this machine has no IP version 6")
    assert listening_address(address, head_address, launcher, FOLDER) == listens


@pytest.mark.parametrize(
    ("head_address", "bound", "found"),
    [
        (None, "ipc:///run/somewhere/head", "ipc:///run/somewhere/head"),
        ("ipc:///run/wire", "ipc:///run/somewhere/head", "ipc:///run/wire"),
        (None, "tcp://10.0.0.1:4711", "tcp://10.0.0.1:4711"),
        (None, "tcp://0.0.0.0:4711", "tcp://127.0.0.1:4711"),
        ("gateway", "tcp://0.0.0.0:4711", "tcp://gateway:4711"),
        ("gateway:80", "tcp://0.0.0.0:4711", "tcp://gateway:80"),
        ("tcp://[fe80::1]:80", "tcp://0.0.0.0:4711", "tcp://[fe80::1]:80"),
    ],
)
def test_where_workers_find_it(head_address, bound, found):
    assert advertised_address(head_address, bound, Somewhere()) == found


@pytest.mark.parametrize("address", ["tcp://:5", "tcp://a:b", "tcp://a:70000", "a/b:5", "::1", ""])
def test_addresses_that_are_none(address):
    with pytest.raises(UsageError, match="address"):
        split(address, "address")


@pytest.mark.parametrize("head_address", ["0.0.0.0", "tcp://[::]:5555"])
def test_nobody_finds_a_head_everywhere(head_address):
    with pytest.raises(UsageError, match="nobody can find"):
        listening_address(None, head_address, Somewhere(), FOLDER)


def test_ipc_does_not_leave_this_machine():
    with pytest.raises(UsageError, match="other"):
        listening_address("ipc", None, Somewhere(), FOLDER)


def test_a_host_that_nobody_knows():
    with pytest.raises(ClusterError, match=r"no-such-host\.invalid.*head_address"):
        address_towards("no-such-host.invalid")


def test_a_machine_without_a_network_has_itself():
    assert socket.inet_aton(address_towards(None))


@pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("ip") is None, reason="needs root and iproute2: apt-get install iproute2"
)
def test_each_network_is_met_at_its_own_address():
    """Two network namespaces behind two interfaces of a third, in which the routing table is asked."""
    with contextlib.ExitStack() as stack:
        middle = f"ef-m-{os.getpid()}"
        _ip(stack, middle)
        for index, name in enumerate(("a", "b")):
            other = f"ef-{name}-{os.getpid()}"
            _ip(stack, other)
            run("ip", "-n", middle, "link", "add", f"to{name}", "type", "veth", "peer", "name", "eth0", "netns", other)
            run("ip", "-n", middle, "addr", "add", f"10.199.{index}.1/24", "dev", f"to{name}")
            run("ip", "-n", other, "addr", "add", f"10.199.{index}.2/24", "dev", "eth0")
            run("ip", "-n", middle, "link", "set", f"to{name}", "up")
            run("ip", "-n", other, "link", "set", "eth0", "up")
        script = (
            "from envfleet.cluster.run.addressing import address_towards as to; "
            "print(to('10.199.0.2'), to('10.199.1.2'), to(None))"
        )
        said = run("ip", "netns", "exec", middle, sys.executable, "-c", script).split()
        assert said == ["10.199.0.1", "10.199.1.1", "127.0.0.1"]  # there is no default route


def _ip(stack, name):
    run("ip", "netns", "add", name)
    stack.callback(run, "ip", "netns", "del", name)


def run(*command):
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=30.0).stdout


def has_version_6():
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET6, socket.SOCK_DGRAM) as probe:
        probe.bind(("::1", 0))
        return True
    return False
