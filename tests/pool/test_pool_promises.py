"""What an error of a pool promises is true: each is provoked for real, then the test does what the text says."""

import os
import signal
import time

import numpy as np
import pytest
from gymnasium.vector import SyncVectorEnv

import envfleet
from envfleet.pool.native import backend as native
from envfleet.testing import Act, ScriptedEnv
from tests.support.inside import child_pid, impatient_pool, native_core
from tests.support.native_makers import make_native

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("quick_spawners")]

STEP = 1  # of ScriptedEnv's observations
NUM_ENVS = 4
SLEEP_S = 3.0


class SlowEnv(ScriptedEnv):
    """Waits in step(), reset() and a method while a file is there."""

    def __init__(self, file=None, **kwargs):
        super().__init__(**kwargs)
        self.file = file

    def reset(self, *, seed=None, options=None):
        self.wait()
        return super().reset(seed=seed, options=options)

    def step(self, action):
        self.wait()
        return super().step(action)

    def wait(self):
        while self.file is not None and os.path.exists(self.file):
            time.sleep(0.01)
        return "waited"


def acts(*some):
    return np.array([*some, *[Act.GO_ON] * (NUM_ENVS - len(some))])


def make_vector(num_envs, autoreset_mode):
    return SyncVectorEnv([ScriptedEnv] * num_envs, autoreset_mode=autoreset_mode)


def make(backend, **settings):
    """A pool of four ScriptedEnvs."""
    if backend == "native":
        return make_native(ScriptedEnv, NUM_ENVS, num_workers=2, **settings)
    if backend == "vector":
        return envfleet.make(make_vector, NUM_ENVS, backend="vector", **settings)
    return envfleet.make(SlowEnv, NUM_ENVS, backend=backend, num_workers=NUM_ENVS, **settings)


def receive_all(pool):
    """Rows of all envs by their ids: one batch, or those of an asynchronous pool."""
    obs, truncated = np.full((NUM_ENVS, 4), np.nan), np.zeros(NUM_ENVS, bool)
    for _ in range(NUM_ENVS // pool.batch_size):
        rows, _, _, truncations, info = pool.recv(timeout_s=60.0)
        obs[info["env_id"]], truncated[info["env_id"]] = rows, truncations
    return obs, truncated


def requires_recv(pool):
    with pytest.raises(envfleet.EnvBusy, match=r"recv\(\)|receive them"):
        pool.step(acts())
    with pytest.raises(envfleet.EnvBusy, match="receive them"):
        pool.call("name")


def goes_on(pool):
    """Everything works as if nothing had been."""
    obs, _ = pool.reset(seed=0)
    assert obs[:, STEP].tolist() == [0] * NUM_ENVS
    pool.send(acts())
    assert receive_all(pool)[0][:, STEP].tolist() == [1] * NUM_ENVS


@pytest.mark.parametrize("batch_size", [NUM_ENVS, 1], ids=["sync", "async"])
def test_after_a_step_that_times_out(tmp_path, batch_size):
    file = tmp_path / "hold"
    with make("process", batch_size=batch_size, env_kwargs={"file": str(file)}) as pool:
        pool.reset(seed=0)
        file.touch()
        with impatient_pool(pool), pytest.raises(envfleet.PoolTimeout, match=r"recv\(\) goes on waiting") as caught:
            pool.step(acts())
        assert set(caught.value.env_ids) <= set(range(NUM_ENVS)) and caught.value.env_ids
        assert str(caught.value) == f"{caught.value.report}\n{caught.value.then}"
        requires_recv(pool)
        with pytest.raises(envfleet.PoolTimeout, match=r"recv\(\) goes on waiting"):
            pool.recv(timeout_s=0.1)
        file.unlink()
        assert receive_all(pool)[0][:, STEP].tolist() == [1] * NUM_ENVS
        goes_on(pool)


def test_after_a_step_of_native_envs_that_times_out(monkeypatch):
    monkeypatch.setattr(native, "HELP_WORTH_S", 0.0)
    with make_native(ScriptedEnv, 2, num_workers=2, batch_size=1, env_kwargs={"sleep_s": SLEEP_S}) as pool:
        pool.reset(seed=0)
        pool.step(np.full(2, Act.GO_ON))
        pool.recv()
        pool.send(np.array([Act.SLEEP]), [0])
        deadline_s = time.monotonic() + 20.0
        while native_core(pool).runs_under_way() != [(0, 0)]:
            assert time.monotonic() < deadline_s, "no helper has taken the task"
        with pytest.raises(envfleet.PoolTimeout, match=r"recv\(\) goes on waiting") as caught:
            pool.recv(timeout_s=0.05)
        assert caught.value.env_ids == (0,)
        assert pool.recv(timeout_s=60.0)[4]["env_id"] == [0]


@pytest.mark.parametrize("batch_size", [NUM_ENVS, 2], ids=["sync", "async"])
@pytest.mark.parametrize("then", ["recv", "reset"])
def test_after_a_reset_that_times_out(tmp_path, batch_size, then):
    """recv() has the rows of all envs; a second reset() is the same first reset, with the pool's seed."""
    with make("serial", seed=7) as pool:
        expected = pool.reset()[0]
    file = tmp_path / "hold"
    with make("process", batch_size=batch_size, env_kwargs={"file": str(file)}, seed=7) as pool:
        file.touch()
        with impatient_pool(pool):
            with pytest.raises(envfleet.PoolTimeout, match=r"Nothing is lost: recv\(\) goes on waiting"):
                pool.reset()
            with pytest.raises(envfleet.PoolTimeout, match=r"nothing was reset: recv\(\) goes on waiting"):
                pool.reset()
        file.unlink()
        if then == "recv":
            obs, *_, info = pool.recv(timeout_s=60.0)
            assert info["env_id"].tolist() == [0, 1, 2, 3]
        else:
            obs = pool.reset()[0]
        assert obs[:, 0].tolist() == expected[:, 0].tolist()
        assert pool.reset()[0][:, 0].tolist() != expected[:, 0].tolist()
        goes_on(pool)


@pytest.mark.parametrize(
    ("backend", "batch_size"),
    [(backend, NUM_ENVS) for backend in ("serial", "process", "native", "vector")]
    + [(backend, 2) for backend in ("serial", "process", "native")],
)
def test_after_a_step_that_fails(backend, batch_size):
    settings = {} if backend == "vector" else {"batch_size": batch_size}
    with make(backend, **settings) as pool:
        pool.reset(seed=0)
        pool.send(acts(Act.RAISE))
        with pytest.raises(envfleet.EnvFailed, match="told to fail"):
            receive_all(pool)
        requires_recv(pool)
        truncated = np.zeros(NUM_ENVS, bool)
        while pool._in_flight.num_envs:
            *_, truncations, info = pool.recv()
            truncated[info["env_id"]] = truncations
            assert not truncations.any() or "told to fail" in info["env_error"][np.flatnonzero(truncations)[0]]
        assert truncated.tolist() == ([True] * NUM_ENVS if backend == "vector" else [True, False, False, False])
        goes_on(pool)


def test_after_a_child_was_killed():
    with make("process") as pool:
        pool.reset(seed=0)
        os.kill(child_pid(pool, 2), signal.SIGKILL)
        with pytest.raises(envfleet.ChildDied, match="a new process takes its place"):
            pool.step(acts())
        requires_recv(pool)
        assert receive_all(pool)[1].tolist() == [False, False, True, False]
        goes_on(pool)


@pytest.mark.parametrize("backend", ["serial", "process", "native", "vector"])
def test_after_a_reset_that_fails(backend):
    with make(backend) as pool:
        pool.reset(seed=0)
        with pytest.raises(envfleet.EnvFailed, match="told to fail in reset"):
            pool.reset(options={"fail": True})
        if backend in ("serial", "process", "native"):
            for _ in range(NUM_ENVS - 1):  # one for each env
                with pytest.raises(envfleet.EnvFailed):
                    pool.recv()
        assert pool.recv()[3].all()
        with pytest.raises(envfleet.EnvFailed, match="told to fail in reset"):
            pool.reset(options={"fail": True})
        goes_on(pool)


@pytest.mark.parametrize("backend", ["serial", "process", "native", "vector"])
def test_after_a_step_on_an_ended_episode(backend):
    """As the text says: recv(), then reset those envs alone."""
    with make(backend, autoreset_mode="Disabled") as pool:
        pool.reset(seed=0)
        pool.step(acts(Act.GO_ON, Act.TERMINATE))
        with pytest.raises(envfleet.StepOnEndedEpisode, match=r"call recv\(\).*then reset"):
            pool.step(acts())
        mask = np.array([False, True, False, False])
        with pytest.raises(envfleet.EnvBusy):
            pool.reset(options={"reset_mask": mask})
        others = 1 if backend == "vector" else 2  # which steps no env then, and says so
        assert pool.recv()[0][:, STEP].tolist() == [others, 1, others, others]
        pool.reset(options={"reset_mask": mask})
        assert pool.step(acts())[0][:, STEP].tolist() == [others + 1, 1, others + 1, others + 1]


@pytest.mark.parametrize("what", ["call", "set_attr"])
def test_after_a_call_that_times_out(tmp_path, what):
    file = tmp_path / "hold"
    with make("process", env_kwargs={"file": str(file)}) as pool:
        pool.reset(seed=0)
        file.touch()
        with impatient_pool(pool):
            with pytest.raises(envfleet.PoolTimeout, match="The call goes on, but its result is dropped"):
                pool.call("wait")
            with pytest.raises(envfleet.PoolTimeout, match="earlier call"):
                pool.call("name") if what == "call" else pool.set_attr("name", "x")
        pool.send(acts())
        with pytest.raises(envfleet.PoolTimeout, match=r"recv\(\) goes on waiting"):
            pool.recv(timeout_s=0.1)
        file.unlink()
        assert receive_all(pool)[0][:, STEP].tolist() == [1] * NUM_ENVS
        assert pool.call("wait") == ("waited",) * NUM_ENVS
        goes_on(pool)


@pytest.mark.parametrize("backend", ["serial", "process", "vector"])
def test_after_a_call_that_fails(backend):
    with make(backend) as pool:
        pool.reset(seed=0)
        with pytest.raises(envfleet.EnvFailed):
            pool.call("no_such_method")
        assert pool.step(acts())[0][:, STEP].tolist() == [1] * NUM_ENVS
        goes_on(pool)
