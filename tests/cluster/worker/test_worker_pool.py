"""A worker's pool, stepping and states, in this process: what checkpoints have, and what of a stream is to be told."""

import contextlib
import os
import signal
import time
from pathlib import Path

import numpy as np
import pytest

from envfleet import Autoreset, EnvFailed, EnvSpec, EveryUpdate
from envfleet.cluster.run.plans import env_pickles, pool_plans
from envfleet.cluster.sync import News
from envfleet.cluster.timing import Timing
from envfleet.cluster.wire.messages import RestoreState, SaveState, SetState, Step, Welcome
from envfleet.cluster.wire.states import states_to_plain
from envfleet.cluster.worker import link as link_module
from envfleet.cluster.worker.link import Link
from envfleet.cluster.worker.pool_states import PoolStates
from envfleet.cluster.worker.pool_stepping import LOST, PoolStepping
from envfleet.cluster.worker.worker import Worker
from envfleet.cluster.worker.worker_pool import WorkerPool
from envfleet.cluster.worker.worker_state import decoded, encoded
from envfleet.contract.pool_config import PoolConfig
from tests.cluster.worker.test_link import PlayedSocket
from tests.support import inside
from tests.support.envs.saving_envs import SavingEnv
from tests.support.envs.uneven_envs import RememberingAgent
from tests.support.waiting import is_running, wait_until

NUM_ENVS = 2
SEED = 7


def welcome_of(env, env_kwargs=None, **settings):
    """As the head sends it to its only worker; and its arrays."""
    spec = EnvSpec.of(env, kwargs=env_kwargs)
    settings = {"backend": "serial", "autoreset": Autoreset.SAME_STEP, "switches_autoreset": True, **settings}
    pool = PoolConfig(num_envs=NUM_ENVS, **settings)
    plans = pool_plans(spec, pool, SEED, num_workers=1)
    (pickled,) = env_pickles(spec, plans)
    said = {"plan": plans[0], "sync": EveryUpdate(), "timing": Timing(), "compression": None, "attributes": {}}
    return Welcome(epoch=1, first_order=1, **said), {"env": np.frombuffer(pickled, np.uint8)}


@contextlib.contextmanager
def worker_pool(env, env_kwargs=None, **settings):
    with contextlib.closing(WorkerPool(*welcome_of(env, env_kwargs, **settings))) as pool:
        yield pool


class Copies:
    """One copy of a policy, in the place of PolicyCopies."""

    version, num_built = 0, 1

    def __init__(self, policy):
        self.newest = policy

    def __getitem__(self, version):
        return self.newest


def collected(pool, agent, num_steps, stream=0):
    """The arrays of a rollout, and the failures that the learner hears of."""
    failures = []
    collector = pool.collector(failures)
    policy, own = (agent, {}) if pool.envs.batch_size == NUM_ENVS else (Copies(agent), {"stream": stream})
    arrays, _, _ = collector.collect(policy, num_steps, failures, lambda: None, **own)
    return arrays, failures


def stepped(pool, autoreset="NextStep"):
    return PoolStepping(pool).step(Step(order=1, autoreset=autoreset), {"action.0": np.zeros(NUM_ENVS, np.int64)})


class BrittleEnv(SavingEnv):
    """A file `break` in `folder` has step() raise; with the text "reset" in it, the reset that follows, too."""

    def __init__(self, folder, name):
        super().__init__(limit=1e6)
        self.file, self.name = Path(folder) / "break", name

    def reset(self, **kwargs):
        if self._is_told("reset"):
            self.file.unlink()
            raise RuntimeError("no reset today")
        return super().reset(**kwargs)

    def step(self, action):
        if self._is_told(""):
            if not self._is_told("reset"):
                self.file.unlink()
            raise RuntimeError("the axle broke")
        return super().step(action)

    def _is_told(self, text):
        return self.name == 1 and self.file.exists() and text in self.file.read_text()


def brittle(folder):
    return [{"folder": str(folder), "name": name} for name in range(NUM_ENVS)]


# -- envs that a stream has left at work --


def test_the_next_rollout_tells_of_an_env_that_failed_while_a_checkpoint_waited_for_it(tmp_path):
    agent = RememberingAgent()
    with worker_pool(BrittleEnv, brittle(tmp_path), batch_size=1) as pool:
        (tmp_path / "break").touch()
        arrays, failures = collected(pool, agent, num_steps=1, stream=1)
        assert arrays["env_ids"].tolist() == [0] and not failures  # env 1 is at work
        pool.require_idle()  # as for a checkpoint
        arrays, (failure,) = collected(pool, agent, num_steps=1, stream=1)
        assert isinstance(failure, EnvFailed) and failure.env_id == 1 and "the axle broke" in str(failure)
        assert arrays["env_ids"].tolist() == [1] and arrays["truncated"].tolist() == [[True]]
        assert not collected(pool, agent, num_steps=1, stream=1)[1]  # once


def test_who_begins_anew_does_not_hear_of_it_later(tmp_path):
    agent = RememberingAgent()
    with worker_pool(BrittleEnv, brittle(tmp_path), batch_size=1) as pool:
        (tmp_path / "break").touch()
        collected(pool, agent, num_steps=1, stream=1)
        ready, _ = stepped(pool, "SameStep")
        assert not ready.failures
        assert not collected(pool, agent, num_steps=1, stream=2)[1]


def test_an_env_without_an_episode_is_no_obstacle_for_a_checkpoint(tmp_path):
    """Its step and its reset have failed; the step that it was sent then can only be refused."""
    agent = RememberingAgent()
    with worker_pool(BrittleEnv, brittle(tmp_path), batch_size=1) as pool:
        pool.collector([])  # which resets all envs
        (tmp_path / "break").write_text("reset")
        arrays, (failure,) = collected(pool, agent, num_steps=2, stream=1)
        assert arrays["env_ids"].tolist() == [0] and failure.env_id == 1
        pool.require_idle()
        saved, why = PoolStates(pool).saved()
        assert saved["collector"] is None and why is None
        arrays, failures = collected(pool, agent, num_steps=2, stream=1)  # all envs are reset
        assert not failures and not arrays["truncated"].any()


# -- what a checkpoint has of the envs --


def as_stored(saved):
    return decoded(encoded(saved))


def test_a_pool_that_was_never_reset_has_no_states_and_lacks_none():
    with worker_pool(SavingEnv) as pool:
        saved, why = PoolStates(pool).saved()
        assert saved["envs"] is None and why is None
        first = pool.collector([])._obs
    with worker_pool(SavingEnv) as other:
        PoolStates(other).restore(as_stored(saved))
        assert np.array_equal(other.collector([])._obs, first)  # with the seeds of the first


def test_a_pool_whose_episodes_were_cut_short_goes_on_there():
    with worker_pool(SavingEnv) as pool:
        ready, arrays = stepped(pool)  # of a process before this one
        assert ready.is_after_loss and arrays["truncated"].all()
        saved, why = PoolStates(pool).saved()
        assert saved["envs"] is None and saved["episodes"] == "CUT_SHORT" and why is None
    with worker_pool(SavingEnv) as other:
        PoolStates(other).restore(as_stored(saved))
        ready, arrays = stepped(other)  # it resets them: nobody hears of the loss again
        assert not ready.is_after_loss and not arrays["truncated"].any()
        assert LOST not in str(ready.info)


def test_an_env_that_was_lost_with_its_process_is_not_in_the_checkpoint():
    with worker_pool(SavingEnv, backend="process", num_workers=1) as pool:
        pool.collector([])
        pid = inside.child_pid(pool.envs)
        os.kill(pid, signal.SIGKILL)
        wait_until(lambda: not is_running(pid), "the child is gone")
        assert PoolStates(pool).saved()[1] is not None  # ChildDied, or NotReset already
        saved, why = PoolStates(pool).saved()
        assert saved["envs"] is None and "it has failed, and has no state" in why
    with worker_pool(SavingEnv) as other:
        PoolStates(other).restore(as_stored(saved))
        assert not collected(other, RememberingAgent(), 2)[1]


class DawdlingEnv(SavingEnv):
    """Its get_state() waits while there is a file `wait` in `folder`."""

    def __init__(self, folder):
        super().__init__(limit=1e6)
        self.file = Path(folder) / "wait"

    def get_state(self):
        while self.file.exists():
            time.sleep(0.01)
        return super().get_state()


def test_envs_that_take_too_long_to_save_are_left_out_and_go_on(tmp_path):
    agent = RememberingAgent()
    with worker_pool(DawdlingEnv, {"folder": str(tmp_path)}, backend="process", num_workers=1) as pool:
        collected(pool, agent, 2)
        (tmp_path / "wait").touch()
        with inside.impatient_pool(pool.envs):
            saved, why = PoolStates(pool).saved()
        assert saved["envs"] is None and "timeout_s=0.3 s" in why
        (tmp_path / "wait").unlink()
        arrays, failures = collected(pool, agent, 2)
        assert not failures and not arrays["truncated"].any()
        saved, why = PoolStates(pool).saved()
        assert len(saved["envs"]) == NUM_ENVS and why is None


# -- what a policy remembers --


@pytest.mark.parametrize("batch_size", [NUM_ENVS, 1], ids=["all", "first ready"])
def test_an_env_that_is_put_back_after_a_resume_is_not_remembered(batch_size):
    agent, settings = RememberingAgent(), {"batch_size": batch_size}
    with worker_pool(SavingEnv, {"limit": 1e6}, **settings) as pool:
        collected(pool, agent, 3)
        states = PoolStates(pool).get_state([0])
        saved = as_stored(PoolStates(pool).saved()[0])
        through = collected(pool, agent, 2)[0]["state.sum"]
        initial = agent.initial_state(1)["sum"][0]
        assert not np.isin(initial, through).any()
    with worker_pool(SavingEnv, {"limit": 1e6}, **settings) as other:
        PoolStates(other).restore(saved)
        order = SetState(env_ids=[0], env_names=[states[0].env_name], states=states_to_plain(states[:1]))
        PoolStates(other).set_state(order)
        begun = collected(other, agent, 2)[0]["state.sum"]
        assert np.array_equal(begun[0], initial)
        assert np.array_equal(begun[1], through[1])


# -- what the worker knows of the learner --


def test_news_go_on_after_a_resume(monkeypatch):
    """The divergence that was announced last decides about the next pull."""
    monkeypatch.setattr(link_module, "WorkerSocket", PlayedSocket)
    news, first, second = News(7, 0.25, 5), *(Link("ipc://nowhere", 0, None, 30.0) for _ in range(2))
    with contextlib.closing(Worker(first, *welcome_of(SavingEnv))) as worker:
        first.news = news
        state = inside.worker_state(worker, SaveState(version=7))
    with contextlib.closing(Worker(second, *welcome_of(SavingEnv))) as other:
        inside.restore_worker(other, RestoreState(weights=None), state)
    assert second.news == news
