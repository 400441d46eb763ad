"""PolicyVersions: what is published is a copy, gets a number, and is encoded once; the same again is no news."""

import numpy as np
import pytest
import torch  # noqa: TID253 - its bfloat16 is the one to agree with

from envfleet.cluster.head import policy_versions
from envfleet.cluster.head.policy_versions import LEAST_BFLOAT16, PolicyVersions
from envfleet.cluster.wire.codec import BadMessage, Decoder
from envfleet.cluster.wire.messages import FromHead, Weights
from envfleet.cluster.wire.plain_values import NotPlain, from_plain
from envfleet.cluster.wire.weights import digest, from_bfloat16, to_bfloat16, unpacked
from envfleet.contract.errors import UsageError
from envfleet.contract.policy import PolicyCode

CODE = PolicyCode(factory="package.module:Agent", kwargs={"sizes": (1, 2)})


def decoded(frames):
    message, arrays = Decoder(FromHead).decode([bytes(frame) for frame in frames])
    return message, {name: array.copy() for name, array in arrays.items()}


@pytest.fixture
def versions():
    made = PolicyVersions()
    made.set_code(CODE)
    return made


def test_at_first_there_is_nothing():
    versions = PolicyVersions()
    assert (versions.version, versions.code_id) == (0, 0)
    assert versions.weight_frames() is None
    assert versions.code_frames() is None


def test_code_by_path_has_no_pickle(versions):
    assert versions.code_id == 1
    message, arrays = decoded(versions.code_frames())
    assert (message.code_id, message.factory, from_plain(message.kwargs)) == (1, CODE.factory, {"sizes": (1, 2)})
    assert not arrays


def test_pickled_code_is_one_array():
    versions = PolicyVersions()
    versions.set_code(PolicyCode(pickled=b"abc"))
    message, arrays = decoded(versions.code_frames())
    assert message.factory is None
    assert arrays["pickled"].tobytes() == b"abc"


def test_arguments_must_be_plain():
    versions = PolicyVersions()
    with pytest.raises(NotPlain):
        versions.set_code(PolicyCode(factory="a:b", kwargs={"object": object()}))


def test_versions_grow_only_with_news(versions):
    weights = {"a": np.arange(3, dtype=np.float32), "b": np.ones((2, 2))}
    assert versions.publish(weights) and versions.version == 1
    assert not versions.publish(weights) and versions.version == 1
    assert not versions.publish({"b": np.ones((2, 2)), "a": np.arange(3, dtype=np.float32)}), "in another order"
    weights["a"][1] = 7
    assert versions.publish(weights) and versions.version == 2
    message, arrays = decoded(versions.weight_frames())
    assert (message.version, message.code_id) == (2, 1)
    assert arrays.keys() == {"a", "b"} and arrays["a"].tolist() == [0, 7, 2] and arrays["a"].dtype == np.float32


DIFFERENT = {
    "value": {"a": np.array([1.0, 3.0])},
    "sign of zero": {"a": np.array([1.0, -0.0])},
    "dtype": {"a": np.array([1.0, 0.0], np.float32)},
    "same bytes, another dtype": {"a": np.array([1.0, 0.0]).view(np.int64)},
    "shape": {"a": np.array([[1.0, 0.0]])},
    "name": {"b": np.array([1.0, 0.0])},
    "one more": {"a": np.array([1.0, 0.0]), "b": np.zeros(1)},
    "one less": {},
    "a NaN": {"a": np.array([1.0, np.nan])},
}


@pytest.mark.parametrize("change", DIFFERENT)
def test_any_bit_is_news(versions, change):
    versions.publish({"a": np.array([1.0, 0.0])})
    assert versions.publish(DIFFERENT[change])
    assert not versions.publish(DIFFERENT[change]), "also a NaN equals itself"
    assert versions.version == 2


def test_no_weights_are_published_once(versions):
    assert versions.publish({}) and versions.version == 1
    assert not versions.publish({})
    assert decoded(versions.weight_frames())[1] == {}


def test_what_is_published_is_a_copy(versions):
    """The learner goes on changing its weights in place; workers that pull later get what was published."""
    weights = np.arange(4.0)
    versions.publish({"a": weights})
    weights[:] = -1
    assert decoded(versions.weight_frames())[1]["a"].tolist() == [0, 1, 2, 3]
    assert versions.publish({"a": weights})


def test_arrays_of_any_layout(versions):
    grid = np.arange(12, dtype=np.float32).reshape(3, 4)
    fortran, every_second = np.asfortranarray(grid), grid[:, ::2]
    read_only = np.arange(2)
    read_only.flags.writeable = False
    weights = {"f": fortran, "s": every_second, "t": grid.T, "r": read_only, "scalar": np.array(2.5), "none": grid[:0]}
    assert versions.publish(weights)
    arrays = decoded(versions.weight_frames())[1]
    for name, weight in weights.items():
        assert arrays[name].shape == weight.shape and arrays[name].dtype == weight.dtype
        np.testing.assert_array_equal(arrays[name], weight)
    assert not versions.publish({name: np.array(weight, order="C") for name, weight in weights.items()})


def test_other_code_needs_weights_of_its_own(versions):
    versions.publish({"a": np.ones(1)})
    versions.set_code(PolicyCode(factory="c:d"))
    assert versions.code_id == 2 and decoded(versions.code_frames())[0].code_id == 2
    assert versions.weight_frames() is None, "those of the other policy are not this one's"
    assert versions.publish({"a": np.ones(1)}), "the same arrays are news to the workers' new copy"
    assert versions.version == 2
    message, _ = decoded(versions.weight_frames())
    assert (message.version, message.code_id) == (2, 2)


def test_frames_are_encoded_once_for_each_version(versions, monkeypatch):
    num_encoded = 0
    encode = policy_versions.encode

    def counted(*arguments):
        nonlocal num_encoded
        num_encoded += 1
        return encode(*arguments)

    monkeypatch.setattr(policy_versions, "encode", counted)
    versions.publish({"a": np.ones(3)})
    assert num_encoded == 0, "nobody has asked"
    first = versions.weight_frames()
    assert versions.weight_frames() is first and num_encoded == 1
    versions.publish({"a": np.ones(3)})
    assert versions.weight_frames() is first, "no news"
    for number in range(5):
        versions.publish({"a": np.full(3, number)})
    assert num_encoded == 1, "nobody has asked for those between"
    second = versions.weight_frames()
    assert second is not first and versions.weight_frames() is second and num_encoded == 2
    assert decoded(first)[1]["a"].tolist() == [1, 1, 1], "a message on its way is not changed"


def test_frames_share_the_memory_of_the_published_weights(versions):
    """Megabytes are copied once, when they are published."""
    versions.publish({"a": np.ones(1 << 16)})
    one, two = (np.frombuffer(versions.weight_frames()[-1], np.uint8) for _ in range(2))
    assert np.shares_memory(one, two) and one.size == 8 << 16


# -- halves --


def bits_as_floats(*bits):
    return np.array(bits, np.uint32).view(np.float32)


NUMBERS = {
    "plain": np.array([0.0, -0.0, 1.0, -1.0, 3.14159265, 1e-3, -65504.0, 1e30], np.float32),
    "infinite": np.array([np.inf, -np.inf], np.float32),
    "nan": bits_as_floats(0x7FC00000, 0xFFC00000, 0x7F800001, 0xFF800001, 0x7FFFFFFF, 0xFFFFFFFF, 0x7F80FFFF),
    "ties go to even": bits_as_floats(0x3F808000, 0x3F818000, 0xBF808000, 0xBF818000, 0x00008000, 0x00018000),
    "beside ties": bits_as_floats(0x3F807FFF, 0x3F808001, 0x3F817FFF, 0x3F818001),
    "denormal": bits_as_floats(0x00000001, 0x00007FFF, 0x00008001, 0x007FFFFF, 0x807FFFFF, 0x00400000),
    "carries": bits_as_floats(0x3FFFFFFF, 0x3FFF8000, 0x007FFFFF, 0x7F7F7FFF),
    "over the largest": bits_as_floats(0x7F7FFFFF, 0xFF7FFFFF, 0x7F7F8000, 0xFF7F8000),
    "many": np.random.default_rng(0).integers(0, 2**32, 100_000, np.uint32).view(np.float32),
    "none": np.zeros(0, np.float32),
}


@pytest.mark.parametrize("kind", NUMBERS)
def test_halves_are_rounded_as_torch_rounds(kind):
    numbers = NUMBERS[kind]
    expected = torch.from_numpy(numbers).to(torch.bfloat16).float().numpy()
    halves = to_bfloat16(numbers)
    got = from_bfloat16(halves)
    assert halves.dtype == np.uint16 and got.dtype == np.float32
    is_nan = np.isnan(numbers)
    np.testing.assert_array_equal(np.isnan(got), is_nan)
    np.testing.assert_array_equal(got[~is_nan].view(np.uint32), expected[~is_nan].view(np.uint32))
    np.testing.assert_array_equal(to_bfloat16(got), halves, "rounded once, it stays")


@pytest.mark.parametrize("shape", [(), (3,), (2, 3), (4, 0), (2, 1, 5)])
def test_halves_have_the_same_shape(shape):
    numbers = np.random.default_rng(0).standard_normal(shape, np.float32)
    assert to_bfloat16(numbers).shape == from_bfloat16(to_bfloat16(numbers)).shape == shape
    if len(shape) > 1:
        np.testing.assert_array_equal(to_bfloat16(numbers.T), to_bfloat16(numbers).T)


def test_only_large_float32_travels_as_halves():
    versions = PolicyVersions(is_bfloat16=True)
    versions.set_code(CODE)
    random = np.random.default_rng(0)
    weights = {
        "large": random.standard_normal((LEAST_BFLOAT16 // 2, 2)).astype(np.float32),
        "small": random.standard_normal(LEAST_BFLOAT16 - 1).astype(np.float32),
        "double": random.standard_normal(1000),
        "whole": random.integers(0, 9, 1000),
    }
    versions.publish(weights)
    message, arrays = decoded(versions.weight_frames())
    assert message.bfloat16 == ["large"]
    assert {name: array.dtype.str[1:] for name, array in arrays.items()} == {
        "large": "u2", "small": "f4", "double": "f8", "whole": "i8",
    }  # fmt: skip
    held = unpacked(message, arrays)
    assert digest(held) == message.digest
    for name in ("small", "double", "whole"):
        np.testing.assert_array_equal(held[name], weights[name])
    rounded = torch.from_numpy(weights["large"]).to(torch.bfloat16).float().numpy()
    np.testing.assert_array_equal(held["large"], rounded)
    assert not np.array_equal(held["large"], weights["large"])


def test_without_halves_nothing_is_rounded(versions):
    weights = {"large": np.random.default_rng(0).standard_normal(1000).astype(np.float32)}
    versions.publish(weights)
    message, arrays = decoded(versions.weight_frames())
    assert message.bfloat16 == [] and message.digest == digest(weights)
    np.testing.assert_array_equal(unpacked(message, arrays)["large"], weights["large"])


def test_a_change_too_small_for_halves_is_news_all_the_same():
    versions = PolicyVersions(is_bfloat16=True)
    versions.set_code(CODE)
    weights = np.ones(1000, np.float32)
    versions.publish({"a": weights})
    weights[0] = np.nextafter(np.float32(1), np.float32(2))
    assert versions.publish({"a": weights}) and versions.version == 2


@pytest.mark.parametrize(
    "arrays",
    [{}, {"b": np.zeros(3, np.uint16)}, {"a": np.zeros(3, np.float32)}, {"a": np.zeros(3, np.int16)},
     {"a": np.zeros(3, np.uint32)}],
    ids=["none", "another name", "float32", "int16", "uint32"],
)  # fmt: skip
def test_halves_that_are_none(arrays):
    with pytest.raises(BadMessage, match=r"'a' must be uint16"):
        unpacked(Weights(version=1, code_id=1, digest=b"", bfloat16=["a"]), arrays)


# -- digests --


def test_digests_of_equal_weights_are_equal():
    grid = np.arange(12, dtype=np.float32).reshape(3, 4)
    weights = {"a": grid, "b": np.array(2.5), "c": np.zeros((0, 4))}
    expected = digest(weights)
    assert len(expected) == 16
    assert digest(dict(reversed(weights.items()))) == expected, "in another order"
    assert digest({**weights, "a": np.asfortranarray(grid)}) == expected, "in another layout"
    assert digest({name: array.copy() for name, array in weights.items()}) == expected


@pytest.mark.parametrize("change", DIFFERENT)
def test_digests_of_different_weights_differ(change):
    assert digest(DIFFERENT[change]) != digest({"a": np.array([1.0, 0.0])})


def test_digests_know_where_an_array_ends():
    one, two = np.array([1.0]), np.array([2.0])
    different = [
        {"a": one, "b": two}, {"a": two, "b": one}, {"a": np.array([1.0, 2.0]), "b": np.zeros(0)},
        {"a": np.array(1.0), "b": two}, {"ab": one, "": two}, {"a": one[:, None], "b": two},
    ]  # fmt: skip
    assert len({digest(each) for each in different}) == len(different)


@pytest.mark.parametrize("weight", [np.zeros(2, np.complex64), np.array(["a"]), np.array([None])])
def test_weights_that_cannot_be_sent_are_refused_at_once(versions, weight):
    with pytest.raises(UsageError, match=r"cannot be sent: odd \("):
        versions.publish({"odd": weight})


def test_plain_numbers_are_weights_too(versions):
    versions.set_code(PolicyCode(factory="a:b"))
    assert versions.publish({"epsilon": 0.1})
    assert not versions.publish({"epsilon": 0.1})
    assert versions.publish({"epsilon": 0.2})
