"""Manual: what it prints is enough to start workers, and only who has the keys can."""

import io
import os
import re
import shlex
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest

from envfleet import ClusterEnv
from envfleet.cluster.wire.sockets import RunKeys
from envfleet.contract.errors import ClusterError, JoinTimeout, UsageError
from envfleet.launchers.launcher import WorkerJob, WorkerState
from envfleet.launchers.manual import Manual
from envfleet.testing import LAUNCHER_CHECKS, LauncherCase
from tests.support.volunteer import PYTHON, volunteer
from tests.support.waiting import wait_until

pytestmark = pytest.mark.slow

SETTINGS = {"network": {"address": "tcp://127.0.0.1:0"}}


@pytest.mark.parametrize("check", LAUNCHER_CHECKS, ids=lambda check: check.__name__)
def test_conformance(check, tmp_path):
    impossible = Manual(key_file=tmp_path / "no folder" / "keys")
    case = LauncherCase(Manual(python=PYTHON), impossible, "no folder", has_logs=False, settings=SETTINGS)
    with volunteer(tmp_path / "log"):
        check(case)


@pytest.fixture
def worker_job(tmp_path):
    (tmp_path / "run").mkdir()
    return WorkerJob(
        num_workers=2,
        argv=("-m", "envfleet.cluster.worker", "--head", "tcp://h:1"),
        environment={"ENVFLEET_KEYS": "a b c"},
        run_dir=tmp_path / "run",
    )


def test_commands_are_printed(worker_job, capsys):
    job = Manual(python="python3").launch(worker_job)
    key_file = worker_job.run_dir / "keys"
    command = f"python3 -m envfleet.cluster.worker --head tcp://h:1 --worker {{}} --keys-file {key_file}"
    lines = capsys.readouterr().out.splitlines()
    assert lines[1:] == [f"  {command.format(0)}", f"  {command.format(1)}"]
    assert str(key_file) in lines[0] and "2 workers" in lines[0]
    assert job.status(1).state is WorkerState.PENDING
    assert job.status(1).detail == f"to be started by hand: {command.format(1)}"
    assert not job.revives

    job.restart(1)
    assert capsys.readouterr().out.splitlines() == ["Worker 1 is needed again:", f"  {command.format(1)}"]
    job.resize(4)
    assert capsys.readouterr().out.splitlines()[1:] == [f"  {command.format(2)}", f"  {command.format(3)}"]
    job.resize(1)
    assert job.status(1).state is WorkerState.ENDED
    assert job.log(0) == "" and job.log_place(0) == "where it was started by hand"
    job.cancel(1.0)
    job.restart(0)
    job.resize(2)
    assert capsys.readouterr().out == ""
    assert not key_file.exists()


def test_only_the_user_can_read_the_keys(worker_job, tmp_path):
    old = os.umask(0)
    try:
        job = Manual(key_file=tmp_path / "my keys").launch(worker_job)
    finally:
        os.umask(old)
    assert stat.S_IMODE((tmp_path / "my keys").stat().st_mode) == 0o600
    assert (tmp_path / "my keys").read_text() == "a b c\n"
    assert shlex.split(job.unguarded.command(0))[-1] == str(tmp_path / "my keys")
    assert list(worker_job.run_dir.iterdir()) == []
    job.cancel(1.0)
    assert not (tmp_path / "my keys").exists()


def test_an_old_key_file_of_ours_is_written_anew(worker_job, tmp_path):
    path = tmp_path / "keys"
    path.write_text("an older run, with longer keys than this one has")
    path.chmod(0o600)
    job = Manual(key_file=path).launch(worker_job)
    assert path.read_text() == "a b c\n"
    path.write_text("a newer run")
    job.cancel(1.0)
    assert path.read_text() == "a newer run"


def test_a_key_file_that_others_can_read_is_refused(worker_job, tmp_path):
    path = tmp_path / "keys"
    path.write_text("something")
    path.chmod(0o644)
    with pytest.raises(UsageError, match="others could read it"):
        Manual(key_file=path).launch(worker_job)
    assert path.read_text() == "something"


def test_a_key_file_behind_a_link_is_refused(worker_job, tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UsageError, match="cannot be written"):
        Manual(key_file=tmp_path / "link").launch(worker_job)
    assert not (tmp_path / "elsewhere").exists()


def test_nothing_can_be_printed(worker_job, monkeypatch):
    """The disk is full, say: nobody can start workers then, and the keys do not stay behind."""
    key_file = worker_job.run_dir / "keys"
    job = Manual().launch(worker_job)
    with io.TextIOWrapper(open("/dev/full", "wb", buffering=0), write_through=True) as full:
        monkeypatch.setattr(sys, "stdout", full)
        for call in (lambda: job.restart(0), lambda: job.resize(3), lambda: Manual().launch(worker_job)):
            assert key_file.exists()
            with pytest.raises(ClusterError, match=r"cannot print .* standard output: .*No space left"):
                call()
        monkeypatch.undo()
    assert not key_file.exists()
    job.cancel(0.0)


def test_keys_cannot_be_written(worker_job, monkeypatch):
    def refuse(*_):
        raise OSError("No space left on device")

    monkeypatch.setattr(os, "ftruncate", refuse)
    with pytest.raises(UsageError, match=r"key_file .* cannot be written: No space left"):
        Manual().launch(worker_job)
    assert list(worker_job.run_dir.iterdir()) == []


def test_a_fork_does_not_remove_the_keys(worker_job):
    job = Manual().launch(worker_job)
    pid = os.fork()
    if pid == 0:
        job.cancel(0.0)
        os._exit(0)
    os.waitpid(pid, 0)
    assert (worker_job.run_dir / "keys").exists()
    job.cancel(0.0)


@pytest.mark.parametrize("settings", [{"python": ""}, {"queue_timeout_s": 0}, {"queue_timeout_s": -1.0}])
def test_wrong_settings(settings):
    with pytest.raises(UsageError, match=next(iter(settings))):
        Manual(**settings)


def test_nobody_starts_them(capsys):
    with pytest.raises(JoinTimeout, match=r"to be started by hand: python -m envfleet\.cluster\.worker"):
        ClusterEnv("CartPole-v1", 1, 1, launcher=Manual(queue_timeout_s=0.1), **SETTINGS)
    assert "--worker 0" in capsys.readouterr().out


def test_a_lost_worker_is_asked_for_once(tmp_path):
    launcher = Manual(python=PYTHON)
    with (
        volunteer(tmp_path / "log") as person,
        ClusterEnv("CartPole-v1", 2, 1, launcher=launcher, backend="serial", **SETTINGS) as cluster,
    ):
        old = cluster.stats().workers[1].pid
        person.is_away = True
        os.kill(old, signal.SIGKILL)
        wait_until(lambda: "Worker 1 is needed again:\n" in person.printed, "somebody is asked")
        time.sleep(1.0)  # the keeper looks ten times, and asks nobody again
        person.come_back()
        wait_until(lambda: cluster.stats().workers[1].pid != old, "another process has come")
        wait_until(lambda: cluster.stats().workers[1].stage == "present", "it is there")
        assert person.printed.count("is needed again") == 1


def test_a_worker_with_other_keys_does_not_get_in(tmp_path):
    launcher = Manual(python=PYTHON)
    with (
        volunteer(tmp_path / "log") as person,
        ClusterEnv("CartPole-v1", 1, 1, launcher=launcher, **SETTINGS) as cluster,
    ):
        words = shlex.split(re.search(r"^  (.*)$", person.printed, re.MULTILINE).group(1))
        key_file = words.index("--keys-file") + 1
        head_key = Path(words[key_file]).read_text().split()[0]
        wrong = tmp_path / "wrong"
        wrong.touch(mode=0o600)
        wrong.write_text(" ".join((head_key, *RunKeys.make().for_workers().split()[1:])))
        words[key_file] = str(wrong)
        pid = cluster.stats().workers[0].pid
        with (tmp_path / "stranger").open("wb") as log:
            stranger = subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        try:
            wait_until(lambda: cluster.stats().num_refused, "it is refused")
            assert cluster.stats().workers[0].pid == pid
        finally:
            stranger.kill()
            stranger.wait()
