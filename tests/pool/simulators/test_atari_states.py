"""Saved states of Atari games: ALE's clone, what it leaves out, and what was seen of the game."""

import pickle
import zlib

import gymnasium
import numpy as np
import pytest

import envfleet
from envfleet import UsageError
from envfleet.testing.programs import require_equal
from tests.support.saved_trajectories import Walker

pytest.importorskip("ale_py", reason="needs envfleet[atari]")

from envfleet.pool.simulators.atari import AtariEnv

pytestmark = pytest.mark.slow

SETTINGS = {
    "plain": ("Pong-v5", {}),
    "lives": (
        "Breakout-v5",
        {"episodic_life": True, "noop_max": 5, "envpool_infos": True, "max_num_steps_per_game": 60},
    ),
    "sticky": ("Breakout-v5", {"repeat_action_probability": 0.25, "terminal_on_life_loss": True, "frame_skip": 3}),
    "very sticky": ("SpaceInvaders-v5", {"repeat_action_probability": 0.8}),
    "colours": ("MsPacman-v5", {"grayscale_obs": False, "stack_num": 2, "frame_skip": 1, "reward_clip": True}),
    "paddles": ("Kaboom-v5", {"frame_skip": 2}),
    "large": ("Seaquest-v5", {"screen_size": (100, 120), "stack_num": 1, "frame_skip": 5}),
}


@pytest.mark.parametrize("kind", list(SETTINGS))
def test_a_restored_game_repeats_itself(kind):
    """In the same pool and in a new one, over the ends of episodes, from several places of the game."""
    env_id, settings = SETTINGS[kind]
    arguments = {"env_kwargs": {"max_num_frames_per_episode": 330, **settings}, "autoreset_mode": "same_step"}
    with (
        envfleet.make(env_id, 2, backend="serial", **arguments) as envs,
        envfleet.make(env_id, 2, num_workers=1, **arguments) as others,
    ):
        envs.reset(seed=4)
        walker = Walker(envs)
        for num_steps in (0, 37, 11):
            walker.walk(walker.actions(num_steps))
            saved = pickle.loads(pickle.dumps(envs.get_state()))
            actions = walker.actions(150)
            expected = walker.walk(actions)
            assert any((each[2] | each[3]).any() for each in expected) or settings.get("frame_skip") == 1
            envs.set_state(saved)
            require_equal(walker.walk(actions), expected)
            others.set_state(saved)
            require_equal(Walker(others).walk(actions), expected)
            others.set_state(saved)
            envs.set_state(others.get_state())  # saved again, it is the same state
            require_equal(walker.walk(actions[:20]), expected[:20])


def test_the_last_picture_of_an_episode_is_laid_over_the_one_before():
    """The frame in which a life ends is never seen: what is shown is the frame before, over what was shown then."""
    settings = {"noop_max": 0, "terminal_on_life_loss": True, "frame_skip": 2, "stack_num": 1}
    game, other = (AtariEnv("breakout", **settings) for _ in range(2))
    dark = zlib.compress(bytes(210 * 160), 1)
    num_laid_over = 0
    for life in range(6):
        game.reset(seed=life)
        draw = np.random.default_rng(life)
        is_running = True
        while is_running:
            saved, action = game.get_state(), int(draw.integers(1, 4))
            result = game.step(action)
            is_running = not result[2]
        for shown in (saved["shown"], dark):
            other.reset(seed=life)
            for _ in range(20):
                other.step(2)  # its paddle is elsewhere
            other.set_state({**saved, "shown": shown})
            again = other.step(action)
            if shown is not dark:
                require_equal(again, result)
        num_laid_over += int((again[0] != result[0]).any())
    assert num_laid_over > 0  # or it would not matter what was shown


def test_a_restored_game_is_drawn_as_it_was():
    with envfleet.make("Breakout-v5", 1, backend="serial", render_mode="rgb_array") as envs:
        envs.reset(seed=0)
        walker = Walker(envs)
        walker.walk(walker.actions(20))
        saved, (drawn,) = envs.get_state(), envs.render()
        walker.walk(walker.actions(30))
        assert (envs.render()[0] != drawn).any()
        envs.set_state(saved)
        assert (envs.render()[0] == drawn).all()


def test_states_of_other_games_and_settings_are_refused():
    with (
        envfleet.make("Pong-v5", 1, backend="serial") as pong,
        envfleet.make("Breakout-v5", 1, backend="serial") as breakout,
        envfleet.make("Pong-v5", 1, backend="serial", env_kwargs={"stack_num": 2}) as other,
    ):
        pong.reset(seed=0)
        for envs in (breakout, other):
            with pytest.raises(UsageError, match=r"AtariEnv \(pong\), for env 0, which is .*(breakout|stack_num=2)"):
                envs.set_state(pong.get_state())


@pytest.mark.parametrize("chance", [0.0, 0.25])
def test_games_of_ale_py_are_cloned_if_no_action_is_sticky(chance):
    def preprocessed():
        env = gymnasium.make("ALE/Breakout-v5", frameskip=1, repeat_action_probability=chance)
        return gymnasium.wrappers.FrameStackObservation(gymnasium.wrappers.AtariPreprocessing(env, noop_max=5), 4)

    with envfleet.make(preprocessed, 2, backend="serial", max_episode_steps=40) as envs:
        envs.reset(seed=0)
        if chance:
            with pytest.raises(UsageError, match=r"leaves out the action that sticky frames repeat.*'ALE/Pong-v5'"):
                envs.get_state()
            return
        walker = Walker(envs)
        walker.walk(walker.actions(30))
        saved, actions = envs.get_state(), walker.actions(100)
        expected = walker.walk(actions)
        envs.set_state(saved)
        require_equal(walker.walk(actions), expected)
        with envfleet.make(preprocessed, 2, backend="serial", max_episode_steps=40) as others:
            others.set_state(saved)
            require_equal(Walker(others).walk(actions), expected)


def test_a_state_is_small():
    """The screens compress well; of 37 kB the last observation is 28."""
    with envfleet.make("Pong-v5", 1, backend="serial") as envs:
        envs.reset(seed=0)
        envs.step(np.array([1]))
        assert len(envs.get_state()[0].state) < 45_000
