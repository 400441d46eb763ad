"""Versions: what is published is a copy, gets a number, and is encoded once; the same again is no news."""

import numpy as np
import pytest

from envfleet.cluster.codec import Decoder
from envfleet.cluster.messages import FromHead
from envfleet.cluster.values_wire import NotPlain, from_plain
from envfleet.cluster.weights import Versions
from envfleet.contract.policy import PolicyCode

CODE = PolicyCode(factory="package.module:Agent", kwargs={"sizes": (1, 2)})


def decoded(frames):
    message, arrays = Decoder(FromHead).decode([bytes(frame) for frame in frames])
    return message, {name: array.copy() for name, array in arrays.items()}


@pytest.fixture
def versions():
    made = Versions()
    made.set_code(CODE)
    return made


def test_at_first_there_is_nothing():
    versions = Versions()
    assert (versions.version, versions.code_id) == (0, 0)
    assert versions.weight_frames() is None
    assert versions.code_frames() is None


def test_code_by_path_has_no_pickle(versions):
    assert versions.code_id == 1
    message, arrays = decoded(versions.code_frames())
    assert (message.code_id, message.factory, from_plain(message.kwargs)) == (1, CODE.factory, {"sizes": (1, 2)})
    assert not arrays


def test_pickled_code_is_one_array():
    versions = Versions()
    versions.set_code(PolicyCode(pickled=b"abc"))
    message, arrays = decoded(versions.code_frames())
    assert message.factory is None
    assert arrays["pickled"].tobytes() == b"abc"


def test_arguments_must_be_plain():
    versions = Versions()
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


def test_frames_are_encoded_once(versions):
    versions.publish({"a": np.ones(3)})
    assert versions.weight_frames() is versions.weight_frames()
