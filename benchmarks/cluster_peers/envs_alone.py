"""The envs of the image rows, stepped by a serial pool in each of two processes: what is left for the wire."""

from __future__ import annotations

import multiprocessing
import time
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
from serve import Served, serve


def step_envs(pipe: Connection, num_envs: int, stacked: bool) -> None:
    """Step for as long as asked, and say how many bytes of observations came of it."""
    import envfleet
    from cluster_envs import RingEnv

    pool = envfleet.make(partial(RingEnv, stacked=stacked), num_envs, backend="serial")
    num_bytes = pool.reset()[0].nbytes
    actions = np.zeros(num_envs, np.int64)
    pipe.send(None)
    while (end_s := pipe.recv()) is not None:
        num_steps = 0
        while time.monotonic() < end_s:
            pool.step(actions)
            num_steps += 1
        pipe.send(num_steps * num_bytes)
    pool.close()


def build(settings: dict[str, Any]) -> Served:
    context = multiprocessing.get_context("spawn")
    pipes, processes = [], []
    for _ in range(settings["num_workers"]):
        ours, theirs = context.Pipe()
        process = context.Process(target=step_envs, args=(theirs, settings["num_envs"], settings["stacked"]))
        process.start()
        pipes.append(ours)
        processes.append(process)
    for pipe in pipes:
        pipe.recv()

    def run_window(window_s: float) -> dict[str, Any]:
        end_s = time.monotonic() + window_s
        for pipe in pipes:
            pipe.send(end_s)
        return {"count": sum(pipe.recv() for pipe in pipes), "duration_s": window_s}

    def close() -> None:
        for pipe in pipes:
            pipe.send(None)
        for process in processes:
            process.join()

    return Served(run_window, close)


if __name__ == "__main__":
    serve(build)
