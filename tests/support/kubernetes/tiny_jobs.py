"""Jobs of tiny workers (tiny_worker.py): started, watched and ended by a test."""

import contextlib
import sys
from pathlib import Path

from envfleet.launchers.kubernetes.settings import Kubernetes
from envfleet.launchers.launcher import WorkerJob, WorkerState
from tests.support.waiting import wait_until

TINY_WORKER = str(Path(__file__).parent / "tiny_worker.py")
LONG_S = 120.0  # a real Job controller waits 10 s and more before it replaces a pod
PENDING, RUNNING, ENDED, REFUSED = (
    WorkerState.PENDING,
    WorkerState.RUNNING,
    WorkerState.ENDED,
    WorkerState.REFUSED,
)


def settings(kube, image="test/worker", **more):
    return Kubernetes(image, namespace=kube.namespace, **{"python": sys.executable, "cpus_per_worker": 0.5, **more})


@contextlib.contextmanager
def running(kube, tmp_path, num_workers=2, **more):
    worker_job = WorkerJob(
        num_workers=num_workers,
        argv=(TINY_WORKER, str(tmp_path)),
        environment={"ENVFLEET_KEYS": "k3y"},
        run_dir=tmp_path,
    )
    job = settings(kube, **more).launch(worker_job)
    try:
        yield job
    finally:
        job.cancel(1.0)
        assert kube.leftovers() == []
        wait_until(lambda: kube.node.pids() == [], "the node has ended all processes", LONG_S)


def wait_for(job, worker, state, timeout_s=LONG_S):
    wait_until(lambda: job.status(worker).state is state, f"worker {worker} is {state}", timeout_s)
    return job.status(worker)


def wait_for_words(job, worker, *words):
    wait_until(
        lambda: all(word in job.status(worker).detail for word in words),
        f"worker {worker} says {words}, not {job.status(worker)}",
        LONG_S,
    )
    return job.status(worker)


def pids(tmp_path, worker):
    return {int(path.name.split("-")[2]) for path in tmp_path.glob(f"started-{worker}-*")}


def wait_for_another(tmp_path, worker, before):
    wait_until(lambda: pids(tmp_path, worker) - before, f"worker {worker} was started again", LONG_S)
    (pid,) = pids(tmp_path, worker) - before
    return pid


def say_exit(tmp_path, worker, code, how="once"):
    """Have a worker end with this exit code, once or as often as it is started."""
    draft = tmp_path / f"draft-{worker}"
    draft.write_text(str(code))
    draft.rename(tmp_path / f"exit-{how}-{worker}")


def pod_of(kube, worker):
    """The worker's newest pod that is not yet gone."""
    return next(
        pod["metadata"]["name"]
        for pod in kube.objects("pods")
        if pod["status"]["phase"] == "Running"
        and str(worker)
        in (
            pod["metadata"].get("annotations", {}).get("batch.kubernetes.io/job-completion-index"),
            pod["metadata"]["labels"].get("envfleet-worker"),
        )
    )
