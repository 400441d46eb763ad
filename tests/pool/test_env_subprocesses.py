"""Processes that an env has started end with the child process that runs it."""

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import numpy as np
import pytest
from spawning_env import SpawningEnv

import envfleet
from waiting import descendants, is_running, wait_until

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
        os.kill(pool._backend._board.pid(0), signal.SIGKILL)
        wait_until(all_gone(first), "those of the killed child have ended")
        with pytest.raises(envfleet.ChildDied):
            pool.step(NO_ACTS)
        pool.reset(seed=0)
        pool.step(NO_ACTS)
        assert all(is_running(pid) for pid in second)
        third = pids_of(pool)[0]
        assert all(is_running(pid) for pid in third)
    wait_until(all_gone(second + third), "all have ended")


def test_they_end_when_the_nursery_is_killed():
    with make() as pool:
        pool.reset(seed=0)
        pids = [pid for pids in pids_of(pool) for pid in pids]
        os.kill(pool._backend._household.nursery._process.pid, signal.SIGKILL)
        end_s = time.monotonic() + 20.0
        with pytest.raises(envfleet.ChildDied, match="nursery"):
            while time.monotonic() < end_s:  # children may finish a step before the kernel ends them
                pool.step(NO_ACTS)
        wait_until(all_gone(pids), "all have ended")


def test_they_end_when_the_parent_is_killed(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        textwrap.dedent(
            f"""
            import sys, time
            sys.path.insert(0, {str(Path(__file__).parent)!r})
            import envfleet
            from spawning_env import SpawningEnv
            pool = envfleet.make(SpawningEnv, 2, backend="process", num_workers=1)
            print("ready", flush=True)
            time.sleep(600)
            """
        )
    )
    with subprocess.Popen([sys.executable, script], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "ready\n"
        wait_until(lambda: len(descendants(process.pid)) == 10, "nursery, child, and four processes of each env")
        pids = descendants(process.pid)
        process.kill()
    wait_until(all_gone(pids), "all have ended")


def test_they_end_with_a_worker():
    with envfleet.ClusterEnv(SpawningEnv, 1, 2, backend="process") as cluster:
        pids = [pid for pids in cluster.call("pids") for pid in pids]
        assert len(pids) == 6 and all(is_running(pid) for pid in pids)
    wait_until(all_gone(pids), "all have ended")
