"""Our Atari env equals Gymnasium's AtariPreprocessing and FrameStackObservation, bit for bit, over whole episodes."""

import numpy as np
import pytest

from tests.support.equal_arrays import assert_array_equal

pytest.importorskip("ale_py", reason="needs envfleet[atari]")
pytest.importorskip("cv2", reason="needs opencv-python-headless, for Gymnasium's wrapper")

from envfleet.pool.simulators.atari import AtariEnv
from tests.support.oracle_atari import make_oracle

pytestmark = pytest.mark.slow

CASES = {
    "pong": ("pong", {}),
    "breakout, a life at a time": ("breakout", {"terminal_on_life_loss": True}),
    "breakout, sticky": ("breakout", {"repeat_action_probability": 0.25, "fire_reset": True}),
    "space invaders, many lives": ("space_invaders", {"terminal_on_life_loss": True, "frame_skip": 3}),
    "seaquest, full action space": ("seaquest", {"full_action_space": True, "reward_clip": True}),
    "air raid, 250 lines": ("air_raid", {}),
    "carnival, 214 lines": ("carnival", {"grayscale_obs": False}),
    "journey escape, 230 lines": ("journey_escape", {"stack_num": 2, "noop_max": 0}),
    "ms pacman in colours": ("ms_pacman", {"grayscale_obs": False, "stack_num": 3, "screen_size": (64, 72)}),
    "pong at half its size": ("pong", {"screen_size": (80, 105)}),
    "pong as it is": (
        "pong",
        {"screen_size": (160, 210), "frame_skip": 1, "stack_num": 1, "max_num_frames_per_episode": 700},
    ),
    "qbert, two frames": ("qbert", {"frame_skip": 2, "screen_size": 96}),
    "breakout, cut short": ("breakout", {"max_num_frames_per_episode": 333}),
    "space invaders, another mode": ("space_invaders", {"mode": 2, "difficulty": 1}),
}


@pytest.mark.parametrize("case", CASES)
def test_episodes_equal_gymnasium(case):
    game, settings = CASES[case]
    ours, theirs = AtariEnv(game, **{"fire_reset": False, **settings}), make_oracle(game, **settings)
    assert ours.observation_space == theirs.observation_space
    assert ours.action_space == theirs.action_space
    _run(ours, theirs, np.random.default_rng(0), first_seed=7)
    ours.close()
    theirs.close()


def _run(ours, theirs, actions, *, first_seed):
    """At least one whole episode, the beginning of another, and some hundred steps."""
    num_ended = num_steps = num_since_reset = 0
    seed, is_over = first_seed, True
    while not (num_ended and num_steps >= 400 and num_since_reset >= 50):
        assert num_steps < 2000, "no episode has ended: nothing was shown of what follows"
        if is_over:
            obs, info = ours.reset(seed=seed)
            expected, expected_info = theirs.reset(seed=seed)
            assert_array_equal(obs, expected)
            assert info["lives"] == expected_info["lives"]
            seed = None if num_ended % 2 == 0 else first_seed + num_ended  # with and without a seed in turn
            num_since_reset = 0
        action = int(actions.integers(ours.action_space.n))
        obs, reward, terminated, truncated, info = ours.step(action)
        expected = theirs.step(action)
        assert_array_equal(obs, expected[0])
        assert (reward, terminated, truncated) == expected[1:4]
        assert info["lives"] == expected[4]["lives"]
        is_over = terminated or truncated
        num_ended += is_over
        num_steps += 1
        num_since_reset += 1
