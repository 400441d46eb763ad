"""Changes of envs while they run: each env applies them in its next reset, once, in order, whoever builds it anew."""

import threading

import gymnasium
import numpy as np
import pytest

import envfleet
from envfleet import EnvFailed, UsageError
from envfleet.contract.live_changes import (
    MOST_PENDING,
    Arguments,
    Change,
    ChangeKind,
    LiveChanges,
    attribute_change,
    call_change,
)
from tests.support.envs.changing_env import ChangingEnv, SavingChangingEnv

pytestmark = pytest.mark.usefixtures("quick_spawners")

LEVEL, CALLS, START, STEP = 0, 1, 2, 4  # columns of ChangingEnv's observation
MODES = ("next_step", "same_step", "disabled")


def pool(backend, num_envs=3, **settings):
    if backend == "process":
        settings["num_workers"] = 2
    return envfleet.make(ChangingEnv, num_envs=num_envs, backend=backend, **settings)


def wrapped_env(**kwargs):
    return gymnasium.wrappers.TimeLimit(ChangingEnv(**kwargs), 100)


def zeros(envs):
    return np.zeros(envs.num_envs, int)


def changes_of(info, num_envs):
    """The number in each row, None where it is absent."""
    mask = info.get("_live_change", np.zeros(num_envs, bool))
    return [int(info["live_change"][row]) if mask[row] else None for row in range(num_envs)]


@pytest.mark.parametrize("backend", ["serial", "process"])
@pytest.mark.parametrize("mode", MODES)
def test_the_next_reset_applies_all_changes_and_says_so(backend, mode):
    with pool(backend, autoreset_mode=mode) as envs:
        obs, info = envs.reset()
        assert "live_change" not in info
        numbers = [envs.broadcast("level", 5), envs.call_at_reset("note", "a", times=2)]
        assert [*numbers, envs.set_reset_options({"start": 7})] == [1, 2, 3]
        for step in range(1, 10):
            is_end = step in (3, 6, 9)
            obs, _, terminated, _, info = envs.step(zeros(envs))
            is_reset = mode == "same_step" and is_end
            if mode == "same_step" and step == 3:
                assert [each[LEVEL] for each in info["final_obs"]] == [0, 0, 0]
            if mode != "same_step" and is_end:
                assert terminated.all() and "live_change" not in info
                # With autoreset in the next step its action is ignored.
                obs, info = envs.reset() if mode == "disabled" else envs.step(zeros(envs))[::4]
                is_reset = True
            assert changes_of(info, 3) == [3 if is_reset else None] * 3
            expected = [5, 2, 7] if step > 3 or is_reset else [0, 0, 0]
            assert (obs[:, [LEVEL, CALLS, START]] == expected).all(), (step, obs)


@pytest.mark.parametrize("backend", ["serial", "process"])
def test_options_of_one_reset_come_before_those_of_all(backend):
    with pool(backend) as envs:
        assert envs.set_reset_options({"start": 7}) == 1
        assert (envs.reset()[0][:, START] == 7).all()
        assert (envs.reset(options={"start": 9})[0][:, START] == 9).all()
        mask = np.array([True, False, True])
        assert envs.reset(options={"reset_mask": mask})[0][:, START].tolist() == [7, 9, 7]
        assert envs.set_reset_options(None) == 2
        assert (envs.reset()[0][:, START] == 0).all()


def test_changes_while_envs_are_in_flight_are_exact():
    """Asynchronously, with a change after each batch: the level shown is always that of the change told."""
    with pool("process", num_envs=4, batch_size=2, autoreset_mode="same_step") as envs:
        envs.async_reset()
        begun_with = np.zeros(4, int)
        for num_changes in range(120):
            obs, _, terminated, _, info = envs.recv()
            for row, (env_id, change) in enumerate(zip(info["env_id"], changes_of(info, 2), strict=True)):
                assert change is None or begun_with[env_id] <= change <= num_changes
                begun_with[env_id] = begun_with[env_id] if change is None else change
                assert obs[row, LEVEL] == 10 * begun_with[env_id]
                assert change is not None or not terminated[row] or not begun_with[env_id]
            assert envs.broadcast("level", 10 * (num_changes + 1)) == num_changes + 1
            envs.send(np.zeros(2, int), info["env_id"])
        assert begun_with.any()


def test_calls_are_made_once_for_each_env_in_their_order():
    with pool("process", autoreset_mode="disabled") as envs:
        envs.reset()
        for value in range(300):
            envs.call_at_reset("note", value)
        envs.step(zeros(envs))
        envs.call_at_reset("note", "last")
        envs.reset(options={"reset_mask": np.array([True, False, True])})
        calls = envs.get_attr("calls")
        assert calls[0] == calls[2] == [*range(300), "last"] and calls[1] == []
        envs.reset()
        assert envs.get_attr("calls") == (calls[0],) * 3


@pytest.mark.parametrize("backend", ["serial", "process"])
def test_an_env_that_is_built_anew_has_the_last_change_of_each_name(backend):
    with pool(backend, on_env_error="restart", env_kwargs={"fails_at": 2}, autoreset_mode="same_step") as envs:
        envs.call_at_reset("note", "old")
        envs.call_at_reset("note", "new")
        envs.broadcast("level", 1)
        envs.set_reset_options({"start": 3})
        envs.reset()
        assert envs.get_attr("calls") == (["old", "new"],) * 3
        number = envs.broadcast("level", 2)
        envs.reset()
        obs, _, _, truncated, info = envs.step(zeros(envs))  # all fail, and are built anew
        assert truncated.all() and changes_of(info, 3) == [number] * 3
        assert (obs[:, [LEVEL, CALLS, START]] == [2, 1, 3]).all()
        assert envs.get_attr("calls") == (["new"],) * 3


@pytest.mark.slow
def test_the_child_that_takes_a_dead_ones_place_has_all_changes():
    with pool("process", num_envs=4, on_env_error="restart", autoreset_mode="same_step") as envs:
        envs.reset()
        envs.broadcast("level", 1)
        with pytest.raises(EnvFailed):
            envs.call_some([0], "kill")
        envs.broadcast("level", 2)  # while the new child is started
        envs.set_reset_options({"start": 8})
        obs, _, _, truncated, info = envs.step(zeros(envs))
        assert truncated.tolist() == [True, True, False, False]
        assert changes_of(info, 4)[:2] == [3, 3]
        assert (obs[:2, [LEVEL, START]] == [2, 8]).all()
        for _ in range(3):
            obs = envs.step(zeros(envs))[0]
        assert (obs[:, [LEVEL, START]] == [2, 8]).all()


@pytest.mark.parametrize("backend", ["serial", "process"])
def test_an_env_without_the_attribute_names_the_change(backend):
    with pool(backend) as envs:
        envs.reset()
        envs.broadcast("level", 1)
        envs.broadcast("levle", 2)
        with pytest.raises(EnvFailed, match=r"env \d .*change 2, broadcast\('levle', \.\.\.\).*no attribute 'levle'"):
            envs.reset()
        for _ in range(2):
            with pytest.raises(EnvFailed, match="change 2"):
                envs.recv()
        envs.recv()
        obs, info = envs.reset()  # it is not tried again
        assert (obs[:, LEVEL] == 1).all() and changes_of(info, 3) == [2, 2, 2]
        envs.call_at_reset("nope")
        with pytest.raises(EnvFailed, match=r"change 3, call_at_reset\('nope'.*no method 'nope'"):
            envs.reset()


def test_wrappers_are_looked_through():
    with envfleet.make(wrapped_env, num_envs=2, backend="serial") as envs:
        envs.broadcast("level", 4)
        envs.call_at_reset("note", 1)
        obs, _ = envs.reset()
        assert (obs[:, [LEVEL, CALLS]] == [4, 1]).all()
        assert envs.get_attr("level") == (4, 4)


def test_what_no_env_could_apply_is_refused_at_the_call():
    with pool("process", num_envs=2) as envs:
        with pytest.raises(UsageError, match="name must be the name of an attribute"):
            envs.broadcast("no name", 1)
        with pytest.raises(UsageError, match="cannot call 'reset'"):
            envs.call_at_reset("reset")
        with pytest.raises(UsageError, match="options must be a dict"):
            envs.set_reset_options([1])
        with pytest.raises(UsageError, match="reset_mask chooses the envs of one reset"):
            envs.set_reset_options({"reset_mask": 1})
        with pytest.raises(UsageError, match=r"args\[0\] cannot be passed to another process"):
            envs.broadcast("level", threading.Lock())
        assert envs.broadcast("level", 1) == 1  # what was refused has no number


@pytest.mark.parametrize("backend", ["native", "vector"])
def test_envs_that_reset_themselves_are_refused_in_words_that_say_what_works(backend):
    with envfleet.make("CartPole-v1", num_envs=2, backend=backend) as envs:
        for change in (lambda: envs.broadcast("length", 1), lambda: envs.set_reset_options({})):
            with pytest.raises(UsageError, match="backend='process'"):
                change()


def test_arguments_are_unpickled_for_each_env():
    """An env that changes its own value must not change that of another."""
    with pool("process", num_envs=4) as envs:
        envs.broadcast("calls", [])
        envs.call_at_reset("note", 1)
        assert (envs.reset()[0][:, CALLS] == 1).all()


def test_a_new_env_gets_the_last_changes_in_the_order_in_which_they_were_made():
    changes = LiveChanges()
    for number, (name, value) in enumerate([("a", 1), ("b", 2), ("a", 3)], 1):
        changes.add(attribute_change(number, name, value))
    changes.add(Change.of(4, ChangeKind.CALL, "a", Arguments((), {})))
    assert [each.number for each in changes.last] == [2, 3, 4]
    assert [each.number for each in changes.of_new_env().pending] == [2, 3, 4]


@pytest.mark.parametrize("num_rounds", [MOST_PENDING // 2, 20 * MOST_PENDING])
def test_what_an_env_keeps_until_its_next_reset_is_bounded(num_rounds):
    """Up to a limit each call counts; beyond it the last of each name, as for a new env."""
    changes, env = LiveChanges(), ChangingEnv()
    waiting = changes.of_new_env()
    for number in range(1, 2 * num_rounds, 2):
        changes.add(attribute_change(number, "level", number))
        changes.add(call_change(number + 1, "note", (number,), {}))
        assert len(waiting.pending) <= MOST_PENDING + 2
    waiting.apply(env)
    assert env.level == 2 * num_rounds - 1
    assert env.calls == list(range(1, 2 * num_rounds, 2))[-len(env.calls) :]
    assert len(env.calls) == num_rounds or num_rounds > MOST_PENDING
    assert waiting.told({}) == {"live_change": 2 * num_rounds} and not waiting.pending


def test_many_changes_of_as_many_names_are_all_kept():
    changes = LiveChanges()
    waiting = changes.of_new_env()
    for number in range(1, 3 * MOST_PENDING):
        changes.add(attribute_change(number, f"level_{number}", number))
    assert [each.number for each in waiting.pending] == list(range(1, 3 * MOST_PENDING))


class KeepsItsLevel(gymnasium.Env):
    observation_space = gymnasium.spaces.Box(-9, 9, (1,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)
    level = 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return np.array([self.level], np.float32), {}

    def step(self, action):
        return np.array([self.level], np.float32), 0.0, False, False, {}

    def get_state(self):
        return self.level

    def set_state(self, state):
        self.level = state


def test_a_state_makes_older_changes_of_the_same_name_void():
    """Env 1 has changes 1 and 2 to apply; the state of env 0, which has both, comes first."""
    with envfleet.make(KeepsItsLevel, 2, backend="serial", autoreset_mode="Disabled") as pool:
        pool.reset(seed=0)
        for level in (1, 2):
            pool.broadcast("level", level)
            pool.reset(options={"reset_mask": np.array([True, False])})
        pool.set_state(pool.get_state([0]), [1])
        assert pool.get_attr("level") == (2, 2)
        assert pool.reset()[0].ravel().tolist() == [2.0, 2.0]


@pytest.mark.parametrize("backend", ["serial", "process"])
def test_a_state_of_another_pool_hides_no_change_of_this_one(backend):
    """Both pools number their changes from 1; only one with the same content was applied before the state was saved."""
    of_envs = {"backend": backend, "autoreset_mode": "Disabled"}
    with envfleet.make(SavingChangingEnv, 1, **of_envs) as one, envfleet.make(SavingChangingEnv, 1, **of_envs) as other:
        for pool, value, level in ((one, "of one", 7), (other, "of other", 7)):
            pool.reset(seed=0)
            pool.call_at_reset("note", value)
            pool.broadcast("level", level)
        one.reset()
        other.set_state(one.get_state())
        assert other.get_attr("calls") == (["of one"],)
        assert other.get_attr("level") == (7,)  # the same change: the state has come after it
        other.reset()
        assert other.get_attr("calls") == (["of one", "of other"],)
