"""What a learner may add to a checkpoint: values come back as they were, and what cannot is named."""

import collections
import enum

import numpy as np
import pytest
import torch  # noqa: TID253 - tensors are part of this
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from envfleet import CheckpointError, UsageError
from envfleet.cluster.checkpoint.file import read_file, write_file
from envfleet.cluster.checkpoint.tree import packed, unpacked

NUMBERS = st.integers() | st.floats(allow_nan=False)
LEAVES = st.none() | st.booleans() | NUMBERS | st.text() | st.binary()
ARRAYS = hnp.arrays(
    hnp.boolean_dtypes()
    | hnp.integer_dtypes()
    | hnp.floating_dtypes()
    | hnp.complex_number_dtypes()
    | hnp.datetime64_dtypes(),
    hnp.array_shapes(min_dims=0, min_side=0),
)
TREES = st.recursive(
    LEAVES | ARRAYS,
    lambda inner: st.lists(inner) | st.tuples(inner, inner) | st.dictionaries(st.text() | st.integers(), inner),
    max_leaves=12,
)
DTYPES = [
    *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64),
]


def again(value):
    return unpacked(*packed(value, "extra"))


def assert_same(got, expected):
    if isinstance(expected, np.ndarray):
        assert type(got) is np.ndarray and got.shape == expected.shape
        assert got.dtype == expected.dtype.newbyteorder("=") and got.flags.writeable
        assert got.tobytes() == expected.astype(got.dtype).tobytes()
        return
    assert type(got) is type(expected)
    if isinstance(expected, dict):
        assert list(got) == list(expected)
        for key, value in expected.items():
            assert_same(got[key], value)
    elif isinstance(expected, list | tuple):
        assert len(got) == len(expected)
        for one, other in zip(got, expected, strict=True):
            assert_same(one, other)
    else:
        assert got == expected


@given(TREES)
def test_values_come_back_as_they_were(value):
    assert_same(again(value), value)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (3,), (2, 0), (2, 3)], ids=str)
def test_tensors_come_back_as_tensors(dtype, shape):
    tensor = torch.arange(6)[: int(np.prod(shape))].reshape(shape).to(dtype)
    got = again({"t": tensor})["t"]
    assert isinstance(got, torch.Tensor) and got.dtype == dtype and got.device.type == "cpu"
    assert got.shape == tensor.shape and torch.equal(got, tensor)


def test_tensors_of_any_form(tmp_path):
    given_ = {
        "parameter": torch.nn.Parameter(torch.ones(2)),
        "transposed": torch.arange(6.0).reshape(2, 3).T,
        "conjugate": torch.tensor([1 + 2j]).conj(),
        "view": torch.arange(10)[3:5],
    }
    write_file(tmp_path / "x", *packed(given_, "extra"))
    got = unpacked(*read_file(tmp_path / "x"))
    assert all(torch.equal(got[name], each.detach()) for name, each in given_.items())
    assert not got["parameter"].requires_grad
    got["view"][0] = 7  # of its own memory
    assert given_["view"][0] == 3


def test_an_optimizer_goes_on_bit_for_bit():
    def made():
        torch.manual_seed(0)
        module = torch.nn.Linear(3, 2)
        return module, torch.optim.AdamW(module.parameters(), lr=0.1, betas=(0.8, 0.9))

    def step(module, optimizer):
        optimizer.zero_grad()
        module(torch.ones(4, 3)).square().sum().backward()
        optimizer.step()

    module, optimizer = made()
    step(module, optimizer)
    state = again({"agent": module.state_dict(), "optimizer": optimizer.state_dict(), "rng": torch.get_rng_state()})
    other, its_optimizer = made()
    other.load_state_dict(state["agent"])
    its_optimizer.load_state_dict(state["optimizer"])
    torch.set_rng_state(state["rng"])
    for each in ((module, optimizer), (other, its_optimizer)):
        step(*each)
    assert all(torch.equal(a, b) for a, b in zip(module.parameters(), other.parameters(), strict=True))


def test_subclasses_come_back_as_plain_values():
    class Level(enum.IntEnum):
        HIGH = 3

    point = collections.namedtuple("point", "x y")
    value = {
        "o": collections.OrderedDict(a=1),
        "l": Level.HIGH,
        "p": point(1, 2),
        "s": np.str_("x"),
        "f": np.float64(2),
    }
    got = again(value)
    assert got == {"o": {"a": 1}, "l": 3, "p": (1, 2), "s": "x", "f": 2.0}
    assert type(got["o"]) is dict and type(got["p"]) is tuple and type(got["f"]) is np.float64


CYCLE: list = []
CYCLE.append(CYCLE)
WRONG = {
    "extra['optimizer']['x'] is a object": {"optimizer": {"x": object()}},
    r"extra\[0\]\[1\] is a set": [[1, {2}]],
    "extra has the key 1.5, a float": {1.5: 1},
    "extra has the key True, a bool": {True: 1},
    r"extra\['a'\] is an array of dtype object": {"a": np.array([object()])},
    r"extra\['a'\] is an array of dtype \[\('x', '<i4'\)\]": {"a": np.zeros(2, [("x", "i4")])},
    r"extra\['m'\] is a numpy.ma": {"m": np.ma.masked_array([1], [True])},
    r"extra\['t'\] is a tensor of layout torch.sparse": {"t": torch.eye(2).to_sparse()},
    r"extra\['t'\] is a tensor without values": {"t": torch.ones(2, device="meta")},
    "is nested deeper than 64 levels": CYCLE,
    r"extra\['s'\] is text that UTF-8 does not have": {"s": "\ud800"},
    "is a function": test_subclasses_come_back_as_plain_values,
}


@pytest.mark.parametrize("what", WRONG)
def test_what_cannot_be_saved_is_named(what):
    with pytest.raises(UsageError, match=what.replace("extra['optimizer']['x']", r"extra\['optimizer'\]\['x'\]")):
        packed(WRONG[what], "extra")


NOT_OURS = [
    ["what"],
    [],
    ["array", 9, "<f4", [1]],
    ["array", 0, "<f4", [7]],
    ["array", 0, "|O", [1]],
    ["array", 0, "f4,f4", [1]],
]
NOT_OURS += [
    ["tensor", 0, "load", [1]],
    ["tensor", 0, "float32", [7]],
    ["dict", 1],
    ["int", "x"],
    ["scalar", "<f4", b""],
]


@pytest.mark.parametrize("plain", NOT_OURS, ids=str)
def test_what_was_not_packed_is_refused(plain):
    with pytest.raises(CheckpointError, match="cannot be read"):
        unpacked(plain, [np.zeros(8, np.uint8)])
