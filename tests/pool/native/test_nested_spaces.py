"""Nested spaces of native envs: each array goes where the space says, in every autoreset mode and in small batches."""

import numpy as np
import pytest
from gymnasium import spaces
from numpy.testing import assert_array_equal

import envfleet
from tests.support.native_makers import load_scripted

OBS = spaces.Dict(
    {
        "move": spaces.Box(np.float32([-1, -2]), np.float32([1, 2])),
        "pair": spaces.Tuple((spaces.Discrete(5), spaces.MultiBinary([2, 3]))),
        "picks": spaces.MultiDiscrete([3, 4]),
        "pixels": spaces.Box(0, 255, (2, 2), np.uint8),
    }
)
ACTIONS = spaces.Dict(
    {
        "bits": spaces.MultiBinary([2, 3]),
        "move": spaces.Box(np.float32([-1, -2]), np.float32([1, 2])),
        "number": spaces.Discrete(5),
        "picks": spaces.MultiDiscrete([3, 4]),
    }
)


@pytest.fixture(autouse=True)
def tree():
    load_scripted()


def _require_shown(obs, actions, rows):
    assert_array_equal(obs["move"][rows], actions["move"][rows])
    assert_array_equal(obs["pair"][0][rows], actions["number"][rows])
    assert_array_equal(obs["pair"][1][rows], actions["bits"][rows])
    assert_array_equal(obs["picks"][rows], actions["picks"][rows])


@pytest.mark.parametrize("mode", ["next_step", "same_step"])
def test_each_array_goes_where_its_space_says(mode):
    with envfleet.make("Tree-v0", 6, autoreset_mode=mode) as pool:
        assert pool.single_observation_space == OBS
        assert pool.single_action_space == ACTIONS
        obs, _ = pool.reset(seed=3)
        expected = [np.random.default_rng(3 + i).integers(256, size=4).reshape(2, 2) for i in range(6)]
        assert_array_equal(obs["pixels"], expected)
        pool.action_space.seed(0)
        was_ended = np.zeros(6, bool)
        for _ in range(50):
            actions = pool.action_space.sample()
            obs, _, terminations, _, infos = pool.step(actions)
            assert pool.observation_space.contains(obs)
            assert_array_equal(terminations, (actions["number"] == 4) & ~was_ended)
            if mode == "same_step":
                _require_shown(obs, actions, ~terminations)
                for row in np.flatnonzero(terminations):
                    final = infos["final_obs"][row]
                    assert final["pair"][0] == 4 and final["pair"][1].shape == (2, 3)
                    assert_array_equal(final["picks"], actions["picks"][row])
                    assert obs["pair"][0][row] == 0
            else:
                _require_shown(obs, actions, ~was_ended)
                was_ended = terminations


def test_wrong_parts_are_named():
    with envfleet.make("Tree-v0", 2) as pool:
        pool.reset(seed=0)
        good = pool.action_space.sample()
        for name, value, words in (
            ("number", [0, 5], r"actions\['number'\], row 1: Discrete\(5\) has no value 5"),
            ("picks", [[0, 4], [0, 0]], r"actions\['picks'\], row 0: MultiDiscrete.* has no value \[0 4\]"),
            ("move", [[0.0, 0.0], [0.0, np.nan]], r"actions\['move'\] has NaN in rows \[1\]"),
            ("bits", np.zeros((2, 3), np.int8), r"actions\['bits'\] must have shape \(2, 2, 3\)"),
        ):
            with pytest.raises(envfleet.InvalidAction, match=words):
                pool.step({**good, name: np.array(value)})
        pool.step(good)


def test_small_batches_of_nested_observations():
    with envfleet.make("Tree-v0", 7, batch_size=3) as pool:
        pool.async_reset(seed=0)
        pool.action_space.seed(1)
        for _ in range(30):
            obs, *_, infos = pool.recv()
            env_ids = infos["env_id"]
            assert obs["pair"][1].shape == (3, 2, 3) and obs["pixels"].shape == (3, 2, 2)
            actions = pool.action_space.sample()
            pool.send({key: value[env_ids] for key, value in actions.items()}, env_ids)
