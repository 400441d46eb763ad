"""Bounds: which rows are outside their space, and which have NaN; by the definition, for every kind of leaf."""

import numpy as np
import pytest
from gymnasium import spaces

from envfleet.contract.bounds import Bounds
from envfleet.contract.spaces import SpaceTree

SPACES = [
    spaces.Box(-1, 2, (3,), np.float32),
    spaces.Box(-1, 2, (), np.float64),
    spaces.Box(-1, 2, (2, 2), np.float16),
    spaces.Box(np.array([-1, -np.inf, 0]), np.array([2, np.inf, 0]), dtype=np.float64),
    spaces.Box(-np.inf, np.inf, (3,), np.float32),
    spaces.Box(-3, 200, (3,), np.int16),
    spaces.Box(0, 255, (3,), np.uint8),
    spaces.Box(0, 1, (3,), np.bool_),
    spaces.Discrete(4, start=-1),
    spaces.MultiDiscrete([2, 5, 3]),
    spaces.MultiDiscrete([2, 5, 3], start=[1, -4, 0]),
    spaces.MultiBinary((2, 3)),
    spaces.Box(0, 1, (0,), np.float32),
]


@pytest.mark.parametrize("space", SPACES, ids=str)
@pytest.mark.parametrize("batch", [(5,), (4, 3)])
def test_rows_outside_are_those_that_the_space_does_not_contain(space, batch):
    (leaf,) = SpaceTree(space).leaves
    bounds, random = Bounds(leaf), np.random.default_rng(0)
    inside = np.empty((*batch, *leaf.shape), leaf.dtype)
    for index in np.ndindex(batch):
        inside[index] = space.sample()
    assert bounds.rows_outside(inside) is None and bounds.rows_with_nan(inside) is None
    num_found, indices = 0, list(np.ndindex(batch))
    for _ in range(50):
        values = inside.copy()
        if values.size:
            flat = values.reshape(-1)
            flat[random.integers(flat.size)] = (
                random.integers(0, 2) if leaf.dtype == np.bool_ else random.integers(0, 9)
            )
            if leaf.dtype.kind in "if":
                flat[random.integers(flat.size)] = random.integers(-9, 0)
        rows = [values[index] if isinstance(space, spaces.Discrete) else np.asarray(values[index]) for index in indices]
        expected = np.array([not space.contains(row) for row in rows]).reshape(batch)
        found = bounds.rows_outside(values)
        assert (found is not None) == expected.any()
        if found is not None:
            assert found.tolist() == expected.tolist()
            num_found += 1
    is_everything = bounds.low is None and bounds.high is None
    assert (num_found == 0) == (is_everything or not inside.size)


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_nan_is_not_outside_and_found_by_its_row(dtype):
    (leaf,) = SpaceTree(spaces.Box(-1, 1, (2,), dtype)).leaves
    values = np.zeros((4, 3, 2), dtype)
    values[2, 1, 0] = values[0, 2, 1] = np.nan
    assert Bounds(leaf).rows_outside(values) is None
    assert np.argwhere(Bounds(leaf).rows_with_nan(values)).tolist() == [[0, 2], [2, 1]]
    values[2, 1, 1] = 2
    assert np.argwhere(Bounds(leaf).rows_outside(values)).tolist() == [[2, 1]]


def test_images_are_not_looked_at():
    (leaf,) = SpaceTree(spaces.Box(0, 255, (84, 84, 4), np.uint8)).leaves
    assert Bounds(leaf).low is None and Bounds(leaf).high is None


def test_choices_and_quantities():
    (discrete,), (box,) = SpaceTree(spaces.Discrete(3)).leaves, SpaceTree(spaces.Box(0, 1, (2,), np.int64)).leaves
    assert Bounds(discrete).is_choice and not Bounds(box).is_choice
