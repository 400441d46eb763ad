"""Processes that an env has started end with the child process that runs it."""

import os
import signal
import subprocess
import sys
import textwrap
import time

import numpy as np
import pytest

import envfleet
from tests.support.envs.spawning_env import SpawningEnv
from tests.support.inside import child_pid, spawner_pid
from tests.support.scripts import script_environment
from tests.support.waiting import descendants, is_running, wait_until

pytestmark = pytest.mark.slow

NO_ACTS = np.zeros(2, int)


def make():
    return envfleet.make(SpawningEnv, 2, backend="process", num_workers=2)


def pids_of(pool):
    """Of both envs: what they have started, and what that has started."""
    both = pool.call("pids")
    wait_until(lambda: all(descendants(pids[2]) for pids in both), "the daemons have started their processes")
    return [[*pids, *descendants(pids[2])] for pids in both]


def all_gone(pids):
    return lambda: not any(is_running(pid) for pid in pids)


def test_they_end_when_the_pool_is_closed():
    with make() as pool:
        pids = [pid for pids in pids_of(pool) for pid in pids]
        assert len(pids) == 8 and all(is_running(pid) for pid in pids)
    wait_until(all_gone(pids), "all have ended")


def test_they_end_with_a_child_that_is_killed_and_no_others_do():
    with make() as pool:
        pool.reset(seed=0)
        first, second = pids_of(pool)
        os.kill(child_pid(pool, 0), signal.SIGKILL)
        wait_until(all_gone(first), "those of the killed child have ended")
        with pytest.raises(envfleet.ChildDied):
            pool.step(NO_ACTS)
        pool.reset(seed=0)
        pool.step(NO_ACTS)
        assert all(is_running(pid) for pid in second)
        third = pids_of(pool)[0]
        assert all(is_running(pid) for pid in third)
    wait_until(all_gone(second + third), "all have ended")


class ForkingEnv(SpawningEnv):
    """Its daemon is a fork of its process, and has closed all files."""

    def __init__(self):
        reading, writing = os.pipe()
        if not (middle := os.fork()):
            if daemon := os.fork():
                os.write(writing, b"%d" % daemon)
                os._exit(0)
            os.setsid()
            os.closerange(0, 256)
            time.sleep(1000)
        os.waitpid(middle, 0)
        self._daemon = int(os.read(reading, 99))

    def daemon(self):
        return self._daemon


def test_a_daemon_that_is_a_fork_ends_with_its_child_and_no_other():
    with envfleet.make(ForkingEnv, 2, backend="process", num_workers=2) as pool:
        first, second = pool.call("daemon")
        assert is_running(first) and is_running(second)
        os.kill(child_pid(pool, 0), signal.SIGKILL)
        wait_until(all_gone([first]), "that of the killed child has ended")
        assert is_running(second)
    wait_until(all_gone([second]), "all have ended")


class ShellEnv(SpawningEnv):
    """Its shell leaves a process behind, which ends soon."""

    def __init__(self):
        pass

    def reset(self, *, seed=None, options=None):
        subprocess.run(["sh", "-c", "sleep 0.01 & exit 0"], check=True)
        return super().reset(seed=seed)


def test_no_zombies_pile_up():
    with envfleet.make(ShellEnv, 2, backend="process", num_workers=1) as pool:
        spawner = spawner_pid(pool)
        for _ in range(3):
            pool.reset(seed=0)
        wait_until(lambda: descendants(spawner) == [child_pid(pool, 0)], "only the child is left")


def test_they_end_when_the_nursery_is_killed():
    with make() as pool:
        pool.reset(seed=0)
        pids = [pid for pids in pids_of(pool) for pid in pids]
        children = [child_pid(pool, child) for child in range(2)]
        os.kill(spawner_pid(pool), signal.SIGKILL)
        wait_until(all_gone(children), "the children died with the spawner")
        with pytest.raises(envfleet.ChildDied, match="spawner"):
            pool.step(NO_ACTS)
        wait_until(all_gone(pids), "all have ended")


def test_they_end_when_the_parent_is_killed(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        textwrap.dedent(
            """
            import time
            import envfleet
            from tests.support.envs.spawning_env import SpawningEnv
            pool = envfleet.make(SpawningEnv, 2, backend="process", num_workers=1)
            print("ready", flush=True)
            time.sleep(600)
            """
        )
    )
    with subprocess.Popen(
        [sys.executable, script], stdout=subprocess.PIPE, text=True, env=script_environment()
    ) as process:
        assert process.stdout.readline() == "ready\n"
        wait_until(lambda: len(descendants(process.pid)) == 10, "spawner, child, and four processes of each env")
        pids = descendants(process.pid)
        process.kill()
    wait_until(all_gone(pids), "all have ended")


def test_they_end_with_a_worker():
    with envfleet.ClusterEnv(SpawningEnv, 1, 2, backend="process") as cluster:
        pids = [pid for pids in cluster.call("pids") for pid in pids]
        assert len(pids) == 6 and all(is_running(pid) for pid in pids)
    wait_until(all_gone(pids), "all have ended")
