"""is_loopback: does a host name lead to this machine only? An address that other machines cannot use."""

from __future__ import annotations

import ipaddress
import socket


def is_loopback(host: str) -> bool:
    """Return whether other machines cannot reach `host`: all its addresses are loopback addresses, or it has none.

    A machine's own name often is such a name: most systems' hosts file maps it to 127.0.0.1 or 127.0.1.1.

    Args:
        host: A host name or an IP address.
    """
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return True
    return all(ipaddress.ip_address(str(each[4][0]).partition("%")[0]).is_loopback for each in found)
