"""Hosts: what a name stands for, as this machine sees it."""

from __future__ import annotations

import ipaddress
import socket


def is_loopback(host: str) -> bool:
    """Whether a name or an address leads to this machine by a way that no other has; or nowhere: of no more use.

    A machine's own name often does: the hosts file of most systems has it at 127.0.0.1 or 127.0.1.1.
    """
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return True
    return all(ipaddress.ip_address(str(each[4][0]).partition("%")[0]).is_loopback for each in found)
