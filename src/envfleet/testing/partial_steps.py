"""The conformance suite: steps of some envs of a synchronous pool."""

from __future__ import annotations

import numpy as np
from numpy.testing import assert_array_equal

from envfleet.contract.episode import Autoreset
from envfleet.contract.errors import EnvFailed, NothingToReceive, StepOnEndedEpisode
from envfleet.testing.envs import Act, ScriptedEnv
from envfleet.testing.expectations import STEP, Make, acts, expect


def some_envs_can_be_stepped(make: Make, mode: Autoreset) -> None:
    """A synchronous pool steps the envs it is told to; their rows are in that order, and the others stand still."""
    with make(ScriptedEnv, 4, autoreset_mode=mode) as pool:
        first = pool.reset(seed=7)[0].copy()
        obs, rewards, terminations, truncations, infos = pool.step(acts(Act.GO_ON, Act.GO_ON), [3, 1])
        assert_array_equal(infos["env_id"], [3, 1])
        assert_array_equal(obs[:, 0], first[[3, 1], 0])
        assert_array_equal(obs[:, STEP], [1, 1])
        assert_array_equal(rewards, [1.1, 1.1])
        assert not terminations.any() and not truncations.any() and len(terminations) == len(truncations) == 2
        pool.send(acts(Act.GO_ON), np.array([0]))
        pool.send(acts(Act.TERMINATE), np.array([3], np.int32))
        obs, rewards, terminations, _, infos = pool.recv()
        assert_array_equal(infos["env_id"], [0, 3])
        assert_array_equal(rewards, [1.1, 2.1])
        assert_array_equal(terminations, [False, True])
        if mode is Autoreset.SAME_STEP:
            assert_array_equal(infos["_final_obs"], [False, True])
            assert infos["final_obs"][1][STEP] == 2 and infos["final_obs"][0] is None
            assert_array_equal(infos["final_info"]["episode"]["l"], [0, 2])
        else:
            assert_array_equal(infos["_episode"], [False, True])
            assert_array_equal(obs[:, STEP], [1, 2])


def envs_that_are_not_stepped_stand_still(make: Make, mode: Autoreset) -> None:
    """Also one whose episode has ended: what follows comes with its own next step."""
    with make(ScriptedEnv, 3, autoreset_mode=mode) as pool:
        pool.reset(seed=7)
        pool.step(acts(Act.TERMINATE), [2])
        assert_array_equal(pool.step(acts(Act.GO_ON), [1])[0][:, STEP], [1])
        if mode is Autoreset.DISABLED:
            expect(StepOnEndedEpisode, lambda: pool.step(acts(Act.GO_ON), [2]))
            pool.recv()
            pool.reset(options={"reset_mask": np.array([False, False, True])})
        obs, *_ = pool.step(acts(Act.GO_ON, Act.GO_ON, Act.GO_ON))
        assert_array_equal(obs[:, STEP], [1, 2, 0 if mode is Autoreset.NEXT_STEP else 1])
        obs, *_, infos = pool.step(acts(Act.GO_ON, Act.GO_ON, Act.GO_ON), [1, 2, 0])
        assert_array_equal(infos["env_id"], [1, 2, 0])
        assert_array_equal(obs[[0, 2], STEP], [3, 2])


def a_failing_env_among_some_is_named(make: Make, mode: Autoreset) -> None:
    """After EnvFailed the batch of the chosen envs is still there; envs that were not chosen have lost nothing."""
    with make(ScriptedEnv, 3, autoreset_mode=mode) as pool:
        pool.reset(seed=40)
        error = expect(EnvFailed, lambda: pool.step(acts(Act.GO_ON, Act.RAISE), [2, 1]))
        assert isinstance(error, EnvFailed) and error.env_id == 1
        obs, _, _, truncations, infos = pool.recv()
        assert_array_equal(infos["env_id"], [2, 1])
        assert_array_equal(truncations, [False, True])
        assert obs[0, STEP] == 1 and "told to fail" in infos["env_error"][1] and infos["env_error"][0] is None
        expect(NothingToReceive, pool.recv)
        assert_array_equal(pool.step(acts(Act.GO_ON, Act.GO_ON), [0, 2])[0][:, STEP], [1, 2])
        pool.send(acts(Act.GO_ON), [0])
        obs, _ = pool.reset(seed=2)  # what was not received is dropped
        assert_array_equal(obs[:, STEP], np.zeros(3))
        assert_array_equal(pool.step(acts(Act.GO_ON, Act.GO_ON, Act.GO_ON))[0][:, STEP], np.ones(3))
