"""Plain values survive the wire exactly; what is not plain is refused by its place; infos of workers join as rows."""

import contextlib
import enum
from collections import OrderedDict, namedtuple

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from envfleet.cluster.wire.bounded_msgpack import decode_bounded
from envfleet.cluster.wire.codec import DTYPES, BadMessage
from envfleet.cluster.wire.plain_values import MAX_DEPTH, NotPlain, from_plain, read_plain, to_plain
from envfleet.contract.errors import UsageError
from envfleet.contract.infos.table import InfoTable


def _over_the_wire(value):
    return from_plain(msgspec.msgpack.decode(msgspec.msgpack.encode(to_plain(value))))


def assert_same(one, other, exact=True):
    """Equal in type, dtype, shape and bits; not `exact`: NumPy's numbers may stand for Python's."""
    if isinstance(one, np.ndarray):
        assert isinstance(other, np.ndarray) and one.dtype == other.dtype and one.shape == other.shape, (one, other)
        if one.dtype == object:
            for ours, theirs in zip(one.reshape(-1), other.reshape(-1), strict=True):
                assert_same(ours, theirs, exact)
        else:
            assert one.tobytes() == other.tobytes()
    elif isinstance(one, dict):
        assert type(one) is type(other) and list(one) == list(other), (one, other)
        for key, theirs in zip(one, other, strict=True):
            assert_same(key, theirs)
            assert_same(one[key], other[key], exact)
    elif isinstance(one, list | tuple):
        assert type(one) is type(other) and len(one) == len(other)
        for ours, theirs in zip(one, other, strict=True):
            assert_same(ours, theirs, exact)
    elif isinstance(one, np.generic) and (exact or isinstance(other, np.generic)):
        assert type(one) is type(other) and one.tobytes() == other.tobytes()
    else:
        assert type(one) is type(other) or not exact
        assert one == other or (one != one and other != other)


dtypes = st.sampled_from(list(DTYPES))
arrays = dtypes.flatmap(
    lambda dtype: hnp.arrays(dtype, hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=3))
)
scalars = dtypes.flatmap(lambda dtype: hnp.arrays(dtype, (1,))).map(lambda array: array[0])
numbers = st.one_of(st.booleans(), st.integers(), st.integers(-(2**200), 2**200), st.floats())
atoms = st.one_of(st.none(), numbers, st.text(max_size=5), st.binary(max_size=5), scalars)


def _objects(values):
    array = np.empty(len(values), dtype=object)
    array[:] = [None] * len(values)
    for index, value in enumerate(values):
        array[index] = value
    return array.reshape(2, -1) if len(values) % 2 == 0 and values else array


hashables = st.one_of(st.integers(), st.text(max_size=3), st.none(), st.tuples(st.integers(), st.text(max_size=3)))
plain_values = st.recursive(
    st.one_of(atoms, arrays),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.lists(inner, max_size=4).map(_objects),
        st.dictionaries(st.text(max_size=3), inner, max_size=3),
        st.dictionaries(hashables, inner, max_size=3),
    ),
    max_leaves=12,
)


@given(plain_values)
def test_plain_values_arrive_as_they_were(value):
    assert_same(value, _over_the_wire(value))


@pytest.mark.parametrize(
    "value",
    [
        np.array(3.5, np.float16),
        np.zeros((0, 3), np.int8),
        np.full((), None, dtype=object),
        np.frombuffer(np.array([0x7FF8DEADBEEF0001], np.uint64), np.float64),
        np.float32("nan"),
        2**63,
        -(2**63),
        2**64,
        -(2**63) - 1,
        [10**5000],
        -0.0,
        {1: "a", (2, "b"): [None], None: {}},
        ["tuple", 1],
        ["array", "int8", [1], b"x"],
    ],
)
def test_corners_arrive_as_they_were(value):
    assert_same(value, _over_the_wire(value))


def test_arrays_can_be_written_and_have_the_machines_byte_order():
    array = _over_the_wire(np.arange(4, dtype=">i4")[::2])
    array += 1
    assert array.tolist() == [1, 3] and array.dtype == np.int32


def test_subclasses_of_plain_types_arrive_as_those():
    point, color = namedtuple("point", "x y"), enum.IntEnum("color", "RED")
    values = [point(1, 2), color.RED, OrderedDict(b=1, a=2), np.str_("text"), np.bytes_(b"bytes")]
    assert_same([(1, 2), 1, {"b": 1, "a": 2}, "text", b"bytes"], _over_the_wire(values))


# -- bytes of any form --


@given(plain_values)
def test_what_is_read_from_bytes_is_what_msgspec_reads(value):
    raw = msgspec.msgpack.encode(to_plain(value))
    assert_same(value, read_plain(raw))
    assert_same(value, read_plain(msgspec.Raw(raw)))


@settings(max_examples=500)
@given(st.binary(max_size=40))
def test_bytes_are_a_value_or_refused(raw):
    with contextlib.suppress(BadMessage):
        decode_bounded(raw)


every_kind = st.recursive(
    st.one_of(atoms.filter(lambda each: not isinstance(each, np.generic)), st.integers(-(2**63), 2**64 - 1), st.none()),
    lambda inner: st.lists(inner, max_size=20) | st.dictionaries(st.text(max_size=40), inner, max_size=20),
    max_leaves=40,
)


@given(every_kind)
def test_bounded_decoding_is_decoding(value):
    """With lists, texts and dictionaries of every length that MessagePack writes in another way."""
    try:
        raw = msgspec.msgpack.encode(value)
    except OverflowError:  # an int of more than 64 bits
        return
    assert_same(msgspec.msgpack.decode(raw), decode_bounded(raw))


@pytest.mark.parametrize("num_items", [0, 15, 16, 40, 70_000])
@pytest.mark.parametrize("item", [b"x" * 300, "x" * 300, 1.5, 2**40, "x" * 20, -100, 200])
def test_long_lists_and_dictionaries(num_items, item):
    for value in ([item] * num_items, {f"key {index}": item for index in range(num_items)}):
        assert decode_bounded(msgspec.msgpack.encode(value)) == value
    long = [b"x" * 70_000, "x" * 70_000, b"x" * 200, msgspec.msgpack.Ext(3, b"x" * 300), msgspec.msgpack.Ext(3, b"x")]
    assert decode_bounded(msgspec.msgpack.encode(long)) == long


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        (b"", "before all its parts"),
        (b"\x92\xc0", "before all its parts"),
        (b"\xc1", "0xc1"),
        (b"\x81\x01\x02", "key that is no text: its first byte is 0x01"),
        (b"\x82\xa1a\xc0\x90\xc0", "key that is no text: its first byte is 0x90"),
        (b"\x81\xa1a\x81\xc4\x01a\x01", "key that is no text: its first byte is 0xc4"),
        (b"\xdd\xff\xff\xff\xff", "has more than 262,144 entries"),
        (b"\xdf\x7f\xff\xff\xff", "has more than 262,144 entries"),
        (b"\xdd\x00\x06\x00\x00" + b"\x80" * 0x60000, "has more than 311,296 entries"),
        (b"\xdb\x00\x00\x00\x09abc", "no value"),
        (b"\xa3\xff\xff\xff", "no value"),
        (b"\x91" * 100_000 + b"\xc0", "no value"),
    ],
)
def test_values_that_are_none_are_refused_before_they_are_made(raw, words):
    with pytest.raises(BadMessage, match=words):
        decode_bounded(raw)


@pytest.mark.parametrize("num_keys", [64, 65])
def test_keys_that_collide(num_keys):
    """Without a limit n of them take n * n / 2 comparisons; a few happen: -1 and -2 have the same hash."""
    keys = [number * (2**61 - 1) for number in range(1, num_keys + 1)]
    value = {**dict.fromkeys(keys, 0), **{(x, y): 0 for x in range(-9, 9) for y in range(-9, 9)}}
    if num_keys <= 64:
        assert _over_the_wire(value) == value
    else:
        with pytest.raises(BadMessage, match="more than 64 have the same hash"):
            _over_the_wire(value)


def test_booleans_in_values_are_0_or_1():
    with pytest.raises(BadMessage, match="neither 0 nor 1"):
        from_plain(["array", "bool", [3], b"\0\1\2"])
    with pytest.raises(BadMessage, match="neither 0 nor 1"):
        from_plain(["scalar", "bool", b"\xff"])


class Simulator:
    pass


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ({"sim": [0, 0, 0, Simulator()]}, r"info\['sim'\]\[3\] is a .*test_plain_values.Simulator"),
        ({"a": (1, {2: {3}})}, r"info\['a'\]\[1\]\[2\] is a set"),
        ({frozenset(): 1}, r"info key frozenset\(\) is a frozenset"),
        (np.array([None, open], dtype=object), r"info\[1\] is a builtin_function_or_method"),
        ({"c": 1j}, r"info\['c'\] is a complex"),
        ({"c": np.zeros(2, complex)}, r"info\['c'\] is an array of dtype complex128"),
        ({"m": np.ma.zeros(2)}, r"info\['m'\] is a numpy.ma.*MaskedArray"),
        ({"file": "a\udc80"}, r"info\['file'\] is text that UTF-8 does not have"),
        ({"\udc80": 1}, r"info key .* is text that UTF-8 does not have"),
        ({"t": np.datetime64("2020-01-01")}, r"info\['t'\] is a numpy.datetime64"),
    ],
)
def test_what_is_not_plain_is_refused_by_its_place(value, words):
    with pytest.raises(NotPlain, match=words) as raised:
        to_plain(value, "info")
    assert isinstance(raised.value, UsageError)


def test_a_value_that_contains_itself_is_refused():
    value = []
    value.append(value)
    with pytest.raises(NotPlain, match="contain itself"):
        to_plain(value)


@pytest.mark.parametrize(
    "value",
    [
        [],
        [1],
        ["pickle", b"x"],
        ["array", "object", [1], b"x"],
        ["array", "int8", [-1], b""],
        ["array", "int8", [2**40], b"x"],
        ["array", "int8", [0, 2**63], b""],
        ["array", "int8", [True], b"x"],
        ["array", "int8", "x", b"x"],
        ["array", "int8", [1], "x"],
        ["array", "int8", [1]],
        ["array", [], [1], b"x"],
        ["array", "int8", [1] * 60, b"x"],
        ["objects", [2**40], []],
        ["objects", [1], {}],
        ["objects", [0, 2**63], []],
        ["scalar", "float32", b"x"],
        ["scalar", "float32"],
        ["int", "nothing"],
        ["int", 5],
        ["dict", 1],
        ["dict", ["list"], 1],
        {1: 2},
        msgspec.msgpack.Ext(1, b"x"),
        object(),
    ],
)
def test_malformed_values_are_refused(value):
    with pytest.raises(BadMessage):
        from_plain(value)


def test_deep_values_are_refused():
    value = ["list"]
    for _ in range(MAX_DEPTH + 1):
        value = ["list", value]
    with pytest.raises(BadMessage, match="deeper"):
        from_plain(value)


kinds = st.sampled_from(["list", "tuple", "dict", "int", "scalar", "array", "objects", "int8", "float64"])
wire_values = st.recursive(
    st.one_of(
        st.none(), st.integers(-(2**63), 2**64 - 1), st.floats(), st.text(max_size=3), st.binary(max_size=8), kinds
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.builds(lambda kind, items: [kind, *items], kinds, st.lists(inner, max_size=3)),
        st.dictionaries(st.one_of(st.text(max_size=2), st.integers(0, 9)), inner, max_size=2),
    ),
    max_leaves=20,
)


@settings(max_examples=300)
@given(wire_values)
def test_noise_is_a_value_or_refused(value):
    try:
        from_plain(value)
    except BadMessage:
        return


# -- joining --

_int_kinds = [st.integers(0, 9), st.floats(0, 9, width=16), st.booleans()]
_column_values = st.sampled_from(
    [
        *_int_kinds,
        st.integers(0, 9).map(np.int32),
        st.floats(0, 9, width=16).map(np.float32),
        st.one_of(*_int_kinds),
        st.text(max_size=2),
        st.lists(st.integers(0, 3), max_size=2),
        hnp.arrays(np.float32, (2,), elements=st.floats(0, 9, width=16)),
        st.one_of(hnp.arrays(np.int32, (2,)), hnp.arrays(np.float32, (2,), elements=st.floats(0, 9, width=16))),
        st.one_of(hnp.arrays(np.uint8, (2,)), hnp.arrays(np.uint8, (3,)), st.none()),
        st.one_of(hnp.arrays(np.uint8, (2,)), st.integers(0, 4), st.fixed_dictionaries({"z": st.integers(0, 3)})),
        st.integers(2**64, 2**70),
    ]
)


@st.composite
def _env_infos(draw, num_rows, depth=0):
    """An info for each row; every key has its own kind of values, and is there in some rows."""
    infos = [{} for _ in range(num_rows)]
    for key in draw(st.lists(st.sampled_from(["a", "b", "sim", "_own"]), unique=True, max_size=3)):
        if depth < 2 and draw(st.booleans()):
            values = draw(_env_infos(num_rows, depth + 1))
        else:
            strategy = draw(_column_values)
            values = [draw(strategy) for _ in range(num_rows)]
        for row in range(num_rows):
            if draw(st.booleans()):
                infos[row][key] = values[row]
    return infos


@settings(max_examples=300)
@given(st.data())
def test_joined_workers_are_as_one_pool(data):
    counts = data.draw(st.lists(st.integers(1, 3), min_size=1, max_size=4))
    rows = data.draw(_env_infos(sum(counts)))
    workers, start = [], 0
    for count in counts:
        sent = InfoTable.from_rows(dict(enumerate(rows[start : start + count])), count).columns
        workers.append(InfoTable(count, _over_the_wire(sent)))
        start += count
    one_pool = InfoTable.from_rows(dict(enumerate(rows)), sum(counts))
    assert_same(InfoTable.join(workers).columns, one_pool.columns, exact=False)


def test_final_rows_of_one_worker_join_with_nothing_of_another():
    final_obs = np.array([None, np.ones(2, np.float32)], dtype=object)
    mask = np.array([False, True])
    worker = {
        "final_obs": final_obs,
        "_final_obs": mask,
        "final_info": {"r": np.array([0, 2.5], np.float32), "_r": mask},
        "_final_info": mask,
    }
    joined = InfoTable.join([InfoTable(1), InfoTable(2, worker), InfoTable(2)]).columns
    assert joined["final_obs"].dtype == object and joined["final_obs"][2] is final_obs[1]
    assert [entry is None for entry in joined["final_obs"]] == [True, True, False, True, True]
    assert joined["_final_obs"].tolist() == [False, False, True, False, False]
    assert joined["final_info"]["r"].dtype == np.float32 and joined["final_info"]["r"].tolist() == [0, 0, 2.5, 0, 0]
    assert joined["_final_info"].dtype == bool


def test_what_has_no_rows_is_kept_from_the_first_that_has_it():
    tables = [InfoTable(1), InfoTable(1, {"version": "1"}), InfoTable(1, {"version": "2"})]
    assert InfoTable.join(tables).columns == {"version": "1"}
    assert InfoTable.join([]).columns == {}


def test_dtypes_without_a_common_one_become_objects():
    workers = [{"a": np.array(["2020-01-01"], "datetime64[D]")}, {"a": np.array([1.5])}]
    joined = InfoTable.join([InfoTable(1, worker) for worker in workers]).columns
    assert joined["a"].tolist() == [np.datetime64("2020-01-01"), 1.5]
