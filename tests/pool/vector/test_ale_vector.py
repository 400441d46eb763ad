"""ale-py's own vector env, behind our facade."""

import gymnasium
import numpy as np
import pytest
from gymnasium.vector import AutoresetMode
from numpy.testing import assert_array_equal

import envfleet

pytestmark = pytest.mark.slow

ale_py = pytest.importorskip("ale_py", reason="needs envfleet[atari]")

SETTINGS = {"max_num_frames_per_episode": 30, "noop_max": 4}


@pytest.mark.parametrize(
    "mode", [envfleet.Autoreset.NEXT_STEP, envfleet.Autoreset.SAME_STEP], ids=lambda mode: mode.name
)
def test_it_is_ales_own(mode):
    reference = ale_py.AtariVectorEnv(
        "breakout",
        3,
        autoreset_mode=AutoresetMode(mode.value),
        max_num_frames_per_episode=30,
        noop_max=4,
        reward_clipping=False,
    )
    with envfleet.make("Breakout-v5", 3, backend="vector", autoreset_mode=mode, env_kwargs=SETTINGS) as pool:
        obs, infos = pool.reset(seed=3)
        expected, expected_infos = reference.reset(seed=3)
        assert_array_equal(obs, expected)
        assert_array_equal(infos["lives"], expected_infos["lives"])
        num_ended = 0
        for _ in range(30):
            *got, infos = pool.step(np.ones(3, np.int64))
            *expected, expected_infos = reference.step(np.ones(3, np.int64))
            for each, each_expected in zip(got, expected, strict=True):
                assert_array_equal(each, each_expected)
            for row in np.flatnonzero(got[2] | got[3]):
                num_ended += 1
                if mode is envfleet.Autoreset.SAME_STEP:
                    assert_array_equal(infos["final_obs"][row], expected_infos["final_obs"][row])
        assert num_ended
    reference.close()


def test_autoreset_can_be_disabled():
    arguments = {"autoreset_mode": "disabled", "env_kwargs": SETTINGS}
    with envfleet.make("ALE/Breakout-v5", 2, backend="vector", **arguments) as pool:
        pool.reset(seed=0)
        ended = np.zeros(2, np.bool_)
        while not ended.any():
            ended = pool.step(np.ones(2, np.int64))[3]
        with pytest.raises(envfleet.StepOnEndedEpisode):
            pool.step(np.ones(2, np.int64))
        pool.recv()
        pool.reset(seed=1, options={"reset_mask": ended})
        assert not pool.step(np.ones(2, np.int64))[3][ended].any()


@pytest.mark.parametrize("name", ["mode", "difficulty"])
def test_settings_of_zero_are_settings(name):
    with pytest.raises(envfleet.UsageError, match=f"no setting {name}"):
        envfleet.make("Pong-v5", 2, backend="vector", env_kwargs={name: 0})


@pytest.mark.parametrize("size", [0, (84, 0), (161, 84), (84, 211)])
def test_images_it_cannot_make_are_refused(size):
    with pytest.raises(envfleet.UsageError, match=r"screen_size must be .*at least 1"):
        envfleet.make("Pong-v5", 1, backend="vector", env_kwargs={"screen_size": size})


def test_it_does_not_draw():
    with pytest.raises(envfleet.UsageError, match="does not draw: render_mode is for backend='process'"):
        envfleet.make("Pong-v5", 1, backend="vector", render_mode="rgb_array")
    with (
        envfleet.make("Pong-v5", 1, backend="vector", num_workers=1) as pool,
        pytest.raises(envfleet.UsageError, match="does not draw; backend='process' does"),
    ):
        pool.render()


def test_others_that_make_it_may_give_any_seeds_too():
    def build(num_envs):
        return ale_py.AtariVectorEnv("breakout", num_envs, num_threads=1)

    for env in (build, gymnasium.spec("ALE/Breakout-v5")):
        with envfleet.make(env, 2, backend="vector") as pool:
            pool.reset(seed=[2**31 + 5, 9])
            before = pool.step(np.ones(2, np.int64))[0]
            mask = np.array([True, False])
            assert_array_equal(pool.reset(seed=[4, None], options={"reset_mask": mask})[0][1], before[1])


def test_settings_it_does_not_have_are_named():
    with pytest.raises(envfleet.UsageError, match="no setting terminal_on_life_loss"):
        envfleet.make("Pong-v5", 2, backend="vector", env_kwargs={"terminal_on_life_loss": True})
