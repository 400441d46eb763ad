"""StandInServer: an HTTP server for stand-ins, on loopback. Once it is closed none of its connections is open."""

import contextlib
import socket
import ssl
import threading
from http.server import ThreadingHTTPServer


class StandInServer(ThreadingHTTPServer):
    """Its threads wait for the next request of a client that has not closed its connection: closing ends them, too."""

    daemon_threads = True

    def __init__(self, handler, tls: ssl.SSLContext | None = None) -> None:
        super().__init__(("127.0.0.1", 0), handler)
        if tls is not None:
            self.socket = tls.wrap_socket(self.socket, server_side=True)
        self._lock = threading.Lock()
        self._open: dict[socket.socket, threading.Thread] = {}  # guarded by _lock
        self._accepting = threading.Thread(target=self.serve_forever, args=(0.02,), daemon=True)
        self._accepting.start()

    def process_request_thread(self, request, client_address):
        with self._lock:
            self._open[request] = threading.current_thread()
        try:
            super().process_request_thread(request, client_address)
        finally:
            with self._lock:
                del self._open[request]

    def handle_error(self, request, client_address):
        pass  # a client that has gone away

    def close(self) -> None:
        self.shutdown()
        self._accepting.join(10)
        self.server_close()
        with self._lock:
            connections = dict(self._open)
        for connection in connections:
            with contextlib.suppress(OSError):  # it has just been closed
                connection.shutdown(socket.SHUT_RDWR)
        for thread in connections.values():
            thread.join(10)
            assert not thread.is_alive(), "a connection of a stand-in stays open"
