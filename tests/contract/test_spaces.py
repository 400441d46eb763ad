"""Spaces as trees of leaves."""

import numpy as np
import pytest
from gymnasium import spaces
from hypothesis import given
from hypothesis import strategies as st

from envfleet import InvalidAction
from envfleet.contract.spaces import SpaceTree
from envfleet.testing.programs import require_equal

LEAVES = st.sampled_from(
    [
        spaces.Box(-1, 1, (2, 3), np.float32),
        spaces.Box(0, 255, (4,), np.uint8),
        spaces.Discrete(3),
        spaces.MultiDiscrete([2, 3]),
        spaces.MultiBinary(4),
        spaces.Text(5),
        spaces.Sequence(spaces.Discrete(2)),
    ]
)
TREES = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.lists(inner, min_size=1, max_size=3).map(spaces.Tuple),
        st.dictionaries(st.sampled_from("abcd"), inner, min_size=1, max_size=3).map(spaces.Dict),
    ),
    max_leaves=6,
)


@given(TREES)
def test_unflatten_is_the_inverse_of_flatten(space):
    tree = SpaceTree(space)
    value = space.sample()
    assert len(tree.leaves) == len(tree.array_leaves) + len(tree.object_leaves)
    require_equal(tree.unflatten(tree.flatten(value)), value)


def test_leaves_have_names_for_messages():
    space = spaces.Dict({"cam": spaces.Tuple((spaces.Box(0, 1, (2,)), spaces.Text(3)))})
    names = [leaf.name_in("obs") for leaf in SpaceTree(space).leaves]
    assert names == ["obs['cam'][0]", "obs['cam'][1]"]


BOX = SpaceTree(spaces.Box(-1, 1, (2,), np.float32))


@pytest.mark.parametrize(
    ("value", "complaint"),
    [
        (np.zeros((2, 2), np.float32), r"shape \(3, 2\).*got \(2, 2\)"),
        (np.zeros((3, 2), np.complex64), "dtype float32; got complex64"),
        (np.array([["a", "b"]] * 3), "dtype float32"),
        (np.full((3, 2), np.nan, np.float32), r"NaN in rows \[0, 1, 2\]"),
        (np.full((3, 2), np.nan, np.float16), "NaN"),
        (np.full((2, 3), np.nan, np.float64).T, "NaN"),
    ],
)
def test_a_batch_must_fit_its_space(value, complaint):
    with pytest.raises(InvalidAction, match=complaint):
        BOX.require_batch(value, 3, "actions")


def test_a_batch_may_be_anything_that_converts_safely():
    for value in (np.zeros((3, 2), np.float64), np.zeros((3, 2), np.int8), [[0, 0]] * 3, np.full((3, 2), np.inf)):
        assert BOX.require_batch(value, 3, "actions")[0].shape == (3, 2)


def test_nested_batches_are_named_where_they_are_wrong():
    tree = SpaceTree(spaces.Dict({"move": spaces.Box(-1, 1, (2,)), "word": spaces.Text(3)}))
    with pytest.raises(InvalidAction, match=r"actions\['move'\] must have shape"):
        tree.require_batch({"move": np.zeros(2), "word": ("a", "b")}, 2, "actions")
    with pytest.raises(InvalidAction, match=r"actions\['word'\] must be a tuple of 2"):
        tree.require_batch({"move": np.zeros((2, 2)), "word": "ab"}, 2, "actions")
    with pytest.raises(InvalidAction, match="without 'word'"):
        tree.require_batch({"move": np.zeros((2, 2))}, 2, "actions")
