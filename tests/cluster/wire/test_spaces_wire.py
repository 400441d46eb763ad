"""Spaces survive the wire; spaces without arrays and malformed descriptions are refused."""

import msgspec
import numpy as np
import pytest
from gymnasium import spaces
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from numpy.testing import assert_array_equal

from envfleet.cluster.wire.codec import BadMessage
from envfleet.cluster.wire.spaces import describe_space, space_of
from envfleet.contract.errors import UsageError


def _over_the_wire(space):
    description, arrays = describe_space(space, "obs")
    description = msgspec.msgpack.decode(msgspec.msgpack.encode(description))
    return space_of(description, arrays, "obs"), arrays


def assert_same(one, other):
    assert one == other and type(one) is type(other) and one.dtype == other.dtype and one.shape == other.shape
    if isinstance(one, spaces.Box):
        for side in ("low", "high", "bounded_below", "bounded_above"):
            assert_array_equal(getattr(one, side), getattr(other, side))
            assert getattr(one, side).dtype == getattr(other, side).dtype
    if isinstance(one, spaces.Dict):
        assert list(one.spaces) == list(other.spaces)
        for key in one.spaces:
            assert_same(one[key], other[key])
    if isinstance(one, spaces.Tuple):
        for ours, theirs in zip(one.spaces, other.spaces, strict=True):
            assert_same(ours, theirs)
    one.seed(3), other.seed(3)
    assert str(one.sample()) == str(other.sample())


int_dtypes = st.sampled_from([np.int8, np.uint8, np.int32, np.int64])
shapes = hnp.array_shapes(min_dims=0, max_dims=3, min_side=1, max_side=3)


@st.composite
def boxes(draw):
    shape = draw(shapes)
    if draw(st.booleans()):
        dtype = draw(st.sampled_from([np.float16, np.float32, np.float64]))
        bounds = st.floats(-100, 100, width=16) | st.just(-np.inf)
        low = draw(hnp.arrays(dtype, shape, elements=bounds))
        high = np.where(draw(st.booleans()), np.inf, np.maximum(low, 100)).astype(dtype)
    else:
        dtype = draw(int_dtypes)
        low = draw(hnp.arrays(dtype, shape, elements=st.integers(0, 50)))
        high = low + draw(hnp.arrays(dtype, shape, elements=st.integers(0, 50)))
    return spaces.Box(low, high, dtype=dtype)


leaf_spaces = st.one_of(
    boxes(),
    st.builds(
        lambda n, start, dtype: spaces.Discrete(n, start=start, dtype=dtype),
        st.integers(1, 50), st.integers(0, 9), int_dtypes
    ),
    hnp.arrays(np.int64, shapes, elements=st.integers(1, 9)).map(spaces.MultiDiscrete),
    st.builds(
        lambda nvec, start: spaces.MultiDiscrete(nvec, np.int32, start=start),
        hnp.arrays(np.int32, (3,), elements=st.integers(1, 9)), hnp.arrays(np.int32, (3,), elements=st.integers(-5, 9))
    ),
    st.integers(1, 5).map(spaces.MultiBinary),
    st.lists(st.integers(1, 4), min_size=1, max_size=3).map(spaces.MultiBinary),
)  # fmt: skip
any_space = st.recursive(
    leaf_spaces,
    lambda inner: st.one_of(
        st.lists(inner, min_size=1, max_size=3).map(spaces.Tuple),
        st.lists(st.tuples(st.text(min_size=1, max_size=3), inner), min_size=1, max_size=3).map(spaces.Dict),
    ),
    max_leaves=5,
)


@given(any_space)
def test_a_space_arrives_as_it_was(space):
    assert_same(space, _over_the_wire(space)[0])


@pytest.mark.parametrize(
    "space",
    [
        spaces.Box(-np.inf, np.inf, (2,), np.int64),
        spaces.Box(-np.inf, 5, (2,), np.int32),
        spaces.Box(0, 1, (2,), np.bool_),
        spaces.Box(np.array([-np.inf, 0], np.float32), np.array([1, np.inf], np.float32)),
        spaces.Box(-1, 1, (0, 3)),
        spaces.Box(-1, 1, ()),
        spaces.Discrete(3, start=-1, dtype=np.int8),
        spaces.Dict(),
        spaces.Tuple(()),
    ],
)
def test_corners_arrive_as_they_were(space):
    assert_same(space, _over_the_wire(space)[0])


def test_equal_bounds_are_one_number():
    description, arrays = describe_space(spaces.Box(0, 255, (4, 84, 84), np.uint8), "obs")
    assert not arrays and description["high"] == 255


def test_the_order_of_keys_is_kept():
    space = spaces.Dict([("b", spaces.Discrete(2)), ("a", spaces.Discrete(3))])
    assert list(_over_the_wire(space)[0].spaces) == ["b", "a"]


@pytest.mark.parametrize(
    "space",
    [
        spaces.Text(5),
        spaces.Sequence(spaces.Discrete(2)),
        spaces.Graph(spaces.Discrete(2), None),
        spaces.Dict(a=spaces.Tuple([spaces.Text(5)])),
        spaces.OneOf([spaces.Discrete(2)]),
        spaces.Space((2,), np.float32),
    ],
)
def test_other_spaces_are_refused(space):
    with pytest.raises(UsageError, match="array spaces only"):
        describe_space(space, "obs")


def test_other_dtypes_are_refused():
    with pytest.raises(UsageError, match="the wire knows"):
        describe_space(spaces.Box(0, 1, (2,), np.longdouble), "obs")


def test_keys_that_are_no_text_are_refused():
    with pytest.raises(UsageError, match="text as keys"):
        describe_space(spaces.Dict({1: spaces.Discrete(2)}), "obs")


def _box(**changes):
    box = {"kind": "box", "shape": [2], "dtype": "float32", "low": 0.0, "high": 1.0}
    return box | {"bounded_below": True, "bounded_above": True} | changes


def _nested(depth):
    description = {"kind": "discrete", "n": 2, "start": 0, "dtype": "int64"}
    for _ in range(depth):
        description = {"kind": "tuple", "parts": [description]}
    return description


@pytest.mark.parametrize(
    "description",
    [
        None,
        {},
        {"kind": "text"},
        {"kind": ["box"]},
        {"kind": "box"},
        _box(shape=[2**40]),
        _box(shape=[-1]),
        _box(shape=[0, 2**63]),
        _box(shape="ab"),
        _box(dtype="object"),
        _box(dtype=["float32"]),
        _box(low=None),
        _box(low="0"),
        _box(low=2.0),
        _box(low=float("nan")),
        _box(high=1e300),
        _box(dtype="uint8", high=300),
        _box(dtype="uint8", high=1.5),
        _box(dtype="uint8", high=float("inf")),
        _box(bounded_below=None),
        _box(bounded_below=7),
        {"kind": "discrete", "n": 0, "start": 0, "dtype": "int64"},
        {"kind": "discrete", "n": 1.5, "start": 0, "dtype": "int64"},
        {"kind": "discrete", "n": 2**64, "start": 0, "dtype": "int64"},
        {"kind": "discrete", "n": 2, "start": 0, "dtype": "float32"},
        {"kind": "multi_discrete", "dtype": "int64"},
        {"kind": "multi_binary", "n": 2**40},
        {"kind": "multi_binary", "n": [0]},
        {"kind": "multi_binary", "n": "12"},
        {"kind": "multi_binary", "n": None},
        {"kind": "tuple", "parts": 3},
        {"kind": "tuple", "parts": [_box(shape=[1 << 25])] * 20},
        {"kind": "dict", "keys": ["a"], "parts": []},
        {"kind": "dict", "keys": ["a", "a"], "parts": [_box(), _box()]},
        {"kind": "dict", "keys": [["a"]], "parts": [_box()]},
        {"kind": "dict", "keys": 5, "parts": [_box()]},
        _nested(100),
        {"kind": "tuple", "parts": [_nested(0)] * 5000},
    ],
)
def test_malformed_descriptions_are_refused(description):
    with pytest.raises(BadMessage):
        space_of(description, {}, "obs")


@pytest.mark.parametrize("low", [np.zeros(3, np.float32), np.zeros(2), np.full(2, 9, np.float32)])
def test_bounds_must_fit_the_box(low):
    with pytest.raises(BadMessage):
        space_of(_box(low=None), {"obs/low": low}, "obs")


def test_whether_a_number_is_bounded_is_0_or_1():
    raw = np.array([0, 2], np.uint8).view(np.bool_)
    with pytest.raises(BadMessage, match="neither 0 nor 1"):
        space_of(_box(bounded_below=None), {"obs/bounded_below": raw}, "obs")


@pytest.mark.parametrize(
    ("nvec", "start"),
    [(np.ones(3), np.zeros(2)), (np.zeros(2, int), np.zeros(2, int)), (np.full(2, np.nan), np.zeros(2))],
)
def test_counts_must_fit_each_other(nvec, start):
    with pytest.raises(BadMessage):
        space_of({"kind": "multi_discrete", "dtype": "int64"}, {"obs/nvec": nvec, "obs/start": start}, "obs")
