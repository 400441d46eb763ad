"""ClusterEnv.stream with images: how many bytes of observations the head accepts in a second."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from benchmarks.rows.cluster_peers.serve import Served, count_for, serve

CREDIT = 2  # the default


def build(settings: dict[str, Any]) -> Served:
    import envfleet
    from benchmarks.rows.cluster_envs import no_action

    num_workers = settings["num_workers"]
    folder = tempfile.TemporaryDirectory()
    library = Path(folder.name) / "ring.so"
    envfleet.compile_native(Path(__file__).parents[1] / "ring.h", library)
    envfleet.load_native(library)
    cluster = envfleet.ClusterEnv(
        "Ring-v0",
        num_workers,
        settings["num_envs_per_worker"],
        env_kwargs={"stacked": int(settings["stacked"])},
        seed=0,
    )
    rollouts = cluster.stream(envfleet.FunctionPolicy(no_action), settings["num_steps"])

    def take() -> int:
        return int(next(rollouts).obs.nbytes)

    def run_window(window_s: float) -> dict[str, Any]:
        # What the workers collected since the last window is not of this one.
        uncounted = sum(take() for _ in range(CREDIT * num_workers))
        return {**count_for(window_s, take), "uncounted": uncounted}

    def close() -> None:
        cluster.close()
        folder.cleanup()

    return Served(run_window, close)


if __name__ == "__main__":
    serve(build)
