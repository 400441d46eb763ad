"""States of remote envs: steps and rollouts go on from them, in the same run and in another one."""

import os
import signal

import numpy as np
import pytest
from numpy.testing import assert_array_equal

import envfleet
from envfleet import ClusterEnv, EnvBusy, EnvFailed, FunctionPolicy, NotReset, PoolSettings, UsageError
from envfleet.testing.programs import require_equal
from tests.support.envs import saving_envs
from tests.support.envs.saving_envs import MarkingEnv, RefusingEnv, SavingEnv, WalkEnv

pytestmark = pytest.mark.usefixtures("quick_workers")
FORKED_WITH = ("tests.support.envs.saving_envs",)

ENVS = {
    "hook": (saving_envs.saving_env, {"backend": "serial"}),
    "pickle": (saving_envs.pickled_env, {"backend": "process", "pool": PoolSettings(env_states="pickle")}),
    "native": ("CartPole-v1", {"backend": "native"}),
    "first ready": (saving_envs.saving_env, {"backend": "serial", "worker_batch_size": 2}),
}


def cluster(kind="hook", env=None, **settings):
    known, arguments = ENVS[kind]
    return ClusterEnv(known if env is None else env, 2, 2, **{**arguments, **settings})


def chosen(weights, obs):
    """What the policy does is decided by what it sees."""
    return (np.abs(obs).sum(axis=1) * 1e3).astype(np.int64) % 2


def agent():
    return FunctionPolicy(chosen, weights={})


def parts(rollout):
    names = "obs next_obs actions rewards terminations truncations final_obs final_envs episode_returns episode_lengths"
    return {name: np.array(getattr(rollout, name)) for name in names.split()}


def actions(num_steps, num_envs=4):
    return list(np.random.default_rng(3).integers(0, 2, (num_steps, num_envs)))


@pytest.mark.parametrize("mode", ["next_step", "same_step"])
@pytest.mark.parametrize("kind", ["hook", "pickle", "native"])
def test_steps_go_on_from_a_state(kind, mode):
    first, then = actions(6), actions(40)
    with cluster(kind, autoreset_mode=mode) as envs:
        envs.reset(seed=1)
        for each in first:
            envs.step(each)
        saved = envs.get_state()
        expected = [envs.step(each) for each in then]
        assert any((each[2] | each[3]).any() for each in expected)
        envs.set_state(saved)
        require_equal([envs.step(each) for each in then], expected)
    with cluster(kind, autoreset_mode=mode) as others:
        others.set_state(saved)  # never reset
        require_equal([others.step(each) for each in then], expected)


@pytest.mark.parametrize("kind", list(ENVS))
def test_rollouts_go_on_from_a_state(kind):
    """With the running episodes: what they have come to counts in their returns and lengths."""
    policy = agent()
    with cluster(kind) as envs:
        envs.reset(seed=1)
        envs.rollout(policy, 5)
        saved = envs.get_state()
        expected = [parts(envs.rollout(policy, 6)) for _ in range(4)]
        assert max(each["episode_lengths"].max(initial=0) for each in expected[:1]) > 6  # of before the state
        envs.set_state(saved)
        require_equal([parts(envs.rollout(policy, 6)) for _ in range(4)], expected)
        for each in actions(3):  # what happens between, in another mode, does not matter
            envs.reset(seed=9)
            envs.step(each)
        envs.set_state(saved)
        assert [each.running for each in envs.get_state()] == [each.running for each in saved]
        require_equal(parts(envs.rollout(policy, 6)), expected[0])
    with cluster(kind) as others:
        others.set_state(saved)
        require_equal([parts(others.rollout(policy, 6)) for _ in range(4)], expected)


def test_a_rollout_begins_another_episode_where_one_had_ended():
    with cluster(env=WalkEnv, pool=PoolSettings(env_states="pickle"), env_kwargs={"limit": 3.0}) as envs:
        envs.reset(seed=2)
        for each in actions(30):
            *_, terminated, _, _ = envs.step(each + 1)
            if terminated.any() and not terminated.all():
                break
        saved = envs.get_state()
        assert [each.has_ended for each in saved] == terminated.tolist()
        rollouts = []
        for _ in range(2):
            envs.set_state(saved)
            rollouts.append(parts(envs.rollout(agent(), 5)))
        require_equal(*rollouts)
        steps = rollouts[0]["obs"][0, :, 1]
        assert (steps[terminated] == 0).all() and (steps[~terminated] > 0).all()


def test_some_envs_are_restored_and_the_others_go_on():
    policy = agent()
    with cluster(env=SavingEnv, env_kwargs={"limit": 1e9}) as envs:
        envs.reset(seed=1)
        envs.rollout(policy, 3)
        saved = envs.get_state([3, 0])
        envs.rollout(policy, 4)
        envs.set_state(saved, [3, 0])
        assert_array_equal(envs.rollout(policy, 2).obs[:, :, 1], [[3, 7, 7, 3], [4, 8, 8, 4]])
        assert [each.running["length"] for each in envs.get_state()] == [5, 9, 9, 5]


def test_masks_of_actions_belong_to_the_state():
    def masked(weights, obs, action_mask):
        assert (action_mask == (np.arange(4) != obs[:, 1:2] % 4)).all()
        return np.argmax(action_mask, axis=1)

    policy = FunctionPolicy(masked, weights={})
    with cluster(env=SavingEnv) as envs:
        envs.reset(seed=1)
        envs.rollout(policy, 3, action_mask="action_mask")
        saved = envs.get_state()
        first = parts(envs.rollout(policy, 2, action_mask="action_mask"))
        envs.set_state(saved)
        require_equal(parts(envs.rollout(policy, 2, action_mask="action_mask")), first)
        envs.set_state(saved[2:], [2, 3])
        envs.rollout(policy, 2, action_mask="action_mask")


def test_what_does_not_fit_is_refused_on_all_workers_before_anything_is_restored():
    with cluster(env=SavingEnv, env_kwargs={"limit": 1e9}) as envs, cluster(env=RefusingEnv) as others:
        with pytest.raises(NotReset):
            envs.get_state()
        envs.reset(seed=1)
        others.reset(seed=1)
        own, foreign = envs.get_state(), others.get_state()
        for each in actions(2):
            envs.step(each)
        for states, text in (
            ([*own[:3], foreign[3]], r"the state of a .*RefusingEnv"),
            (own[:3], "expected 4, got 3"),
            ([1, 2, 3, 4], r"what get_state\(\) gave; got int"),
        ):
            with pytest.raises(UsageError, match=text):
                envs.set_state(states)
        with pytest.raises(UsageError, match=r"^env_ids "):
            envs.get_state([4])
        assert_array_equal(envs.step(actions(1)[0])[0][:, 1], [3, 3, 3, 3])
        envs.send(actions(1)[0])
        with pytest.raises(EnvBusy):
            envs.get_state()
        envs.recv()
        stream = envs.stream(agent(), 3)
        next(stream)
        with pytest.raises(EnvBusy):
            envs.get_state()
        stream.close()
        envs.set_state(own)
        assert_array_equal(envs.step(actions(1)[0])[0][:, 1], [1, 1, 1, 1])


def test_an_env_without_a_hook_is_refused_in_words():
    with cluster(env=WalkEnv) as envs:
        envs.reset(seed=0)
        with pytest.raises(UsageError, match=r"WalkEnv cannot be saved.*get_state\(\).*env_states='pickle'"):
            envs.get_state()
        with pytest.raises(UsageError, match="WalkEnv cannot be saved"):
            envs.set_state([envfleet.EnvState("other", b"", 0, False, {})] * 4)


def test_an_env_that_does_not_take_its_state_is_named():
    with cluster(env=RefusingEnv, env_kwargs={"limit": 1e9}) as envs:
        envs.reset(seed=0)
        for each in actions(3):
            envs.step(each)
        with pytest.raises(EnvFailed, match=r"env [02].*no state after three steps"):
            envs.set_state(envs.get_state())
        obs, _ = envs.reset(seed=0)
        assert_array_equal(obs[:, 1], [0, 0, 0, 0])


def test_the_head_never_unpickles_a_state_and_large_ones_come_whole():
    with cluster(env=MarkingEnv, env_kwargs={"ballast_bytes": 3 << 20}) as envs:
        envs.reset(seed=0)
        saved = envs.get_state()
        assert all(len(each.state) > 3 << 20 for each in saved)
        envs.set_state(saved)
        for marks, pid in zip(envs.call("marks"), envs.call("pid"), strict=True):
            assert set(marks) == {pid}
        assert [len(each.state) for each in envs.get_state()] == [len(each.state) for each in saved]
    assert saving_envs.UNPICKLED_HERE == []


def test_states_outlive_killed_workers():
    """The workers that take their place are put into the states, and go on."""
    then = actions(20)
    with cluster(pool=PoolSettings(on_env_error="restart")) as envs:
        envs.reset(seed=1)
        envs.step(actions(1)[0])
        saved = envs.get_state()
        expected = [envs.step(each) for each in then]
        for pid in set(envs.call("pid")):
            os.kill(pid, signal.SIGKILL)
        envs.set_state(saved)
        require_equal([envs.step(each) for each in then], expected)
