"""ArrayJob and StepsJob: what Slurm() starts, outside a Slurm job and inside one."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

from envfleet.contract.errors import ClusterError, UsageError
from envfleet.contract.worker_environment import MODULE_PATH_VARIABLE, cpu_counts, module_path
from envfleet.launchers.launcher import WorkerJob, WorkerState, WorkerStatus
from envfleet.launchers.processes import Command, Processes, end_of_file
from envfleet.launchers.slurm.commands import (
    ANSWER_S,
    environment_outside_jobs,
    leave_to_slurm,
    run_slurm,
)
from envfleet.launchers.slurm.queue_watch import QueueWatch
from envfleet.launchers.slurm.script import (
    job_id_of,
    sbatch_arguments,
    sbatch_script,
    srun_arguments,
    step_name,
)
from envfleet.launchers.slurm.status import Element, elements_of, squeue_arguments, step_queue_arguments, steps_of

if TYPE_CHECKING:
    from envfleet.launchers.slurm.settings import Slurm

logger = logging.getLogger("envfleet.launchers")

SUBMIT_S = 60.0  # the most that sbatch may take; it retries by itself while the controller is busy
CANCEL_S = 15.0  # the most that cancel() may take in addition to the workers' time to leave


class ArrayJob:
    """A Job of one element of a job array for each worker; Slurm requeues each element by itself.

    restart() submits a new array with that one worker. All arrays of a run have the same name, which no other run has.
    By that name they are found and ended, also those whose job id sbatch could not report.

    Args:
        settings: The user's settings, with an absolute log_dir.
        job: What to start.
        name: The name of the run.

    Raises:
        UsageError: log_dir cannot be created.
        ClusterError: sbatch refuses, or does not answer.
    """

    def __init__(self, settings: Slurm, job: WorkerJob, name: str) -> None:
        self._settings = settings
        self._job = job
        self._name = name
        self._log_dir = settings.log_dir_of(name)
        self._is_cancelled = False
        self._elements: dict[int, str] = {}  # id of the newest element of each worker
        self._submitted_s: dict[str, float] = {}  # when each element was submitted
        try:
            self._log_dir.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UsageError(f"log_dir {str(self._log_dir)!r} cannot be created: {error}") from error
        self._watch = QueueWatch(squeue_arguments(name, os.getuid()), elements_of)
        try:
            self._submit(range(job.num_workers))
        except BaseException as error:
            self._watch.close()
            if not _is_refusal(error):
                with contextlib.suppress(ClusterError):
                    self._scancel()
            raise

    @property
    def revives(self) -> bool:
        """See Job. The element's script restarts a crashed worker, and Slurm requeues the element."""
        return True

    def status(self, worker: int) -> WorkerStatus:
        """Return the state of one worker."""
        self._watch.look()
        element_id = self._elements.get(worker)
        if element_id is None:
            return WorkerStatus(WorkerState.ENDED, "it was not submitted to Slurm")
        element = self._watch.entries.get(element_id)
        if element is not None:
            state = element.worker_state
            if state is WorkerState.REFUSED and element != self._watch.before.get(element_id):
                state = WorkerState.PENDING  # one look is not enough: the scheduler may correct its first reason
            return WorkerStatus(state, f"{element}{self._where(worker) if state is WorkerState.ENDED else ''}")
        if self._watch.seen_s < self._submitted_s[element_id]:
            return WorkerStatus(WorkerState.PENDING, f"Slurm job {element_id}: submitted")
        detail = f"Slurm job {element_id} is not in the queue any more{self._where(worker)}"
        return WorkerStatus(WorkerState.ENDED, detail)

    def log(self, worker: int, max_bytes: int = 4000) -> str:
        """Return the end of what a worker has printed."""
        return end_of_file(self._log_dir / f"worker-{worker}.log", max_bytes)

    def log_place(self, worker: int) -> str:
        """Return where the whole log of a worker is."""
        return str(self._log_dir / f"worker-{worker}.log")

    def restart(self, worker: int) -> None:
        """End what is left of a worker and start it again."""
        element_id = self._elements.get(worker)
        if element_id is not None:
            with contextlib.suppress(ClusterError):  # if it still runs, the head refuses it: it is not the newest
                self._scancel([element_id])
        self._submit([worker])

    def resize(self, num_workers: int) -> None:
        """Start workers up to this number, or end those from this number on."""
        surplus = [worker for worker in self._elements if worker >= num_workers]
        if surplus:
            self._scancel([self._elements[worker] for worker in surplus])
            for worker in surplus:
                del self._elements[worker]
        missing = [worker for worker in range(num_workers) if worker not in self._elements]
        if missing:
            self._submit(missing)

    def cancel(self, grace_s: float) -> None:
        """End all workers; they have `grace_s` seconds to leave by themselves."""
        self._is_cancelled = True
        self._watch.close()
        deadline_s = time.monotonic() + grace_s + CANCEL_S
        try:
            # Pending elements first, before they start. Running workers were told to leave and need no signal yet.
            self._scancel(["--state=PENDING"], deadline_s)
            if not self._wait_until(lambda each: each.is_over, min(deadline_s, time.monotonic() + grace_s)):
                self._scancel([], deadline_s)
                self._wait_until(lambda each: each.is_over or each.state == "COMPLETING", deadline_s)
        except ClusterError as error:
            self._warn_of_what_is_left(str(error))
        except BaseException:  # a second Ctrl-C: do not wait, but leave nothing in the queue
            leave_to_slurm(self._scancel_commands())
            self._warn_of_what_is_left("interrupted; scancel continues in the background")
            raise

    def _warn_of_what_is_left(self, why: str) -> None:
        job_ids = sorted({element_id.partition("_")[0] for element_id in self._submitted_s}, key=int)
        logger.warning(
            "Slurm jobs %s may still be in the queue, until their workers notice that the head is gone (%s). "
            "To end them now: scancel --name=%s",
            *(", ".join(job_ids), why, self._name),
        )

    def _where(self, worker: int) -> str:
        if os.path.exists(self.log_place(worker)):
            return f"; log: {self.log_place(worker)}"
        return f"; it left no log in {self._log_dir}: log_dir must be on a file system that the nodes share"

    # -- calls of Slurm --

    def _submit(self, workers: Sequence[int]) -> None:
        answer = run_slurm(
            sbatch_arguments(self._settings, workers, self._name),
            timeout_s=SUBMIT_S,
            text=sbatch_script(self._settings, self._job, workers, name=self._name),
            environment=self._environment(),
        )
        now_s = time.monotonic()
        try:
            job_id = job_id_of(answer)
        except ValueError as error:
            raise ClusterError(str(error)) from error
        for worker in workers:
            self._elements[worker] = f"{job_id}_{worker}"
            self._submitted_s[self._elements[worker]] = now_s
        logger.info("Slurm job %s (%s): workers %s", job_id, self._name, ", ".join(map(str, workers)))
        self._watch.look_soon()
        if self._is_cancelled:  # by another thread, while sbatch was running
            self._scancel()

    def _scancel(self, which: Iterable[str] = (), deadline_s: float | None = None) -> None:
        """Cancel all jobs of the run, or these elements.

        The scripts of running elements are told first that they are no longer needed, or they would wait to be
        requeued.
        """

        def answer_s() -> float:
            return ANSWER_S if deadline_s is None else max(1.0, min(ANSWER_S, deadline_s - time.monotonic()) / 2)

        tell, scancel = self._scancel_commands(which)
        if "--state=PENDING" not in scancel:
            with contextlib.suppress(ClusterError):  # no element is running
                run_slurm(tell, timeout_s=answer_s())
        run_slurm(scancel, timeout_s=answer_s())

    def _scancel_commands(self, which: Iterable[str] = ()) -> tuple[list[str], list[str]]:
        """Return two commands: the first tells running elements that they are no longer needed, the second cancels."""
        scancel = ["scancel", "--quiet", f"--user={os.getuid()}", f"--name={self._name}", *which]
        return [*scancel, "--batch", "--signal=USR2", "--state=RUNNING"], scancel

    def _wait_until(self, is_gone: Callable[[Element], bool], deadline_s: float) -> bool:
        """Return whether `is_gone` held for all elements before the deadline."""
        while True:
            answer_s = max(1.0, min(ANSWER_S, deadline_s - time.monotonic()))
            elements = elements_of(run_slurm(squeue_arguments(self._name, os.getuid()), timeout_s=answer_s))
            if all(map(is_gone, elements.values())):
                return True
            if time.monotonic() >= deadline_s:
                return False
            time.sleep(0.2)

    def _environment(self) -> dict[str, str]:
        return {**environment_outside_jobs(), **self._job.environment, **_paths(self._settings)}


class StepsJob:
    """A Job of one srun for each worker; each srun starts a step of the Slurm job that this process runs in.

    Args:
        settings: The user's settings, with an absolute log_dir.
        job: What to start.
        name: The name of the run.

    Raises:
        UsageError: log_dir cannot be created, or srun cannot be started.
    """

    def __init__(self, settings: Slurm, job: WorkerJob, name: str) -> None:
        self._name = name
        self._job_id = os.environ["SLURM_JOB_ID"]
        self._started_s: dict[int, float] = {}
        threads = cpu_counts(settings.cpus_per_worker)
        inherited = {name: value for name, value in os.environ.items() if not name.startswith(_OF_THE_WHOLE_JOB)}

        def command_of(worker: int) -> Command:
            self._started_s[worker] = time.monotonic()
            environment = {**inherited, **job.environment, **_paths(settings), **threads}
            return Command(srun_arguments(settings, job, worker, name), environment)

        self._watch = QueueWatch(step_queue_arguments(self._job_id), steps_of)
        try:
            self._processes = Processes(job.num_workers, settings.log_dir_of(name), command_of, "Slurm()")
        except BaseException:
            self._watch.close()
            raise

    @property
    def revives(self) -> bool:
        """Whether the engine restarts failed workers by itself."""
        return False

    def status(self, worker: int) -> WorkerStatus:
        """See Job. An srun without a step waits for free resources in the job; it may not print so for a minute."""
        status = self._processes.status(worker)
        if status.state is not WorkerState.RUNNING:
            return WorkerStatus(status.state, f"srun in Slurm job {self._job_id}: {status.detail}")
        self._watch.look()
        step_id = self._watch.entries.get(step_name(self._name, worker))
        if step_id is None and self._watch.seen_s > self._started_s[worker]:
            detail = f"srun waits: Slurm job {self._job_id} has no room for this worker now"
            return WorkerStatus(WorkerState.PENDING, detail)
        return WorkerStatus(WorkerState.RUNNING, f"step {step_id or ''} of Slurm job {self._job_id}")

    def log(self, worker: int, max_bytes: int = 4000) -> str:
        """Return the end of what a worker has printed."""
        return self._processes.log(worker, max_bytes)

    def log_place(self, worker: int) -> str:
        """Return where the whole log of a worker is."""
        return self._processes.log_place(worker)

    def restart(self, worker: int) -> None:
        """End what is left of a worker and start it again."""
        self._end_steps([worker])
        self._processes.restart(worker)
        self._watch.look_soon()

    def resize(self, num_workers: int) -> None:
        """Start workers up to this number, or end those from this number on."""
        surplus = [worker for worker in self._started_s if worker >= num_workers]
        self._end_steps(surplus)
        for worker in surplus:
            del self._started_s[worker]
        self._processes.resize(num_workers)
        self._watch.look_soon()

    def _end_steps(self, workers: Sequence[int]) -> None:
        """Cancel the steps of these workers: a step may outlive its srun and keep the CPUs that the next one needs."""
        if not workers:
            return
        with contextlib.suppress(ClusterError):
            steps = steps_of(run_slurm(step_queue_arguments(self._job_id), timeout_s=ANSWER_S))
            names = (step_name(self._name, worker) for worker in workers)
            if step_ids := [steps[name] for name in names if name in steps]:
                run_slurm(["scancel", "--quiet", *step_ids], timeout_s=ANSWER_S)

    def cancel(self, grace_s: float) -> None:
        """End all workers; they have `grace_s` seconds to leave by themselves."""
        self._watch.close()
        self._processes.cancel(grace_s)


def _is_refusal(error: BaseException) -> bool:
    """Return whether Slurm has refused. If sbatch was interrupted or got no answer in time, there may be a job."""
    return isinstance(error, ClusterError) and error.__cause__ is None and "timed out" not in str(error)


# Variables of the job that srun would apply to the step.
_OF_THE_WHOLE_JOB = ("SLURM_MEM_PER_", "SLURM_NTASKS", "SLURM_NPROCS", "SLURM_TASKS_PER_NODE", "SLURM_NNODES")


def _paths(settings: Slurm) -> dict[str, str]:
    """Let workers import policies and envs by name, from where this process does."""
    if settings.python is not None:
        return {}
    return {MODULE_PATH_VARIABLE: module_path(sys.path)}
