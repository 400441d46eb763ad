"""The process backend when things go wrong: each test does it for real."""

import os
import signal
import threading
import time
from functools import partial

import numpy as np
import pytest
from gymnasium.envs.registration import EnvSpec

import envfleet
from envfleet.pool.process import resources
from envfleet.pool.process.children import Children
from envfleet.testing import Act, ScriptedEnv
from tests.support.inside import child_pid, num_children, spawner_pid, task_queues
from tests.support.waiting import is_running, wait_until

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("quick_spawners")]

STEP = 1


def acts(*actions):
    return np.array(actions, dtype=np.int64)


def make(num_envs=4, **kwargs):
    return envfleet.make(ScriptedEnv, num_envs, backend="process", **{"num_workers": 2, **kwargs})


def pids_of(pool):
    children = range(num_children(pool))
    wait_until(lambda: all(child_pid(pool, child) for child in children), "all children have started")
    return [child_pid(pool, child) for child in children]


@pytest.mark.parametrize(
    ("act", "how"), [(Act.KILL, "SIGKILL"), (Act.SEGFAULT, "SIGSEGV"), (Act.EXIT, "exit status 3")]
)
def test_a_child_that_dies_is_named_and_replaced(act, how):
    with make() as pool:
        pool.reset(seed=0)
        pid = pids_of(pool)[1]
        with pytest.raises(envfleet.ChildDied, match=how) as caught:  # not PoolTimeout: the death was noticed
            pool.step(acts(Act.GO_ON, Act.GO_ON, Act.GO_ON, act))
        assert caught.value.env_id == 3
        assert caught.value.env_ids == (2, 3)
        assert str(pid) in str(caught.value) and "env 3" in str(caught.value) and "step()" in str(caught.value)

        obs, rewards, terminations, truncations, infos = pool.recv()
        assert not truncations[:2].any() and truncations[3] and not terminations.any()
        assert obs[:2, STEP].tolist() == [1, 1] and rewards[3] == 0
        assert how in infos["env_error"][3]

        # Env 2 ran in the same process. Whether or not its step was finished in time, its episode is lost.
        obs, _, _, later_truncations, infos = pool.step(acts(*[Act.GO_ON] * 4))
        assert truncations[2] or (later_truncations[2] and how in infos["env_error"][2])
        assert obs[3].tolist()[STEP] == 0 and not later_truncations[3]
        pool.reset(seed=0)
        assert pool.step(acts(*[Act.GO_ON] * 4))[0][:, STEP].tolist() == [1, 1, 1, 1]


@pytest.mark.parametrize("mode", list(envfleet.Autoreset))
def test_a_child_that_dies_is_restarted_without_an_error(mode):
    with make(on_env_error="restart", autoreset_mode=mode) as pool:
        pool.reset(seed=0)
        obs, _, _, truncations, infos = pool.step(acts(Act.KILL, Act.GO_ON, Act.GO_ON, Act.GO_ON))
        assert truncations[0] and not truncations[2:].any()
        assert "SIGKILL" in infos["env_error"][0]
        assert obs[2:, STEP].tolist() == [1, 1]
        if mode is envfleet.Autoreset.SAME_STEP:
            assert infos["_final_obs"][0]
        pool.reset(seed=0)
        assert pool.step(acts(*[Act.GO_ON] * 4))[0][:, STEP].tolist() == [1, 1, 1, 1]


def test_a_child_that_dies_again_and_again_uses_its_restarts_up():
    with make(num_envs=1, num_workers=1, on_env_error="restart", max_env_restarts=2) as pool:
        for _ in range(2):
            pool.reset(seed=0)
            assert pool.step(acts(Act.KILL))[3].tolist() == [True]
        pool.reset(seed=0)
        with pytest.raises(envfleet.ChildDied):
            pool.step(acts(Act.KILL))
        assert pool.recv()[3].tolist() == [True]


def test_a_child_killed_while_idle_is_noticed_at_the_next_step():
    with make() as pool:
        pool.reset(seed=0)
        pid = pids_of(pool)[0]
        os.kill(pid, signal.SIGKILL)
        wait_until(lambda: not is_running(pid), "the child is gone")
        with pytest.raises(envfleet.ChildDied, match="SIGKILL"):
            pool.step(acts(*[Act.GO_ON] * 4))
        assert pool.recv()[3].tolist() == [True, True, False, False]


def test_a_child_killed_in_reset_resets_in_its_new_process():
    with make(on_env_error="restart", env_kwargs={"sleep_s": 0.5}) as pool:
        expected = pool.reset(seed=5)[0].copy()
        pool.step(acts(*[Act.GO_ON] * 4))
        pool.async_reset(seed=5)
        os.kill(pids_of(pool)[0], signal.SIGKILL)
        assert pool.recv()[0][:, 0].tolist() == expected[:, 0].tolist()


def test_asynchronous_batches_survive_kills():
    with make(num_envs=8, batch_size=3, num_workers=3, on_env_error="restart", max_env_restarts=50) as pool:
        pool.async_reset(seed=0)
        num_rows = np.zeros(8, dtype=int)
        num_lost = 0
        for round_ in range(120):
            _, _, _, truncations, infos = pool.recv(timeout_s=30)
            env_ids = infos["env_id"]
            num_rows[env_ids] += 1
            num_lost += int(truncations.sum())
            if round_ % 12 == 5:
                os.kill(pids_of(pool)[round_ // 12 % 3], signal.SIGKILL)
            pool.send(np.full(3, Act.TERMINATE if round_ % 3 == 0 else Act.GO_ON), env_ids)
        assert num_rows.sum() == 360 and num_rows.min() > 0
        assert num_lost >= 5


def test_the_spawner_may_die_too():
    with make() as pool:
        pool.reset(seed=0)
        pids = pids_of(pool)
        os.kill(spawner_pid(pool), signal.SIGKILL)
        wait_until(lambda: not any(is_running(pid) for pid in pids), "the children died with the spawner")
        with pytest.raises(envfleet.ChildDied, match="spawner") as caught:
            pool.step(acts(*[Act.GO_ON] * 4))
        assert caught.value.env_ids == (0, 1, 2, 3) and "envs 0, 1, 2, 3;" in str(caught.value)
        assert pool.recv()[3].all()
        pool.reset(seed=0)
        assert pool.step(acts(*[Act.GO_ON] * 4))[0][:, STEP].tolist() == [1, 1, 1, 1]


def test_a_call_names_all_envs_that_were_lost_with_the_spawner():
    with make(num_envs=6, num_workers=3, on_env_error="restart") as pool:
        pool.reset(seed=0)
        pids = pids_of(pool)
        os.kill(spawner_pid(pool), signal.SIGKILL)
        wait_until(lambda: not any(is_running(pid) for pid in pids), "the children died with the spawner")
        with pytest.raises(envfleet.ChildDied, match="envs 0 to 1, 2 to 3, 4 to 5 died before they could") as caught:
            pool.get_attr("render_mode")
        assert caught.value.env_ids == (0, 1, 2, 3, 4, 5)
        assert len(pool.get_attr("render_mode")) == 6


def test_a_hung_step_is_reported_with_its_stack_and_loses_nothing():
    with make(env_kwargs={"sleep_s": 3.0}) as pool:
        pool.reset(seed=0)
        pool.send(acts(Act.GO_ON, Act.GO_ON, Act.SLEEP, Act.GO_ON))
        with pytest.raises(envfleet.PoolTimeout) as caught:
            pool.recv(timeout_s=0.3)
        text = str(caught.value)
        assert "env 2 is in step()" in text and "still at work: envs [2, 3]" in text
        assert "testing/envs.py" in text and "in step" in text  # the Python stack of the child
        assert pool.recv(timeout_s=30)[0][:, STEP].tolist() == [1, 1, 1, 1]


def test_a_failure_is_told_while_other_envs_still_work():
    with make(env_kwargs={"sleep_s": 2.0}) as pool:
        pool.reset(seed=0)
        with pytest.raises(envfleet.EnvFailed):
            pool.step(acts(Act.RAISE, Act.GO_ON, Act.SLEEP, Act.GO_ON))
        assert 2 in task_queues(pool).busy_env_ids()
        assert pool.recv()[3].tolist() == [True, False, False, False]


def test_reset_drops_what_is_in_flight():
    with make(env_kwargs={"sleep_s": 0.3}) as pool:
        pool.reset(seed=0)
        pool.send(acts(Act.SLEEP, Act.GO_ON, Act.RAISE, Act.GO_ON))
        obs, _ = pool.reset(seed=0)
        assert obs[:, STEP].tolist() == [0, 0, 0, 0]
        assert pool.step(acts(*[Act.GO_ON] * 4))[0][:, STEP].tolist() == [1, 1, 1, 1]


def test_closing_does_not_wait_for_a_hung_env(monkeypatch):
    monkeypatch.setattr("envfleet.pool.process.resources.CLOSE_GRACE_S", 0.2)
    pool = make(env_kwargs={"sleep_s": 600.0})  # longer than a test may take
    pool.reset(seed=0)
    pids = pids_of(pool)
    pool.send(acts(Act.SLEEP, Act.GO_ON, Act.GO_ON, Act.GO_ON))
    pool.close()
    assert not any(is_running(pid) for pid in pids)


class MarksItsEnd(ScriptedEnv):
    def __init__(self, folder, number, **kwargs):
        super().__init__(**kwargs)
        self._file = folder / str(number)

    def close(self):
        self._file.touch()


def test_terminating_kills_what_is_at_work_at_once_and_lets_the_others_close(monkeypatch, tmp_path):
    """A worker that replaces a hung pool does so. (Else this would take longer than a test may.)"""
    monkeypatch.setattr("envfleet.pool.process.resources.CLOSE_GRACE_S", 600.0)
    kwargs = [{"folder": tmp_path, "number": number, "sleep_s": 600.0} for number in range(4)]
    pool = envfleet.make(MarksItsEnd, 4, backend="process", num_workers=4, env_kwargs=kwargs)
    pool.reset(seed=0)
    pool.send(acts(Act.GO_ON, Act.GO_ON, Act.SLEEP, Act.GO_ON))
    with pytest.raises(envfleet.PoolTimeout, match=r"env 2 is in step\(\)"):
        pool.recv(timeout_s=0.3)
    pids = pids_of(pool)
    pool.close(terminate=True)
    assert not any(is_running(pid) for pid in pids)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0", "1", "3"]


def test_call_to_a_dead_child_is_an_error_and_the_next_one_works():
    with make(on_env_error="restart") as pool:
        pool.reset(seed=0)
        os.kill(pids_of(pool)[0], signal.SIGKILL)
        with pytest.raises(envfleet.ChildDied):
            pool.call("name")
        assert pool.call("double", 2) == (4, 4, 4, 4)


class DiesInCall(ScriptedEnv):
    def __init__(self, dies=False):
        super().__init__()
        self._dies = dies

    def first(self):
        return "first"

    def second(self):
        if self._dies:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(1.0)  # while another child dies and is replaced
        return "second"

    def lock(self):
        return threading.Lock() if self._dies else None


def test_the_answer_of_an_earlier_call_is_not_given_for_a_dead_child():
    kwargs = {"num_workers": 2, "on_env_error": "restart", "env_kwargs": [{}, {"dies": True}]}
    with envfleet.make(DiesInCall, 2, backend="process", **kwargs) as pool:
        assert pool.call("first") == ("first", "first")
        with pytest.raises(envfleet.ChildDied, match="envs 1 to 1 died before it could call 'second'") as caught:
            pool.call("second")
        assert caught.value.env_ids == (1,)
        assert pool.call("first") == ("first", "first")


def test_an_answer_that_cannot_be_pickled_names_the_env_that_gave_it():
    with envfleet.make(DiesInCall, 2, backend="process", num_workers=1, env_kwargs=[{}, {"dies": True}]) as pool:
        with pytest.raises(envfleet.EnvFailed, match=r"env 1 raised .*lock") as caught:
            pool.call("lock")
        assert caught.value.env_id == 1


class SlowToCall(ScriptedEnv):
    def nap(self, seconds):
        time.sleep(seconds)
        return seconds


def test_a_call_that_times_out_does_not_confuse_the_next_one():
    with envfleet.make(SlowToCall, 2, backend="process", num_workers=2, timeout_s=0.5) as pool:
        with pytest.raises(envfleet.PoolTimeout, match="did not call 'nap'"):
            pool.call("nap", 0.8)
        assert pool.call("nap", 0.0) == (0.0, 0.0)


class SlowToReset(ScriptedEnv):
    def reset(self, *, seed=None, options=None):
        time.sleep(0.7)
        return super().reset(seed=seed, options=options)


def test_a_reset_that_times_out_can_still_be_received():
    with envfleet.make(SlowToReset, 3, batch_size=2, backend="process", num_workers=3, timeout_s=0.3) as pool:
        with pytest.raises(envfleet.PoolTimeout, match=r"in reset\(\)"):
            pool.reset(seed=0)
        obs, *_, infos = pool.recv(timeout_s=30)
        assert infos["env_id"].tolist() == [0, 1, 2] and obs[:, STEP].tolist() == [0, 0, 0]
        pool.send(np.full(3, Act.GO_ON))
        assert pool.recv(timeout_s=30)[0].shape == (2, 4)


def test_building_errors_say_which_env_and_why():
    with pytest.raises(envfleet.EnvFailed, match="no_such_argument") as caught:
        make(env_kwargs=[{}, {}, {"no_such_argument": 1}, {}])
    assert caught.value.env_id == 2
    with pytest.raises(envfleet.EnvFailed, match="cannot be built"):
        make(env_kwargs={"no_such_argument": 1})
    with pytest.raises(envfleet.ChildDied, match="exit status 9"):
        envfleet.make(lambda: os._exit(9), 2, backend="process")


def _note_and_build(path, fails):
    if fails:
        raise RuntimeError("no licence")
    with open(path, "a") as file:
        file.write("built ")
    env = ScriptedEnv()
    env.close = lambda: path.write_text(path.read_text() + "closed ")
    return env


@pytest.mark.parametrize("backend", ["serial", "process"])
def test_envs_that_were_built_are_closed_when_another_cannot_be(tmp_path, backend):
    builds = [partial(_note_and_build, tmp_path / "notes", fails) for fails in (False, False, True)]
    with pytest.raises(envfleet.EnvFailed, match="env 2 cannot be built: RuntimeError: no licence") as caught:
        envfleet.make(builds, 3, backend=backend)
    assert caught.value.env_id == 2
    notes = (tmp_path / "notes").read_text().split()
    assert notes.count("built") == notes.count("closed")


def test_a_first_child_that_is_told_to_go_on_and_to_stop_at_once_stops(tmp_path, monkeypatch):
    """If it missed that it is to stop, it would be killed after the grace, and its env would not be closed."""
    monkeypatch.setattr(resources, "CLOSE_GRACE_S", 60.0)  # on a busy machine 5 s may be too short
    start_first = Children.start_first

    def held(children, deadline_s, **settings):  # until the second child has failed
        traits = start_first(children, deadline_s, **settings)
        pid = children._task_queues.pid(0)
        os.kill(pid, signal.SIGSTOP)
        threading.Timer(1.5, os.kill, (pid, signal.SIGCONT)).start()
        return traits

    monkeypatch.setattr(Children, "start_first", held)
    builds = [partial(_note_and_build, tmp_path / "notes", fails) for fails in (False, True)]
    with pytest.raises(envfleet.EnvFailed, match="env 1 cannot be built"):
        envfleet.make(builds, 2, backend="process", num_workers=2)
    assert (tmp_path / "notes").read_text() == "built closed "


def test_building_has_a_deadline():
    with pytest.raises(envfleet.PoolTimeout, match="start_timeout_s"):
        envfleet.make(lambda: time.sleep(30), 2, backend="process", start_timeout_s=0.5)


class DrawingEnv(ScriptedEnv):
    """Its observations show what its generator drew."""

    def reset(self, *, seed=None, options=None):
        obs, info = super().reset(seed=seed, options=options)
        return np.full_like(obs, self.np_random.integers(1_000_000)), info


def observations_after_a_death():
    with envfleet.make(DrawingEnv, 2, backend="process", num_workers=1, on_env_error="restart") as pool:
        pool.reset(seed=7)
        pool.reset()  # the generators go on; the seed of the first reset still counts
        assert pool.step(acts(Act.KILL, Act.GO_ON))[3].all()
        return pool.step(acts(Act.GO_ON, Act.GO_ON))[0]


def test_envs_that_are_built_anew_after_an_unseeded_reset_have_the_same_seeds_in_each_run():
    np.testing.assert_array_equal(observations_after_a_death(), observations_after_a_death())


class UnpicklableSpecEnv(ScriptedEnv):
    def __init__(self):
        super().__init__()
        self.spec = EnvSpec("Scripted-v0", entry_point=ScriptedEnv, kwargs={"lock": threading.Lock()})


def test_a_spec_that_cannot_be_pickled_is_left_out(caplog):
    with envfleet.make(UnpicklableSpecEnv, 3, backend="process", num_workers=2) as pool:
        assert pool.spec is None
        assert pool.reset(seed=0)[0].shape[0] == 3
    assert "the spec of the envs is left out, since it cannot be pickled: TypeError" in caplog.text
