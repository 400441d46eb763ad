"""OwnedJob: nothing is done after cancel(), nor in a fork of the owner; and each launcher goes through it."""

import os
from pathlib import Path

import pytest

from envfleet.launchers.launcher import WorkerState, WorkerStatus
from envfleet.launchers.owned_job import OwnedJob

RUNNING = WorkerStatus(WorkerState.RUNNING, "on node7")
LAUNCHERS = Path(OwnedJob.__init__.__code__.co_filename).parent


class EngineJob:
    """Writes down what is asked of it."""

    revives = True

    def __init__(self):
        self.asked = []

    def status(self, worker):
        self.asked.append(("status", worker))
        return RUNNING

    def log(self, worker, max_bytes=4000):
        self.asked.append(("log", worker, max_bytes))
        return "words"

    def log_place(self, worker):
        return f"log of {worker}"

    def restart(self, worker):
        self.asked.append(("restart", worker))

    def resize(self, num_workers):
        self.asked.append(("resize", num_workers))

    def cancel(self, grace_s):
        self.asked.append(("cancel", grace_s))


@pytest.fixture
def job():
    return OwnedJob(EngineJob())


@pytest.fixture
def in_a_fork(monkeypatch):
    pid = os.getpid()
    return lambda: monkeypatch.setattr(os, "getpid", lambda: pid + 1)


def act(job):
    job.restart(1)
    job.resize(3)
    job.cancel(0.5)


def test_all_is_passed_on(job):
    assert job.revives and job.status(0) == RUNNING
    assert job.log(0) == job.log(0, 10) == "words" and job.log_place(4) == "log of 4"
    act(job)
    asked = [("status", 0), ("log", 0, 4000), ("log", 0, 10), ("restart", 1), ("resize", 3), ("cancel", 0.5)]
    assert job.unguarded.asked == asked


def test_nothing_is_started_or_ended_after_cancel(job):
    job.cancel(0.0)
    act(job)
    assert job.unguarded.asked == [("cancel", 0.0)]
    assert job.status(0) == WorkerStatus(WorkerState.ENDED, "the run is over")
    assert job.log(0) == "words" and job.log_place(0) == "log of 0"


def test_a_cancel_that_failed_is_not_tried_again(job):
    def fail(grace_s):
        raise KeyboardInterrupt

    job.unguarded.cancel = fail
    with pytest.raises(KeyboardInterrupt):
        job.cancel(1.0)
    job.cancel(1.0)
    job.restart(0)
    assert job.unguarded.asked == []


def test_a_fork_does_not_touch_the_workers_of_its_parent(job, in_a_fork):
    assert job.status(0) == RUNNING
    job.unguarded.asked.clear()
    in_a_fork()
    act(job)
    assert job.status(0) == RUNNING  # as it was
    assert job.status(1).state is WorkerState.PENDING
    assert "cannot be read in a fork" in job.log(0) and job.log_place(0) == "log of 0"
    assert job.unguarded.asked == []


def test_what_a_fork_does_is_not_remembered_by_its_parent(job, monkeypatch, in_a_fork):
    in_a_fork()
    act(job)
    monkeypatch.undo()
    act(job)
    assert job.unguarded.asked == [("restart", 1), ("resize", 3), ("cancel", 0.5)]


def test_no_other_file_of_the_launchers_guards_itself():
    files = [path for path in LAUNCHERS.rglob("*.py") if path.name != "owned_job.py"]
    assert len(files) > 15
    assert [path.name for path in files if "os.getpid()" in path.read_text()] == []
