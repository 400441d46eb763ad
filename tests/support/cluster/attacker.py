"""HandshakeLimits at the head's port, in a process of their own. `python attacker.py KIND PORT NUM_CONNECTIONS SECONDS`

idle: connections that say nothing. The others push as much as they can:
raw: no greeting; null, curve: after ZeroMQ's greeting, in frames that claim to be large.
"""

import contextlib
import selectors
import socket
import sys
import time

ZEROS = bytes(64 << 10)
HUGE = b"\x02" + (4 << 30).to_bytes(8, "big")  # a long frame of 4 GiB
LARGE = b"\x02" + (500 << 10).to_bytes(8, "big")
COMMAND = b"\x06" + (500 << 10).to_bytes(8, "big")  # of a handshake


def greeting(mechanism):
    return b"\xff" + bytes(8) + b"\x7f\x03\x01" + mechanism.ljust(20, b"\0") + b"\0" + bytes(31)


OPENINGS = {
    "raw": [b"\xff" * 9, b""],
    "null": [greeting(b"NULL") + HUGE, greeting(b"NULL") + LARGE],
    "curve": [greeting(b"CURVE") + each for each in (HUGE, LARGE, COMMAND)],
}


def main(kind, port, num_connections, seconds):
    selector = selectors.DefaultSelector()
    num_made, end_s = 0, time.monotonic() + seconds
    while time.monotonic() < end_s:
        while len(selector.get_map()) < num_connections:
            try:
                connection = socket.create_connection(("127.0.0.1", port), timeout=2.0)
            except OSError:
                break
            num_made += 1
            with contextlib.suppress(OSError):
                if kind != "idle":
                    connection.sendall(OPENINGS[kind][num_made % len(OPENINGS[kind])])
                connection.setblocking(False)
            selector.register(connection, selectors.EVENT_READ if kind == "idle" else selectors.EVENT_WRITE)
        for key, _ in selector.select(0.05):
            try:
                is_over = not (key.fileobj.recv(4096) if kind == "idle" else key.fileobj.send(ZEROS))
            except BlockingIOError:
                continue
            except OSError:
                is_over = True
            if is_over:
                selector.unregister(key.fileobj)
                key.fileobj.close()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4]))
