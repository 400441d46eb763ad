"""reset, step, send and recv of all envs and of some, in EnvPool's forms."""

import numpy as np
import pytest

import envfleet.compat.envpool as envpool
from envfleet import EnvBusy, InvalidAction, NothingToReceive, UsageError


@pytest.fixture
def pool():
    with envpool.make_gymnasium("CartPole-v1", num_envs=4, max_episode_steps=3) as pool:
        yield pool


def zeros(num_rows=4):
    return np.zeros(num_rows, np.int32)


def test_each_call_says_which_envs_and_how_far_they_are(pool):
    obs, info = pool.reset()
    assert obs.shape == (4, 4) and obs.dtype == np.float32
    for step in range(1, 9):
        assert info["env_id"].tolist() == info["players"]["env_id"].tolist() == [0, 1, 2, 3]
        assert info["env_id"].dtype == info["elapsed_step"].dtype == np.int32
        obs, rewards, terminated, truncated, info = pool.step(zeros())
        assert rewards.dtype == np.float32
        # An episode ends after 3 steps; the step after that resets, and is none.
        assert info["elapsed_step"].tolist() == [step % 4] * 4
        assert rewards.tolist() == [float(step % 4 > 0)] * 4
        assert truncated.tolist() == [step % 4 == 3] * 4 and not terminated.any()


def test_a_step_before_the_reset_resets(pool):
    with envpool.make_gymnasium("CartPole-v1", num_envs=4) as other:
        obs, rewards, terminated, truncated, info = pool.step(zeros())
        assert np.array_equal(obs, other.reset()[0])
        assert not rewards.any() and not terminated.any() and not truncated.any()
        assert not info["elapsed_step"].any()
    assert pool.step(zeros())[-1]["elapsed_step"].tolist() == [1] * 4


def test_envs_are_reset_by_their_first_action_each_for_itself(pool):
    _, info = pool.reset(np.array([2, 1]))
    assert info["env_id"].tolist() == [2, 1]
    obs, rewards, _, _, info = pool.step(zeros(3), np.array([2, 0, 3]))  # only 2 was reset
    assert info["env_id"].tolist() == [2, 0, 3]
    assert info["elapsed_step"].tolist() == [1, 0, 0] and rewards.tolist() == [1.0, 0.0, 0.0]
    assert obs.shape == (3, 4)
    pool.send(zeros())
    assert pool.recv()[-1]["elapsed_step"].tolist() == [1, 1, 2, 1]


def test_some_envs_step_and_are_reset_in_the_order_given(pool):
    before, _ = pool.reset()
    obs, *_, info = pool.step(np.array([0, 1]), np.array([3, 1]))
    assert info["env_id"].tolist() == [3, 1] and info["elapsed_step"].tolist() == [1, 1]
    assert not np.array_equal(obs, before[[3, 1]])
    obs, info = pool.reset(np.array([1, 0]))
    assert info["env_id"].tolist() == [1, 0] and info["elapsed_step"].tolist() == [0, 0]
    _, info = pool.reset(options={"reset_mask": np.array([False, True, False, True])})
    assert info["env_id"].tolist() == [1, 3]
    assert pool.step(zeros())[-1]["elapsed_step"].tolist() == [1, 1, 1, 1]
    assert pool.step(zeros(1), 2)[-1]["env_id"].tolist() == [2]
    with pytest.raises(ValueError, match="not by both"):
        pool.reset(np.array([1]), options={"reset_mask": np.ones(4, bool)})
    with pytest.raises(ValueError, match="at least one"):
        pool.reset(options={"reset_mask": np.zeros(4, bool)})
    with pytest.raises(ValueError, match="reset_mask' only"):
        pool.reset(options={"low": 0.1})
    with pytest.warns(UserWarning, match="pass seed to make"):
        pool.reset(seed=3)


def test_an_env_that_has_ended_is_not_reset_twice(pool):
    pool.reset()
    for _ in range(3):
        truncated = pool.step(zeros())[3]
    assert truncated.all()
    pool.reset(np.array([0]))
    assert pool.step(zeros())[-1]["elapsed_step"].tolist() == [1, 0, 0, 0]


@pytest.mark.parametrize(
    "action",
    [
        np.ones(4),
        np.ones(4, np.int64),
        np.ones((4, 1), np.int32),
        np.full((4, 1), 1.7),
        [1, 1, 1, 1],
        {"action": np.ones(4, np.int32)},
        {"action": np.ones(4, np.int32), "env_id": np.arange(4, dtype=np.int32)},
        {"action": np.ones(4, np.int32), "players": {"env_id": np.arange(4, dtype=np.int32)}},
    ],
    ids=str,
)
def test_actions_in_all_forms_are_the_same(pool, action):
    with envpool.make_gymnasium("CartPole-v1", num_envs=4) as other:
        pool.reset()
        other.reset()
        assert np.array_equal(pool.step(action)[0], other.step(np.ones(4, np.int32))[0])


def test_wrong_actions_are_refused_in_words(pool):
    pool.reset()
    with pytest.raises(RuntimeError, match="must have dtype int32"):
        pool.step({"action": np.ones(4, np.int64)})
    with pytest.raises(RuntimeError, match="needs the key 'action'"):
        pool.step({"act": zeros()})
    with pytest.raises(RuntimeError, match="got 'speed'"):
        pool.step({"action": zeros(), "speed": zeros()})
    with pytest.raises(InvalidAction, match="from 0 to 1; got 7"):
        pool.step(np.full(4, 7))
    with pytest.raises(InvalidAction, match="shape"):
        pool.step(zeros(3))
    assert pool.step(zeros())[-1]["elapsed_step"].tolist() == [1] * 4  # nothing of it was a step


def test_a_dict_names_the_envs():
    with envpool.make_gymnasium("Pendulum-v1", num_envs=3) as pool:
        pool.reset()
        action = {"action": np.zeros((2, 1), np.float32), "env_id": np.array([2, 0], np.int32)}
        assert pool.step(action)[-1]["env_id"].tolist() == [2, 0]


def test_an_asynchronous_pool_returns_the_first_that_are_ready():
    with envpool.make_gymnasium("CartPole-v1", num_envs=4, batch_size=2) as pool:
        assert pool.is_async and len(pool) == 4
        pool.async_reset()
        seen = []
        for _ in range(20):
            obs, _, _, _, info = pool.recv()
            assert obs.shape == (2, 4)
            seen += info["env_id"].tolist()
            pool.send(zeros(2), info["env_id"])
        assert set(seen) == {0, 1, 2, 3}
        obs, info = pool.reset()
        assert obs.shape == (2, 4) and info["elapsed_step"].tolist() == [0, 0]
        _, *_, info = pool.step(zeros(2), info["env_id"])
        assert len(info["env_id"]) == 2
        with pytest.raises(EnvBusy, match="have results to come"):
            pool.reset(np.array([1]))
        with pytest.raises(EnvBusy):
            pool.send(zeros())


def test_a_synchronous_pool_can_be_stepped_by_send_and_recv(pool):
    pool.async_reset()
    obs, rewards, _, _, info = pool.recv()
    assert obs.shape == (4, 4) and not rewards.any() and not info["elapsed_step"].any()
    pool.send(zeros(2), np.array([3, 0]))
    assert pool.recv()[-1]["env_id"].tolist() == [3, 0]
    pool.async_reset()
    assert len(pool.recv(reset=True)) == 2
    with pytest.raises(UsageError, match="no env is in flight"):
        pool.recv()  # EnvPool's would wait for ever


def test_the_form_of_old_gym_has_four_values():
    with envpool.make("CartPole-v1", env_type="gym", num_envs=2, gym_reset_return_info=False) as pool:
        obs = pool.reset()
        assert obs.shape == (2, 4)
        assert pool.reset(np.array([1])).shape == (1, 4)
        obs, _, done, info = pool.step(zeros(2))
        assert done.dtype == np.bool_ and info["TimeLimit.truncated"].tolist() == [False, False]
        assert info["elapsed_step"].tolist() == [1, 1] and not done.any()
    arguments = {"num_envs": 2, "gym_reset_return_info": False, "max_episode_steps": 1}
    with envpool.make("CartPole-v1", env_type="gym", **arguments) as pool:
        pool.reset()
        _, _, done, info = pool.step(zeros(2))
        assert done.all() and info["TimeLimit.truncated"].all()


def test_envs_can_be_drawn():
    pytest.importorskip("pygame")
    with envpool.make_gymnasium("CartPole-v1", num_envs=3, render_mode="rgb_array", render_env_id=2) as pool:
        pool.reset()
        frames = pool.render([0, 2])
        assert frames.shape == (2, 400, 600, 3) and frames.dtype == np.uint8
        assert np.array_equal(pool.render(), frames[1:]) and np.array_equal(pool.render(0), frames[:1])
        with pytest.raises(RuntimeError, match="render_camera_id=1"):
            pool.render(camera_id=1)
    with envpool.make_gymnasium("CartPole-v1") as pool, pytest.raises(RuntimeError, match="render_mode='rgb_array'"):
        pool.render()


def test_mixed_in_context_managers_close(pool):
    pool.reset()
    pool.close()
    with pytest.raises(UsageError, match="closed"):
        pool.step(zeros())


def test_envs_that_were_never_reset_may_be_sent_in_two_calls():
    envs = envpool.make_gymnasium("CartPole-v1", num_envs=3, seed=1)
    envs.send(np.zeros(1, np.int32), np.array([0]))
    envs.send(np.zeros(2, np.int32), np.array([1, 2]))
    assert sorted(envs.recv()[4]["env_id"].tolist()) == [0, 1, 2]
    envs.close()


@pytest.mark.parametrize("task_id", ["CartPole-v1", "Pong-v5"])
def test_some_envs_of_an_asynchronous_pool_are_reset_while_others_step(task_id):
    if task_id == "Pong-v5":
        pytest.importorskip("ale_py", reason="needs ale_py")
    with envpool.make_gymnasium(task_id, num_envs=4, batch_size=2, seed=0) as env:
        env.async_reset()
        *_, info = env.recv()
        first, others = info["env_id"].copy(), np.setdiff1d(range(4), info["env_id"])
        env.send(np.zeros(2, int), first)
        seen = {env_id: [] for env_id in range(4)}
        for _ in range(2):
            *_, info = env.recv()
            for env_id, elapsed_step in zip(info["env_id"], info["elapsed_step"], strict=True):
                seen[env_id].append(int(elapsed_step))
        assert all(seen[env_id] == [1] for env_id in first) and all(seen[env_id] == [0] for env_id in others)
        env.send(np.zeros(2, int), others)
        _, info = env.reset(first)  # two of the four that are at work now
        rows = list(zip(info["env_id"], info["elapsed_step"], strict=True))
        *_, info = env.recv()
        rows += zip(info["env_id"], info["elapsed_step"], strict=True)
        assert sorted(rows) == sorted([*((i, 0) for i in first), *((i, 1) for i in others)])
        with pytest.raises(NothingToReceive):
            env.reset(first[:1])  # a batch has two rows: EnvPool waits for ever
        with pytest.raises(EnvBusy):
            env.reset(first[:1])


def test_the_first_reset_of_an_asynchronous_pool_may_be_of_some_envs():
    with (
        envpool.make_gymnasium("CartPole-v1", num_envs=4, batch_size=2, seed=0) as env,
        envpool.make_gymnasium("CartPole-v1", num_envs=4, seed=0) as all_envs,
    ):
        expected, _ = all_envs.reset()
        obs, info = env.reset(np.array([1, 3]))
        np.testing.assert_array_equal(obs, expected[info["env_id"]])
        assert sorted(info["env_id"]) == [1, 3]
        env.send(np.zeros(3, int), np.array([0, 1, 2]))  # envs 0 and 2 are reset by their first action
        env.send(np.zeros(1, int), np.array([3]))
        rows = {}
        for _ in range(2):
            obs, *_, info = env.recv()
            received = zip(info["env_id"].tolist(), obs, info["elapsed_step"].tolist(), strict=True)
            rows |= {env_id: (row, step) for env_id, row, step in received}
        assert {i: step for i, (_, step) in rows.items()} == {0: 0, 1: 1, 2: 0, 3: 1}
        np.testing.assert_array_equal([rows[0][0], rows[2][0]], expected[[0, 2]])
