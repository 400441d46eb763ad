"""A relay between workers and their head: real TCP connections that a test can hold, cut and slow down."""

import contextlib
import socket
import struct
import threading
import time

STEP_BYTES = 64 << 10
AT_ONCE = struct.pack("ii", 1, 0)  # SO_LINGER: what was not sent is thrown away, and the other side hears of it


class _Pair:
    """One connection of a worker, and its continuation to the head."""

    def __init__(self, relay, near):
        self._relay = relay
        self._near = near
        self._far = socket.create_connection(relay.target)
        for end in (near, self._far):
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.is_held = threading.Event()
        self.is_cut = threading.Event()
        for name, source, target in (("up", near, self._far), ("down", self._far, near)):
            threading.Thread(target=self._carry, args=(name, source, target), daemon=True).start()

    def _carry(self, name, source, target):
        with contextlib.suppress(OSError):
            while piece := source.recv(STEP_BYTES):
                while self.is_held.is_set() and not self.is_cut.is_set():
                    time.sleep(0.005)
                if self.is_cut.is_set():
                    return
                self._relay.carried(name, len(piece))
                target.sendall(piece)
        while self.is_held.is_set() and not self.is_cut.is_set():
            time.sleep(0.005)  # nobody hears that the other side has hung up
        self.cut()

    def cut(self):
        self.is_cut.set()
        for end in (self._near, self._far):
            with contextlib.suppress(OSError):
                end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, AT_ONCE)
                end.shutdown(socket.SHUT_RDWR)
            end.close()


class Relay:
    """Listens at `address`; carries all it gets to `target`, (host, port), and back."""

    def __init__(self, target, rate_bytes_s=None):
        self.target = target
        self.num_bytes = {"up": 0, "down": 0}  # that were carried to the head, and from it
        self.rate_bytes_s = rate_bytes_s
        self._free_s = {"up": 0.0, "down": 0.0}
        self._lock = threading.Lock()
        self._pairs = []
        self._is_down = threading.Event()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"tcp://127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._listener.close()
        self.cut()

    @property
    def num_connections(self):
        return len(self._pairs)

    def hold(self):
        """Nothing of the present connections goes on, nor does anybody hear that they were closed."""
        for pair in list(self._pairs):
            pair.is_held.set()

    def release(self):
        for pair in list(self._pairs):
            pair.is_held.clear()

    def cut(self, down_s=0.0):
        """All connections end at once, and there are no new ones for a while."""
        self._is_down.set()
        for pair in list(self._pairs):
            pair.cut()
        time.sleep(down_s)
        self._is_down.clear()

    def carried(self, name, num_bytes):
        """Counts, and takes its time."""
        with self._lock:
            self.num_bytes[name] += num_bytes
            if self.rate_bytes_s is None:
                return
            self._free_s[name] = max(self._free_s[name], time.monotonic()) + num_bytes / self.rate_bytes_s
            wait_s = self._free_s[name] - time.monotonic()
        time.sleep(max(0.0, wait_s))

    def _accept(self):
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                if self._is_down.is_set():
                    near.close()
                    continue
                with contextlib.suppress(OSError):
                    self._pairs.append(_Pair(self, near))
