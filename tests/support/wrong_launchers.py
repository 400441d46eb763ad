"""Launchers that are Local, with one thing wrong with each."""

import subprocess
import sys
from dataclasses import dataclass
from types import SimpleNamespace
from typing import ClassVar

from envfleet.launchers.launcher import WorkerState, WorkerStatus
from envfleet.launchers.local import Local


class Wrapped:
    """A job, as it should be; what is wrong with it is written below."""

    started: ClassVar[list] = []  # for the test, which ends what a wrong launcher has left

    def __init__(self, launcher, worker_job):
        self.worker_job = worker_job
        self.right = self.launch(worker_job)
        self.num_workers = worker_job.num_workers
        Wrapped.started.append(self.right)

    def launch(self, worker_job):
        return Local().launch(worker_job)

    def __getattr__(self, name):
        return getattr(self.right, name)


class Forgetful(Wrapped):
    """Starts no worker but the first."""

    def launch(self, worker_job):
        right = Local().launch(worker_job)
        right.resize(1)
        return right

    def status(self, worker):
        return self.right.status(worker) if worker == 0 else WorkerStatus(WorkerState.RUNNING)


class Mute(Wrapped):
    def log(self, worker, max_bytes=4000):
        return ""


class Verbose(Wrapped):
    def log(self, worker, max_bytes=4000):
        return self.right.log(worker)


class Placeless(Wrapped):
    def log_place(self, worker):
        return ""


class Gloomy(Wrapped):
    """Says that a worker has been refused, which works."""

    def status(self, worker):
        return WorkerStatus(WorkerState.REFUSED, "no")


class OnCommandLine(Wrapped):
    def launch(self, worker_job):
        code = "import time; time.sleep(60)"
        self.child = subprocess.Popen([sys.executable, "-c", code, *worker_job.environment.values()])
        return Local().launch(worker_job)

    def cancel(self, grace_s):
        self.child.kill()
        self.child.wait()
        self.right.cancel(grace_s)


class InLog(Wrapped):
    def log(self, worker, max_bytes=4000):
        return f"started with {dict(self.worker_job.environment)}"


class InOpenFile(Wrapped):
    def launch(self, worker_job):
        path = worker_job.run_dir / "worker-9.log"
        path.write_text(" ".join(worker_job.environment.values()))
        path.chmod(0o644)
        return Local().launch(worker_job)


class NeverRestarts(Wrapped):
    def restart(self, worker):
        pass


class RestartsAll(Wrapped):
    def restart(self, worker):
        for each in range(self.num_workers):
            self.right.restart(each)


class Rigid(Wrapped):
    """Knows no other number of workers than the first."""

    def resize(self, num_workers):
        pass

    def restart(self, worker):
        if worker < self.num_workers:
            self.right.restart(worker)


class BeginsAnew(Wrapped):
    """Resizes by starting everything again."""

    def resize(self, num_workers):
        self.right.resize(num_workers)
        self.right.restart(0)


class KeepsLeaving(Wrapped):
    """Says that it has ended what it has not."""

    def cancel(self, grace_s):
        self.is_over = True

    def status(self, worker):
        return WorkerStatus(WorkerState.ENDED, "gone") if hasattr(self, "is_over") else self.right.status(worker)


class StillRunning(Wrapped):
    """Ends all, and goes on saying what was."""

    def status(self, worker):
        return WorkerStatus(WorkerState.RUNNING)


class StartsAgain(Wrapped):
    """Starts workers after it was cancelled."""

    def restart(self, worker):
        self.right = Local().launch(self.worker_job)
        Wrapped.started.append(self.right)


class FailsTheSecondTime(Wrapped):
    def cancel(self, grace_s):
        assert not hasattr(self, "is_over"), "cancelled twice"
        self.is_over = True
        self.right.cancel(grace_s)


class LeavesFile(Wrapped):
    def cancel(self, grace_s):
        (self.worker_job.run_dir / "script.sh").touch()
        self.right.cancel(grace_s)


class CancelsAllRuns(Wrapped):
    """Its engine knows jobs by the launcher's name."""

    running: ClassVar[list] = []

    def launch(self, worker_job):
        right = Local().launch(worker_job)
        CancelsAllRuns.running.append(right)
        return right

    def cancel(self, grace_s):
        while CancelsAllRuns.running:
            CancelsAllRuns.running.pop().cancel(grace_s)

    def restart(self, worker):
        self.right = Local().launch(self.worker_job)
        CancelsAllRuns.running.append(self.right)


class WaitsForEver(Wrapped):
    """Waits for what the engine has refused."""

    def launch(self, worker_job):
        return Local().launch(SimpleNamespace(num_workers=0, run_dir=worker_job.run_dir))

    def status(self, worker):
        return WorkerStatus(WorkerState.PENDING, "(Resources)")

    def restart(self, worker):
        pass


class FailsWithoutWords(Wrapped):
    def launch(self, worker_job):
        return Local(python=sys.executable).launch(SimpleNamespace(num_workers=0, run_dir=worker_job.run_dir))

    def status(self, worker):
        return WorkerStatus(WorkerState.REFUSED)


@dataclass(frozen=True)
class Wrong:
    """A launcher whose jobs are wrong."""

    job_type: type = Wrapped

    is_on_this_host = True
    head_address = None
    queue_timeout_s = None

    def host_of_workers(self):
        return "127.0.0.1"

    def launch(self, worker_job):
        return self.job_type(self, worker_job)


@dataclass
class Changeable:
    """Its settings can be changed while it is in use."""

    partition: str = "a"

    is_on_this_host = True
    head_address = None
    queue_timeout_s = None

    def host_of_workers(self):
        return None


@dataclass(frozen=True)
class Nowhere(Wrong):
    def host_of_workers(self):
        return ""


@dataclass(frozen=True)
class NoTime(Wrong):
    queue_timeout_s = 0.0


class Plain:
    is_on_this_host = True
    head_address = None
    queue_timeout_s = None
