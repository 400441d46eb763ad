"""Addressing: where the head listens, and where workers find it. The routing table is asked, not the host's name."""

from __future__ import annotations

import contextlib
import ipaddress
import logging
import socket
from pathlib import Path

from envfleet.contract.errors import ClusterError, UsageError
from envfleet.launchers.launcher import Launcher

logger = logging.getLogger("envfleet.cluster")

SOMEWHERE = "192.0.2.1"  # an address that belongs to nobody: the way to it is the default route
ANY_PORT = 9  # nothing is sent there
EVERYWHERE = ("0.0.0.0", "[::]", "*")  # all interfaces: a head can listen there, but nobody can find it there


def listening_address(address: str | None, head_address: str | None, launcher: Launcher, folder: Path) -> str:
    """Where the head binds: as the user says; in a private folder if workers are here; else towards the workers."""
    is_private = head_address is None or head_address.startswith("ipc://")
    if address == "ipc" or (address is None and is_private and launcher.is_on_this_host):
        if not launcher.is_on_this_host:
            raise UsageError("address='ipc' is for workers on this machine; the launcher's are on others")
        return f"ipc://{folder}/head"
    if address is not None:
        if not address.startswith("tcp://"):
            raise UsageError(f"address must be 'ipc' or 'tcp://host:port'; got {address!r}")
        host, port = split(address, "address")
        return f"tcp://{host}:{port or 0}"
    if head_address is not None:
        host, port = split(head_address, "head_address")
        if host in EVERYWHERE:
            raise UsageError(f"head_address is where workers find the head; nobody can find {host!r}: say address=")
        # What is no address of this machine is a name or a gateway for it: any of its own may be meant.
        everywhere = "[::]" if host.startswith("[") else "0.0.0.0"
        return f"tcp://{host if _is_own(host) else everywhere}:{port or 0}"
    return f"tcp://{_bracketed(address_towards(launcher.host_of_workers()))}:0"


def advertised_address(head_address: str | None, bound: str, launcher: Launcher) -> str:
    """Where workers find a head that is bound."""
    if bound.startswith("ipc://"):
        return head_address or bound
    host, port = split(bound, "address")
    if head_address is not None:
        if "://" in head_address and not head_address.startswith("tcp://"):
            return head_address
        said_host, said_port = split(head_address, "head_address")
        return f"tcp://{said_host}:{said_port or port}"
    if host in EVERYWHERE:
        host = _bracketed(address_towards(launcher.host_of_workers()))
    return f"tcp://{host}:{port}"


def address_towards(host: str | None) -> str:
    """The address of this machine on the way to a host. None: to anywhere. Nothing is sent."""
    try:
        found = socket.getaddrinfo(host or SOMEWHERE, ANY_PORT, type=socket.SOCK_DGRAM)
    except OSError as error:
        raise ClusterError(
            f"the address of {host!r} cannot be found: {error}; give address= or head_address="
        ) from error
    for family, kind, protocol, _, target in sorted(found, key=lambda each: each[0] is not socket.AF_INET):
        with socket.socket(family, kind, protocol) as probe, contextlib.suppress(OSError):
            probe.connect(target)
            return str(probe.getsockname()[0])
    if host is None:
        logger.warning(
            "this machine has no default route: workers can find the head from this machine only (127.0.0.1)"
        )
        return "127.0.0.1"
    raise ClusterError(f"there is no route to {host!r} from here; give address= or head_address=")


def split(address: str, name: str) -> tuple[str, int | None]:
    """Host and port of "host", "host:port" or "tcp://host:port". An address of version 6 stands in brackets."""
    text = address.removeprefix("tcp://")
    host, colon, port = text.rpartition(":")
    if not colon or port.endswith("]"):
        host, port = text, ""
    if not host or "/" in host or (port and not (port.isdecimal() and int(port) < 65536)):
        raise UsageError(f"{name} must be 'tcp://host:port', with a port below 65536; got {address!r}")
    if host.count(":") and not (host.startswith("[") and host.endswith("]")):
        raise UsageError(f"{name}: an address of IP version 6 stands in brackets, [::1]:0; got {address!r}")
    return host, int(port) if port else None


def _is_own(host: str) -> bool:
    """Is this an address, not a name, of one of this machine's interfaces?"""
    host = host.strip("[]")
    try:
        version = ipaddress.ip_address(host).version
    except ValueError:
        return False
    with socket.socket(socket.AF_INET if version == 4 else socket.AF_INET6, socket.SOCK_DGRAM) as probe:
        try:
            probe.bind((host, 0))
        except OSError:
            return False
    return True


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host
