"""The floor under step(actions): a ROUTER sends each DEALER a message of that size over ipc, and waits for answers."""

from __future__ import annotations

import multiprocessing
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import zmq  # noqa: TID253

from benchmarks.rows.cluster_peers.serve import Served, serve

QUESTION_BYTES = 64 * 8  # actions
ANSWER_BYTES = 64 * (16 + 8 + 1 + 1)  # observations, rewards, terminated, truncated


def echo(address: str, name: bytes) -> None:
    """Answer until we are ended."""
    answer = bytes(ANSWER_BYTES)
    dealer = zmq.Context().socket(zmq.DEALER)
    dealer.routing_id = name
    dealer.connect(address)
    dealer.send(b"here")
    while True:
        dealer.recv_multipart()
        dealer.send_multipart([b"header", answer])


def build(settings: dict[str, Any]) -> Served:
    folder = tempfile.TemporaryDirectory(prefix="envfleet-bench-")
    address = f"ipc://{Path(folder.name) / 'router'}"
    context = zmq.Context()
    router = context.socket(zmq.ROUTER)
    router.linger = 0
    router.bind(address)
    names = [b"%d" % index for index in range(settings["num_workers"])]
    start = multiprocessing.get_context("spawn").Process
    processes = [start(target=echo, args=(address, name), daemon=True) for name in names]
    for process in processes:
        process.start()
    for _ in processes:
        router.recv_multipart()
    question = bytes(QUESTION_BYTES)

    def ask_all() -> None:
        for name in names:
            router.send_multipart([name, b"header", question])
        for _ in names:
            router.recv_multipart()

    def run_window(window_s: float) -> dict[str, Any]:
        durations_s = []
        now_s = start_s = time.perf_counter()
        while now_s - start_s < window_s:
            before_s = now_s
            ask_all()
            now_s = time.perf_counter()
            durations_s.append(now_s - before_s)
        median_us = float(np.median(durations_s)) * 1e6
        return {"count": len(durations_s), "duration_s": now_s - start_s, "median_us": median_us}

    def close() -> None:
        for process in processes:
            process.terminate()
            process.join()
        router.close()
        context.term()
        folder.cleanup()

    return Served(run_window, close)


if __name__ == "__main__":
    serve(build)
