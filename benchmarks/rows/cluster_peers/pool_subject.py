"""The pool of one row of benchmarks/pool.py or simulators.py, in a process of its own: see benchmarks/releases.py."""

from __future__ import annotations

import argparse
from typing import Any

from benchmarks.rows.cluster_peers.serve import Served, serve


def build(settings: dict[str, Any]) -> Served:
    import envfleet
    from benchmarks.pool import POOL
    from benchmarks.rows.pool_row import start_pools
    from benchmarks.simulators import SIMULATORS

    row = next(row for row in (*POOL.rows, *SIMULATORS.rows) if row.name == settings["row"])
    start = start_pools(row, settings["machine"], argparse.Namespace())
    running = start(row.comparisons[0].subject)

    def run_window(window_s: float) -> dict[str, Any]:
        window = running.run_window(window_s)
        return {"count": window.count, "duration_s": window.duration_s}

    return Served(run_window, running.close, {"versions": f"envfleet {envfleet.__version__}"})


if __name__ == "__main__":
    serve(build)
