"""Envs that hang, or take minutes, on real workers: what that costs, and what the caller and the head hear of it."""

import contextlib
import logging
import os
import signal
import subprocess
import sys
import time
from functools import partial

import numpy as np
import pytest

import envfleet
from envfleet import ClusterTimeout, EnvFailed
from envfleet.contract.exits import WorkerExit
from envfleet.pool import waits
from envfleet.testing.cluster_arguments import cluster_arguments
from tests.cluster.worker.test_leaving import Kept
from tests.support.envs.cluster_envs import Agent
from tests.support.envs.hanging_envs import HangingEnv, hang_no_more, has_hung, tell_to_hang
from tests.support.inside import fleet
from tests.support.scripts import script_environment
from tests.support.waiting import is_running, wait_until

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("quick_workers")]

AGENT = Agent()
QUICK = {"heartbeat_s": 0.2, "resend_s": 1.0, "timeout_s": 60.0, "backend": "process", "pool_workers": 2}
NUM_ENVS = 4  # of each worker, two in each process
NUM_STEPS = 12
LATE = 5  # the second env of the second worker
ITS_PROCESS = [4, 5]
SEED = 3


@contextlib.contextmanager
def cluster(folder, **settings):
    env_kwargs = [{"folder": str(folder), "name": index} for index in range(2 * NUM_ENVS)]
    arguments = cluster_arguments({**QUICK, "env_kwargs": env_kwargs, "pool_timeout_s": 1.0, "seed": SEED, **settings})
    with envfleet.ClusterEnv(HangingEnv, 2, NUM_ENVS, **arguments) as envs:
        yield envs


def others(*without):
    return [env_id for env_id in range(2 * NUM_ENVS) if env_id not in without]


def rollouts(envs, folder, how=None, num_rollouts=3):
    """Rollouts, in the second of which env LATE hangs; and what was raised."""
    parts, raised = [], []
    while len(parts) < num_rollouts:
        if how is not None and len(parts) == 1 and not raised:
            tell_to_hang(folder, LATE, how)
        try:
            parts.append(envs.rollout(AGENT, NUM_STEPS))
        except EnvFailed as error:
            raised.append(error)
    return parts, raised


@pytest.fixture(scope="module")
def expected(tmp_path_factory, quick_workers):
    """Rollouts of envs that do not hang."""
    folder = tmp_path_factory.mktemp("calm")
    with cluster(folder) as envs:
        parts, raised = rollouts(envs, folder)
    assert not raised
    return parts


def require_same(parts, expected, env_ids):
    for part, other in zip(parts, expected, strict=True):
        for name in ("obs", "rewards", "terminations", "truncations", "actions"):
            ours, theirs = getattr(part, name)[:, env_ids], getattr(other, name)[:, env_ids]
            assert np.array_equal(ours, theirs), name
        assert np.array_equal(part.next_obs[env_ids], other.next_obs[env_ids])


@pytest.mark.parametrize(("how", "lost"), [("sleep", [LATE]), ("stopped", ITS_PROCESS)])
@pytest.mark.parametrize("on_env_error", ["raise", "restart"])
def test_a_hung_env_in_a_rollout_costs_nobody_else(tmp_path, expected, how, lost, on_env_error):
    with cluster(tmp_path, on_env_error=on_env_error) as envs:
        pids = envs.call("pid")
        parts, raised = rollouts(envs, tmp_path, how)
        after = envs.call("pid")
        stats = envs.stats()
    assert has_hung(tmp_path, LATE)
    kept = [env_id for env_id in others() if how == "sleep" or env_id not in ITS_PROCESS]
    assert [after[env_id] for env_id in kept] == [pids[env_id] for env_id in kept]
    assert [worker.num_restarts for worker in stats.workers] == [0, 0]
    require_same(parts, expected, others(*lost))
    require_same(parts[:1], expected[:1], lost)
    assert parts[1].truncations[:, LATE].sum() == 1
    assert not parts[1].truncations[:, others(*lost)].any()
    if on_env_error == "restart":
        assert not raised
    else:
        (error,) = raised
        assert error.env_id == LATE and f"env {LATE} of worker 1" in str(error)
        assert "timeout_s=1 s" in str(error)


def test_a_hung_env_in_a_stream_of_the_first_that_are_ready(tmp_path):
    with cluster(tmp_path, on_env_error="restart", worker_batch_size=2, pool_workers=4) as envs:
        stream = envs.stream(AGENT, 4)
        next(stream)
        tell_to_hang(tmp_path, LATE, "loop")
        counts, deadline_s = np.zeros(2 * NUM_ENVS, int), time.monotonic() + 60.0
        while True:
            assert time.monotonic() < deadline_s
            rollout = next(stream)
            counts[rollout.env_ids] += 1
            if rollout.truncations.any():
                break
        row = np.flatnonzero(rollout.truncations.any(axis=0))
        assert rollout.env_ids[row].tolist() == [LATE]
        assert counts[others(LATE)].min() > counts[LATE]
        stream.close()


@pytest.mark.parametrize("mode", ["next_step", "same_step", "disabled"])
def test_a_hung_env_in_a_step(tmp_path, mode):
    with cluster(tmp_path, autoreset_mode=mode) as envs:
        envs.reset(seed=SEED)
        before = envs.step(np.zeros(2 * NUM_ENVS, int))[0].copy()
        tell_to_hang(tmp_path, LATE, "sleep")
        with pytest.raises(EnvFailed, match=r"EnvTimedOut: its step\(\) had not returned.*timeout_s=1 s") as caught:
            envs.step(np.zeros(2 * NUM_ENVS, int))
        assert caught.value.env_id == LATE
        obs, _, _, truncations, info = envs.recv()
        assert np.flatnonzero(truncations).tolist() == [LATE] == np.flatnonzero(info["_env_error"]).tolist()
        assert obs[others(LATE), 1].tolist() == [2] * (2 * NUM_ENVS - 1)
        last = info["final_obs"][LATE] if mode == "same_step" else obs[LATE]
        assert last.tolist() == before[LATE].tolist()


def test_a_hung_reset(tmp_path):
    """The env is built anew and reset again where it runs."""
    with cluster(tmp_path, on_env_error="restart") as envs:
        first = envs.reset(seed=SEED)[0].copy()
        tell_to_hang(tmp_path, LATE, "sleep", "reset")
        obs = envs.reset(seed=SEED)[0]
        assert has_hung(tmp_path, LATE, "reset")
        assert obs[:, :2].tolist() == first[:, :2].tolist()


def test_a_reset_that_hangs_in_every_new_process_does_not_keep_its_worker_for_ever(tmp_path):
    """The caller hears of each process that was lost, then that the env is given up, and has the rows of all others."""
    with cluster(tmp_path, pool_timeout_s=0.5) as envs:
        tell_to_hang(tmp_path, LATE, "stopped", "reset", always=True)
        raised, receive, result = [], partial(envs.reset, seed=SEED), None
        while result is None:
            try:
                result = receive()
            except EnvFailed as error:
                raised.append(error)
            receive = envs.recv
        assert [error.env_id for error in raised] == [LATE] * len(raised)
        assert "3 processes in a row were lost at this task" in str(raised[-1])
        *_, truncations, info = result
        assert np.flatnonzero(truncations).tolist() == [LATE] == np.flatnonzero(info["_env_error"]).tolist()
        with pytest.raises(EnvFailed, match="processes in a row were lost at this task") as caught:
            envs.rollout(AGENT, 3)  # there is no episode to begin with
        assert caught.value.env_id == LATE
        hang_no_more(tmp_path, LATE, "reset")
        rollout = envs.rollout(AGENT, 3)
        assert not rollout.truncations.any()
        assert [worker.num_restarts for worker in envs.stats().workers] == [0, 0]


# -- envs that take minutes --


def has_heard_since(envs, heard_s):
    return fleet(envs)[1].member.heard_s > heard_s


def held_by(folder, env_id):
    return int((folder / f"hung-step-{env_id}").read_text())


def test_workers_say_that_they_are_alive_while_an_env_takes_its_time(tmp_path, monkeypatch, caplog):
    """With no limit at all: the head hears of its workers, the log names the late one, and the step comes back."""
    monkeypatch.setattr(waits, "HEARTBEAT_S", 0.5)
    with cluster(tmp_path, pool_timeout_s=None, timeout_s=None, on_env_error="restart") as envs:
        envs.reset(seed=SEED)
        tell_to_hang(tmp_path, LATE, "stopped")
        envs.send(np.zeros(2 * NUM_ENVS, int))
        wait_until(lambda: has_hung(tmp_path, LATE), "the env hangs")
        caplog.clear()
        with caplog.at_level(logging.WARNING, "envfleet.cluster"), pytest.raises(ClusterTimeout, match="of this call"):
            envs.recv(timeout_s=4.0)
        for _ in range(2):
            heard_s = fleet(envs)[1].member.heard_s
            wait_until(partial(has_heard_since, envs, heard_s), "the head hears of the worker while its env hangs")
        lines = [record.getMessage() for record in caplog.records if "waiting for" in record.getMessage()]
        assert lines and all("worker 1" in line and "worker 0" not in line for line in lines)
        os.kill(held_by(tmp_path, LATE), signal.SIGKILL)
        assert LATE in np.flatnonzero(envs.recv()[3])
        assert envs.stats().workers[1].num_restarts == 0


def test_a_call_that_the_cluster_ends_says_which_limit_it_was(tmp_path):
    with cluster(tmp_path, pool_timeout_s=30.0, timeout_s=1.0) as envs:
        envs.reset(seed=SEED)
        tell_to_hang(tmp_path, LATE, "sleep")
        with pytest.raises(ClusterTimeout) as caught:
            envs.step(np.zeros(2 * NUM_ENVS, int))
        text = str(caught.value)
        assert "no answer within 1 s, timing.timeout_s (raise it with timing=Timing(timeout_s=...)" in text
        assert "pool=PoolSettings(timeout_s=30 s)" in text


@pytest.mark.parametrize("backend", ["process", "serial"])
def test_a_worker_leaves_though_an_env_is_in_its_step(tmp_path, backend):
    """SIGTERM, as engines send it. Its envs end with it, and another worker takes its place."""
    settings = {"backend": backend, "on_env_error": "restart", "pool_timeout_s": None}
    with cluster(tmp_path, **settings) as envs:
        envs.reset(seed=SEED)
        pids = [worker.pid for worker in envs.stats().workers]
        tell_to_hang(tmp_path, LATE, "sleep")
        envs.send(np.zeros(2 * NUM_ENVS, int))
        wait_until(lambda: has_hung(tmp_path, LATE), "the env hangs")
        os.kill(pids[1], signal.SIGTERM)
        wait_until(lambda: not is_running(pids[1]), "the worker has left", 40.0)
        assert not is_running(held_by(tmp_path, LATE))
        *_, truncations, _ = envs.recv()
        assert np.flatnonzero(truncations).tolist() == [4, 5, 6, 7]
        assert envs.stats().workers[1].num_restarts == 1


@pytest.mark.parametrize("backend", ["process", "serial"])
def test_a_worker_in_whose_place_is_another_leaves_though_an_env_is_in_its_step(tmp_path, backend):
    """The head tells it to stop, on a connection that stays open; nobody kills it."""
    launcher = Kept()
    arguments = cluster_arguments(QUICK, backend=backend, pool_timeout_s=None, on_env_error="restart")
    with envfleet.ClusterEnv(HangingEnv, 1, 1, launcher=launcher, env_kwargs={"folder": tmp_path}, **arguments) as envs:
        envs.reset(seed=SEED)
        tell_to_hang(tmp_path, 0, "sleep")
        envs.send(np.zeros(1, int))
        wait_until(lambda: has_hung(tmp_path, 0), "the env hangs")
        launcher.restart(0)
        assert launcher.processes[0][0].wait(60.0) == WorkerExit.DONE
        assert not is_running(held_by(tmp_path, 0))
        assert envs.recv()[3].tolist() == [True]


HEAD = """
import time
import numpy as np
from tests.cluster.test_slow_envs import cluster
from tests.support.envs.hanging_envs import has_hung, tell_to_hang
with cluster({folder!r}, backend={backend!r}, pool_timeout_s=None) as envs:
    envs.reset(seed=0)
    tell_to_hang({folder!r}, 5, "sleep")
    envs.send(np.zeros(8, int))
    print(*(worker.pid for worker in envs.stats().workers), flush=True)
    time.sleep(300)
"""


@pytest.mark.parametrize("backend", ["process", "serial"])
def test_a_worker_whose_head_was_killed_leaves_though_an_env_is_in_its_step(tmp_path, backend):
    command = [sys.executable, "-c", HEAD.format(folder=str(tmp_path), backend=backend)]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=script_environment()
    ) as head:
        pids = [int(pid) for pid in head.stdout.readline().split()]
        wait_until(lambda: has_hung(tmp_path, LATE), "the env hangs")
        pids.append(held_by(tmp_path, LATE))
        head.kill()
    wait_until(lambda: not any(map(is_running, pids)), "the workers and their envs are gone", 40.0)
