"""A head and many simulated workers: how many rollouts it accepts in a second, and what that costs it."""

from __future__ import annotations

import itertools
import subprocess
import sys
import time
from dataclasses import dataclass
from typing import Any

from benchmarks.rows.cluster_peers.serve import Served, count_for, serve

CREDIT = 2
NUM_PROCESSES = 2


@dataclass(frozen=True, slots=True)
class SimulatedFleet:
    """A launcher: the workers of a job, shared among a few processes."""

    num_steps: int

    is_on_this_host = True
    head_address = None
    queue_timeout_s = None

    def host_of_workers(self) -> str:
        return "127.0.0.1"

    def launch(self, job: Any) -> FleetJob:
        address = job.argv[job.argv.index("--head") + 1]
        module = "benchmarks.rows.cluster_peers.simulated_workers"
        num_processes = min(NUM_PROCESSES, job.num_workers)
        bounds = [index * job.num_workers // num_processes for index in range(num_processes + 1)]
        return FleetJob(
            [
                subprocess.Popen(
                    [sys.executable, "-m", module, address, str(first), str(end - first), str(self.num_steps)],
                    stderr=subprocess.DEVNULL,
                )
                for first, end in itertools.pairwise(bounds)
            ]
        )


class FleetJob:
    """Its processes; a worker that is lost is not replaced, because none is lost."""

    revives = False

    def __init__(self, processes: list[subprocess.Popen[bytes]]) -> None:
        self._processes = processes

    def status(self, worker: int) -> Any:
        from envfleet.launchers.launcher import WorkerState, WorkerStatus

        is_running = all(process.poll() is None for process in self._processes)
        return WorkerStatus(WorkerState.RUNNING if is_running else WorkerState.ENDED)

    def log(self, worker: int, max_bytes: int = 4000) -> str:
        return ""

    def log_place(self, worker: int) -> str:
        return "nowhere"

    def restart(self, worker: int) -> None:
        raise RuntimeError(f"simulated worker {worker} was lost")

    def resize(self, num_workers: int) -> None:
        raise RuntimeError("a simulated fleet keeps its size")

    def cancel(self, grace_s: float) -> None:
        for process in self._processes:
            process.kill()
            process.wait()


def build(settings: dict[str, Any]) -> Served:
    import envfleet
    from benchmarks.rows.cluster_envs import no_action

    num_workers, num_steps = settings["num_workers"], settings["num_steps"]
    cluster = envfleet.ClusterEnv(
        "CartPole-v1",
        num_workers,
        settings["num_envs_per_worker"],
        launcher=SimulatedFleet(num_steps),
        network={"credit": CREDIT},
    )
    rollouts = cluster.stream(envfleet.FunctionPolicy(no_action), num_steps)

    def take() -> int:
        next(rollouts)
        return 1

    def run_window(window_s: float) -> dict[str, Any]:
        # What came since the last window is not of this one.
        for _ in range(CREDIT * num_workers):
            take()
        before_s = time.process_time()
        window = count_for(window_s, take)
        return {**window, "head_cpu_s": time.process_time() - before_s}

    return Served(run_window, cluster.close)


if __name__ == "__main__":
    serve(build)
