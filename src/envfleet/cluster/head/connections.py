"""Connections: which connection of the head's socket belongs to which process of a worker. Pure.

A worker that connects again comes on a new connection. Every message brings the name of its process, so the head
answers on the newest connection on which it heard that name. What an old connection still brings is received as well.
"""

from __future__ import annotations

import enum

MOST_CONNECTIONS = 10_000  # one that is forgotten is known again with its next message


class Delivery(enum.Enum):
    """What became of a message to a process."""

    SENT = enum.auto()
    NOT_NOW = enum.auto()  # the connection is full
    CLOSED = enum.auto()  # there is no open connection


class Connections:
    """Names of connections, as ZeroMQ makes them up, and of processes. Remembers the `most` newest connections."""

    def __init__(self, most: int = MOST_CONNECTIONS) -> None:
        self._most = most
        self._process_of: dict[bytes, bytes] = {}  # by connection, oldest first
        self._newest: dict[bytes, bytes] = {}  # connection, by process

    def heard(self, connection: bytes, process: bytes) -> bool:
        """A message came. True: the process is answered on this connection from now on, and was not before.

        A connection that was replaced by a newer one counts again only if that one is gone.
        """
        if process in self._newest and self._process_of.get(connection) == process:
            return False
        if len(self._process_of) >= self._most:
            self.closed(next(iter(self._process_of)))
        self.closed(connection)  # under another name
        self._process_of[connection] = process
        self._newest[process] = connection
        return True

    def newest(self, process: bytes) -> bytes | None:
        """The connection on which a process is answered; None: it has no open connection that is known."""
        return self._newest.get(process)

    def closed(self, connection: bytes) -> None:
        """Forget a connection that is closed."""
        process = self._process_of.pop(connection, None)
        if process is not None and self._newest.get(process) == connection:
            del self._newest[process]
