"""What a killed head leaves is removed by the next run, by its lock: never the folder of a head that lives."""

import contextlib
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

import envfleet
from envfleet.cluster.run import run_folder
from tests.support.envs.cluster_envs import CountingEnv
from tests.support.scripts import script_environment
from tests.support.waiting import descendants, is_running, wait_until

pytestmark = pytest.mark.slow

HEAD = """
import os, time
import envfleet
from tests.support.envs.cluster_envs import CountingEnv

envs = envfleet.ClusterEnv(CountingEnv, 1, backend="serial", network=dict(address={address!r}))
if {forks} and os.fork() == 0:
    time.sleep(600)
print("ready", flush=True)
time.sleep(600)
"""


@contextlib.contextmanager
def head(address=None, forks=False):
    """A process with a cluster, and all processes below it."""
    text = HEAD.format(address=address, forks=forks)
    process = subprocess.Popen(
        [sys.executable, "-c", text], stdout=subprocess.PIPE, text=True, env=script_environment()
    )
    below = []
    try:
        assert process.stdout.readline() == "ready\n"
        below = descendants(process.pid)
        yield process, below
    finally:
        for pid in [process.pid, *below]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.communicate()
        wait_until(lambda: not any(map(is_running, below)), "all are gone")


def kill(process, *below):
    """The head is waited for: its first thread may be gone while others still hold its lock."""
    for pid in (process.pid, *below):
        os.kill(pid, signal.SIGKILL)
    process.wait(20.0)
    wait_until(lambda: not any(map(is_running, below)), "they are gone")


def parent():
    return Path(os.environ["TMPDIR"])


def test_the_next_run_removes_what_a_killed_tcp_head_left(run_folders):
    with head("tcp://127.0.0.1:0") as (process, below):
        kill(process)
        wait_until(lambda: not any(map(is_running, below)), "its worker has left")
        assert len(run_folders()) == 1
        with envfleet.ClusterEnv(CountingEnv, 1, backend="serial") as envs:
            assert run_folders() == [Path(envs.address.removeprefix("ipc://")).parent.name]
    assert run_folders() == []


def test_head_and_workers_killed_together(run_folders):
    with head() as (process, below):
        kill(process, *below)
        assert len(run_folders()) == 1
        run_folder.remove_run_folder(run_folder.make_run_folder())
        assert run_folders() == []


def test_a_fork_that_outlives_the_head_does_not_keep_its_folder(run_folders):
    with head(forks=True) as (process, below):
        kill(process)
        assert any(map(is_running, below))
        run_folder.remove_run_folder(run_folder.make_run_folder())
        assert run_folders() == []


MANUAL = """
import envfleet
from tests.support.envs.cluster_envs import CountingEnv

envfleet.ClusterEnv(CountingEnv, 1, launcher=envfleet.Manual(), network=dict(head_address="127.0.0.1"))
"""


def test_the_keys_of_a_killed_head_go_with_its_folder(run_folders):
    """Manual puts them there, and waits for a person."""
    process = subprocess.Popen([sys.executable, "-c", MANUAL], stdout=subprocess.PIPE, env=script_environment())
    try:
        wait_until(lambda: bool(list(parent().glob("envfleet-*/keys"))), "the keys are there", timeout_s=60.0)
    finally:
        process.kill()
        process.communicate()
    assert len(run_folders()) == 1
    run_folder.remove_run_folder(run_folder.make_run_folder())
    assert run_folders() == []


def test_the_folders_of_heads_that_live_stay(run_folders):
    """That of another process, stopped for a while, and two of this one."""
    with head() as (process, _), envfleet.ClusterEnv(CountingEnv, 1, backend="serial") as first:
        os.kill(process.pid, signal.SIGSTOP)
        try:
            with envfleet.ClusterEnv(CountingEnv, 1, backend="serial") as second:
                assert len(run_folders()) == 3
                for envs in (first, second):
                    assert envs.call("pid")
                child = os.fork()
                if child == 0:
                    try:
                        run_folder.make_run_folder()
                    finally:
                        os._exit(0)
                os.waitpid(child, 0)
                assert len(run_folders()) == 4
                run_folder.remove_run_folder(run_folder.make_run_folder())  # and with it that of the dead child
                assert len(run_folders()) == 3
        finally:
            os.kill(process.pid, signal.SIGCONT)
        assert len(run_folders()) == 2
        kill(process)
        wait_until(lambda: len(run_folders()) == 1, "its worker has removed its folder")


def test_many_threads_make_folders_and_lose_none(run_folders):
    made = []

    def make_some():
        for _ in range(20):
            made.append(run_folder.make_run_folder())

    threads = [threading.Thread(target=make_some) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(run_folders()) == sorted(folder.name for folder in made)
    for folder in made:
        run_folder.remove_run_folder(folder)


@pytest.mark.parametrize("what", ["no lock", "open to others", "a link", "another name", "a file of somebody else"])
def test_what_is_not_ours_to_judge_stays(run_folders, what):
    folder = parent() / ("other-1" if what == "another name" else "envfleet-1")
    real = folder if what != "a link" else parent() / "elsewhere"
    real.mkdir(mode=0o700)
    (real / "head").touch()
    if what != "no lock":
        (real / "lock").touch()
    if what == "open to others":
        real.chmod(0o755)
    if what == "a link":
        folder.symlink_to(real)
    if what == "a file of somebody else":
        (real / "thesis.tex").touch()
    run_folder.remove_run_folder(run_folder.make_run_folder())
    assert folder.exists()
    if what == "a file of somebody else":
        assert [path.name for path in real.iterdir()] == ["thesis.tex"]
    else:
        assert (real / "head").exists()
    for path in real.iterdir():
        path.unlink()
    (folder.unlink if folder.is_symlink() else folder.rmdir)()


def test_a_file_system_without_locks(run_folders, monkeypatch, caplog):
    def refuse(*args):
        raise OSError(38, "Function not implemented")

    with monkeypatch.context() as patch:
        patch.setattr(run_folder.fcntl, "lockf", refuse)
        folder = run_folder.make_run_folder()
    assert "cannot be locked" in caplog.text and list(folder.iterdir()) == []
    run_folder.remove_run_folder(run_folder.make_run_folder())
    assert run_folders() == [folder.name]
    run_folder.remove_run_folder(folder)
