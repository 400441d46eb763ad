"""Specs say of values what spaces say of them."""

import numpy as np
import pytest
from gymnasium import spaces

import envfleet

specs = pytest.importorskip("dm_env").specs
spec_of = pytest.importorskip("envfleet.adapters.dm_specs").spec_of

SPACES = [
    spaces.Discrete(3, seed=1),
    spaces.Discrete(3, start=-1, seed=1),
    spaces.MultiDiscrete([2, 3], seed=1),
    spaces.MultiDiscrete([2, 3], start=[1, -4], seed=1),
    spaces.MultiBinary((2, 2), seed=1),
    spaces.Box(-1, 1, (2, 3), seed=1),
    spaces.Box(np.array([-np.inf, 0]), np.array([np.inf, 1]), dtype=np.float64, seed=1),
    spaces.Box(-np.inf, np.inf, (4,), seed=1),
    spaces.Box(0, 255, (8, 8, 3), np.uint8, seed=1),
]


@pytest.mark.parametrize("space", SPACES, ids=str)
def test_values_of_a_space_are_those_of_its_spec(space):
    spec = spec_of(space, "obs")
    for _ in range(20):
        value = space.sample()
        assert spec.validate(value) is value or np.array_equal(spec.validate(value), value)
    assert space.contains(spec.generate_value()) or not np.isfinite(spec.generate_value()).all()
    assert (spec.shape, spec.dtype) == (space.shape, space.dtype)


@pytest.mark.parametrize("space", [space for space in SPACES if not isinstance(space, spaces.Box)], ids=str)
def test_values_beside_the_space_are_refused(space):
    largest = np.array([space.sample() for _ in range(100)]).max(axis=0)
    with pytest.raises(ValueError, match="obs"):
        spec_of(space, "obs").validate((largest + 1).astype(space.dtype))


def test_bounds_are_those_of_the_box():
    spec = spec_of(spaces.Box(np.float32([-1, 0]), np.float32([2, np.inf])), "obs")
    assert spec.minimum.tolist() == [-1, 0] and spec.maximum.tolist() == [2, np.inf]


def test_unbounded_actions_have_a_finite_example():
    spec = spec_of(spaces.Box(-np.inf, np.inf, (2,)), "action")
    assert not isinstance(spec, specs.BoundedArray)
    assert spec.generate_value().tolist() == [0, 0]


def test_trees_keep_their_form():
    space = spaces.Dict(camera=spaces.Box(0, 1, (2,)), parts=spaces.Tuple([spaces.Discrete(2), spaces.MultiBinary(3)]))
    spec = spec_of(space, "obs")
    assert list(spec) == ["camera", "parts"]
    assert isinstance(spec["parts"], tuple)
    assert [each.name for each in (spec["camera"], *spec["parts"])] == ["obs/camera", "obs/parts/0", "obs/parts/1"]
    assert isinstance(spec["parts"][0], specs.DiscreteArray) and spec["parts"][0].num_values == 2


def test_spaces_that_are_no_arrays_are_refused():
    with pytest.raises(envfleet.UsageError, match=r"obs/word has the space Text\(.*wrap the env"):
        spec_of(spaces.Dict(word=spaces.Text(5)), "obs")
