"""Atari games by their ids, in pools: every backend gives the same; what settings mean; what is refused."""

import sys

import gymnasium
import numpy as np
import pytest
from numpy.testing import assert_array_equal

import envfleet
from envfleet.pool.simulators.atari_ids import atari_game
from envfleet.testing.programs import require_equal

pytest.importorskip("ale_py", reason="needs envfleet[atari]")

from ale_py import roms

from envfleet.pool.simulators.atari import AtariSettings

pytestmark = pytest.mark.slow

MODES = list(envfleet.Autoreset)


def test_all_of_ales_games_have_both_names():
    ids = [env_id for env_id in gymnasium.registry if env_id.startswith("ALE/")]
    assert len(ids) > 100
    for env_id in ids:
        assert atari_game(env_id) == atari_game(env_id.removeprefix("ALE/")) is not None
        assert roms.get_rom_path(atari_game(env_id)) is not None
    assert atari_game("TicTacToe3d-v5") == atari_game("ALE/TicTacToe3D-v5")  # EnvPool's spelling
    assert atari_game("CartPole-v1") is None
    assert atari_game("Ant-v5") is None
    assert atari_game("NoSuchGame-v5") is None


@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.name.lower())
def test_processes_equal_serial(mode):
    """Over the ends of episodes, with the infos of all of them."""
    arguments = {
        "autoreset_mode": mode,
        "seed": 5,
        "env_kwargs": {"max_num_frames_per_episode": 90, "reward_clip": True, "frame_skip": 2},
    }
    with (
        envfleet.make("Breakout-v5", 3, backend="serial", **arguments) as serial,
        envfleet.make("ALE/Breakout-v5", 3, num_workers=2, **arguments) as pool,
    ):
        require_equal(pool.reset(), serial.reset())
        generator = np.random.default_rng(0)
        for _ in range(60):
            actions = generator.integers(0, 4, 3)
            got, expected = pool.step(actions), serial.step(actions)
            require_equal(got, expected)
            ended = expected[2] | expected[3]
            if mode is envfleet.Autoreset.DISABLED and ended.any():
                options = {"reset_mask": ended}
                require_equal(pool.reset(options=options), serial.reset(options=options))


# One of each size of screen, with paddles and joysticks, with and without FIRE or lives.
@pytest.mark.parametrize(
    "game",
    ["Asterix", "Carnival", "DoubleDunk", "Freeway", "JourneyEscape", "MontezumaRevenge", "Pitfall2", "VideoChess"],
)
def test_games_start(game):
    with envfleet.make(f"{game}-v5", 1, backend="serial") as pool:
        obs, infos = pool.reset(seed=0)
        assert obs.shape == (1, 4, 84, 84) and obs.max() > 0
        ale = pool.get_attr("ale")[0]
        assert infos["lives"][0] == ale.lives()
        pool.step(np.zeros(1, np.int64))
        assert ale.getEpisodeFrameNumber() > 4


def test_envpools_names_of_settings():
    names = {
        "img_height": 60,
        "img_width": 80,
        "gray_scale": False,
        "stack_num": 2,
        "frame_skip": 3,
        "noop_max": 5,
        "episodic_life": True,
        "zero_discount_on_life_loss": False,
        "reward_clip": True,
        "use_inter_area_resize": True,
        "use_fire_reset": False,
        "repeat_action_probability": 0.1,
        "full_action_space": True,
    }
    expected = AtariSettings(
        screen_size=(80, 60),
        grayscale_obs=False,
        stack_num=2,
        frame_skip=3,
        noop_max=5,
        episodic_life=True,
        reward_clip=True,
        fire_reset=False,
        repeat_action_probability=0.1,
        full_action_space=True,
    )
    assert AtariSettings.of(names) == expected
    assert AtariSettings.of({"img_width": 42}).image_size() == (84, 42)
    with envfleet.make("Pong-v5", 2, backend="serial", env_kwargs=names) as pool:
        assert pool.single_observation_space.shape == (2, 60, 80, 3)
        assert pool.single_action_space.n == 18


def test_steps_can_be_limited():
    """EnvPool's max_episode_steps is an argument of make()."""
    with envfleet.make("Pong-v5", 1, backend="serial", seed=0, max_episode_steps=3) as pool:
        pool.reset()
        truncated = [bool(pool.step(np.zeros(1, np.int64))[3][0]) for _ in range(4)]
        assert truncated == [False, False, True, False]


def test_clipped_rewards_keep_the_games_own_in_info():
    with envfleet.make("SpaceInvaders-v5", 1, backend="serial", seed=0, env_kwargs={"reward_clip": True}) as pool:
        pool.reset()
        for _ in range(500):
            _, rewards, _, _, infos = pool.step(np.ones(1, np.int64))
            assert rewards[0] == np.sign(infos["reward"][0])
            if infos["reward"][0] > 1:
                break
        assert infos["reward"][0] in (5.0, 10.0, 15.0, 20.0, 25.0, 30.0, 200.0)


def test_asynchronous_batches():
    with envfleet.make("Pong-v5", 4, batch_size=2, num_workers=2) as pool:
        pool.async_reset(seed=0)
        for _ in range(10):
            obs, *_, infos = pool.recv()
            assert obs.shape == (2, 4, 84, 84) and infos["lives"].shape == (2,)
            pool.send(np.zeros(2, np.int64), infos["env_id"])


def test_an_episodic_life_goes_on_with_the_game():
    """EnvPool's rule: a lost life ends the episode, the next one is not a new game, until all lives are lost."""
    settings = {"episodic_life": True, "noop_max": 0}
    with envfleet.make("Breakout-v5", 1, backend="serial", seed=0, env_kwargs=settings) as pool:
        pool.reset()
        lives_after_resets = []
        was_over = False
        for _ in range(3000):
            _, _, terminated, _, infos = pool.step(np.array([1]))
            if was_over:
                lives_after_resets.append(int(infos["lives"][0]))
            was_over = bool(terminated[0])
            if len(lives_after_resets) == 6:
                break
        assert lives_after_resets == [4, 3, 2, 1, 5, 4]


def test_the_last_life_lasts_until_the_game_is_over():
    """Some games go on with 0 lives: EnvPool ends that episode with the game."""
    settings = {"episodic_life": True, "envpool_infos": True}
    with envfleet.make("WizardOfWor-v5", 1, backend="serial", seed=42, env_kwargs=settings) as pool:
        pool.reset()
        random, num_steps_without_life, is_over = np.random.default_rng(0), 0, False
        for _ in range(4000):
            _, _, terminated, _, infos = pool.step(random.integers(pool.single_action_space.n, size=1))
            if infos["lives"][0] == 0:
                is_over = bool(infos["terminated"][0])
                assert bool(terminated[0]) == is_over
                num_steps_without_life += 1
            if is_over:
                break
        assert is_over and num_steps_without_life > 1


def test_gymnasiums_spec_stays_gymnasiums():
    with envfleet.make(gymnasium.spec("ALE/Pong-v5"), 1, backend="serial") as pool:
        assert pool.single_observation_space.shape == (210, 160, 3)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"frame_skip": 0}, "frame_skip must be a whole number of at least 1"),
        ({"stack": 3}, "no setting stack; known: frame_skip"),
        ({"screen_size": (161, 84)}, r"must not be larger than pong's screen, \(160, 210\)"),
        ({"screen_size": "84"}, "screen_size must be"),
        ({"screen_size": (84, 84.5)}, "screen_size must be"),
        ({"screen_size": 84, "img_width": 84}, "give one of them"),
        ({"fire_reset": True, "use_fire_reset": True}, "by our name and by EnvPool's"),
        ({"zero_discount_on_life_loss": True}, "use episodic_life"),
        ({"use_inter_area_resize": False}, "always resized by area"),
        ({"terminal_on_life_loss": True, "episodic_life": True}, "exclude each other"),
        ({"repeat_action_probability": 1.0}, "repeat_action_probability"),
        ({"repeat_action_probability": "a"}, "repeat_action_probability"),
        ({"screen_size": 0}, "screen_size must be a number of at least 1"),
        ({"screen_size": True}, "screen_size must be"),
        ({"frame_skip": 2**33}, "frame_skip must be"),
        ({"episodic_life": 1}, "episodic_life must be True or False"),
        ({"reward_clip": "no"}, "reward_clip must be True or False"),
        ({"mode": "x"}, "mode must be a whole number"),
        ({"mode": 999}, "mode of pong must be one of 0, 1"),
        ({"difficulty": 7}, "difficulty of pong must be one of 0, 1"),
    ],
)
def test_wrong_settings_are_named(settings, message):
    with pytest.raises(envfleet.UsageError, match=message):
        envfleet.make("Pong-v5", 2, env_kwargs=settings)


def test_without_ale_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "ale_py", None)
    with pytest.raises(envfleet.MissingExtra, match=r"envfleet\[atari\]"):
        envfleet.make("ALE/Pong-v5", 2)
    assert atari_game("Pong-v5") is None


def test_frames_are_rendered():
    with envfleet.make("Pong-v5", 2, render_mode="rgb_array") as pool:
        pool.reset(seed=0)
        frames = pool.render()
        assert [frame.shape for frame in frames] == [(210, 160, 3)] * 2
        assert_array_equal(pool.get_attr("settings")[0].image_size(), (84, 84))
