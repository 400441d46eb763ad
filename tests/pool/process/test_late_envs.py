"""Envs that hang in a process pool: only the one that hangs fails, whatever it hangs in."""

import contextlib
import logging
import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np
import pytest
from gymnasium.vector import SyncVectorEnv

import envfleet
from envfleet.pool import waits
from envfleet.pool.process.interruption import INTERRUPT_SIGNAL
from tests.support import inside
from tests.support.envs.hanging_envs import (
    DEAF,
    INTERRUPTIBLE,
    HangingEnv,
    hang_no_more,
    has_hung,
    let_go_on,
    tell_to_hang,
)
from tests.support.waiting import is_running, wait_until

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("quick_spawners")]

NUM_ENVS = 6
NUM_WORKERS = 2  # envs 0 to 2, and 3 to 5
LATE = 1  # the env that hangs
HANGS_AT = 4
NUM_STEPS = 20


def make(folder, num_envs=NUM_ENVS, num_workers=NUM_WORKERS, **settings):
    env_kwargs = [{"folder": str(folder), "name": index} for index in range(num_envs)]
    settings = {"timeout_s": 2.0, "env_kwargs": env_kwargs, **settings}
    return envfleet.make(HangingEnv, num_envs, backend="process", num_workers=num_workers, **settings)


def acts(num_envs=NUM_ENVS):
    return np.zeros(num_envs, np.int64)


def played(pool, folder, how=None):
    """All rows of NUM_STEPS steps; errors by step and env; what was raised. Env LATE hangs in step HANGS_AT."""
    rows, errors, raised = [pool.reset(seed=5)[0].copy()], {}, []
    for step in range(NUM_STEPS):
        if how is not None and step == HANGS_AT:
            tell_to_hang(folder, LATE, how)
        receive = partial(pool.step, acts())
        while True:
            try:
                obs, rewards, terminated, truncated, info = receive()
                break
            except envfleet.EnvFailed as error:
                raised.append(error)
            except envfleet.PoolTimeout as error:
                raised.append(error)
                pool.give_up(error.env_ids)
            receive = pool.recv
        rows.append(np.column_stack([obs, rewards, terminated, truncated]))
        for env_id in np.flatnonzero(info.get("_env_error", [])):
            errors[step, int(env_id)] = info["env_error"][env_id]
            assert truncated[env_id] and rewards[env_id] == 0
    return rows, errors, raised


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    """The rows of a pool none of whose envs hangs."""
    folder = tmp_path_factory.mktemp("calm")
    with make(folder) as pool:
        rows, errors, raised = played(pool, folder)
    assert not errors and not raised
    return rows


def require_same(rows, expected, env_ids):
    for step, (row, other) in enumerate(zip(rows, expected, strict=True)):
        assert np.array_equal(row[env_ids], other[env_ids]), f"row {step} of envs {env_ids}"


def others(*without):
    return [env_id for env_id in range(NUM_ENVS) if env_id not in without]


@pytest.mark.parametrize("how", INTERRUPTIBLE)
def test_an_env_that_can_be_interrupted_costs_that_env_only(tmp_path, expected, how):
    with make(tmp_path, on_env_error="restart") as pool:
        pids = pool.call("pid")
        rows, errors, raised = played(pool, tmp_path, how)
        assert pool.call("pid") == pids  # nobody was killed
    assert has_hung(tmp_path, LATE) and not raised
    assert list(errors) == [(HANGS_AT, LATE)]
    assert "EnvTimedOut: its step() had not returned" in errors[HANGS_AT, LATE]
    assert "timeout_s=2 s is the limit" in errors[HANGS_AT, LATE]
    require_same(rows, expected, others(LATE))  # also those of the same process
    require_same(rows[: HANGS_AT + 1], expected[: HANGS_AT + 1], [LATE])
    assert rows[HANGS_AT + 2][LATE, 1] == 0  # it was built anew, and begins another episode


@pytest.mark.parametrize("how", DEAF)
def test_an_env_that_cannot_be_interrupted_costs_its_process_only(tmp_path, expected, how):
    with make(tmp_path, on_env_error="restart") as pool:
        pids = pool.call("pid")
        rows, errors, raised = played(pool, tmp_path, how)
        after = pool.call("pid")
        assert after[3:] == pids[3:] and after[0] != pids[0] and not is_running(pids[0])
        queues = pool._backend._task_queues
        assert [queues.num_failures(env_id) for env_id in (0, 2)] == [0, 0]  # they have not failed themselves
    assert not raised
    assert {env_id for _, env_id in errors} == {0, 1, 2}
    text = errors[HANGS_AT, LATE]
    assert f"was killed, since env {LATE} was in step() for longer than timeout_s=2 s" in text
    assert "envs 0 to 2" in text
    require_same(rows, expected, [3, 4, 5])


def test_without_restart_nothing_is_lost_until_the_caller_gives_the_env_up(tmp_path, expected):
    with make(tmp_path) as pool:
        pids = pool.call("pid")
        rows, errors, raised = played(pool, tmp_path, "sleep")
        assert pool.call("pid") == pids
    timeout, failed = raised
    assert isinstance(timeout, envfleet.PoolTimeout) and timeout.env_ids == (LATE,)
    assert f"env {LATE} was in step() for longer than timeout_s=2 s" in str(timeout)
    assert "make(..., timeout_s=...), on a cluster pool=PoolSettings(timeout_s=...); None: no limit" in str(timeout)
    assert "time.sleep(3600)" in str(timeout) or "in hang" in str(timeout)  # its stack
    assert isinstance(failed, envfleet.EnvFailed) and failed.env_id == LATE and "EnvTimedOut" in str(failed)
    assert "in hang" in failed.child_traceback
    assert list(errors) == [(HANGS_AT, LATE)]
    require_same(rows, expected, others(LATE))


def test_a_second_wait_lasts_as_long_as_the_first(tmp_path):
    """Or a caller that goes on waiting would hear PoolTimeout again at once."""
    with make(tmp_path, num_envs=1, num_workers=1, timeout_s=3.0) as pool:
        pool.reset(seed=0)
        tell_to_hang(tmp_path, 0, "held")
        with pytest.raises(envfleet.PoolTimeout, match=r"timeout_s=3 s"):
            pool.step(acts(1))
        late = pool._backend._late
        first_wait_s = late._begun_s

        def let_go():
            wait_until(lambda: late._begun_s != first_wait_s, "the second wait has looked at what is late")
            let_go_on(tmp_path, 0)

        with ThreadPoolExecutor() as threads:
            helper = threads.submit(let_go)
            obs, *_ = pool.recv()
            helper.result(20.0)
        assert obs[0, 1] == 1


def test_a_killed_process_without_restart(tmp_path):
    with make(tmp_path) as pool:
        _, errors, raised = played(pool, tmp_path, "stopped")
    timeout, died = raised
    assert isinstance(timeout, envfleet.PoolTimeout)
    assert isinstance(died, envfleet.ChildDied) and died.env_id == LATE and died.env_ids == (0, 1, 2)
    assert f"the caller gave env {LATE} up" in str(died)
    assert {env_id for _, env_id in errors} == {0, 1, 2}


def test_the_time_of_each_env_counts_from_its_own_step(tmp_path):
    """Four envs of 0.6 s, one after the other, are no timeout of 1.5 s."""
    env_kwargs = [{"folder": str(tmp_path), "name": index, "step_s": 0.6} for index in range(4)]
    settings = {"num_envs": 4, "num_workers": 1, "timeout_s": 1.5, "env_kwargs": env_kwargs}
    for on_env_error in ("raise", "restart"):
        with make(tmp_path, on_env_error=on_env_error, **settings) as pool:
            pool.reset(seed=0)
            obs, *_, info = pool.step(acts(4))
            assert obs[:, 1].tolist() == [1] * 4 and "env_error" not in info


def test_several_that_hang_one_behind_the_other(tmp_path, expected):
    """Each has its own time, in one process and in several."""
    with make(tmp_path, on_env_error="restart") as pool:
        rows = [pool.reset(seed=5)[0].copy()]
        for env_id in (0, 2, 5):
            tell_to_hang(tmp_path, env_id, "sleep")
        obs, rewards, terminated, truncated, info = pool.step(acts())
        rows.append(np.column_stack([obs, rewards, terminated, truncated]))
        assert truncated.tolist() == [True, False, True, False, False, True]
        assert info["_env_error"].tolist() == truncated.tolist()
    require_same(rows, expected[:2], [1, 3, 4])


def test_a_reset_that_hangs_is_made_again(tmp_path):
    with make(tmp_path, on_env_error="restart") as pool:
        tell_to_hang(tmp_path, LATE, "loop", "reset")
        obs, _ = pool.reset(seed=5)
        assert has_hung(tmp_path, LATE, "reset")
        assert obs[:, 1].tolist() == [0] * NUM_ENVS
        assert not pool.step(acts())[3].any()


MOST_RAISED = 20  # by far more than any wait here has errors


def received(receive, again):
    """A batch, and all that was raised before it came."""
    raised = []
    while len(raised) < MOST_RAISED:
        try:
            return receive(), raised
        except envfleet.EnvFailed as error:
            raised.append(error)
        receive = again
    raise AssertionError(f"no batch, but {raised}")


@pytest.mark.parametrize(("how", "mode", "restarts"), [("c", "next_step", 10), ("stopped", "same_step", 1)])
def test_a_reset_that_hangs_in_every_new_process_is_not_made_for_ever(tmp_path, monkeypatch, how, mode, restarts):
    """Its row ends with an error; the other envs of its process have theirs, and a later reset may succeed."""
    monkeypatch.setattr("envfleet.pool.process.late_envs.INTERRUPT_GRACE_S", 0.1)
    settings = {"on_env_error": "restart", "max_env_restarts": restarts, "timeout_s": 0.5, "autoreset_mode": mode}
    with make(tmp_path, num_envs=2, num_workers=1, **settings) as pool:
        pool.reset(seed=0)
        tell_to_hang(tmp_path, 0, how, "reset", always=True)
        if mode == "same_step":  # the env is lost in a step, and the reset that follows in the same step hangs
            os.kill(pool._backend._task_queues.pid(0), signal.SIGKILL)
        begin = partial(pool.reset, seed=1) if mode == "next_step" else partial(pool.step, acts(2))
        result, raised = received(begin, pool.recv)
        assert [type(error) for error in raised[:-1]] == [envfleet.ChildDied] * (len(raised) - 1)
        assert type(raised[-1]) is envfleet.EnvFailed and raised[-1].env_id == 0
        assert "3 processes in a row were lost at this task" in str(raised[-1])
        where = "reset" if mode == "next_step" else "step"  # of which the reset is a part
        assert f"in {where}() for longer than timeout_s=0.5 s" in str(raised[-1])
        assert result[3].tolist() == [True, mode == "same_step"]
        assert "timeout_s=0.5 s" in result[-1]["env_error"][0]
        _, raised = received(partial(pool.reset, seed=1), pool.recv)
        one_more_try = [envfleet.ChildDied, envfleet.EnvFailed]
        assert [type(error) for error in raised] == one_more_try[restarts > 1 :]
        hang_no_more(tmp_path, 0, "reset")
        obs, _ = pool.reset(seed=1)
        assert obs[:, 1].tolist() == [0, 0]
        assert not pool.step(acts(2))[3].any()


@pytest.mark.parametrize("mode", ["next_step", "same_step"])
def test_a_reset_that_hangs_again_and_again_is_given_up(tmp_path, mode):
    """After three times, though with 10 restarts: each takes timeout_s."""
    with make(tmp_path, num_envs=2, num_workers=1, on_env_error="restart", timeout_s=0.5, autoreset_mode=mode) as pool:
        tell_to_hang(tmp_path, 0, "sleep", "reset", always=True)
        begun_s = time.monotonic()
        with pytest.raises(
            envfleet.EnvFailed, match=r"timeout_s=0.5 s.*\(3 times in a row: it is given up\)"
        ) as caught:
            pool.reset(seed=0)
        assert time.monotonic() - begun_s < 10 * 0.5
        assert caught.value.env_id == 0
        assert pool.recv()[3].tolist() == [True, False]
        hang_no_more(tmp_path, 0, "reset")
        assert pool.reset(seed=0)[0][:, 1].tolist() == [0, 0]


@pytest.mark.parametrize(("how", "on_env_error"), [("raise", "raise"), ("stopped", "restart")])
def test_a_constructor_that_fails_in_every_new_process_is_not_called_for_ever(tmp_path, monkeypatch, how, on_env_error):
    monkeypatch.setattr("envfleet.pool.process.late_envs.INTERRUPT_GRACE_S", 0.1)
    restarts = {"max_env_restarts": 1} if on_env_error == "restart" else {}
    with make(tmp_path, num_envs=2, num_workers=1, on_env_error=on_env_error, **restarts) as pool:
        pool.reset(seed=0)
        with inside.quick_builds(pool) if how == "stopped" else contextlib.nullcontext():
            tell_to_hang(tmp_path, 0, how, "build", always=True)
            os.kill(inside.child_pid(pool), signal.SIGKILL)
            result, raised = received(partial(pool.step, acts(2)), pool.recv)
            assert result[3].tolist() == [True, True] == result[-1]["_env_error"].tolist()
            assert raised[-1].env_id == 0
            text = str(raised[-1])
            assert "no licence" in text if how == "raise" else "lost at this task" in text or "EnvTimedOut" in text
        hang_no_more(tmp_path, 0, "build")
        obs, _ = pool.reset(seed=1)
        assert obs[:, 1].tolist() == [0, 0]
        assert not pool.step(acts(2))[3].any()


def test_an_env_that_hangs_once_too_often(tmp_path):
    with make(tmp_path, num_envs=2, num_workers=1, on_env_error="restart", max_env_restarts=1, timeout_s=0.5) as pool:
        pool.reset(seed=0)
        tell_to_hang(tmp_path, 0, "sleep")
        assert pool.step(acts(2))[3].tolist() == [True, False]
        pool.step(acts(2))
        tell_to_hang(tmp_path, 0, "sleep")
        with pytest.raises(envfleet.EnvFailed, match=r"2 failures without a finished episode") as caught:
            pool.step(acts(2))
        assert caught.value.env_id == 0
        assert pool.recv()[3].tolist() == [True, False]


def test_building_anew_has_its_own_time(tmp_path):
    """A constructor may take `start_timeout_s`, though a step may take much less; it can be interrupted, too."""
    with make(tmp_path, num_envs=2, num_workers=1, on_env_error="restart", start_timeout_s=30.0) as pool:
        pool.reset(seed=0)
        tell_to_hang(tmp_path, 0, "sleep")
        tell_to_hang(tmp_path, 0, "loop", "build")
        pool.send(acts(2))
        deadline_s = time.monotonic() + 60.0
        while not has_hung(tmp_path, 0, "build"):
            assert time.monotonic() < deadline_s
            with pytest.raises(envfleet.PoolTimeout):
                pool.recv(timeout_s=0.3)
        with pytest.raises(envfleet.PoolTimeout, match="the timeout_s of this recv"):
            pool.recv(timeout_s=4.0)  # longer than timeout_s
        pool.give_up([0])
        *_, truncated, info = pool.recv()
        assert truncated.tolist() == [True, False]
        assert "then, in reset: EnvTimedOut: its constructor had not returned" in info["env_error"][0]
        pool.step(acts(2))
        assert pool.step(acts(2))[0][:, 1].tolist() == [1, 3]


def test_an_asynchronous_pool_goes_on_meanwhile(tmp_path):
    with make(tmp_path, num_workers=NUM_ENVS, batch_size=2, on_env_error="restart") as pool:
        pool.async_reset(seed=0)
        tell_to_hang(tmp_path, LATE, "sleep")
        counts, errors = np.zeros(NUM_ENVS, int), []
        deadline_s = time.monotonic() + 60.0
        while not errors:
            assert time.monotonic() < deadline_s
            *_, info = pool.recv()
            counts[info["env_id"]] += 1
            errors += [text for text in info.get("env_error", []) if text]
            if LATE in info["env_id"] and errors:
                break
            pool.send(np.zeros(2, np.int64), info["env_id"])
        assert "timeout_s=2 s" in errors[0]
        assert min(counts[others(LATE)]) > 10 * counts[LATE]  # they did not wait for it


def test_an_asynchronous_pool_gives_up_whom_the_caller_gives_up(tmp_path):
    """Though batches of the others are always full, so that nothing is ever waited for."""
    with make(tmp_path, num_workers=NUM_ENVS, batch_size=2, timeout_s=None) as pool:
        pool.async_reset(seed=0)
        tell_to_hang(tmp_path, LATE, "sleep")
        deadline_s, is_given_up = time.monotonic() + 60.0, False
        with pytest.raises(envfleet.EnvFailed, match="EnvTimedOut") as caught:
            while time.monotonic() < deadline_s:
                *_, info = pool.recv()
                pool.send(np.zeros(2, np.int64), info["env_id"])
                if not is_given_up and has_hung(tmp_path, LATE):
                    pool.give_up([LATE])
                    is_given_up = True
        assert caught.value.env_id == LATE


def test_a_signal_that_comes_too_late_hits_nobody(tmp_path):
    """The env has answered in the meantime; its process is at the next task."""
    env_kwargs = {"folder": str(tmp_path), "step_s": 0.5}
    with make(tmp_path, num_envs=1, num_workers=1, env_kwargs=env_kwargs) as pool:
        pool.reset(seed=0)
        (pid,) = pool.call("pid")
        clocks, queues = pool._backend._arrays.task_clocks, pool._backend._task_queues
        os.kill(pid, INTERRUPT_SIGNAL)  # while it is idle
        clocks.given_up_s[0] = time.monotonic()
        os.kill(pid, INTERRUPT_SIGNAL)
        for number in range(1, 4):
            pool.send(acts(1))
            wait_until(lambda: queues.doing(0).env_id == 0, "it is in the step")
            os.kill(pid, INTERRUPT_SIGNAL)  # of the task before this one
            obs, _, _, truncated, _ = pool.recv()
            assert obs[0, 1] == number and not truncated[0]


def test_giving_up_is_for_envs_that_are_at_work(tmp_path):
    with make(tmp_path) as pool:
        pool.reset(seed=0)
        pool.give_up([0, 1])  # nothing is in flight
        assert not pool.step(acts())[3].any()
        with pytest.raises(envfleet.UsageError, match="between 0 and 5"):
            pool.give_up([6])
    for backend in ("serial", "native"):
        with (
            envfleet.make("CartPole-v1", 2, backend=backend) as pool,
            pytest.raises(envfleet.UsageError, match=r"cannot be interrupted|nothing can interrupt"),
        ):
            pool.give_up([0])


# -- no limit --


@pytest.fixture
def quick_heartbeat(monkeypatch):
    monkeypatch.setattr(waits, "HEARTBEAT_S", 0.4)


@pytest.mark.usefixtures("quick_heartbeat")
def test_without_a_limit_the_log_says_what_is_waited_for(tmp_path, caplog):
    with make(tmp_path, timeout_s=None) as pool:
        pool.reset(seed=0)
        tell_to_hang(tmp_path, LATE, "sleep")
        pool.send(acts())
        caplog.clear()
        with caplog.at_level(logging.WARNING, "envfleet.pool"), pytest.raises(envfleet.PoolTimeout, match="this recv"):
            pool.recv(timeout_s=1.5)
        lines = [record.getMessage() for record in caplog.records]
        assert len(lines) >= 2 and all(f"env {LATE} in step() for " in line for line in lines)
        assert "(timeout_s=None)" in lines[0]
        assert has_hung(tmp_path, LATE)
        os.kill(pool._backend._task_queues.pid(0), signal.SIGKILL)  # noticed at once, and the batch is complete
        with pytest.raises(envfleet.ChildDied, match="SIGKILL"):
            pool.recv()
        assert pool.recv()[3].tolist() == [False, True, True, False, False, False]  # env 0 was done


def test_without_a_limit_a_pool_can_be_interrupted_and_closed(tmp_path, monkeypatch):
    monkeypatch.setattr("envfleet.pool.process.resources.CLOSE_GRACE_S", 0.2)
    with make(tmp_path, timeout_s=None) as pool:
        pool.reset(seed=0)
        tell_to_hang(tmp_path, LATE, "c")
        pool.send(acts())
        wait_until(lambda: has_hung(tmp_path, LATE), "the env hangs")
        pids = [pool._backend._task_queues.pid(child) for child in range(NUM_WORKERS)]
        threading.Timer(0.5, signal.raise_signal, (signal.SIGINT,)).start()
        with pytest.raises(KeyboardInterrupt):
            pool.recv()
    assert not any(map(is_running, pids))


@pytest.mark.usefixtures("quick_heartbeat")
def test_without_a_limit_a_constructor_may_take_its_time(tmp_path, caplog):
    tell_to_hang(tmp_path, 0, "stopped", "build")

    def wake():
        wait_until(lambda: has_hung(tmp_path, 0, "build"), "it is being built")
        time.sleep(1.0)
        os.kill(int((tmp_path / "hung-build-0").read_text()), signal.SIGKILL)

    waker = threading.Thread(target=wake)
    waker.start()
    with caplog.at_level(logging.WARNING, "envfleet.pool"), pytest.raises(envfleet.ChildDied, match="SIGKILL"):
        make(tmp_path, start_timeout_s=None)
    waker.join(60)
    assert "the first env is being built (start_timeout_s=None)" in caplog.text


@pytest.mark.usefixtures("quick_heartbeat")
@pytest.mark.parametrize("backend", ["serial", "vector"])
def test_envs_in_the_callers_thread_are_watched_by_another(tmp_path, caplog, backend):
    def build(num_envs, autoreset_mode):
        return SyncVectorEnv([lambda: HangingEnv(tmp_path, step_s=1.2)], autoreset_mode=autoreset_mode)

    env, settings = build, {}
    if backend == "serial":
        env, settings = HangingEnv, {"env_kwargs": {"folder": tmp_path, "step_s": 1.2}}
    with envfleet.make(env, 1, backend=backend, timeout_s=None, **settings) as pool:
        pool.reset(seed=0)
        with caplog.at_level(logging.WARNING, "envfleet.pool"):
            pool.step(acts(1))
        thread = pool._backend._watch._thread
    what = "env 0 is at work in this thread" if backend == "serial" else "SyncVectorEnv steps in this thread"
    assert what in caplog.text
    thread.join(20.0)
    assert not thread.is_alive()
