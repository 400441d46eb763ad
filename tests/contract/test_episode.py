"""The rule for what follows the last step, without any pool."""

import numpy as np
import pytest

from envfleet import Autoreset, StepOnEndedEpisode
from envfleet.contract.episode import Episode
from envfleet.testing import Act, ScriptedEnv

STEP = 1


def episode(mode: Autoreset) -> Episode:
    made = Episode(ScriptedEnv(), mode, last_obs=np.zeros(4))
    made.reset(seed=0)
    return made


def test_next_step_resets_in_the_step_after_and_ignores_its_action():
    it = episode(Autoreset.NEXT_STEP)
    assert it.step(Act.TERMINATE).terminated
    again = it.step(Act.RAISE)
    assert again.obs[STEP] == 0 and again.reward == 0 and not again.terminated


def test_same_step_keeps_a_copy_of_the_final_observation():
    it = episode(Autoreset.SAME_STEP)
    it.step(Act.GO_ON)
    last = it.step(Act.TRUNCATE)
    assert last.truncated and last.has_final
    assert last.obs[STEP] == 0 and last.final_obs[STEP] == 2  # the env writes both into one array
    assert last.final_info["episode"]["l"] == 2 and last.info == {"first": True}


def test_disabled_refuses_to_go_on():
    it = episode(Autoreset.DISABLED)
    it.step(Act.TERMINATE)
    with pytest.raises(StepOnEndedEpisode):
        it.step(Act.GO_ON)
    it.reset()
    assert it.step(Act.GO_ON).obs[STEP] == 1


@pytest.mark.parametrize("mode", list(Autoreset))
def test_an_explicit_reset_after_the_last_step_is_not_repeated(mode):
    it = episode(mode)
    it.step(Act.TERMINATE)
    it.reset()
    assert it.step(Act.GO_ON).obs[STEP] == 1


@pytest.mark.parametrize("mode", list(Autoreset))
def test_cut_short_ends_the_episode_where_it_was(mode):
    it = episode(mode)
    it.step(Act.GO_ON)
    cut = it.cut_short({"env_error": "gone"})
    assert cut.truncated and not cut.terminated and cut.reward == 0
    assert (cut.final_obs if cut.has_final else cut.obs)[STEP] == 1
    assert it.ended is (mode is not Autoreset.SAME_STEP)


def test_numbers_of_any_kind_become_plain_ones():
    class Odd(ScriptedEnv):
        def step(self, action):
            return self._state, np.float32(0.5), np.bool_(True), 0, {}

    it = Episode(Odd(), Autoreset.NEXT_STEP, last_obs=None)
    it.reset(seed=0)
    transition = it.step(0)
    assert transition.reward == 0.5 and type(transition.reward) is float
    assert transition.terminated is True and transition.truncated is False
