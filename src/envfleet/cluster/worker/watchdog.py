"""Watchdog: a worker leaves when its head is gone, whatever it is doing at the time."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

import zmq  # noqa: TID253 - only the cluster's own processes come here

from envfleet.cluster.run.run_folder import remove_if_abandoned
from envfleet.cluster.wire.sockets import recv_event
from envfleet.contract.exits import WorkerExit

logger = logging.getLogger("envfleet.worker")

HEAD_GONE_S = 5.0  # after a connection has stayed closed for this long the head counts as gone
LEAVE_S = 2.0  # for the worker to close its pool; then its process is ended, and the pool's with it
CHECK_S = 0.25


class Watchdog:
    """Watches the connection from a thread of its own: ZeroMQ tells it when the connection closes and opens."""

    def __init__(self, dealer: zmq.Socket[bytes], head_socket: Path | None) -> None:
        """`head_socket` is a file on this host, which the worker removes if the head was killed."""
        self._dealer = dealer
        self._events = dealer.get_monitor_socket(
            zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED | zmq.EVENT_MONITOR_STOPPED
        )
        self._head_socket = head_socket
        self._closed_s: float | None = time.monotonic()  # since when there is no connection
        self._is_over = threading.Event()
        self.head_is_gone = False
        self.num_connected = 0  # times that a connection was made
        self._thread = threading.Thread(target=self._watch, name="envfleet-watchdog", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread: the worker leaves by itself."""
        self._is_over.set()
        self._thread.join(5.0)
        self._dealer.disable_monitor()  # before the other end is closed, or it waits for somebody to read
        self._events.close()

    def remove_head_folder(self) -> None:
        """Remove the folder of a head that is dead; one that was only stopped still needs it."""
        if self.head_is_gone and self._head_socket is not None:
            remove_if_abandoned(self._head_socket.parent)

    def _watch(self) -> None:
        while not self._is_over.is_set():
            if self._events.poll(int(CHECK_S * 1000)):
                event = recv_event(self._events)[0]
                if event == zmq.EVENT_MONITOR_STOPPED:
                    return
                is_open = event == zmq.EVENT_HANDSHAKE_SUCCEEDED
                self.num_connected += is_open
                self._closed_s = None if is_open else time.monotonic()
            if self._closed_s is not None and time.monotonic() - self._closed_s > HEAD_GONE_S:
                return self._give_up()

    def _give_up(self) -> None:
        self.head_is_gone = True
        logger.error("the head is gone: no connection for %g s; this worker leaves", HEAD_GONE_S)
        if not self._is_over.wait(LEAVE_S):
            self.remove_head_folder()
            os._exit(WorkerExit.HEAD_GONE)


def leave_with_stdin(leave: Callable[[str], None]) -> None:
    """Call `leave` when the standard input is closed: the process at its other end is gone. Then end, whatever runs."""

    def watch() -> None:
        while os.read(0, 4096):
            pass
        leave("its standard input was closed")
        time.sleep(LEAVE_S)
        os._exit(WorkerExit.TOLD_TO_LEAVE)

    threading.Thread(target=watch, name="envfleet-stdin", daemon=True).start()
