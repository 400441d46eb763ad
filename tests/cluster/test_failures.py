"""Things that go wrong in a cluster, each done for real: no hang, an error that names the place, and no row twice."""

import contextlib
import gc
import os
import re
import signal
import subprocess
import sys
import threading
import time
import types

import cloudpickle
import numpy as np
import pytest

import envfleet
from envfleet.cluster.wire.messages import Collect, Refused
from envfleet.contract.errors import (
    ChildDied,
    ClusterTimeout,
    EnvBusy,
    EnvFailed,
    JoinTimeout,
    PolicyFailed,
    PoolClosed,
    WorkerFailed,
    WorkerLost,
)
from envfleet.launchers.local import Local
from envfleet.policies.by_path import PolicySpec
from envfleet.testing.cluster_arguments import cluster_arguments
from tests.support.cluster.hand_worker import ByHand, HandWorker
from tests.support.envs.cluster_envs import (
    Accounts,
    Agent,
    CountingEnv,
    DyingEnv,
    NotHereEnv,
    OtherAgent,
    PickyAgent,
    RaisingAgent,
)
from tests.support.scripts import script_environment
from tests.support.waiting import descendants, is_running, wait_until

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("quick_workers")]

AGENT = Agent()  # after an error "the same call" has the same agent
QUICK = {"heartbeat_s": 0.2, "resend_s": 1.0, "timeout_s": 60.0, "backend": "serial"}
HOST = os.uname().nodename


@contextlib.contextmanager
def cluster(tmp_path, num_workers=2, num_envs=1, env=CountingEnv, **settings):
    """A cluster of CountingEnvs that listen to files in tmp_path."""
    if env is CountingEnv:
        settings.setdefault("env_kwargs", {"folder": str(tmp_path)})
    with envfleet.ClusterEnv(env, num_workers, num_envs, **cluster_arguments({**QUICK, **settings})) as envs:
        yield envs


def pids(envs):
    return [worker.pid for worker in envs.stats().workers]


def restarts(envs):
    return [worker.num_restarts for worker in envs.stats().workers]


def hold(tmp_path):
    (tmp_path / "hold").touch()


def let_go(tmp_path):
    (tmp_path / "hold").unlink()


def wait_for_holding(tmp_path, pid):
    wait_until((tmp_path / f"holding-{pid}").exists, f"an env of process {pid} is in the middle of a step")


def kill_while_holding(tmp_path, pid):
    """SIGKILL in the middle of a step."""
    wait_for_holding(tmp_path, pid)
    os.kill(pid, signal.SIGKILL)
    let_go(tmp_path)


def in_background(call, *args):
    thread = threading.Thread(target=call, args=args, daemon=True)
    thread.start()
    return thread


def actions(envs, action=0):
    return np.full(envs.num_envs, action)


# -- a worker is killed --


def test_killed_during_step(tmp_path, caplog):
    with cluster(tmp_path, num_envs=2) as envs:
        envs.reset(seed=0)
        before, victim = pids(envs), pids(envs)[1]
        hold(tmp_path)
        killer = in_background(kill_while_holding, tmp_path, victim)
        with pytest.raises(ChildDied) as caught:
            envs.step(actions(envs))
        killer.join()
        assert caught.value.env_ids == (2, 3)
        for part in ("worker 1", HOST, "SIGKILL", "envs 2 to 3"):
            assert part in str(caught.value)
        obs, _, _, truncations, info = envs.recv()
        assert truncations.tolist() == [False, False, True, True]
        assert "lost" in info["env_error"][2]
        obs, *_, truncations, info = envs.step(actions(envs))
        assert not truncations.any()
        assert obs[:2, 1].tolist() == [2, 2]  # the others' episodes went on
        assert obs[2:, 1].tolist() == [0, 0]  # those have begun anew
        assert pids(envs)[0] == before[0] and pids(envs)[1] != victim
        assert restarts(envs) == [0, 1]
    assert re.search(rf"worker 1 \(host {HOST}, pid {victim}\) is lost.*SIGKILL.*replaced", caplog.text)


def test_killed_during_step_with_restart(tmp_path, caplog):
    with cluster(tmp_path, on_env_error="restart", autoreset_mode="same_step") as envs:
        envs.reset(seed=0)
        hold(tmp_path)
        killer = in_background(kill_while_holding, tmp_path, pids(envs)[0])
        obs, _, _, truncations, info = envs.step(actions(envs))
        killer.join()
        assert truncations.tolist() == [True, False]
        assert "lost" in info["env_error"][0]
        assert info["_final_obs"].tolist() == [True, False]
        obs, *_, truncations, info = envs.step(actions(envs))
        assert obs[:, 1].tolist() == [1, 2]
    assert "SIGKILL" in caplog.text


def test_killed_during_rollout(tmp_path, caplog):
    accounts = Accounts()
    with cluster(tmp_path, num_envs=2) as envs:
        accounts.add(envs.rollout(AGENT, 10))
        victim = pids(envs)[0]
        hold(tmp_path)
        killer = in_background(kill_while_holding, tmp_path, victim)
        accounts.add(envs.rollout(AGENT, 10))
        killer.join()
        accounts.add(envs.rollout(AGENT, 10))
        assert restarts(envs) == [1, 0]
        assert envs.stats().num_steps == accounts.num_rows == 3 * 10 * 4
    assert accounts.num_env_objects == 2 + 4
    assert f"pid {victim}) is lost" in caplog.text and "SIGKILL" in caplog.text


def test_killed_during_stream(tmp_path, caplog):
    accounts, counts = Accounts(), [0, 0]
    with cluster(tmp_path) as envs:
        victims = pids(envs)
        for rollout in envs.stream(AGENT, 8):
            accounts.add(rollout)
            counts[int(rollout.workers[0])] += 1
            if accounts.num_env_objects == 2 and is_running(victims[0]):  # the next rollout may come before it is gone
                with contextlib.suppress(ProcessLookupError):
                    os.kill(victims[0], signal.SIGKILL)
            if accounts.num_env_objects == 3 and is_running(victims[1]):
                for pid in pids(envs):  # both at once
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
            if accounts.num_env_objects >= 5:
                break
        assert restarts(envs) == [2, 1]
    assert min(counts) > 0
    assert "SIGKILL" in caplog.text


def test_a_pool_process_of_a_worker_is_killed(tmp_path):
    """Not the worker itself: the env's own process beside it."""
    with cluster(tmp_path, backend="process", num_workers=1, num_envs=2, pool_workers=2) as envs:
        accounts = Accounts()
        accounts.add(envs.rollout(AGENT, 5))
        worker = pids(envs)[0]
        os.kill(envs.call("pid")[1], signal.SIGKILL)
        with pytest.raises(EnvFailed) as caught:
            envs.rollout(AGENT, 5)
        for part in ("env 1", "worker 0", HOST, "SIGKILL"):
            assert part in str(caught.value)
        rollout = envs.rollout(AGENT, 5)
        assert rollout.truncations[0].tolist() == [False, True]
        assert envs.rollout(AGENT, 5).num_steps == 5
        assert pids(envs) == [worker]


# -- slow is not dead --


@pytest.mark.long
def test_stopped_for_20_s_is_not_dead(tmp_path, caplog):
    accounts = Accounts()
    with cluster(tmp_path, env_kwargs={"step_s": 0.002}, heartbeat_s=1.0, resend_s=5.0) as envs:
        before = pids(envs)
        stream = envs.stream(AGENT, 50)
        accounts.add(next(stream))
        os.kill(before[0], signal.SIGSTOP)
        try:
            end_s, counts = time.monotonic() + 20.0, [0, 0]
            while time.monotonic() < end_s:
                rollout = next(stream)
                accounts.add(rollout)
                counts[int(rollout.workers[0])] += 1
        finally:
            os.kill(before[0], signal.SIGCONT)
        assert counts[1] > counts[0]  # what it had sent before may have come afterwards
        while int((rollout := next(stream)).workers[0]) != 0:
            accounts.add(rollout)
        accounts.add(rollout)
        assert pids(envs) == before
        assert restarts(envs) == [0, 0]
        assert accounts.num_env_objects == 2
    assert "lost" not in caplog.text


# -- an env raises --


@pytest.mark.parametrize("backend", ["serial", "process"])
def test_env_raises_in_step(tmp_path, backend):
    with cluster(tmp_path, backend=backend) as envs:
        envs.reset(seed=5)
        (tmp_path / "raise").touch()
        with pytest.raises(EnvFailed, match="fell off the table") as caught:
            envs.step(actions(envs, 2))
        error = caught.value
        assert error.env_id in (0, 1)
        assert error.seed == 5 + error.env_id
        for part in (f"env {error.env_id}", f"worker {error.env_id}", HOST, "last action: ", "in _obey"):
            assert part in str(error)
        assert "2" in str(error.last_action)
        *_, truncations, _ = envs.recv()
        assert np.flatnonzero(truncations).tolist() == [error.env_id]
        for _ in range(3):
            envs.step(actions(envs))
        assert restarts(envs) == [0, 0]


def test_step_after_an_error_asks_for_recv(tmp_path):
    """The batch with the failed env is still to be received, as with a pool on this machine."""
    with cluster(tmp_path) as envs:
        envs.reset(seed=0)
        (tmp_path / "raise").touch()
        with pytest.raises(EnvFailed):
            envs.step(actions(envs))
        with pytest.raises(EnvBusy):
            envs.step(actions(envs))
        envs.recv()
        obs = [envs.step(actions(envs))[0] for _ in range(3)]
        assert len({float(each[0, 1]) for each in obs}) == 3


def test_env_raises_in_rollout(tmp_path):
    accounts = Accounts()
    with cluster(tmp_path, num_envs=2) as envs:
        accounts.add(envs.rollout(AGENT, 5))
        (tmp_path / "raise").touch()
        with pytest.raises(EnvFailed, match="fell off the table") as caught:
            envs.rollout(AGENT, 5)
        env_id = caught.value.env_id
        assert f"env {env_id} of worker {env_id // 2} (host {HOST}" in str(caught.value)
        rollout = envs.rollout(AGENT, 5)
        assert rollout.truncations[:, env_id].any()
        assert not np.delete(rollout.truncations, env_id, axis=1).any()
        assert envs.rollout(AGENT, 5).num_steps == 5
        assert envs.stats().num_steps == 3 * 5 * 4


def test_env_raises_in_rollout_with_restart(tmp_path):
    with cluster(tmp_path, on_env_error="restart") as envs:
        envs.rollout(AGENT, 5)
        (tmp_path / "raise").touch()
        rollout = envs.rollout(AGENT, 5)
        assert rollout.truncations.sum() == 1
        assert not (tmp_path / "raise").exists()


@pytest.mark.parametrize("on_env_error", ["raise", "restart"])
def test_env_raises_in_stream(tmp_path, on_env_error):
    with cluster(tmp_path, on_env_error=on_env_error) as envs:
        stream = envs.stream(AGENT, 5)
        next(stream)
        (tmp_path / "raise").touch()
        if on_env_error == "raise":
            with pytest.raises(EnvFailed, match=rf"env \d of worker \d \(host {HOST}.*fell off the table"):
                for _ in stream:
                    pass
            stream = envs.stream(AGENT, 5)
        else:
            while not next(stream).truncations.any():
                pass
        for _ in range(10):
            assert next(stream).num_steps == 5
        assert restarts(envs) == [0, 0]


# -- a policy raises --


def test_policy_raises(tmp_path):
    with cluster(tmp_path) as envs:
        for collect in (lambda agent: envs.rollout(agent, 5), lambda agent: next(envs.stream(agent, 5))):
            for agent, cause in ((RaisingAgent(), "the network is empty"), (PickyAgent(), "layer 7 is missing")):
                with pytest.raises(PolicyFailed, match=cause) as caught:
                    collect(agent)
                assert re.search(rf"worker \d \(host {HOST}, pid \d+\)", str(caught.value))
                assert "Traceback" in str(caught.value)
            collect(AGENT)
        assert restarts(envs) == [0, 0]


def test_policy_cannot_be_imported_there(tmp_path, monkeypatch):
    module = types.ModuleType("only_at_the_head")
    exec("from tests.support.envs.cluster_envs import Agent\nclass Hidden(Agent):\n    pass", module.__dict__)
    module.Hidden.__module__ = "only_at_the_head"
    monkeypatch.setitem(sys.modules, "only_at_the_head", module)
    with cluster(tmp_path) as envs:
        for agent in (module.Hidden(), PolicySpec("no_such_module:Agent")):
            with pytest.raises(PolicyFailed, match=r"worker \d .*(only_at_the_head|no_such_module)") as caught:
                envs.rollout(agent, 5)
            assert "PYTHONPATH" in str(caught.value)
        cloudpickle.register_pickle_by_value(module)
        try:
            envs.rollout(module.Hidden(), 5)
        finally:
            cloudpickle.unregister_pickle_by_value(module)


def test_a_policy_that_is_no_longer_wanted_keeps_nobody_waiting(tmp_path):
    """Orders for a policy whose code the head does not hold any more."""
    with cluster(tmp_path, num_workers=1, timeout_s=20.0) as envs:
        for _ in range(3):
            stream = envs.stream(AGENT, 5)
            del stream
            envs.rollout(OtherAgent(), 5)
        hold(tmp_path)
        stream = envs.stream(AGENT, 5)
        wait_for_holding(tmp_path, pids(envs)[0])
        del stream
        killer = in_background(kill_while_holding, tmp_path, pids(envs)[0])
        envs.rollout(OtherAgent(), 5)  # the replacement gets the old orders first
        killer.join()


# -- a worker does not start --


def test_never_joins(tmp_path, caplog):
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\nexec sleep 1000\n")
    python.chmod(0o700)
    with (
        pytest.raises(JoinTimeout) as caught,
        cluster(tmp_path, launcher=Local(python=str(python)), start_timeout_s=0.5),
    ):
        pass
    for part in ("0 of 2 workers joined in 0.5 s", "worker 0", "worker 1", "running", "log: "):
        assert part in str(caught.value)


def test_never_joins_and_is_started_again(tmp_path, caplog):
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho waiting for the file server\nexec sleep 1000\n")
    python.chmod(0o700)
    settings = {"start_timeout_s": 60.0, "join_timeout_s": 0.5, "max_worker_restarts": 1}
    with pytest.raises(WorkerLost) as caught, cluster(tmp_path, 1, launcher=Local(python=str(python)), **settings):
        pass
    for part in ("worker 0", "not joined within 0.5 s", "waiting for the file server"):
        assert part in str(caught.value)
    assert "replaced" in caplog.text


@pytest.mark.parametrize("program", ["/bin/false", "/no/such/python"])
def test_dies_at_start(tmp_path, program):
    with (
        pytest.raises((WorkerLost, envfleet.EnvFleetError)) as caught,
        cluster(tmp_path, launcher=Local(python=program)),
    ):
        pass
    assert program in str(caught.value) or "exit code 1" in str(caught.value)


def test_dies_when_its_pool_is_built(tmp_path):
    with pytest.raises(WorkerLost) as caught, cluster(tmp_path, 1, env=DyingEnv):
        pass
    for part in ("worker 0", "exit code 9", "the simulator has no licence"):
        assert part in str(caught.value)


def test_pool_cannot_be_built(tmp_path):
    with pytest.raises(WorkerFailed, match="no simulator on this machine") as caught, cluster(tmp_path, env=NotHereEnv):
        pass
    assert re.search(rf"worker \d \(host {HOST}, pid \d+\) cannot build its pool", str(caught.value))


def test_env_is_unknown(tmp_path):
    with pytest.raises(envfleet.EnvFleetError, match="NoSuchEnv"), cluster(tmp_path, env="NoSuchEnv-v0"):
        pass


def test_restarts_are_used_up(tmp_path):
    with cluster(tmp_path, max_worker_restarts=1) as envs:
        envs.rollout(AGENT, 5)
        (tmp_path / "exit").touch()
        with pytest.raises(WorkerLost) as caught:
            envs.rollout(AGENT, 5)
        for part in ("worker", HOST, "SIGKILL", "max_worker_restarts"):
            assert part in str(caught.value)
        (tmp_path / "exit").unlink()
        with pytest.raises(WorkerLost):
            envs.rollout(AGENT, 5)


def test_stream_goes_on_without_a_worker_that_is_given_up(tmp_path):
    accounts = Accounts()
    with cluster(tmp_path, max_worker_restarts=0) as envs:
        stream = envs.stream(AGENT, 5)
        accounts.add(next(stream))
        os.kill(pids(envs)[0], signal.SIGKILL)
        wait_until(lambda: envs.stats().workers[0].stage == "given up", "worker 0 is given up")
        num_of_lost = 0
        for _ in range(20):
            rollout = next(stream)
            accounts.add(rollout)
            num_of_lost += int(rollout.workers[0]) == 0
        assert num_of_lost <= 2  # what it had sent before
        os.kill(pids(envs)[1], signal.SIGKILL)
        with pytest.raises(WorkerLost, match=r"worker 0.*worker 1"):
            for _ in range(100):
                accounts.add(next(stream))


# -- waits that end early --


def test_timeout_of_step_loses_nothing(tmp_path):
    with cluster(tmp_path) as envs:
        envs.reset(seed=0)
        hold(tmp_path)
        envs.send(actions(envs))
        with pytest.raises(ClusterTimeout) as caught:
            envs.recv(timeout_s=0.3)
        for part in ("worker 0", "worker 1", HOST, "0.3 s"):
            assert part in str(caught.value)
        let_go(tmp_path)
        assert envs.recv()[0][:, 1].tolist() == [1, 1]
        assert envs.step(actions(envs))[0][:, 1].tolist() == [2, 2]


def test_timeout_of_rollout_loses_nothing(tmp_path):
    accounts = Accounts()
    with cluster(tmp_path) as envs:
        accounts.add(envs.rollout(AGENT, 5))
        hold(tmp_path)
        for _ in range(2):
            with pytest.raises(ClusterTimeout, match="worker 0"):
                envs.rollout(AGENT, 5, timeout_s=0.2)
        let_go(tmp_path)
        accounts.add(envs.rollout(AGENT, 5))
        accounts.add(envs.rollout(AGENT, 5))
        assert accounts.num_env_objects == 2


def test_timeout_of_stream_loses_nothing(tmp_path):
    accounts = Accounts()
    with cluster(tmp_path) as envs:
        stream = envs.stream(AGENT, 5, timeout_s=0.5)
        accounts.add(next(stream))
        hold(tmp_path)
        with pytest.raises(ClusterTimeout, match="worker 0"):
            for _ in range(20):
                accounts.add(next(stream))
        let_go(tmp_path)
        deadline_s = time.monotonic() + 20.0  # either worker may be the first, and for long
        while accounts.num_env_objects < 2 and time.monotonic() < deadline_s:
            accounts.add(next(stream))
        assert accounts.num_env_objects == 2


def test_close_while_workers_step(tmp_path):
    with cluster(tmp_path) as envs:
        envs.reset(seed=0)
        hold(tmp_path)
        envs.send(actions(envs))
        for pid in pids(envs):
            wait_for_holding(tmp_path, pid)
        processes = pids(envs)
        envs.close()
        envs.close()
        assert not any(map(is_running, processes))
        for call in (lambda: envs.recv(), lambda: envs.rollout(AGENT, 1), lambda: envs.stats(), lambda: envs.reset()):
            with pytest.raises(PoolClosed):
                call()


def test_close_within_a_stream(tmp_path):
    with cluster(tmp_path) as envs:
        stream = envs.stream(AGENT, 5)
        next(stream)
        envs.close()
        with pytest.raises((StopIteration, PoolClosed)):
            next(stream)


def test_garbage_collected(tmp_path):
    envs = envfleet.ClusterEnv(CountingEnv, 2, **cluster_arguments(QUICK))
    stream = envs.stream(AGENT, 5)
    next(stream)
    processes = pids(envs)
    del envs, stream
    gc.collect()
    assert not any(map(is_running, processes))


# -- the head goes away --

HEAD = """
import os, signal, sys, time
import envfleet
from tests.support.envs.cluster_envs import Accounts, Agent, CountingEnv

def main():
    envs = envfleet.ClusterEnv(
        CountingEnv, 2, backend={backend!r}, env_kwargs=dict(step_s=0.001),
        timing=envfleet.Timing(heartbeat_s=0.2, resend_s=1.0, silence_s={silence_s}, reconnect_s=2.0),
    )
    accounts, num = Accounts(), 0
    print("pids", *[worker.pid for worker in envs.stats().workers], flush=True)
    for rollout in envs.stream(Agent(), 20):
        accounts.add(rollout)
        num += 1
        print("rollout", num, flush=True)
        {then}

main()
"""


@contextlib.contextmanager
def head_process(then="pass", silence_s=30.0, backend="serial"):
    """A script that runs a cluster. Yields it and the processes below it, once rollouts come."""
    text = HEAD.format(then=then, silence_s=silence_s, backend=backend)
    process = subprocess.Popen(
        [sys.executable, "-c", text],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        bufsize=1,
        env=script_environment(),
    )
    try:
        line = process.stdout.readline()
        assert line.startswith("pids"), line + process.stderr.read()
        assert process.stdout.readline() == "rollout 1\n"
        yield process, descendants(process.pid)
    finally:
        process.kill()
        process.communicate()


def num_rollouts(process):
    """Read on for one rollout."""
    return int(process.stdout.readline().split()[1])


def test_head_is_killed(run_folders):
    """Three at a time: with envs in the worker, in processes of its own, and by a signal that could be caught."""
    with contextlib.ExitStack() as stack:
        heads = [stack.enter_context(head_process(backend=backend)) for backend in ("serial", "process", "serial")]
        everybody = [pid for _, below in heads for pid in below]
        assert len(everybody) >= 6 and len(run_folders()) == 3
        for (process, _), how in zip(heads, (signal.SIGKILL, signal.SIGKILL, signal.SIGTERM), strict=True):
            process.send_signal(how)
        wait_until(lambda: not any(map(is_running, everybody)), "the workers left", timeout_s=10.0)
        wait_until(lambda: not run_folders(), "the folders are gone", timeout_s=10.0)


def test_head_is_stopped_and_goes_on(run_folders, tmp_path):
    """Longer than any worker waits for it: the workers leave, but remove nothing that they have not made."""
    mine = tmp_path / "mine"
    mine.mkdir(mode=0o700)
    (mine / "thesis.tex").touch()
    command = [sys.executable, "-m", "envfleet.cluster.worker", "--head", f"ipc://{mine}/head", "--worker", "0"]
    with head_process(silence_s=1.0) as (process, below):
        process.send_signal(signal.SIGSTOP)
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=30)
            assert "the head is gone" in done.stderr
            assert (mine / "thesis.tex").exists()
            wait_until(lambda: not any(map(is_running, below)), "the workers left")
            assert len(run_folders()) == 1
        finally:
            process.send_signal(signal.SIGCONT)
        last = num_rollouts(process)
        while num_rollouts(process) < last + 200:
            pass
        assert len(set(filter(is_running, descendants(process.pid))) - set(below)) == 2
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=30)


def test_ctrl_c(run_folders):
    with head_process() as (process, below):
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=30)
        # On a busy machine the head may also say that a message was dropped, even after the traceback.
        assert errors.count("Traceback") == 1 and "KeyboardInterrupt" in errors.splitlines(), errors
        assert not any(map(is_running, below))
        assert not run_folders()


def test_a_fork_of_the_head_does_not_disturb_it(tmp_path):
    accounts = Accounts()
    with cluster(tmp_path) as envs:
        stream = envs.stream(AGENT, 5)
        accounts.add(next(stream))
        child = os.fork()
        if child == 0:
            try:
                envs.close()
                del stream, envs
                gc.collect()
            finally:
                os._exit(0)
        deadline_s = time.monotonic() + 20
        while os.waitpid(child, os.WNOHANG) == (0, 0):
            assert time.monotonic() < deadline_s
            accounts.add(next(stream))
        for _ in range(20):
            accounts.add(next(stream))
        assert accounts.num_env_objects == 2
        assert restarts(envs) == [0, 0]


# -- a worker joins twice, late, or by hand --


def test_a_second_process_takes_over(tmp_path, caplog):
    accounts = Accounts()
    with cluster(tmp_path) as envs:
        stream = envs.stream(AGENT, 5)
        accounts.add(next(stream))
        older = pids(envs)[0]
        command = [sys.executable, "-m", "envfleet.cluster.worker", "--head", envs.address, "--worker", "0"]
        log = tmp_path / "second.log"
        with log.open("wb") as file:
            second = subprocess.Popen(command, stdout=file, stderr=file, env=script_environment())
        try:
            deadline_s = time.monotonic() + 30
            while accounts.num_env_objects < 3:
                assert time.monotonic() < deadline_s, log.read_text()
                accounts.add(next(stream))
            assert pids(envs)[0] == second.pid
            wait_until(lambda: not is_running(older), "the older process has left")
            num_before = envs.stats().workers[0].num_rollouts
            while envs.stats().workers[0].num_rollouts < num_before + 50:
                accounts.add(next(stream))
            assert pids(envs)[0] == second.pid, log.read_text()  # nobody has thrown it out
            assert accounts.num_env_objects == 3
        finally:
            envs.close()
            second.wait(20)
    assert re.search(rf"worker 0 \(host {HOST}, pid {older}\) is replaced by a newer process", caplog.text)


def test_a_worker_of_another_run_is_refused(tmp_path):
    with cluster(tmp_path, 1) as envs:
        command = [sys.executable, "-m", "envfleet.cluster.worker", "--head", envs.address, "--worker", "7"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=30)
        assert "this run has workers 0 to 0, no worker 7" in done.stderr
        assert sum(envs.stats().num_refused.values()) >= 1
        envs.rollout(AGENT, 5)


def test_a_late_worker_is_taken_in(tmp_path):
    """A stream goes on while a worker is away, and has its rollouts again when it is back."""
    accounts = Accounts()
    with cluster(tmp_path) as envs:
        stream, before = envs.stream(AGENT, 5), pids(envs)
        os.kill(before[1], signal.SIGKILL)
        wait_until(lambda: envs.stats().workers[1].stage != "present", "the loss is known")
        deadline_s = time.monotonic() + 30
        while envs.stats().workers[1].stage != "present":
            assert time.monotonic() < deadline_s
            accounts.add(next(stream))
        num_rollouts = envs.stats().workers[1].num_rollouts
        while envs.stats().workers[1].num_rollouts < num_rollouts + 10:
            assert time.monotonic() < deadline_s
            accounts.add(next(stream))


# -- answers that come twice, or of processes that are no members any more --


def test_the_same_answer_twice(tmp_path):
    sent = []

    def twice(hand, order):
        frames = hand.rollout(order)
        sent.append(frames)
        return [frames, frames, sent[0], frames]

    accounts = Accounts()
    launcher = ByHand(lambda address: [HandWorker(address, answers=twice)])
    with cluster(tmp_path, 1, launcher=launcher) as envs:
        for _ in range(3):
            accounts.add(envs.rollout(AGENT, 5))
        stream = envs.stream(AGENT, 5)
        for _ in range(5):
            accounts.add(next(stream))
        (reason,) = [reason for reason in envs.stats().num_refused if "before" in reason]
        assert envs.stats().num_refused[reason] >= 3 * 7
        assert accounts.num_env_objects == 1


def test_answers_too_early_and_to_no_order(tmp_path):
    def out_of_turn(hand, order):
        later = types.SimpleNamespace(order=order.order + 1, num_steps=order.num_steps)
        never = types.SimpleNamespace(order=10**9, num_steps=order.num_steps)
        return [hand.rollout(later), hand.rollout(never), hand.rollout(order)]

    launcher = ByHand(lambda address: [HandWorker(address, answers=out_of_turn)])
    with cluster(tmp_path, 1, launcher=launcher) as envs:
        for _ in range(3):
            assert envs.rollout(AGENT, 5).num_steps == 5
        refused = envs.stats().num_refused
        assert any("no such order" in reason for reason in refused)


def test_an_answer_of_a_former_process(tmp_path):
    orders = []

    def keep(hand, order):
        orders.append(order)
        return []

    launcher = ByHand(lambda address: [HandWorker(address, answers=keep)])
    with cluster(tmp_path, 1, launcher=launcher) as envs:
        (former,) = launcher.started
        with pytest.raises(ClusterTimeout):
            envs.rollout(AGENT, 5, timeout_s=0.3)
        wait_until(lambda: len(orders) == 1, "the first process has the order")
        with HandWorker(envs.address, answers=keep) as newer:
            wait_until(lambda: newer.has(Collect), "the second has it, too")
            wait_until(lambda: former.has(Refused), "the first knows that it is none any more")
            former.send(former.rollout(orders[0]))
            wait_until(lambda: envs.stats().num_refused.get("from a former member", 0) > 0, "its answer is refused")
            newer.send(newer.rollout(orders[1]))
            rollout = envs.rollout(AGENT, 5)
            assert rollout.obs[0, 0, 0] == int.from_bytes(newer.process[:6])
            assert envs.stats().workers[0].num_rollouts == 1


def test_a_malformed_answer_is_an_error(tmp_path):
    def wrong(hand, order):
        hand.num_envs = 2
        return [hand.rollout(order)]

    launcher = ByHand(lambda address: [HandWorker(address, answers=wrong)])
    with cluster(tmp_path, 1, launcher=launcher) as envs:
        with pytest.raises(WorkerFailed, match=r"worker 0.*malformed"):
            envs.rollout(AGENT, 5)
        assert envs.stats().num_refused["malformed"] == 1


def test_one_that_joins_and_falls_silent(tmp_path, caplog):
    """Its connection is closed: it is lost after reconnect_s, and the error says so."""
    launcher = ByHand(lambda address: [HandWorker(address)])
    with cluster(tmp_path, 1, launcher=launcher, reconnect_s=0.5, max_worker_restarts=0) as envs:
        envs.rollout(AGENT, 5)
        launcher.started[0].close()
        with pytest.raises(WorkerLost, match=r"worker 0 \(host by-hand.*closed for 0.5 s"):
            envs.rollout(AGENT, 5)
    assert "given up" in caplog.text


# -- no place for logs --


@pytest.mark.parametrize("backend", ["serial", "process"])
def test_disk_is_full(tmp_path, backend):
    logs = tmp_path / "logs"
    logs.mkdir()
    for worker in range(2):
        (logs / f"worker-{worker}.log").symlink_to("/dev/full")
    (tmp_path / "print").touch()
    accounts = Accounts()
    with cluster(tmp_path, launcher=Local(log_dir=logs), backend=backend) as envs:
        for _ in range(3):
            accounts.add(envs.rollout(AGENT, 5))
        os.kill(pids(envs)[0], signal.SIGKILL)
        accounts.add(envs.rollout(AGENT, 5))
        with pytest.raises(PolicyFailed):  # which the worker would log
            envs.rollout(RaisingAgent(), 5)


def test_log_dir_is_read_only(tmp_path):
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(envfleet.EnvFleetError, match="log_dir"), cluster(tmp_path, launcher=Local(log_dir=file)):
        pass


def test_logs_stay_where_they_were_asked_for(tmp_path):
    logs = tmp_path / "logs"
    with cluster(tmp_path, launcher=Local(log_dir=logs)) as envs:
        (tmp_path / "print").touch()
        envs.rollout(AGENT, 2)
    assert all("xxx" in (logs / f"worker-{worker}.log").read_text() for worker in range(2))
