"""ZeroMQ's own speed on this machine: processes that push frames over ipc (DEALER) into one ROUTER, nothing else.

`refill`: a pusher writes its frame anew before it sends it, as whoever has new rollouts to send must.
"""

from __future__ import annotations

import multiprocessing
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import zmq  # noqa: TID253

from benchmarks.rows.cluster_peers.serve import Served, count_for, serve

NUM_AHEAD = 2  # messages in either queue


def push(address: str, num_bytes: int, refill: bool) -> None:
    """Send until we are ended."""
    source = np.random.default_rng(0).integers(0, 256, num_bytes, np.uint8)
    frame = source.copy()
    context = zmq.Context()
    dealer = context.socket(zmq.DEALER)
    dealer.sndhwm = NUM_AHEAD
    dealer.connect(address)
    while True:
        if refill:
            frame = np.empty_like(source)
            frame[:] = source
        dealer.send_multipart([b"header", frame], copy=False)


def build(settings: dict[str, Any]) -> Served:
    folder = tempfile.TemporaryDirectory(prefix="envfleet-bench-")
    address = f"ipc://{Path(folder.name) / 'router'}"
    context = zmq.Context()
    router = context.socket(zmq.ROUTER)
    router.rcvhwm = NUM_AHEAD
    router.linger = 0
    router.bind(address)
    start = multiprocessing.get_context("spawn").Process
    pushers = [
        start(target=push, args=(address, settings["num_bytes"], settings["refill"]), daemon=True)
        for _ in range(settings["num_workers"])
    ]
    for pusher in pushers:
        pusher.start()

    def take() -> int:
        return int(router.recv_multipart(copy=False)[-1].buffer.nbytes)

    def run_window(window_s: float) -> dict[str, Any]:
        # What was under way between the windows is not of this one.
        uncounted = sum(take() for _ in range(2 * NUM_AHEAD * len(pushers)))
        return {**count_for(window_s, take), "uncounted": uncounted}

    def close() -> None:
        for pusher in pushers:
            pusher.terminate()
            pusher.join()
        router.close()
        context.term()
        folder.cleanup()

    return Served(run_window, close, {"versions": f"pyzmq {zmq.__version__}, libzmq {zmq.zmq_version()}"})


if __name__ == "__main__":
    serve(build)
