"""States of envs: an env that is put back into one repeats its trajectory, bit for bit, in any pool of its kind."""

import os
import pickle
import signal

import gymnasium
import numpy as np
import pytest
from numpy.testing import assert_array_equal

import envfleet
from envfleet import EnvFailed, EnvState, NotReset, UsageError
from envfleet.testing.programs import require_equal
from tests.support.envs import saving_envs
from tests.support.envs.saving_envs import MarkingEnv, OtherSignature, RefusingEnv, SavingEnv, WalkEnv
from tests.support.saved_trajectories import Walker
from tests.support.waiting import is_running, wait_until

pytestmark = pytest.mark.usefixtures("quick_spawners")

MODES = ("next_step", "same_step", "disabled")
ENVS = {
    "hook": (saving_envs.saving_env, {}),
    "wrappers": (saving_envs.wrapped_env, {}),
    "hook of a wrapper": (saving_envs.covered_env, {}),
    "attributes named": (saving_envs.half_locked_env, {}),
    "pickle": (saving_envs.pickled_env, {"env_states": "pickle"}),
    "native": ("CartPole-v1", {"max_episode_steps": 20}),
}


def pool(env, backend="serial", num_envs=3, **settings):
    if backend == "process":
        settings.setdefault("num_workers", 2)
    return envfleet.make(env, num_envs, backend=backend, **settings)


CASES = [
    *((kind, "native" if kind == "native" else "serial", mode) for kind in ENVS for mode in MODES),
    *(("hook", "process", mode) for mode in MODES),
    ("wrappers", "process", "next_step"),
    ("pickle", "process", "same_step"),
]


@pytest.mark.parametrize(("kind", "backend", "mode"), CASES)
def test_a_restored_env_repeats_its_trajectory(kind, backend, mode):
    """In the same pool, where other things have happened since, and in new ones; infos and resets included."""
    env, settings = ENVS[kind]
    settings = {**settings, "autoreset_mode": mode}
    with pool(env, backend, **settings) as envs:
        envs.reset(seed=3)
        walker = Walker(envs)
        walker.walk(walker.actions(17))
        saved, ended, shown = envs.get_state(), walker.ended, envs.observations()
        actions = walker.actions(200)
        expected = walker.walk(actions)
        assert sum((each[2] | each[3]).sum() for each in expected if len(each) == 5) > 20
        envs.set_state(saved)
        require_equal(envs.observations(), shown)
        walker.ended = ended
        require_equal(walker.walk(actions), expected)
    carried = pickle.loads(pickle.dumps(saved))
    for other_backend in {backend, "serial" if backend == "process" else backend}:
        with pool(env, other_backend, **settings) as others:
            others.set_state(carried)
            require_equal(others.observations(), shown)
            walker = Walker(others)
            walker.ended = ended
            require_equal(walker.walk(actions), expected)


@pytest.mark.parametrize("backend", ["serial", "process"])
def test_an_asynchronous_pool_goes_on_from_states(backend):
    with pool(saving_envs.saving_env, backend, num_envs=4, batch_size=2) as envs:
        envs.reset(seed=1)
        saved = envs.get_state()
        first = envs.step_all(np.array([1, 2, 3, 1]))
        envs.set_state(saved)
        require_equal(envs.step_all(np.array([1, 2, 3, 1])), first)
        require_equal(envs.observations(), first[0])
        envs.set_state(saved)
        envs.send(np.array([1, 2, 3, 1]), np.arange(4))
        with pytest.raises(envfleet.EnvBusy):
            envs.get_state()
        for _ in range(2):
            obs, *_, info = envs.recv()
            assert_array_equal(obs, first[0][info["env_id"]])


@pytest.mark.parametrize("backend", ["serial", "process"])
def test_some_envs_can_be_copied_to_others(backend):
    """Also from env 0, which alone has Gymnasium's checker around it."""
    gymnasium.register("SavedWalk-v0", entry_point="tests.support.envs.saving_envs:SavingEnv", max_episode_steps=9)
    try:
        with pool("SavedWalk-v0", backend, num_envs=4) as envs:
            envs.reset(seed=0)
            envs.step(np.array([1, 2, 3, 1]))
            envs.set_state(2 * envs.get_state([0]) + envs.get_state([2]), env_ids=[3, 1, 0])
            for _ in range(30):
                obs, rewards, *_ = envs.step(np.full(4, 2))
                assert (obs[3] == obs[1]).all() and rewards[3] == rewards[1]
                assert (obs[0] == obs[2]).all() and (obs[0] != obs[1]).any()
            saved, expected = envs.get_state(), envs.step(np.full(4, 2))
        with pool("SavedWalk-v0", backend, num_envs=4) as others:  # where it has checked nothing yet
            others.set_state(saved)
            require_equal(others.step(np.full(4, 2)), expected)
    finally:
        del gymnasium.registry["SavedWalk-v0"]


@pytest.mark.parametrize("backend", ["serial", "process"])
def test_an_env_without_a_hook_is_refused_and_told_both_remedies(backend):
    with pool(WalkEnv, backend) as envs:
        for act in (envs.get_state, lambda: envs.set_state([])):
            with pytest.raises(UsageError, match=r"WalkEnv cannot be saved.*get_state\(\).*env_states='pickle'"):
                act()
        assert "env_states='pickle'" in envs.why_no_states
    with pool(OtherSignature, backend, num_envs=1) as envs:
        assert "its set_state must be a pair" in envs.why_no_states
    with pool(SavingEnv, backend) as envs:
        assert envs.why_no_states is None
        with pytest.raises(NotReset):
            envs.get_state()
        with pytest.raises(NotReset):
            envs.observations()
        envs.reset(seed=0)
        saved = envs.get_state([0])
    with pool(SavingEnv, backend) as envs, pytest.raises(NotReset, match="must restore all envs"):
        envs.set_state(saved, [0])


def test_what_pickles_by_its_arguments_alone_is_refused():
    """It would be pickled without a word, and come back without its state."""
    for settings in ({}, {"env_states": "pickle"}):
        with pool("LunarLander-v3", "process", num_envs=1, num_workers=1, **settings) as envs:
            assert ("(gymnasium.utils.EzPickle), without its state" in envs.why_no_states) is bool(settings)
            assert "env_states='pickle'" not in envs.why_no_states  # it would be no remedy
            with pytest.raises(UsageError, match=r"get_state\(\) and set_state\(state\)"):
                envs.get_state()


def test_vector_envs_are_refused():
    with envfleet.make("CartPole-v1", 2, backend="vector") as envs:
        envs.reset(seed=0)
        with pytest.raises(UsageError, match="does not save the states of its envs: make a pool of single envs"):
            envs.get_state()
        assert "does not save" in envs.why_no_states


def test_a_wrong_setting_is_refused():
    with pytest.raises(UsageError, match="env_states must be 'own' or 'pickle'; got 'deepcopy'"):
        pool(WalkEnv, env_states="deepcopy")


@pytest.mark.parametrize("backend", ["serial", "process"])
def test_states_that_do_not_fit_are_refused_before_anything_is_restored(backend):
    with pool(SavingEnv, backend) as envs, pool(RefusingEnv, backend) as others:
        envs.reset(seed=0)
        others.reset(seed=0)
        envs.step(np.array([1, 2, 3]))
        own, foreign, shown = envs.get_state(), others.get_state(), envs.observations()
        envs.step(np.array([1, 2, 3]))
        now = envs.observations()
        assert (now != shown).any()
        for states in ([own[0], own[1], foreign[2]], own[:2], foreign):
            with pytest.raises(UsageError, match=r"the state of a .*RefusingEnv|expected 3, got 2"):
                envs.set_state(states)
            assert_array_equal(envs.observations(), now)
        with pytest.raises(UsageError, match=r"^env_ids "):
            envs.get_state([3])
        envs.set_state(own)
        assert_array_equal(envs.observations(), shown)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("backend", ["serial", "process"])
def test_an_env_that_does_not_take_its_state_is_named_and_needs_a_reset(backend, mode):
    with pool(RefusingEnv, backend, num_envs=4, autoreset_mode=mode, env_kwargs={"limit": 1e9}) as envs:
        envs.reset(seed=0)
        early = envs.get_state()
        for _ in range(3):
            envs.step(np.array([1, 1, 1, 1]))
        late, before = envs.get_state(), envs.observations()
        with pytest.raises(
            EnvFailed, match=r"env 1 raised StateNotRestored: in set_state\(\): ValueError: no state"
        ) as e:
            envs.set_state([early[0], late[1], early[2], early[3]])
        assert e.value.env_id == 1 and "set_state" in e.value.child_traceback
        assert_array_equal(envs.observations()[:, 1], [0, 3, 0, 0])  # the others are restored
        if mode == "next_step":
            obs, *_ = envs.step(np.ones(4, int))
            assert_array_equal(obs[:, 1], [1, 0, 1, 1])  # it was reset
            assert (obs[1] != before[1]).any()
        else:
            with pytest.raises(envfleet.StepOnEndedEpisode, match="env 1"):
                envs.step(np.ones(4, int))
            envs.recv()
            envs.reset(options={"reset_mask": np.arange(4) == 1})
            assert_array_equal(envs.step(np.ones(4, int))[0][:, 1], [2, 1, 2, 2])


@pytest.mark.parametrize("backend", ["serial", "process"])
def test_a_damaged_state_costs_its_env_alone(backend):
    with pool(SavingEnv, backend, num_envs=2, env_kwargs={"limit": 1e9}) as envs:
        envs.reset(seed=0)
        envs.step(np.ones(2, int))
        saved = envs.get_state()
        damaged = EnvState(saved[1].env_name, saved[1].state[:-9], 1, False, {})
        with pytest.raises(EnvFailed, match="env 1 raised StateNotRestored"):
            envs.set_state([saved[0], damaged])
        assert_array_equal(envs.step(np.ones(2, int))[0][:, 1], [2, 0])


def test_wrappers_with_state_that_cannot_be_saved_are_named():
    with pool(saving_envs.locked_env) as envs:
        envs.reset(seed=0)
        with pytest.raises(UsageError, match=r"env 0.*'lock' of the wrapper .*Locked.*state_attributes"):
            envs.get_state()


def test_an_env_that_cannot_be_pickled_is_named():
    with pool(lambda: saving_envs.Locked(WalkEnv()), env_states="pickle") as envs:
        envs.reset(seed=0)
        with pytest.raises(UsageError, match=r"env 0.*WalkEnv in Locked, pickled: the env cannot be pickled.*lock"):
            envs.get_state()


def test_only_the_process_that_runs_an_env_unpickles_its_state():
    with pool(MarkingEnv, "process", num_envs=2) as envs:
        envs.reset(seed=0)
        envs.set_state(pickle.loads(pickle.dumps(envs.get_state())))
        assert envs.call("marks") == tuple([pid] for pid in envs.call("pid"))
    assert saving_envs.UNPICKLED_HERE == []


def test_states_outlive_killed_children():
    """Those of a pool all of whose processes are killed are restored in another one, and in the same."""
    with pool(saving_envs.saving_env, "process", num_envs=4) as envs:
        envs.reset(seed=1)
        walker = Walker(envs)
        walker.walk(walker.actions(5))
        saved, actions = envs.get_state(), walker.actions(50)
        expected = walker.walk(actions)
        pids = set(envs.call("pid"))
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        wait_until(lambda: not any(map(is_running, pids)), "the children are gone")
        with pool(saving_envs.saving_env, "process", num_envs=4, num_workers=1) as others:
            others.set_state(saved)
            require_equal(Walker(others).walk(actions), expected)
        with pytest.raises(envfleet.ChildDied):
            envs.get_state()
        _until_told(envs, saved)
        require_equal(walker.walk(actions), expected)


def _until_told(envs, saved):
    """Each child that died is told of once, whatever is asked."""
    for _ in range(2):
        try:
            envs.set_state(saved)
            return
        except envfleet.ChildDied:
            pass
    envs.set_state(saved)


def test_an_env_that_was_lost_has_no_state():
    with pool(saving_envs.saving_env, "process", num_envs=2, num_workers=1, on_env_error="restart") as envs:
        envs.reset(seed=1)
        saved = envs.get_state()
        (pid,) = set(envs.call("pid"))
        os.kill(pid, signal.SIGKILL)
        wait_until(lambda: not is_running(pid), "the child is gone")
        with pytest.raises((NotReset, envfleet.ChildDied)):
            envs.get_state()
        with pytest.raises(NotReset, match="env 0: it has failed"):
            envs.get_state()
        envs.set_state(saved)  # and then it has one, and no row says that it was lost
        assert "env_error" not in envs.step(np.ones(2, int))[4]


def test_a_pickled_env_is_given_the_live_changes_that_it_has_missed():
    with pool(WalkEnv, env_states="pickle", num_envs=1) as envs:
        envs.reset(seed=0)
        saved = envs.get_state()
        envs.broadcast("limit", 77.0)
        envs.reset()
        assert envs.get_attr("limit") == (77.0,)
        envs.set_state(saved)
        assert envs.get_attr("limit") == (6.0,)
        envs.reset()
        assert envs.get_attr("limit") == (77.0,)


def test_old_states_of_five_values_still_work():
    with envfleet.make("CartPole-v1", 1, backend="native") as envs:
        envs.reset(seed=0)
        (saved,) = envs.get_state()
        envs.set_state([EnvState(saved.env_name, saved.state, saved.num_steps, saved.has_ended, saved.generator)])
