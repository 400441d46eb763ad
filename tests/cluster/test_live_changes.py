"""Changes of remote envs while rollouts are collected: exact rows, also after kills and for workers that come later."""

import os
import signal
import time

import numpy as np
import pytest

from envfleet import ClusterEnv, EnvFailed, FunctionPolicy, PoolSettings, UsageError
from tests.support.envs.changing_env import ChangingEnv, SavingChangingEnv, first_action

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("quick_workers")]

LEVEL, CALLS, START, PID, STEP = range(5)  # columns of ChangingEnv's observation
NUM_EACH = 2
DEADLINE_S = 60.0


def cluster(backend="serial", **settings):
    settings.setdefault("pool", PoolSettings(on_env_error="restart"))
    return ClusterEnv(ChangingEnv, 2, NUM_EACH, backend=backend, **settings)


def agent():
    return FunctionPolicy(first_action, weights={})


def require_exact(rollout, levels):
    """Each row shows the level that its change has set."""
    changes = np.zeros(rollout.rewards.shape, int) if rollout.changes is None else rollout.changes
    assert changes.shape == rollout.rewards.shape
    assert (rollout.obs[..., LEVEL] == np.array(levels)[changes]).all()
    steps, envs = np.nonzero(np.diff(changes, axis=0))
    ended = rollout.terminations | rollout.truncations
    assert ended[steps, envs].all()  # only a reset can change an env
    assert (np.diff(changes, axis=0) >= 0).all()


def take_until_all_have(stream, number, levels, num_workers=2):
    """Take rollouts until each worker has sent one in which all rows were begun with change `number`."""
    there, deadline_s = set(), time.monotonic() + DEADLINE_S
    while time.monotonic() < deadline_s:
        rollout = next(stream)
        require_exact(rollout, levels)
        if rollout.changes is not None and rollout.changes.min() == number:
            there.add(int(rollout.workers[0]))
        if len(there) == num_workers:
            return
    raise AssertionError(f"only workers {there} had change {number} after {DEADLINE_S:g} s")


@pytest.mark.parametrize("backend", ["serial", "process"])
def test_rows_say_exactly_from_where_on_a_change_applies(backend):
    levels, policy = [0], agent()
    with cluster(backend) as envs:
        assert envs.rollout(policy, 4).changes is None
        stream = envs.stream(policy, 4)
        for number in range(1, 21):  # at any time, several between two rollouts
            levels.append(100 + number)
            assert envs.broadcast("level", levels[-1]) == number
            if number % 3:
                require_exact(next(stream), levels)
        take_until_all_have(stream, 20, levels)
        stream.close()
        # Between rollouts too, and right before and after others are cancelled.
        levels.append(500)
        assert envs.broadcast("level", 500) == 21
        require_exact(envs.rollout(policy, 4), levels)
        rollout = envs.rollout(policy, 4)
        assert (rollout.changes == 21).all()
        assert rollout.to_torch().changes.tolist() == rollout.changes.tolist()
        stream = envs.stream(policy, 4)
        levels.append(600)
        assert envs.broadcast("level", 600) == 22
        stream.close()  # cancels what workers have not begun, but no change
        envs.rollout(policy, 4)
        assert (envs.rollout(policy, 4).obs[..., LEVEL] == 600).all()
        assert envs.get_attr("level") == (600,) * 4


def test_a_killed_worker_is_replaced_by_one_with_all_changes():
    levels, policy = [0, 1], agent()
    with cluster() as envs:
        envs.call_at_reset("note", "a", times=2)
        envs.set_reset_options({"start": 9})
        envs.broadcast("level", 1)
        levels[:] = [0, 0, 0, 1]
        stream = envs.stream(policy, 4)
        take_until_all_have(stream, 3, levels)
        pid = envs.stats().workers[0].pid
        levels.append(2)
        envs.broadcast("level", 2)
        os.kill(pid, signal.SIGKILL)
        levels.append(3)
        envs.broadcast("level", 3)  # while it is replaced
        seen, deadline_s = None, time.monotonic() + DEADLINE_S
        while time.monotonic() < deadline_s:
            rollout = next(stream)
            require_exact(rollout, levels)
            if rollout.workers[0] == 0 and rollout.obs[0, 0, PID] != pid:
                seen = rollout
                break
        assert seen is not None and envs.stats().workers[0].num_restarts == 1
        assert (seen.changes >= 4).all() and (seen.obs[..., START] == 9).all() and (seen.obs[..., CALLS] == 2).all()
        take_until_all_have(stream, 5, levels)
        stream.close()
        assert envs.get_attr("calls") == (["a", "a"],) * 4  # once, whatever was repeated


def test_workers_that_come_later_have_all_changes():
    policy = agent()
    with cluster() as envs:
        envs.broadcast("level", 7)
        stream = envs.stream(policy, 4)
        envs.broadcast("level", 8)
        envs.scale(3)
        take_until_all_have(stream, 2, [0, 7, 8], num_workers=3)
        stream.close()
        envs.scale(4)
        rollout = envs.rollout(policy, 2)
        assert (rollout.obs[0, 3 * NUM_EACH :, LEVEL] == 8).all() and (rollout.changes == 2).all()


def test_an_env_that_is_built_anew_in_a_stream_has_all_changes():
    levels = [0]
    with cluster("process", env_kwargs={"fails_at": 2}) as envs:
        stream = envs.stream(agent(), 4)
        for level in (1, 2, 3):
            levels.append(level)
            take_until_all_have(stream, envs.broadcast("level", level), levels)


@pytest.mark.parametrize("mode", ["next_step", "same_step", "disabled"])
def test_steps_with_the_learners_actions_have_changes_too(mode):
    actions = np.zeros(2 * NUM_EACH, int)
    with cluster(autoreset_mode=mode) as envs:
        assert envs.set_reset_options({"start": 5}) == 1
        obs, info = envs.reset()
        assert (obs[:, START] == 5).all() and (info["live_change"] == 1).all()
        envs.send(actions)
        assert envs.broadcast("level", 4) == 2  # while they are in flight
        envs.recv()
        for _ in range(2 + (mode == "next_step")):
            obs, _, _, _, info = envs.step(actions)
        if mode == "disabled":
            obs, info = envs.reset(options={"start": 6})
        assert (obs[:, START] == (6 if mode == "disabled" else 5)).all()
        assert (obs[:, LEVEL] == 4).all() and (info["live_change"] == 2).all()


def test_errors():
    policy = agent()
    with cluster(pool=None) as envs:
        with pytest.raises(UsageError, match=r"args\[0\] is a"):
            envs.broadcast("level", object())
        assert envs.broadcast("levle", 1) == 1
        for _ in range(2 * NUM_EACH):
            with pytest.raises(EnvFailed, match=r"change 1, broadcast\('levle'.*no attribute 'levle'"):
                envs.rollout(policy, 4)
        envs.rollout(policy, 4)
        assert envs.broadcast("level", 3) == 2
        envs.rollout(policy, 4)
        assert (envs.rollout(policy, 4).obs[..., LEVEL] == 3).all()
    with (
        ClusterEnv("CartPole-v1", 1, 2, backend="native") as envs,
        pytest.raises(UsageError, match="native envs cannot be changed while they run"),
    ):
        envs.broadcast("length", 1.0)


def test_first_ready_and_evaluation():
    """Columns of first-ready rollouts say their changes; envs of evaluations have them too."""
    levels, policy = [0], FunctionPolicy(first_action, weights={}, act_deterministically=first_action)
    with cluster("process", worker_batch_size=1) as envs:
        stream = envs.stream(policy, 4)
        for number in range(1, 8):
            levels.append(100 + number)
            assert envs.broadcast("level", levels[-1]) == number
            require_exact(next(stream), levels)
        evaluation = envs.evaluate(policy, 4, seed=1)
        assert evaluation.infos["level"].tolist() == [107] * 4
        take_until_all_have(stream, 7, levels)
        stream.close()
        levels.append(500)
        envs.broadcast("level", 500)
        require_exact(envs.rollout(policy, 8), levels)


@pytest.mark.parametrize("backend", ["serial", "process"])
@pytest.mark.parametrize("env", [SavingChangingEnv, ChangingEnv], ids=["own", "pickle"])
def test_a_resumed_run_does_not_apply_changes_once_more(tmp_path, backend, env):
    """Rows are those of a run that was not interrupted: also those of episodes that were under way."""
    policy, seen = agent(), [LEVEL, CALLS, START, STEP]
    settings = {"backend": backend, "pool": PoolSettings(env_states="pickle"), "seed": 1}

    def rows(envs):
        parts = [envs.rollout(policy, 4) for _ in range(2)]
        return [(part.obs[..., seen].tolist(), part.changes.tolist()) for part in parts]

    with ClusterEnv(env, 1, NUM_EACH, **settings) as envs:
        envs.broadcast("level", 5)
        envs.call_at_reset("note", "a")
        envs.set_reset_options({"start": 9})
        envs.rollout(policy, 4)  # in the middle of the second episode
        envs.set_reset_options({"start": 10})  # for the third one
        envs.save(tmp_path / "run.ckpt")
        expected = rows(envs)
    with ClusterEnv(env, 1, NUM_EACH, resume=tmp_path / "run.ckpt", **settings) as envs:
        assert rows(envs) == expected
        assert envs.get_attr("calls") == (["a"],) * NUM_EACH
    starts = {row[2] for obs, _ in expected for step in obs for row in step}
    assert starts == {9, 10}
