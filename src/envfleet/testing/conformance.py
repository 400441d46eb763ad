"""The conformance suite: what every pool must do, whatever runs its envs.

Each check takes `make`, called like `envfleet.make`, and an autoreset mode.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
from gymnasium.vector import AutoresetMode, VectorEnv
from numpy.testing import assert_array_equal

from envfleet.contract.episode import Autoreset
from envfleet.contract.errors import (
    EnvBusy,
    EnvFailed,
    InvalidAction,
    NothingToReceive,
    NotReset,
    PoolClosed,
    StepOnEndedEpisode,
    UsageError,
)
from envfleet.testing.envs import Act, BoxActionEnv, ScriptedEnv, TreeEnv
from envfleet.testing.expectations import EPISODE, LAST_ACT, STEP, Check, Make, acts, expect
from envfleet.testing.partial_steps import (
    a_failing_env_among_some_is_named,
    envs_that_are_not_stepped_stand_still,
    some_envs_can_be_stepped,
)
from envfleet.testing.programs import random_program, require_equal, run_program
from envfleet.testing.wrong_results import wrong_results_are_failures_of_the_env


def check_pool(make: Make) -> None:
    """Run all checks in all autoreset modes, on a pool of Python envs.

    Args:
        make: called like `envfleet.make`; returns a pool.

    Raises:
        AssertionError: the pool does something else than the contract says.
    """
    for check in CHECKS + PYTHON_ENV_CHECKS:
        for mode in Autoreset:
            check(make, mode)


def explicit_reset_does_not_swallow_the_next_step(make: Make, mode: Autoreset) -> None:
    """After an episode has ended and reset() was called, the next step is a real one."""
    with make(ScriptedEnv, 2, autoreset_mode=mode) as pool:
        pool.reset(seed=0)
        pool.step(acts(Act.TERMINATE, Act.GO_ON))
        pool.reset(seed=1)
        obs, rewards, *_ = pool.step(acts(Act.GO_ON, Act.GO_ON))
        assert_array_equal(obs[:, STEP], [1, 1])
        assert_array_equal(obs[:, LAST_ACT], [Act.GO_ON, Act.GO_ON])
        assert_array_equal(rewards, [1.1, 1.1])


def is_a_vector_env(make: Make, mode: Autoreset) -> None:
    """The pool has the attributes that Gymnasium promises."""
    with make(ScriptedEnv, 3, autoreset_mode=mode) as pool:
        single = ScriptedEnv()
        assert pool.autoreset_mode is AutoresetMode(mode.value)
        assert isinstance(pool, VectorEnv)
        assert pool.num_envs == 3
        assert pool.single_observation_space == single.observation_space
        assert pool.single_action_space == single.action_space
        assert pool.observation_space.shape == (3, 4)
        assert pool.action_space.shape == (3,)
        assert pool.metadata["autoreset_mode"] is AutoresetMode(mode.value)
        obs, _ = pool.reset(seed=5)
        assert pool.observation_space.contains(obs)
        seeds: Any = pool.np_random_seed
        assert seeds == (5, 6, 7)
        assert not pool.closed


def autoreset_follows_its_mode(make: Make, mode: Autoreset) -> None:
    """The step that ends an episode, and the one after it, return what the mode says."""
    with make(ScriptedEnv, 2, autoreset_mode=mode) as pool:
        pool.reset(seed=3)
        pool.step(acts(Act.GO_ON, Act.GO_ON))
        obs, rewards, terminations, truncations, infos = pool.step(acts(Act.TERMINATE, Act.GO_ON))
        assert_array_equal(rewards, [2.1, 2.1])
        assert_array_equal(terminations, [True, False])
        assert_array_equal(truncations, [False, False])
        if mode is Autoreset.SAME_STEP:
            assert_array_equal(obs[:, STEP], [0, 2])
            assert_array_equal(obs[:, EPISODE], [1, 0])
            assert infos["final_obs"].dtype == object and infos["final_obs"][1] is None
            assert infos["final_obs"][0][STEP] == 2 and infos["final_obs"][0][LAST_ACT] == Act.TERMINATE
            assert_array_equal(infos["_final_obs"], [True, False])
            assert_array_equal(infos["final_info"]["episode"]["l"], [2, 0])
            assert_array_equal(infos["_final_info"], [True, False])
        else:
            assert_array_equal(obs[:, STEP], [2, 2])
            assert_array_equal(infos["episode"]["l"], [2, 0])
            assert_array_equal(infos["_episode"], [True, False])
            assert "final_obs" not in infos
        if mode is Autoreset.DISABLED:
            pool.reset(options={"reset_mask": np.array([True, False])})
        obs, rewards, terminations, truncations, _ = pool.step(acts(Act.GO_ON, Act.GO_ON))
        first_step = 0 if mode is Autoreset.NEXT_STEP else 1
        assert_array_equal(obs[:, STEP], [first_step, 3])
        assert_array_equal(rewards, [0.0 if mode is Autoreset.NEXT_STEP else 1.1, 3.1])
        assert not terminations.any() and not truncations.any()


def stepping_an_ended_episode_is_refused(make: Make, mode: Autoreset) -> None:
    """With autoreset disabled the caller must reset; a step without it changes nothing."""
    if mode is not Autoreset.DISABLED:
        return
    with make(ScriptedEnv, 2, autoreset_mode=mode) as pool:
        pool.reset(seed=3)
        pool.step(acts(Act.TRUNCATE, Act.GO_ON))
        expect(StepOnEndedEpisode, lambda: pool.step(acts(Act.GO_ON, Act.GO_ON)))
        pool.reset(seed=3)
        obs, *_ = pool.step(acts(Act.GO_ON, Act.GO_ON))
        assert_array_equal(obs[:, STEP], [1, 1])


def seeds_follow_the_convention(make: Make, mode: Autoreset) -> None:
    """Env i gets seed + i; a list gives each its own; the same seeds give the same arrays."""
    with make(ScriptedEnv, 3, autoreset_mode=mode) as pool:
        by_number = pool.reset(seed=10)[0].copy()
        assert_array_equal(pool.reset(seed=[10, 11, 12])[0], by_number)
        expected = [np.random.default_rng(10 + i).random() for i in range(3)]
        assert_array_equal(by_number[:, 0], expected)
        kept = pool.reset(seed=[12, None, 10])[0]
        assert kept[0, 0] == expected[2] and kept[2, 0] == expected[0] and kept[1, 0] != expected[1]
        assert pool.reset()[0][0, 0] not in expected
        expect(UsageError, lambda: pool.reset(seed=[1, 2]))
        expect(UsageError, lambda: pool.reset(seed=-1))
    with make(ScriptedEnv, 3, autoreset_mode=mode, seed=10) as pool:
        assert_array_equal(pool.reset()[0], by_number)


def some_envs_can_be_reset(make: Make, mode: Autoreset) -> None:
    """`reset_mask` resets the chosen envs; the others keep their observation and go on."""
    with make(ScriptedEnv, 3, autoreset_mode=mode) as pool:
        pool.reset(seed=0)
        before = pool.step(acts(Act.GO_ON, Act.GO_ON, Act.GO_ON))[0].copy()
        options = {"reset_mask": np.array([False, True, False]), "level": 3}
        obs, infos = pool.reset(seed=20, options=options)
        assert "reset_mask" in options, "the caller's options must not change"
        assert_array_equal(obs[[0, 2]], before[[0, 2]])
        assert obs[1, 0] == np.random.default_rng(21).random() and obs[1, STEP] == 0
        assert_array_equal(infos["_first"], [False, True, False])
        assert infos["options"]["level"][1] == 3 and "reset_mask" not in infos["options"]
        assert_array_equal(pool.step(acts(Act.GO_ON, Act.GO_ON, Act.GO_ON))[0][:, STEP], [2, 1, 2])
        for mask in (np.array([1, 0, 0]), np.array([True]), np.zeros(3, dtype=np.bool_), [True, False, False]):
            expect(UsageError, partial(pool.reset, options={"reset_mask": mask}))


def misuse_is_refused_and_loses_nothing(make: Make, mode: Autoreset) -> None:
    """Each wrong call has a named error, and afterwards the pool goes on as if it had not been made."""
    with make(ScriptedEnv, 3, autoreset_mode=mode) as pool:
        good = acts(Act.GO_ON, Act.GO_ON, Act.GO_ON)
        expect(NotReset, lambda: pool.step(good))
        expect(NotReset, lambda: pool.reset(options={"reset_mask": np.array([True, False, False])}))
        pool.reset(seed=0)
        expect(NothingToReceive, pool.recv)
        expect(InvalidAction, lambda: pool.step(good[:2]))
        expect(InvalidAction, lambda: pool.step(good.reshape(3, 1)))
        expect(InvalidAction, lambda: pool.step(good.astype(np.float64)))
        expect(InvalidAction, lambda: pool.step(["a", "b", "c"]))
        for wrong in ([0, 0], [3], [-1], [0.5], [[0]], []):
            expect(UsageError, partial(pool.send, good[: len(wrong)], wrong))
        pool.send(good[:2], [2, 0])
        expect(EnvBusy, lambda: pool.send(good))
        expect(EnvBusy, lambda: pool.send(good[:2], [1, 2]))
        expect(EnvBusy, lambda: pool.call("name"))
        expect(EnvBusy, lambda: pool.reset(options={"reset_mask": np.array([True, False, False])}))
        pool.send(good[:1], [1])
        obs, _, _, _, infos = pool.recv()
        assert_array_equal(infos["env_id"], [2, 0, 1])
        assert_array_equal(obs[:, STEP], [1, 1, 1])
        expect(NothingToReceive, pool.recv)
    with make(BoxActionEnv, 2, autoreset_mode=mode) as pool:
        pool.reset(seed=0)
        nan = np.zeros((2, 3), np.float32)
        nan[1, 2] = np.nan
        assert "rows [1]" in str(expect(InvalidAction, lambda: pool.step(nan)))
        assert_array_equal(pool.step(np.ones((2, 3)))[0], np.zeros((2, 3)))
        expect(InvalidAction, lambda: pool.step(nan.astype(np.float64)))
        assert_array_equal(pool.step(np.zeros((2, 3)))[0], np.ones((2, 3)))


def actions_belong_to_the_env(make: Make, mode: Autoreset) -> None:
    """An env may keep its action: neither the caller nor the next step may change it."""
    with make(BoxActionEnv, 2, autoreset_mode=mode) as pool:
        pool.reset(seed=0)
        actions = np.full((2, 3), 0.25, np.float32)
        pool.step(actions)
        actions[:] = 0.5
        obs, rewards, *_ = pool.step(actions)
        assert_array_equal(obs, np.full((2, 3), 0.25, np.float32))
        assert_array_equal(rewards, [0.75, 0.75])


def asynchronous_batches_miss_nothing(make: Make, mode: Autoreset) -> None:
    """With small batches each env sees exactly its own actions, in order."""
    num_envs, batch_size = 7, 3
    with make(ScriptedEnv, num_envs, batch_size=batch_size, autoreset_mode=mode) as pool:
        pool.async_reset(seed=0)
        num_steps = np.full(num_envs, -1)
        for _ in range(60):
            obs, rewards, terminations, truncations, infos = pool.recv()
            env_ids = infos["env_id"]
            assert len(set(env_ids.tolist())) == batch_size == len(obs) == len(rewards)
            num_steps[env_ids] += 1
            assert_array_equal(obs[:, STEP], num_steps[env_ids])
            assert not terminations.any() and not truncations.any()
            pool.send(np.full(batch_size, Act.GO_ON), env_ids)
        first = pool.reset(seed=4)[0].copy()
        assert first.shape == (num_envs, 4)
        assert_array_equal(first[:, STEP], np.zeros(num_envs))
        obs, *_, infos = pool.step(np.full(num_envs, Act.GO_ON))
        assert obs.shape == (batch_size, 4)
        assert_array_equal(obs[:, 0], first[infos["env_id"], 0])


def a_failing_env_is_named(make: Make, mode: Autoreset) -> None:
    """EnvFailed tells all; the batch is still there, with that row truncated; the pool goes on."""
    with make(ScriptedEnv, 3, autoreset_mode=mode) as pool:
        pool.reset(seed=40)
        pool.step(acts(Act.GO_ON, Act.GO_ON, Act.GO_ON))
        error = expect(EnvFailed, lambda: pool.step(acts(Act.GO_ON, Act.RAISE, Act.GO_ON)))
        assert isinstance(error, EnvFailed)
        assert error.env_id == 1 and error.seed == 41 and int(error.last_action) == Act.RAISE
        assert "told to fail in step" in error.child_traceback and "ScriptedEnv" not in str(error.args[0])
        expect(EnvBusy, lambda: pool.step(acts(Act.GO_ON, Act.GO_ON, Act.GO_ON)))
        obs, rewards, terminations, truncations, infos = pool.recv()
        assert_array_equal(obs[[0, 2], STEP], [2, 2])
        assert_array_equal(rewards, [2.1, 0.0, 2.1])
        assert_array_equal(truncations, [False, True, False])
        assert not terminations.any()
        assert "told to fail" in infos["env_error"][1] and infos["env_error"][0] is None
        last = infos["final_obs"][1] if mode is Autoreset.SAME_STEP else obs[1]
        assert last[STEP] == 1
        expect(EnvFailed, lambda: pool.reset(options={"fail": True}))
        obs, _ = pool.reset(seed=2)
        assert_array_equal(obs[:, STEP], np.zeros(3))
        expect(EnvFailed, lambda: pool.step(acts(Act.GO_ON, Act.GO_ON, Act.WRONG_SHAPE)))
        assert_array_equal(pool.recv()[3], [False, False, True])
        pool.reset(seed=2)
        assert_array_equal(pool.step(acts(Act.GO_ON, Act.GO_ON, Act.GO_ON))[0][:, STEP], np.ones(3))


def a_failing_env_is_restarted(make: Make, mode: Autoreset) -> None:
    """With on_env_error="restart" the row is truncated, the reason is in info, and the env is a new one."""
    with make(ScriptedEnv, 2, autoreset_mode=mode, on_env_error="restart", max_env_restarts=2) as pool:
        pool.reset(seed=0)
        _, rewards, terminations, truncations, infos = pool.step(acts(Act.RAISE, Act.GO_ON))
        assert_array_equal(truncations, [True, False])
        assert not terminations.any() and rewards[0] == 0
        assert "told to fail" in infos["env_error"][0]
        assert_array_equal(infos["_env_error"], [True, False])
        if mode is Autoreset.DISABLED:
            pool.reset(options={"reset_mask": np.array([True, False])})
        obs, *_ = pool.step(acts(Act.GO_ON, Act.GO_ON))
        assert_array_equal(obs[:, STEP], [0 if mode is Autoreset.NEXT_STEP else 1, 2])
        _fail_until_no_restart_is_left(pool, mode)
        pool.reset(seed=0)
        assert_array_equal(pool.step(acts(Act.GO_ON, Act.GO_ON))[0][:, STEP], [1, 1])


def _fail_until_no_restart_is_left(pool: Any, mode: Autoreset) -> None:
    # An episode that ends wipes the slate clean; one that fails again and again uses the restarts up.
    pool.reset(seed=0)
    pool.step(acts(Act.TERMINATE, Act.GO_ON))
    for attempt in range(3):
        pool.reset(seed=0)
        if attempt < 2:
            pool.step(acts(Act.RAISE, Act.GO_ON))
        else:
            error = expect(EnvFailed, lambda: pool.step(acts(Act.RAISE, Act.GO_ON)))
            assert "no restart is left" in str(error)
            pool.recv()


def a_restarted_env_is_a_new_one(make: Make, mode: Autoreset) -> None:
    """Nothing of the failed env is left."""
    with make(ScriptedEnv, 2, autoreset_mode=mode, on_env_error="restart") as pool:
        pool.reset(seed=0)
        pool.set_attr("name", ["a", "b"])
        pool.step(acts(Act.RAISE, Act.GO_ON))
        assert pool.get_attr("name") == ("env", "b")


def methods_and_attributes_reach_each_env(make: Make, mode: Autoreset) -> None:
    """call, get_attr, set_attr and render."""
    kwargs = [{"name": "a"}, {"name": "b"}]
    with make(ScriptedEnv, 2, autoreset_mode=mode, env_kwargs=kwargs, render_mode="rgb_array") as pool:
        pool.reset(seed=0)
        assert pool.get_attr("name") == ("a", "b")
        assert pool.call("double", 4) == (8, 8)
        pool.set_attr("name", ["c", "d"])
        assert pool.get_attr("name") == ("c", "d")
        pool.set_attr("name", "e")
        assert pool.get_attr("name") == ("e", "e")
        expect(UsageError, lambda: pool.set_attr("name", ["x"]))
        pool.set_attr("name", ["f"], [1])
        assert pool.get_attr("name") == ("e", "f")
        pool.set_attr("name", "g", [0])
        assert pool.get_attr("name") == ("g", "f")
        expect(EnvFailed, lambda: pool.call("no_such_thing"))
        expect(EnvFailed, lambda: pool.call("double"))
        pool.step(acts(Act.GO_ON, Act.GO_ON))
        frames = pool.render()
        assert len(frames) == 2 and frames[1].shape == (2, 2, 3) and frames[1].max() == 1
        pool.set_attr("name", ["c", "d"])
        assert pool.call_some([1, 0], "name") == ("d", "c") and pool.call_some([1], "double", 3) == (6,)
        assert len(pool.render([1])) == 1 and pool.render([1])[0].max() == 1
        for wrong in ([], [2], [-1], [0, 0], 1, [0.5]):
            expect(UsageError, partial(pool.render, wrong))
        assert pool.render_mode == "rgb_array"
        assert pool.metadata["render_fps"] == 1


def any_space_is_carried(make: Make, mode: Autoreset) -> None:
    """Nested spaces, and spaces that are no arrays, in observations and actions."""
    with make(TreeEnv, 3, autoreset_mode=mode) as pool:
        obs, _ = pool.reset(seed=1)
        references = [TreeEnv() for _ in range(3)]
        expected = [env.reset(seed=1 + i)[0] for i, env in enumerate(references)]
        _require_rows(pool, obs, expected)
        pool.action_space.seed(3)
        for _ in range(5):
            actions = pool.action_space.sample()
            actions["pair"][0][:] = 1  # no episode ends
            obs, *_ = pool.step(actions)
            singles = list(_rows(pool.single_action_space, actions, 3))
            expected = [env.step(action)[0] for env, action in zip(references, singles, strict=True)]
            _require_rows(pool, obs, expected)
        del actions["word"]
        expect(InvalidAction, lambda: pool.step(actions))


def programs_equal_gymnasium(make: Make, mode: Autoreset) -> None:
    """Random programs give what Gymnasium's SyncVectorEnv gives."""
    generator = np.random.default_rng(0)
    with make(ScriptedEnv, 3, autoreset_mode=mode) as pool:
        for _ in range(5):
            run_program(pool, random_program(3, 30, lambda n: int(generator.integers(n))))


def closing_is_final(make: Make, mode: Autoreset) -> None:
    """close() twice is fine; anything else afterwards is refused."""
    pool = make(ScriptedEnv, 2, autoreset_mode=mode)
    pool.reset(seed=0)
    pool.close()
    pool.close()
    assert pool.closed
    expect(PoolClosed, pool.reset)
    expect(PoolClosed, lambda: pool.step(acts(Act.GO_ON, Act.GO_ON)))
    expect(PoolClosed, pool.recv)
    expect(PoolClosed, lambda: pool.call("name"))


CHECKS: tuple[Check, ...] = (
    explicit_reset_does_not_swallow_the_next_step,
    is_a_vector_env,
    autoreset_follows_its_mode,
    stepping_an_ended_episode_is_refused,
    seeds_follow_the_convention,
    some_envs_can_be_reset,
    misuse_is_refused_and_loses_nothing,
    actions_belong_to_the_env,
    some_envs_can_be_stepped,
    envs_that_are_not_stepped_stand_still,
    a_failing_env_among_some_is_named,
    asynchronous_batches_miss_nothing,
    a_failing_env_is_named,
    a_failing_env_is_restarted,
    programs_equal_gymnasium,
    closing_is_final,
)

# What only a Python env can do: be called, have its attributes set, and speak in objects that are no arrays.
PYTHON_ENV_CHECKS: tuple[Check, ...] = (
    a_restarted_env_is_a_new_one,
    methods_and_attributes_reach_each_env,
    any_space_is_carried,
    wrong_results_are_failures_of_the_env,
)


def _require_rows(pool: Any, batch: Any, expected: list[Any]) -> None:
    for row, single in zip(_rows(pool.single_observation_space, batch, len(expected)), expected, strict=True):
        require_equal(row, single)


def _rows(space: Any, batch: Any, num_rows: int) -> list[Any]:
    from envfleet.contract.spaces import SpaceTree

    tree = SpaceTree(space)
    leaves = tree.flatten(batch)
    return [tree.unflatten([leaf[row] for leaf in leaves]) for row in range(num_rows)]
