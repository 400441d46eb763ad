"""What an error of a cluster promises is true: each is provoked for real, then the test does what the text says."""

import contextlib
import os
import signal
import threading
import time
from pathlib import Path

import numpy as np
import pytest

import envfleet
from envfleet.contract.errors import (
    ChildDied,
    ClusterTimeout,
    EnvBusy,
    EnvFailed,
    NothingToReceive,
    StepOnEndedEpisode,
    WorkerFailed,
)
from envfleet.testing.cluster_arguments import cluster_arguments
from tests.support.envs.cluster_envs import Agent, CountingEnv
from tests.support.inside import impatient_cluster
from tests.support.waiting import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("quick_workers")]

AGENT = Agent()
QUICK = {"heartbeat_s": 0.2, "resend_s": 1.0, "timeout_s": 60.0, "backend": "serial"}
HUNG = {**QUICK, "backend": "process", "pool_timeout_s": 2.0, "pool_workers": 1}
NUM_STEPS = 3


class ObeyingEnv(CountingEnv):
    """Waits in reset() and in a method, too, and raises in reset(), as files say."""

    level = 0

    def reset(self, *, seed=None, options=None):
        self._wait_for("hold-reset")
        with contextlib.suppress(FileNotFoundError):
            (self.folder / "raise-reset").unlink()
            raise RuntimeError("the cart has no wheels")
        return super().reset(seed=seed, options=options)

    def wait(self):
        self._wait_for("hold-call")
        return "waited"

    def fail(self):
        raise RuntimeError("the cart has no brakes")

    def _wait_for(self, name):
        while (self.folder / name).exists():
            time.sleep(0.01)


@contextlib.contextmanager
def cluster(folder, num_workers=2, num_envs=1, **settings):
    settings = {**QUICK, "env_kwargs": {"folder": str(folder)}, **settings}
    with envfleet.ClusterEnv(ObeyingEnv, num_workers, num_envs, **cluster_arguments(settings)) as envs:
        yield envs


@contextlib.contextmanager
def held(folder, name="hold"):
    """Envs wait, in step(), reset() or in a method."""
    (folder / name).touch()
    try:
        yield
    finally:
        (folder / name).unlink(missing_ok=True)


def acts(envs):
    return np.zeros(envs.num_envs, int)


def receive_all(envs):
    """Observations and truncations of all envs, by their ids."""
    obs, truncated = np.full((envs.num_envs, 2), np.nan), np.zeros(envs.num_envs, bool)
    for _ in range(envs.num_envs // envs.batch_size):
        rows, _, _, truncations, info = envs.recv()
        obs[info["env_id"]], truncated[info["env_id"]] = rows, truncations
    return obs, truncated


def requires_recv(envs):
    for call in (lambda: envs.step(acts(envs)), lambda: envs.call("wait"), lambda: envs.set_attr("level", 1)):
        with pytest.raises(EnvBusy, match=r"recv\(\)|receive them"):
            call()


def goes_on(envs):
    """Steps, calls, rollouts and streams, as if nothing had been."""
    first = envs.reset(seed=0)[0][:, 1]
    envs.send(acts(envs))
    assert receive_all(envs)[0][:, 1].tolist() == (first + 1).tolist()
    assert envs.call("wait") == ("waited",) * envs.num_envs
    assert envs.rollout(AGENT, NUM_STEPS).num_steps == NUM_STEPS
    assert next(envs.stream(AGENT, NUM_STEPS)).num_steps == NUM_STEPS


# Each takes (cluster) and makes one call; then what its ClusterTimeout says; then what is done about it.
def begin_step(envs):
    envs.step(acts(envs))


def begin_send(envs):
    envs.send(acts(envs))
    envs.recv()


def begin_reset(envs):
    envs.reset(seed=5)


RECV = r"Nothing is lost: recv\(\) goes on waiting for this batch"
SAME_CALL = "Nothing is lost: the same call goes on waiting for this rollout"


@pytest.fixture(scope="module", params=["sync", "async"])
def shared(request, tmp_path_factory):
    """A cluster for many tests: each leaves it as good as new, or the next one shows it."""
    folder = tmp_path_factory.mktemp("files")
    with cluster(folder, batch_size=2 if request.param == "sync" else 1) as envs:
        yield envs, folder


@pytest.mark.parametrize(
    ("begin", "file"),
    [(begin_step, "hold"), (begin_send, "hold"), (begin_reset, "hold-reset")],
    ids=lambda each: getattr(each, "__name__", str(each)),
)
def test_after_a_timeout_recv_goes_on(shared, begin, file):
    envs, folder = shared
    first = envs.reset(seed=0)[0]
    with held(folder, file):
        with impatient_cluster(envs), pytest.raises(ClusterTimeout, match=RECV):
            begin(envs)
        requires_recv(envs)
        with pytest.raises(ClusterTimeout, match=RECV):
            envs.recv(timeout_s=0.1)
    if begin is begin_reset:  # all rows are one batch, as reset() would have returned it
        obs, *_, info = envs.recv()
        assert info["env_id"].tolist() == [0, 1]
    else:
        obs, _ = receive_all(envs)
    assert obs[:, 1].tolist() == (first[:, 1] + 1).tolist()
    with pytest.raises(NothingToReceive):
        envs.recv()
    goes_on(envs)


def test_after_a_reset_that_times_out_reset_begins_anew(tmp_path):
    """Also the first one, with the cluster's seed."""
    with cluster(tmp_path, seed=3, backend="serial") as envs:
        with held(tmp_path, "hold-reset"):
            for _ in range(2):
                with impatient_cluster(envs), pytest.raises(ClusterTimeout, match=RECV):
                    envs.reset()
            assert envs._first_seed == 3
        envs.reset()
        assert envs._first_seed is None
        assert envs.step(acts(envs))[0].shape == (2, 2)


def test_after_a_timeout_the_same_rollout_goes_on(shared):
    envs, folder = shared
    for collect in (lambda: envs.rollout(AGENT, NUM_STEPS), lambda: envs.step(AGENT)):
        with held(folder), impatient_cluster(envs):
            for _ in range(2):
                with pytest.raises(ClusterTimeout, match=SAME_CALL):
                    collect()
            with pytest.raises(EnvBusy, match="finish the rollout"):
                envs.call("wait")
        num_steps = envs.stats().num_steps
        collect()
        assert envs.stats().num_steps - num_steps in (2, 2 * NUM_STEPS)  # the one that was begun, and no other
    goes_on(envs)


def test_after_a_timeout_next_of_the_stream_goes_on(shared):
    envs, folder = shared
    with held(folder):
        stream = envs.stream(AGENT, NUM_STEPS, timeout_s=0.3)
        for _ in range(2):
            with pytest.raises(ClusterTimeout, match=r"Nothing is lost: next\(\) of this stream goes on"):
                next(stream)
    wait_until(lambda: all(worker.num_rollouts for worker in envs.stats().workers), "rollouts came")
    assert next(stream).num_steps == NUM_STEPS
    stream.close()
    goes_on(envs)


def test_after_a_timeout_a_call_is_given_up(shared):
    envs, folder = shared
    first = envs.reset(seed=0)[0]
    with (
        held(folder, "hold-call"),
        impatient_cluster(envs),
        pytest.raises(ClusterTimeout, match="The call is given up"),
    ):
        envs.call("wait")
    assert envs.call("wait") == ("waited",) * 2
    envs.set_attr("level", [1, 2])
    assert envs.get_attr("level") == (1, 2)
    envs.send(acts(envs))
    assert receive_all(envs)[0][:, 1].tolist() == (first[:, 1] + 1).tolist()
    goes_on(envs)


def test_compiled_programs_are_refused_in_words(shared):
    envs, _ = shared
    with pytest.raises(envfleet.UsageError, match=r"xla\(\) is for native pools.*Collect with rollout\(\)"):
        envs.xla()


def test_after_a_failure_recv_returns_the_batch(shared):
    envs, folder = shared
    envs.reset(seed=0)
    for file, begin in (("raise", begin_step), ("raise-reset", begin_reset)):
        (folder / file).touch()
        with pytest.raises(EnvFailed, match="the cart"):
            begin(envs)
            receive_all(envs)
        requires_recv(envs)
        num_rows = len(envs.recv()[0])
        assert num_rows == (envs.num_envs if begin is begin_reset else envs.batch_size)
        with contextlib.suppress(NothingToReceive):  # of the other worker, if it is asynchronous
            envs.recv()
        envs.send(acts(envs))
        receive_all(envs)
    goes_on(envs)


def test_after_a_failure_with_fewer_in_flight_than_a_batch_has(tmp_path):
    """The batch that is held back can be received, though the one worker that is left is no batch."""
    with cluster(tmp_path, num_workers=3, batch_size=2) as envs:
        envs.reset(seed=0)
        (tmp_path / "raise").touch()
        envs.send(acts(envs))
        with pytest.raises(EnvFailed):
            for _ in range(100):  # the worker whose env raises may be the slowest one
                env_ids = envs.recv()[4]["env_id"]
                envs.send(np.zeros(2, int), env_ids)
        obs, *_, info = envs.recv()
        assert len(obs) == 2
        for _ in range(5):
            envs.send(np.zeros(2, int), info["env_id"])
            *_, info = envs.recv()
        envs.reset(seed=0)
        info = envs.step(acts(envs))[4]
        for _ in range(5):
            envs.send(np.zeros(2, int), info["env_id"])
            *_, info = envs.recv()


def test_after_a_failure_the_same_rollout_returns(shared):
    envs, folder = shared
    for collect in (lambda: envs.rollout(AGENT, NUM_STEPS).truncations, lambda: envs.step(AGENT)[3]):
        (folder / "raise").touch()
        with pytest.raises(EnvFailed, match="fell off the table"):
            collect()
        num_steps = envs.stats().num_steps
        assert collect().sum() == 1
        assert envs.stats().num_steps == num_steps  # it was there already
    goes_on(envs)


def test_after_a_failure_next_of_the_stream_returns_it(shared):
    envs, folder = shared
    stream = envs.stream(AGENT, NUM_STEPS)
    next(stream)
    (folder / "raise").touch()
    with pytest.raises(EnvFailed, match="fell off the table"):
        for _ in range(100):
            assert not next(stream).truncations.any()
    assert next(stream).truncations.sum() == 1
    assert not next(stream).truncations.any()
    stream.close()
    goes_on(envs)


def test_after_a_call_that_fails(shared):
    envs, _ = shared
    envs.reset(seed=0)
    with pytest.raises(EnvFailed, match="the cart has no brakes"):
        envs.call("fail")
    envs.send(acts(envs))
    receive_all(envs)
    goes_on(envs)


def kill_during(envs, folder, begin):
    """SIGKILL to worker 1 in the middle of what `begin` has it do."""
    victim = envs.stats().workers[1].pid

    def kill():
        wait_until((folder / f"holding-{victim}").exists, "it is in the middle of a step")
        os.kill(victim, signal.SIGKILL)
        (folder / "hold").unlink()

    (folder / "hold").touch()
    killer = threading.Thread(target=kill)
    killer.start()
    try:
        return begin(envs)
    finally:
        killer.join()


@pytest.mark.parametrize("batch_size", [2, 1], ids=["sync", "async"])
def test_after_a_worker_was_killed(tmp_path, batch_size):
    with cluster(tmp_path, batch_size=batch_size) as envs:
        envs.reset(seed=0)
        with pytest.raises(ChildDied, match="has taken over"):
            kill_during(envs, tmp_path, lambda envs: (envs.send(acts(envs)), receive_all(envs)))
        requires_recv(envs)
        assert envs.recv()[3].any()
        with contextlib.suppress(NothingToReceive):
            envs.recv()
        envs.send(acts(envs))
        assert not receive_all(envs)[1].any()
        # Rollouts are collected anew by the replacement: there is no error.
        assert kill_during(envs, tmp_path, lambda envs: envs.rollout(AGENT, NUM_STEPS)).num_steps == NUM_STEPS
        assert kill_during(envs, tmp_path, lambda envs: envs.step(AGENT))[0].shape == (2, 2)
        goes_on(envs)


def test_after_a_loss_with_autoreset_disabled(tmp_path):
    """A step without a reset is refused as for an ended episode: recv(), then reset those envs alone."""
    with cluster(tmp_path, num_envs=2, autoreset_mode="disabled") as envs:
        envs.reset(seed=0)
        with pytest.raises(ChildDied):
            kill_during(envs, tmp_path, begin_step)
        assert envs.recv()[3].tolist() == [False, False, True, True]
        with pytest.raises(StepOnEndedEpisode, match=r"call recv\(\).*then reset"):
            envs.step(acts(envs))
        assert envs.recv()[0][:2, 1].tolist() == [2, 2]
        envs.reset(options={"reset_mask": np.array([False, False, True, True])})
        assert envs.step(acts(envs))[0][:, 1].tolist() == [3, 3, 1, 1]


# -- an env hangs --


def told(call):
    """What a call returns, once it has raised all that was to be told of envs."""
    for _ in range(40):
        with contextlib.suppress(EnvFailed, StepOnEndedEpisode):
            return call()
    raise AssertionError("it has raised forty times")


@pytest.mark.parametrize("mode", ["next_step", "same_step", "disabled"])
def test_after_a_hung_step_on_a_worker(tmp_path, mode):
    """EnvFailed for each env, with where it hung; recv() has truncated rows, and no reset() is needed."""
    with cluster(tmp_path, num_workers=1, num_envs=2, autoreset_mode=mode, **HUNG) as envs:
        before = envs.reset(seed=0)[0].copy()
        text = r"EnvTimedOut: its step\(\) had not returned.*timeout_s=2 s"
        with held(tmp_path), pytest.raises(EnvFailed, match=text) as caught:
            envs.step(acts(envs))
        assert caught.value.env_id in (0, 1) and "in _obey" in str(caught.value)
        assert "Nothing is lost" not in str(caught.value)
        requires_recv(envs)
        with pytest.raises(EnvFailed, match=text) as other:
            envs.recv()
        assert {caught.value.env_id, other.value.env_id} == {0, 1}
        obs, _, _, truncations, info = envs.recv()
        assert truncations.all() and info["_env_error"].all() and "EnvTimedOut" in info["env_error"][0]
        last = np.stack(info["final_obs"]) if mode == "same_step" else obs
        assert last.tolist() == before.tolist()
        if mode == "disabled":
            with pytest.raises(StepOnEndedEpisode, match=r"call recv\(\).*then reset"):
                envs.step(acts(envs))
            told(envs.recv)
            envs.reset(options={"reset_mask": np.ones(2, bool)})
        assert envs.step(acts(envs))[0][:, 1].tolist() == [0 if mode == "next_step" else 1] * 2
        goes_on(envs)


def test_after_a_hung_step_with_restart(tmp_path):
    with cluster(tmp_path, num_workers=1, on_env_error="restart", max_env_restarts=1, **HUNG) as envs:
        envs.reset(seed=0)
        with held(tmp_path):
            *_, truncations, info = envs.step(acts(envs))
            assert truncations.all() and "EnvTimedOut" in info["env_error"][0]
            envs.step(acts(envs))  # resets
            with pytest.raises(EnvFailed, match="EnvTimedOut"):  # the second without a finished episode
                envs.step(acts(envs))
            assert envs.recv()[3].all()
        goes_on(envs)


def test_after_a_hung_reset_on_a_worker(tmp_path):
    with cluster(tmp_path, **HUNG) as envs:
        envs.reset(seed=0)
        with held(tmp_path, "hold-reset"), pytest.raises(EnvFailed, match=r"its reset\(\) had not returned"):
            envs.reset(seed=0)
        assert told(envs.recv)[3].all()
        assert not envs.step(acts(envs))[3].any()  # resets
        goes_on(envs)


def test_after_a_hung_rollout_on_a_worker(tmp_path):
    with cluster(tmp_path, **HUNG) as envs:
        with held(tmp_path), pytest.raises(EnvFailed, match="EnvTimedOut"):
            envs.rollout(AGENT, NUM_STEPS)
        assert told(lambda: envs.rollout(AGENT, NUM_STEPS)).truncations.all()  # the same rollout
        assert not envs.rollout(AGENT, NUM_STEPS).truncations.any()
        with held(tmp_path):
            stream = envs.stream(AGENT, NUM_STEPS)
            with pytest.raises(EnvFailed, match="EnvTimedOut"):
                next(stream)
        assert told(lambda: next(stream)).num_steps == NUM_STEPS
        stream.close()
        goes_on(envs)


@pytest.mark.parametrize("then", ["call", "step", "rollout", "reset some"])
def test_after_a_hung_call_on_a_worker(tmp_path, then):
    """Its pool is built anew: what comes next works, and steps tell of the lost episodes."""
    mode = "disabled" if then == "reset some" else None
    with cluster(tmp_path, num_workers=1, num_envs=2, autoreset_mode=mode, **HUNG) as envs:
        envs.reset(seed=0)
        with held(tmp_path, "hold-call"), pytest.raises(WorkerFailed, match="hung, and another one is built"):
            envs.call("wait")
        if then == "call":
            assert envs.call("wait") == ("waited",) * 2
            envs.set_attr("level", 4)
            assert envs.get_attr("level") == (4, 4)
        elif then == "rollout":
            assert envs.rollout(AGENT, NUM_STEPS).num_steps == NUM_STEPS
        if then == "reset some":
            with pytest.raises(EnvFailed, match="hung"):
                envs.reset(options={"reset_mask": np.array([True, False])})
            assert envs.recv()[4]["_env_error"].tolist() == [False, True]
        elif then != "rollout":
            with pytest.raises(EnvFailed, match="hung"):
                envs.step(acts(envs))
            assert envs.recv()[3].all()
            assert not envs.step(acts(envs))[3].any()
        goes_on(envs)


def test_after_a_reset_that_fails_where_a_worker_was_replaced(tmp_path):
    """The reset in the next step is one of the caller's steps: an env that raises in it has a row like any other."""
    with cluster(tmp_path, num_workers=2) as envs:
        envs.reset(seed=0)
        with pytest.raises(ChildDied):
            kill_during(envs, Path(tmp_path), begin_step)
        envs.recv()
        (tmp_path / "raise-reset").touch()
        with pytest.raises(EnvFailed, match="no wheels"):
            envs.step(acts(envs))
        envs.recv()
        goes_on(envs)


@pytest.mark.parametrize("backend", ["serial", "process"])
def test_after_a_reset_that_fails_a_rollout_begins_anew(tmp_path, backend):
    with cluster(tmp_path, num_workers=1, num_envs=2, backend=backend) as envs:
        (tmp_path / "raise-reset").touch()
        with pytest.raises(EnvFailed, match="no wheels"):
            envs.reset(seed=0)
        truncated = envs.recv()[3]
        assert truncated.tolist().count(True) == 1, "the row of the env that failed is truncated"
        for _ in range(2):
            assert envs.rollout(AGENT, NUM_STEPS).rewards.shape == (NUM_STEPS, 2)


class UnsendableEnv(CountingEnv):
    """Env 0 raises in its second step; the info of env 1 is too large for a message then."""

    num_calls = 0

    def __init__(self, index, folder):
        super().__init__(folder=folder)
        self.index = index

    def step(self, action):
        self.num_calls += 1
        obs, reward, terminated, truncated, info = super().step(action)
        if self.num_calls == 2 and self.index == 0:
            raise RuntimeError("the cart has no brakes")
        if self.num_calls == 2:
            info = {**info, "numbers": [0] * 400_000}
        return obs, reward, terminated, truncated, info


def test_the_error_that_drops_a_batch_is_the_one_that_is_raised(tmp_path):
    kwargs = [{"index": index, "folder": str(tmp_path)} for index in range(2)]
    with envfleet.ClusterEnv(UnsendableEnv, 2, 1, **cluster_arguments({**QUICK, "env_kwargs": kwargs})) as envs:
        envs.reset(seed=0)
        envs.step(np.zeros(2, np.int64))
        with pytest.raises(WorkerFailed, match="worker 1"):
            envs.step(np.zeros(2, np.int64))
        with pytest.raises(NothingToReceive):
            envs.recv()
        envs.reset(seed=0)
