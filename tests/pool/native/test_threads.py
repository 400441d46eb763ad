"""Native pools and their threads: the same results with any number of them, and none that outlives its pool."""

import contextlib
import logging
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

import envfleet
from envfleet.pool import guard, waits
from envfleet.pool.native import backend as native
from envfleet.testing import Act, ScriptedEnv
from envfleet.testing.programs import require_equal
from tests.support.inside import native_core
from tests.support.native_makers import make_native
from tests.support.waiting import wait_until

pytestmark = pytest.mark.slow

MODES = list(envfleet.Autoreset)
modes = pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.name.lower())


def _helpers():
    """Where the kernel tells about each of them."""
    helpers = []
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):  # it has just ended
            if (task / "comm").read_text().strip() == "envfleet-helper":
                helpers.append(task)
    return helpers


def _helper_threads():
    return len(_helpers())


@pytest.fixture(autouse=True)
def no_thread_is_left():
    yield
    wait_until(lambda: _helper_threads() == 0, "helper threads are gone")


@pytest.fixture
def always_help(monkeypatch):
    """Wake the helpers for every batch, however small."""
    monkeypatch.setattr(native, "HELP_WORTH_S", 0.0)


@modes
@pytest.mark.parametrize("num_workers", [1, 2, 5])
@pytest.mark.usefixtures("always_help")
def test_results_do_not_depend_on_the_number_of_threads(num_workers, mode, monkeypatch):
    """Also where envs fail and are restarted: native equals serial, row for row."""
    monkeypatch.setattr(guard, "LONGEST_BACKOFF_S", 0.0)
    generator = np.random.default_rng(1)
    kwargs = {"autoreset_mode": mode, "on_env_error": "restart", "max_env_restarts": 100}
    acts = [Act.GO_ON] * 6 + [Act.TERMINATE, Act.TRUNCATE, Act.RAISE, Act.FAIL_NEXT_RESET]
    with (
        envfleet.make(ScriptedEnv, 7, backend="serial", **kwargs) as serial,
        make_native(ScriptedEnv, 7, num_workers=num_workers, **kwargs) as pool,
    ):
        require_equal(pool.reset(seed=9), serial.reset(seed=9))
        for _ in range(150):
            actions = generator.choice(acts, 7)
            got, expected = pool.step(actions), serial.step(actions)
            _forget_names_of_exceptions(got, expected)
            require_equal(got, expected)
            ended = expected[2] | expected[3]
            if mode is envfleet.Autoreset.DISABLED and ended.any():
                for each in (pool, serial):
                    each.reset(seed=5, options={"reset_mask": ended})


def _forget_names_of_exceptions(*results):
    """C++ and Python throw exceptions of other types with the same words."""
    for result in results:
        for infos in (result[4], result[4].get("final_info", {})):
            for row, error in enumerate(infos.get("env_error", ())):
                if error is not None:
                    infos["env_error"][row] = error.replace("RuntimeError", "ValueError")


@pytest.mark.parametrize("env_id", ["CartPole-v1", "Taxi-v3", "Blackjack-v1", "MountainCarContinuous-v0"])
@modes
@pytest.mark.usefixtures("always_help")
def test_real_envs_do_not_depend_on_threads_either(env_id, mode):
    with (
        envfleet.make(env_id, 33, backend="native", num_workers=1, autoreset_mode=mode) as alone,
        envfleet.make(env_id, 33, backend="native", num_workers=4, autoreset_mode=mode) as helped,
    ):
        alone.action_space.seed(0)
        require_equal(helped.reset(seed=1), alone.reset(seed=1))
        for _ in range(300):
            actions = alone.action_space.sample()
            expected = alone.step(actions)
            require_equal(helped.step(actions), expected)
            ended = expected[2] | expected[3]
            if mode is envfleet.Autoreset.DISABLED and ended.any():
                options = {"reset_mask": ended}
                require_equal(helped.reset(options=options), alone.reset(options=options))
        assert native_core(helped).num_helpers == 3


@pytest.mark.parametrize("mode", ["next_step", "same_step"])
@pytest.mark.parametrize("num_workers", [1, 3])
@pytest.mark.usefixtures("always_help")
def test_asynchronous_rows_are_those_of_a_synchronous_pool(num_workers, mode):
    """Each env, seen alone, does the same whichever batch its steps come in."""
    num_envs, num_steps = 9, 200
    actions = np.random.default_rng(0).integers(0, 2, (num_steps, num_envs))
    with envfleet.make("CartPole-v1", num_envs, backend="native", autoreset_mode=mode) as pool:
        pool.reset(seed=2)
        expected = [[] for _ in range(num_envs)]
        for step in range(num_steps):
            obs, rewards, terminations, truncations, _ = pool.step(actions[step])
            for env_id in range(num_envs):
                expected[env_id].append((obs[env_id], rewards[env_id], terminations[env_id], truncations[env_id]))
    kwargs = {"batch_size": 4, "autoreset_mode": mode, "num_workers": num_workers}
    with envfleet.make("CartPole-v1", num_envs, backend="native", **kwargs) as pool:
        pool.async_reset(seed=2)
        num_seen = np.full(num_envs, -1)
        while num_seen.min() < num_steps - 1:
            obs, rewards, terminations, truncations, infos = pool.recv()
            env_ids = infos["env_id"]
            num_seen[env_ids] += 1
            for row, env_id in enumerate(env_ids):
                step = num_seen[env_id] - 1
                if 0 <= step < num_steps:
                    got = (obs[row], rewards[row], terminations[row], truncations[row])
                    require_equal(got, expected[env_id][step])
            next_steps = np.minimum(num_seen[env_ids], num_steps - 1)
            pool.send(actions[next_steps, env_ids], env_ids)


def test_work_that_is_not_worth_it_starts_no_thread(monkeypatch):
    monkeypatch.setattr(native, "HELP_WORTH_S", 60.0)
    with envfleet.make("CartPole-v1", 64, num_workers=4) as pool:
        pool.reset(seed=0)
        for _ in range(50):
            pool.step(np.zeros(64, np.int64))
        assert native_core(pool).num_helpers == _helper_threads() == 0


def test_slow_envs_are_stepped_by_several_threads():
    """Eight envs that sleep 50 ms each, on four threads: some of them sleep at the same time."""
    with make_native(ScriptedEnv, 8, num_workers=4, env_kwargs={"sleep_s": 0.05}) as pool:
        pool.reset(seed=0)
        pool.step(np.full(8, Act.SLEEP))
        assert native_core(pool).step_cost_ns > 1e6
        pool.step(np.full(8, Act.SLEEP))
        assert native_core(pool).num_helpers == 3
        wait_until(lambda: _helper_threads() == 3, "all helpers have started")


@pytest.mark.usefixtures("always_help")
def test_there_are_as_many_threads_as_usable_cpus(monkeypatch):
    """usable_cpus() follows affinity and cgroup quota; tests/pool/process/test_choices.py holds it to that."""
    monkeypatch.setattr(native, "usable_cpus", lambda: 3)
    for num_envs, num_helpers in ((8, 2), (2, 1), (1, 0)):
        with envfleet.make("CartPole-v1", num_envs, backend="native") as pool:
            pool.reset(seed=0)
            assert native_core(pool).num_helpers == num_helpers


@pytest.mark.usefixtures("always_help")
def test_helpers_are_pinned_if_asked():
    cpus = sorted(os.sched_getaffinity(0))

    def allowed():
        return {len(os.sched_getaffinity(int(helper.name))) for helper in _helpers()}

    with envfleet.make("CartPole-v1", 8, num_workers=2, pin_workers=True) as pool:
        pool.reset(seed=0)
        wait_until(lambda: allowed() == {1}, "the helper keeps to one CPU")
        assert os.sched_getaffinity(0) == set(cpus), "the calling thread is the caller's"
    with envfleet.make("CartPole-v1", 8, num_workers=2) as pool:
        pool.reset(seed=0)
        wait_until(lambda: allowed() == {len(cpus)}, "the helper may run anywhere")


def test_the_gil_is_free_while_envs_step():
    with make_native(ScriptedEnv, 2, num_workers=1, env_kwargs={"sleep_s": 1.0}) as pool:
        pool.reset(seed=0)
        is_stepping = threading.Event()
        seen = []

        def look():
            is_stepping.wait(10)
            time.sleep(0.2)
            seen.append(time.monotonic())

        watcher = threading.Thread(target=look)
        watcher.start()
        is_stepping.set()
        pool.step(np.full(2, Act.SLEEP))
        stepped_at = time.monotonic()
        watcher.join(10)
        assert seen and seen[0] < stepped_at


@pytest.mark.usefixtures("always_help")
def test_a_timeout_loses_nothing():
    with make_native(ScriptedEnv, 2, num_workers=2, batch_size=1, env_kwargs={"sleep_s": 0.5}) as pool:
        pool.reset(seed=0)
        pool.step(np.full(2, Act.GO_ON))  # so that the cost of a step is known, and helpers are called
        pool.recv()
        pool.send(np.array([Act.SLEEP]), [0])
        wait_until(lambda: native_core(pool).runs_under_way() == [(0, 0)], "the helper has taken the task")
        with pytest.raises(envfleet.PoolTimeout, match="no full batch after"):
            pool.recv(timeout_s=0.05)
        assert pool.recv()[4]["env_id"] == [0]


@pytest.mark.usefixtures("always_help")
def test_without_a_limit_the_log_says_what_is_waited_for(monkeypatch, caplog):
    monkeypatch.setattr(waits, "HEARTBEAT_S", 0.3)
    settings = {"num_workers": 2, "batch_size": 1, "timeout_s": None, "env_kwargs": {"sleep_s": 1.5}}
    with make_native(ScriptedEnv, 2, **settings) as pool:
        pool.reset(seed=0)
        pool.step(np.full(2, Act.GO_ON))
        pool.recv()
        pool.send(np.array([Act.SLEEP]), [0])
        wait_until(lambda: pool._backend._pool.runs_under_way() == [(0, 0)], "the helper has taken the task")
        looks = []
        pool.call_while_waiting(lambda: looks.append(time.monotonic()))
        with caplog.at_level(logging.WARNING, "envfleet.pool"):
            assert pool.recv()[4]["env_id"] == [0]
        assert "native envs (timeout_s=None); threads are at work on envs 0 to 0" in caplog.text
        assert len(looks) >= 2


def test_a_helper_that_hangs_does_not_hang_close(monkeypatch, caplog):
    monkeypatch.setattr(native, "HELP_WORTH_S", 0.0)
    monkeypatch.setattr(native, "CLOSE_WAIT_S", 0.1)
    pool = make_native(ScriptedEnv, 2, num_workers=2, batch_size=1, env_kwargs={"sleep_s": 2.0})
    pool.reset(seed=0)
    pool.step(np.full(2, Act.GO_ON))
    pool.recv()
    pool.send(np.array([Act.SLEEP]), [1])
    wait_until(lambda: native_core(pool).runs_under_way() == [(1, 1)], "the helper has taken the task")
    pool.close()
    assert "did not stop" in caplog.text and "envs 1 to 1" in caplog.text


@pytest.mark.usefixtures("always_help")
def test_a_forked_process_may_only_close_the_pool():
    with envfleet.make("CartPole-v1", 16, num_workers=3) as pool:
        pool.reset(seed=0)
        actions = np.zeros(16, np.int64)
        pool.step(actions)
        wait_until(lambda: _helper_threads() == 2, "both helpers have started")
        child = os.fork()
        if child == 0:
            code = 1
            try:
                with pytest.raises(envfleet.PoolClosed, match="belongs to process"):
                    pool.step(actions)
                pool.close()
                code = 0
            finally:
                os._exit(code)
        exit_codes = []

        def has_exited():
            pid, status = os.waitpid(child, os.WNOHANG)
            if pid:
                exit_codes.append(os.waitstatus_to_exitcode(status))
            return bool(exit_codes)

        wait_until(has_exited, "the forked process has ended")
        assert exit_codes == [0]
        pool.step(actions)


DAEMON = """
import sys, threading, time
import numpy as np
import envfleet
pool = envfleet.make("CartPole-v1", 64, backend=sys.argv[1], num_workers=2)
pool.reset(seed=0)
steps = []
def loop():
    while True:
        pool.step(np.zeros(64, int))
        steps.append(1)
threading.Thread(target=loop, daemon=True).start()
while len(steps) < 100:
    time.sleep(0.01)
"""


@pytest.mark.parametrize("backend", ["native", "process"])
def test_a_program_may_end_while_a_daemon_thread_steps(backend):
    for _ in range(3):
        ended = subprocess.run([sys.executable, "-c", DAEMON, backend], capture_output=True, text=True, timeout=60)
        assert ended.returncode == 0, ended.stderr
        assert "nanobind" not in ended.stderr


def test_a_pool_that_nobody_closed_leaves_nothing():
    pool = make_native(ScriptedEnv, 4, num_workers=2, env_kwargs={"sleep_s": 0.02})
    pool.reset(seed=0)
    for _ in range(2):
        pool.step(np.full(4, Act.SLEEP))
    wait_until(lambda: _helper_threads() == 1, "the helper has started")
    del pool


@pytest.mark.parametrize("mode", ["next_step", "same_step"])
@pytest.mark.parametrize("num_workers", [1, 3])
@pytest.mark.usefixtures("always_help")
def test_asynchronous_envs_fail_and_go_on(num_workers, mode, monkeypatch):
    """Failed rows of small batches: each env's own count of steps stays right, and nobody else's changes."""
    monkeypatch.setattr(guard, "LONGEST_BACKOFF_S", 0.0)
    generator = np.random.default_rng(3)
    num_envs, batch_size = 50, 3
    kwargs = {"autoreset_mode": mode, "on_env_error": "restart", "max_env_restarts": 1000, "num_workers": num_workers}
    with make_native(ScriptedEnv, num_envs, batch_size=batch_size, **kwargs) as pool:
        pool.async_reset(seed=0)
        num_steps = np.full(num_envs, -1)
        is_first = np.ones(num_envs, bool)  # the next row shows a reset
        last_acts = np.zeros(num_envs, int)
        for _ in range(1000):
            obs, rewards, _, truncations, infos = pool.recv()
            env_ids = infos["env_id"]
            failed = (last_acts[env_ids] == Act.RAISE) & ~is_first[env_ids]
            np.testing.assert_array_equal(truncations, failed)
            num_steps[env_ids] = np.where(is_first[env_ids], 0, num_steps[env_ids] + ~failed)
            shown = num_steps[env_ids]
            if mode == "same_step":
                shown = np.where(failed, 0, shown)
                num_steps[env_ids] = shown
            np.testing.assert_array_equal(obs[:, 1], shown)
            np.testing.assert_array_equal(rewards, np.where(failed | is_first[env_ids], 0.0, num_steps[env_ids] + 0.1))
            is_first[env_ids] = failed & (mode == "next_step")
            last_acts[env_ids] = generator.choice([Act.GO_ON] * 5 + [Act.RAISE], batch_size)
            pool.send(last_acts[env_ids], env_ids)
