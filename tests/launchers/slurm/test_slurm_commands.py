"""Slurm's programs when they hang, fail or are gone: stand-ins for them, which do as they are told."""

import logging
import os
import re
import signal
from pathlib import Path

import pytest

from envfleet.contract.errors import ClusterError
from envfleet.launchers.launcher import WorkerJob, WorkerState
from envfleet.launchers.slurm import commands as slurm_commands
from envfleet.launchers.slurm import job as slurm_job
from envfleet.launchers.slurm import queue_watch
from envfleet.launchers.slurm.commands import environment_outside_jobs, run_slurm
from envfleet.launchers.slurm.queue_watch import QueueWatch
from envfleet.launchers.slurm.settings import Slurm
from envfleet.launchers.slurm.status import elements_of
from tests.support.waiting import wait_until

pytestmark = pytest.mark.slow

JOB = WorkerJob(num_workers=2, argv=("-m", "worker"), environment={"ENVFLEET_KEYS": "secret"}, run_dir=Path())
HANG = "exec sleep 60"


@pytest.fixture
def program(tmp_path, monkeypatch):
    """Makes a program of Slurm that runs these lines of shell; each call is noted."""
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    monkeypatch.setattr(queue_watch, "FIRST_LOOK_S", 0.02)
    for module in (slurm_commands, queue_watch, slurm_job):
        monkeypatch.setattr(module, "ANSWER_S", 3.0)  # a busy machine may take a second to run a line of shell
    monkeypatch.setattr(slurm_job, "SUBMIT_S", 3.0)
    monkeypatch.setattr(slurm_job, "CANCEL_S", 4.0)

    def make(name, lines):
        new = tmp_path / f"{name}.new"
        new.write_text(f'#!/bin/sh\necho "{name} $*" >> {tmp_path}/calls\n{lines}\n')
        new.chmod(0o755)
        new.rename(tmp_path / name)

    calls = tmp_path / "calls"
    make.calls = lambda: calls.read_text().splitlines() if calls.exists() else []
    return make


def look_until(watch, condition, what):
    def is_so():
        watch.look()
        return condition()

    wait_until(is_so, what)


def test_the_queue_is_silent_and_speaks_again(program, caplog):
    program("squeue", "echo '1_0|RUNNING|node1|None'")
    watch = QueueWatch(["squeue"], elements_of)
    try:
        look_until(watch, lambda: "1_0" in watch.entries, "an answer has come")
        for lines in ("echo no >&2; exit 1", HANG):
            program("squeue", lines)
            caplog.clear()
            look_until(watch, lambda: "does not report" in caplog.text, "it is said that there is no answer")
            num_calls = len(program.calls())
            look_until(watch, lambda before=num_calls: len(program.calls()) > before, "it is asked again")
            assert caplog.text.count("does not report") == 1
            assert watch.entries["1_0"].state == "RUNNING"  # as it was
            program("squeue", "echo '1_0|RUNNING|node1|None'")
            look_until(watch, lambda: "answers again" in caplog.text, "it is said that it answers")
        program("squeue", "")
        look_until(watch, lambda: not watch.entries, "the queue is empty")
    finally:
        watch.close()


def test_squeue_goes_missing(program, caplog, monkeypatch, tmp_path):
    watch = QueueWatch(["squeue-that-is-not-there"], elements_of)
    look_until(watch, lambda: "does not report" in caplog.text, "it is said")
    watch.close()


def test_long_answers(program):
    """Longer than a pipe would take."""
    program("squeue", "seq -f '1_%.0f|RUNNING|node1|None' 0 9999")
    watch = QueueWatch(["squeue"], elements_of)
    look_until(watch, lambda: len(watch.entries) == 10_000, "all of it has come")
    watch.close()


def test_words_of_a_refusal(program):
    program("sbatch", "echo 'sbatch: error: no such partition' >&2; exit 1")
    with pytest.raises(ClusterError, match="sbatch failed: sbatch: error: no such partition"):
        Slurm(log_dir="logs").launch(JOB)
    program("sbatch", "exit 3")
    with pytest.raises(ClusterError, match="exit code 3"):
        run_slurm(["sbatch"], timeout_s=10.0)


def test_nothing_is_left_of_a_job_whose_number_is_unknown(program):
    """Slurm took the job, but sbatch never said so."""
    program("scancel", "")
    names = []
    for lines, words in ((HANG, "has not answered sbatch"), ("echo what", "expected a job id")):
        program("sbatch", lines)
        with pytest.raises(ClusterError, match=words):
            Slurm(log_dir="logs", job_name="walker").launch(JOB)
        submitted, cancelled = program.calls()[-3], program.calls()[-1]
        name = next(word for word in submitted.split() if word.startswith("--job-name=")).removeprefix("--job-name=")
        assert re.fullmatch(r"walker-\d{8}-\d{6}-[0-9a-f]{6}", name)
        names.append(name)
        assert cancelled == f"scancel --quiet --user={os.getuid()} --name={name}"
    assert names[0] != names[1]  # or one run would cancel the other's jobs


def test_a_job_that_is_gone_from_the_queue(program):
    program("sbatch", "echo 12")
    program("squeue", "")
    program("scancel", "")
    job = Slurm(log_dir="logs").launch(JOB)
    assert job.status(0).state is WorkerState.PENDING
    wait_until(lambda: job.status(0).state is WorkerState.ENDED, "it is known to be gone")
    assert "12_0 is not in the queue any more" in job.status(0).detail
    assert "it left no log" in job.status(0).detail
    program("sbatch", "echo 13")
    job.restart(0)
    status = job.status(0)  # asked once: the next look may find that this one is gone, too
    assert "13_0" in status.detail and status.state is WorkerState.PENDING
    job.cancel(0.0)
    assert not any("secret" in call for call in program.calls())


def test_cancel_when_nobody_answers(program, caplog):
    program("sbatch", "echo 12")
    program("squeue", HANG)
    program("scancel", HANG)
    job = Slurm(log_dir="logs").launch(JOB)
    with caplog.at_level(logging.WARNING):
        job.cancel(0.1)
    assert "Slurm jobs 12 may still be in the queue" in caplog.text
    assert job.status(0).state is WorkerState.ENDED
    num_calls = len(program.calls())
    job.cancel(0.1)
    job.restart(0)
    job.resize(5)
    assert len(program.calls()) == num_calls


@pytest.mark.filterwarnings("ignore:subprocess .* is still running:ResourceWarning")  # Python's own way with Ctrl-C
def test_cancel_is_interrupted(program, caplog):
    """By a second Ctrl-C, say. What waits in the queue is ended even so, and the user knows how to make sure."""
    program("sbatch", "echo 12")
    program("squeue", "")
    program("scancel", HANG)
    job = Slurm(log_dir="logs").launch(JOB)

    def interrupt(*_):
        program("scancel", "")
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, 0.1)
    try:
        with pytest.raises(KeyboardInterrupt):
            job.cancel(20.0)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)
    assert "Slurm jobs 12 may still be in the queue" in caplog.text and "scancel --name=" in caplog.text
    everything = f"scancel --quiet --user={os.getuid()} --name={job.unguarded._name}"
    wait_until(lambda: everything in program.calls(), "all of it is cancelled")
    assert f"{everything} --batch --signal=USR2 --state=RUNNING" in program.calls()


def test_steps_that_are_not_wanted_any_more(program, monkeypatch):
    """A step outlives its srun: it is ended, too, and only it."""
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    program("srun", HANG)
    program("scancel", "")
    program("squeue", "")
    job = Slurm(log_dir="logs").launch(JOB)
    try:
        lines = (f"echo '7.{worker + 1}|{job.unguarded._name}-{worker}'" for worker in range(2))
        program("squeue", "\n".join((*lines, "echo '7.9|of-somebody-else'")))
        job.resize(2)
        assert not any(call.startswith("scancel") for call in program.calls())
        job.resize(1)
        assert [call for call in program.calls() if call.startswith("scancel")] == ["scancel --quiet 7.2"]
        job.restart(0)
        assert program.calls().count("scancel --quiet 7.1") == 1
        assert job.status(1).state is WorkerState.ENDED
    finally:
        job.cancel(0.0)
    num_calls = len(program.calls())
    job.resize(0)
    assert len(program.calls()) == num_calls


def test_a_new_job_is_not_told_of_the_present_one(monkeypatch):
    monkeypatch.setenv("SLURM_JOB_ID", "5")
    monkeypatch.setenv("SLURM_MEM_PER_NODE", "5")
    monkeypatch.setenv("SLURM_CONF", "/etc/slurm.conf")
    environment = environment_outside_jobs()
    assert "SLURM_JOB_ID" not in environment and "SLURM_MEM_PER_NODE" not in environment
    assert environment["SLURM_CONF"] == "/etc/slurm.conf"


@pytest.fixture(autouse=True)
def in_a_folder_of_its_own(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
