"""Messages survive the wire; whatever else comes is refused by name."""

import sys
import tracemalloc

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from numpy.testing import assert_array_equal

from envfleet.cluster.wire.codec import DTYPES, BadMessage, Decoder, encode
from envfleet.cluster.wire.messages import FromWorker, Limits, RowsReady
from envfleet.contract.errors import MissingExtra, UsageError


class Hello(msgspec.Struct, frozen=True, tag="hello"):
    name: str
    number: int


class Bye(msgspec.Struct, frozen=True, tag="bye"):
    pass


decoder = Decoder(Hello | Bye)
array_shapes = hnp.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=4)
any_array = st.sampled_from(list(DTYPES)).flatmap(lambda dtype: hnp.arrays(dtype, array_shapes))


def _wire(frames):
    return [bytes(memoryview(frame).cast("B")) if memoryview(frame).nbytes else b"" for frame in frames]


@given(
    st.text(max_size=20), st.integers(-(2**63), 2**63 - 1), st.dictionaries(st.text(max_size=9), any_array, max_size=4)
)
def test_what_is_sent_arrives(name, number, arrays):
    message, received = decoder.decode(_wire(encode(Hello(name, number), arrays)))
    assert message == Hello(name, number)
    assert list(received) == list(arrays)
    for key, array in arrays.items():
        assert received[key].dtype == array.dtype and received[key].shape == array.shape
        assert_array_equal(received[key], array)


def test_contiguous_arrays_are_not_copied():
    array = np.arange(12_000.0).reshape(3, 4000)
    frames = encode(Bye(), {"a": array})
    assert np.shares_memory(frames[1], array)
    _, received = decoder.decode([bytes(frames[0]), memoryview(frames[1])])
    assert np.shares_memory(received["a"], array)
    with pytest.raises(ValueError, match="read-only"):
        received["a"][0, 0] = 1


def test_other_layouts_are_sent_as_their_values():
    array = np.arange(12).reshape(3, 4)
    arrays = {"columns": array.T, "every other": array[::2], "big": array.astype(">i4")}
    _, received = decoder.decode(_wire(encode(Bye(), arrays)))
    for key, expected in arrays.items():
        assert_array_equal(received[key], expected)


@given(st.lists(st.binary(max_size=60), max_size=4))
def test_noise_is_refused(frames):
    with pytest.raises(BadMessage):
        decoder.decode(frames)


@given(st.data())
def test_a_damaged_message_is_refused_or_still_a_message(data):
    frames = _wire(encode(Hello("x", 1), {"a": np.zeros((2, 3), np.float32), "b": np.zeros(4, np.uint8)}))
    which = data.draw(st.integers(0, len(frames) - 1))
    damaged = bytearray(frames[which])
    for _ in range(data.draw(st.integers(1, 3))):
        kind = data.draw(st.sampled_from(["change", "drop", "add"]))
        place = data.draw(st.integers(0, max(len(damaged) - 1, 0)))
        if kind == "change" and damaged:
            damaged[place] = data.draw(st.integers(0, 255))
        elif kind == "drop" and damaged:
            del damaged[place]
        else:
            damaged.insert(place, data.draw(st.integers(0, 255)))
    frames[which] = bytes(damaged)
    try:
        message, arrays = decoder.decode(frames)
    except BadMessage:
        return
    assert isinstance(message, Hello | Bye) and sum(array.nbytes for array in arrays.values()) < 1000


def _forged(*headers):
    return msgspec.msgpack.encode((Bye(), headers))


@pytest.mark.parametrize(
    ("frames", "words"),
    [
        ([], "at least one frame"),
        ([b"x" * 2000], "a header of 2000 bytes"),
        ([b""] * 9, "8 arrays; at most 4"),
        ([_forged(*((str(index), "int8", (1,), False, b"y") for index in range(5)))], "5 arrays; at most 4"),
        ([_forged(("a", "int8", (2,), False, b"y"))], "takes 2 bytes; 1 came"),
        ([_forged(("a", "int8", (1,), False, b"y")), b"y"], "tells of 0 frames; 1 came"),
        ([_forged(), b"y" * 7_000, b"y" * 7_000], "at most 10000 are allowed"),
        ([_forged(), b"y" * 9_000], "a frame of 9000 bytes"),
        ([_forged(), b"y"], "tells of 0 frames; 1 came"),
        ([_forged(("a", "int8", (1,)), ("a", "int8", (1,))), b"y", b"y"], "'a' comes twice"),
        ([_forged(("a", "object", (1,))), b"y"], "dtype 'object'"),
        ([_forged(("a", "V8", (1,))), b"yyyyyyyy"], "dtype 'V8'"),
        ([_forged(("a", "int8", (-1,))), b"y"], ">= 0"),
        ([_forged(("a", "int8", (1,) * 20)), b"y"], "shape"),
        ([_forged(("a", "int64", (2**62, 2**62))), b"y"], "takes .* bytes; 1 came"),
        ([_forged(("a", "int64", (0, 2**62))), b""], "shape .* too big"),
        ([_forged(("a", "int64", (0, 2**62))), b"y"], "takes 0 bytes; 1 came"),
    ],
)
def test_lies_are_refused_by_name(frames, words):
    strict = Decoder(Hello | Bye, Limits(header_bytes=1000, num_arrays=4, frame_bytes=8_000, total_bytes=10_000))
    with pytest.raises(BadMessage, match=words):
        strict.decode(frames)


def test_what_the_wire_does_not_know_is_not_sent():
    with pytest.raises(UsageError, match="dtype object"):
        encode(Bye(), {"a": np.array([None])})
    with pytest.raises(UsageError, match="dtype complex128"):
        encode(Bye(), {"a": np.zeros(2, complex)})


def test_frames_of_zeromq_are_read_where_they_are():
    zmq = pytest.importorskip("zmq")
    frames = [zmq.Frame(frame) for frame in _wire(encode(Bye(), {"a": np.arange(5000.0), "b": np.zeros((0, 2))}))]
    _, received = decoder.decode(frames)
    assert np.shares_memory(received["a"], np.frombuffer(frames[1].buffer, np.uint8))
    assert_array_equal(received["a"], np.arange(5000.0))
    assert received["b"].shape == (0, 2)


def test_arrays_are_aligned_and_cannot_be_written():
    raw = memoryview(bytearray(b"x" + np.arange(3.0).tobytes()))[1:]
    _, received = decoder.decode([_forged(("a", "float64", (3,))), raw])
    assert received["a"].flags.aligned and not received["a"].flags.writeable
    assert received["a"].tolist() == [0, 1, 2]


# -- compression --

IMAGE = np.zeros((4, 64, 64), np.uint8)


def test_images_are_compressed_and_small_or_dense_arrays_are_not():
    noise = np.random.default_rng(0).integers(0, 256, (128, 64), np.uint8)
    arrays = {"image": IMAGE, "small": IMAGE[0, 0], "floats": np.zeros(9999), "noise": noise, "columns": IMAGE.T}
    frames = _wire(encode(Bye(), arrays, "zstd"))
    assert [len(frame) < 100 for frame in frames[1:]] == [True, False, False, True]  # `small` is in the header
    assert len(frames[3]) == noise.nbytes
    _, received = decoder.decode(frames)
    for key, expected in arrays.items():
        assert_array_equal(received[key], expected)
        assert not received[key].flags.writeable


def _zstd(raw, **options):
    return pytest.importorskip("zstandard").ZstdCompressor(**options).compress(raw)


@pytest.mark.parametrize(
    ("shape", "frame", "words"),
    [
        ((4096,), _zstd(bytes(4095)), "does not unpack to the 4096 bytes"),
        ((4096,), _zstd(bytes(50_000_000)), "does not unpack to the 4096 bytes"),
        ((4096,), _zstd(bytes(4096), write_content_size=False), "does not unpack to the 4096 bytes"),
        ((4096,), _zstd(bytes(range(256)) * 16)[:-4], "does not unpack"),
        ((4096,), b"noise", "does not unpack"),
        ((4096,), b"", "does not unpack"),
        ((60_000,), _zstd(bytes(60_000)), "would unpack to 60000 bytes"),
        ((2**50,), _zstd(bytes(4096)), "would unpack to"),
        ((-4096,), _zstd(bytes(4096)), ">= 0"),
    ],
)
def test_bombs_are_refused(shape, frame, words):
    strict = Decoder(Hello | Bye, Limits(frame_bytes=50_000))
    tracemalloc.start()
    try:
        with pytest.raises(BadMessage, match=words):
            strict.decode([_forged(("a", "uint8", shape, True)), frame])
        assert tracemalloc.get_traced_memory()[1] < 500_000
    finally:
        tracemalloc.stop()


def test_many_packed_arrays_do_not_unpack_to_more_than_a_message_may_have():
    strict = Decoder(Hello | Bye, Limits(total_bytes=100_000))
    frames = encode(Bye(), {str(index): np.zeros(40_000, np.uint8) for index in range(3)}, "zstd")
    with pytest.raises(BadMessage, match=r"'2' .* would unpack to 40000 bytes"):
        strict.decode(frames)


def test_unknown_compression_is_refused():
    with pytest.raises(UsageError, match="'lz4'; known: zstd"):
        encode(Bye(), {"a": IMAGE}, "lz4")


def test_without_zstandard_the_extra_is_named(monkeypatch):
    frames = encode(Bye(), {"a": IMAGE}, "zstd")
    monkeypatch.setitem(sys.modules, "zstandard", None)
    with pytest.raises(MissingExtra, match=r"pip install 'envfleet\[zstd\]'"):
        encode(Bye(), {"a": IMAGE}, "zstd")
    with pytest.raises(BadMessage, match=r"pip install 'envfleet\[zstd\]'"):
        decoder.decode(frames)


# -- fuzz: only BadMessage comes out, and little is allocated --


def _decode_or_refuse(real_decoder, frames):
    """Decode within a budget of memory."""
    num_bytes = sum(map(len, frames))
    tracemalloc.start()
    try:
        real_decoder.decode(frames)
    except BadMessage:
        pass
    finally:
        peak_bytes = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peak_bytes < 300_000 + 100 * num_bytes, f"{peak_bytes} bytes for {num_bytes}"


from_worker = Decoder(FromWorker, Limits(frame_bytes=1 << 20, total_bytes=1 << 21))
VALID = _wire(
    encode(
        RowsReady(7, {"a": ["list", 1, 2.5, None], "b": ["array", "int8", [2], b"xy"]}),
        {"obs": np.zeros((2, 3), np.float32), "image": np.zeros((2, 64, 64), np.uint8), "done": np.zeros(2, bool)},
        "zstd",
    )
)

mutations = st.tuples(
    st.sampled_from(["flip", "flip", "cut", "grow", "drop", "twice", "swap", "lengths"]),
    st.integers(0, len(VALID)),
    st.integers(0, 4000),
    st.integers(0, 255),
)


def _mutate(frames, kind, which, place, byte):
    if not frames:
        return frames
    which %= len(frames)
    frame = bytearray(frames[which])
    place %= len(frame) + 1
    if kind == "flip" and place < len(frame):
        frame[place] ^= 1 << byte % 8
    elif kind == "cut":
        del frame[place:]
    elif kind == "grow":
        frame[place:place] = bytes([byte]) * (byte % 9)
    elif kind == "lengths":  # claims of enormous lists, maps, texts and extensions
        frame[place : place + 5] = bytes([(0xDD, 0xDF, 0xDB, 0xC6, 0xC9)[byte % 5]]) + b"\x7f\xff\xff\xff"
    changed = [*frames[:which], bytes(frame), *frames[which + 1 :]]
    if kind == "drop":
        del changed[which]
    elif kind == "twice":
        changed.insert(which, changed[which])
    elif kind == "swap":
        changed[0], changed[which] = changed[which], changed[0]
    return changed


@settings(max_examples=500)
@given(st.lists(mutations, min_size=1, max_size=4))
def test_mutated_messages_are_messages_or_refused(steps):
    frames = VALID
    for step in steps:
        frames = _mutate(frames, *step)
    _decode_or_refuse(from_worker, frames)


dims = st.one_of(st.integers(-3, 5), st.sampled_from([2**31, 2**32, 2**62, 2**63 - 1, 2**64 - 1, -(2**63)]))
names = st.sampled_from([*DTYPES, "object", "O", "V8", "<f4", "float128", "datetime64", ""])
inline = st.none() | st.binary(max_size=9)
header_fields = st.tuples(st.sampled_from(["a", "b", ""]), names, st.lists(dims, max_size=5), st.booleans(), inline)


@settings(max_examples=500)
@given(st.lists(st.tuples(header_fields, st.binary(max_size=40)), max_size=4))
def test_forged_array_headers_are_true_or_refused(pairs):
    frames = [_forged(*(header for header, _ in pairs)), *(frame for header, frame in pairs if header[-1] is None)]
    _decode_or_refuse(decoder, frames)


@settings(max_examples=300)
@given(st.lists(st.one_of(st.binary(max_size=200), st.sampled_from(VALID)), max_size=5))
def test_random_frames_are_refused(frames):
    _decode_or_refuse(from_worker, frames)


@pytest.mark.parametrize(
    "arrays",
    [
        b"\xdd\x00\x10\x00\x00" + b"\x93\xa0\xa0\x90" * (1 << 20),  # a million arrays
        b"\x91\x93\xa0\xa0\xdd\x00\x40\x00\x00" + b"\x01" * (4 << 20),  # one of four million dimensions
    ],
)
def test_long_lists_of_arrays_are_refused_before_they_are_made(arrays):
    header = b"\x92" + msgspec.msgpack.encode(Bye()) + arrays
    tracemalloc.start()
    try:
        with pytest.raises(BadMessage, match="length <="):
            decoder.decode([header])
        assert tracemalloc.get_traced_memory()[1] < 500_000
    finally:
        tracemalloc.stop()


def test_a_value_of_any_form_stays_bytes():
    """What becomes of it is bounded by who reads it: four million empty dictionaries would take 300 MB."""
    bomb = msgspec.Raw(b"\xdd\x00\x40\x00\x00" + b"\x80" * (4 << 20))
    frames = encode(RowsReady(1, bomb))
    tracemalloc.start()
    try:
        message, _ = Decoder(FromWorker).decode(frames)
        assert tracemalloc.get_traced_memory()[1] < 500_000
    finally:
        tracemalloc.stop()
    assert message.info == bomb


DEEP = [b"\x91", b"\x81\xa1a", b"\xdc\xff\xff", b"\xdd\x7f\xff\xff\xff", b"\xde\xff\xff\xa1a"]


@pytest.mark.parametrize("opening", DEEP)
@pytest.mark.parametrize("depth", [10, 900, 100_000])
def test_deep_nesting_is_refused(opening, depth):
    header = b"\x92\x83\xa4type\xaarows_ready\xa5order\x01\xa4info" + opening * depth
    with pytest.raises(BadMessage):
        from_worker.decode([header])
    _decode_or_refuse(from_worker, [header])


@pytest.mark.parametrize("length", [b"\xdd\xff\xff\xff\xff", b"\xdc\xff\xff", b"\xdf\xff\xff\xff\xff"])
def test_a_long_list_that_does_not_come_takes_no_memory(length):
    """msgspec trusts a claimed length only as far as the bytes go; if it did not, 4 bytes would take 32 GB."""
    _decode_or_refuse(from_worker, [b"\x92\x83\xa4type\xaarows_ready\xa5order\x01\xa4info" + length])
    _decode_or_refuse(from_worker, [msgspec.msgpack.encode([Bye()])[:-1] + length])
    _decode_or_refuse(from_worker, [msgspec.msgpack.encode((RowsReady(1, None), []))[:-1] + length])
