"""Stacks of frames arrive bit by bit as they were, whatever they hold; arrays that do not fit are refused."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.testing import assert_array_equal

from envfleet.cluster.wire.codec import BadMessage
from envfleet.cluster.wire.rollouts.stacks import is_stack, pack, pack_finals, unpack, unpack_finals

FRAME = (16, 17)


def _stacks(num_times, num_envs, num_frames, resets=(), frame=FRAME, dtype=np.uint8, seed=0):
    """Rows as frame stacking makes them; a reset at (time, env) fills the stack with its first frame."""
    rng = np.random.default_rng(seed)
    stacks = np.empty((num_times, num_envs, num_frames, *frame), dtype)
    for time in range(num_times):
        new = rng.integers(0, 256, (num_envs, *frame)).astype(dtype)
        for env in range(num_envs):
            if time == 0 or (time, env) in resets:
                stacks[time, env] = new[env]
            else:
                stacks[time, env, :-1] = stacks[time - 1, env, 1:]
                stacks[time, env, -1] = new[env]
    return stacks


def _bits(array):
    return np.ascontiguousarray(array).view(np.uint8)


def _assert_arrives(stacks):
    arrays = pack("obs", stacks)
    assert arrays is not None
    assert sum(array.nbytes for array in arrays.values()) <= stacks.nbytes * 0.7
    wider = np.full((stacks.shape[0], stacks.shape[1] + 2, *stacks.shape[2:]), 7, stacks.dtype)
    unpack("obs", arrays, wider[:, 1:-1])
    assert_array_equal(_bits(wider[:, 1:-1]), _bits(stacks))
    assert (wider[:, 0] == 7).all() and (wider[:, -1] == 7).all()
    return arrays


@given(
    st.integers(6, 12),
    st.integers(1, 4),
    st.integers(3, 5),
    st.sets(st.tuples(st.integers(1, 11), st.integers(0, 3)), max_size=1),
    st.sampled_from([np.uint8, np.float32, np.int16]),
)
def test_stacks_arrive_as_they_were(num_times, num_envs, num_frames, resets, dtype):
    stacks = _stacks(num_times, num_envs, num_frames, resets, frame=(32, 17), dtype=dtype)
    arrays = _assert_arrives(stacks)
    assert len(arrays["obs/whole"]) == len([1 for time, env in resets if time < num_times and env < num_envs])


@given(st.data())
def test_a_single_changed_value_arrives(data):
    stacks = _stacks(9, 3, 4, frame=(8, 33))
    for _ in range(data.draw(st.integers(1, 2))):
        place = tuple(data.draw(st.integers(0, size - 1)) for size in stacks.shape)
        stacks[place] ^= 1
    if (arrays := pack("obs", stacks)) is not None:
        out = np.zeros_like(stacks)
        unpack("obs", arrays, out)
        assert_array_equal(out, stacks)


def test_bits_count_not_values():
    stacks = _stacks(8, 2, 4, dtype=np.float32)
    stacks[3:, 0, :] = 0.0
    stacks[5, 0, 1, 0, 0] = -0.0  # equal in value to what it replaces
    stacks[:, 1] = np.nan
    arrays = _assert_arrives(stacks)
    assert (arrays["obs/whole_at"] % 2 == 0).all()


def test_rows_of_other_layouts_are_packed():
    stacks = _stacks(8, 6, 4, resets={(3, 1), (5, 4), (5, 0)})
    _assert_arrives(stacks[:, ::2])
    _assert_arrives(np.asfortranarray(stacks))
    _assert_arrives(_stacks(8, 6, 4, frame=(32, 34))[..., ::2])


@pytest.mark.parametrize(
    "stacks",
    [
        np.zeros((9, 4, 4), np.uint8),
        np.zeros((9, 4, 1, 84, 84), np.uint8),
        np.zeros((9, 4, 17, 84, 84), np.uint8),
        np.zeros((9, 4, 4, 5, 5), np.uint8),
        np.zeros((1, 4, 4, 84, 84), np.uint8),
        np.zeros((9, 0, 4, 84, 84), np.uint8),
        np.random.default_rng(0).integers(0, 256, (9, 4, 3, 40, 40), np.uint8),
        _stacks(4, 2, 4, resets={(1, 0), (1, 1), (2, 0)}),
    ],
)
def test_what_saves_too_little_is_left_alone(stacks):
    assert pack("obs", stacks) is None


def test_which_leaves_may_be_stacks():
    assert is_stack((4, 84, 84), np.uint8) and is_stack((4, 300), np.float32) and is_stack((2, 84, 84, 3), np.uint8)
    assert not is_stack((84,), np.uint8) and not is_stack((210, 160, 3), np.uint8) and not is_stack((4, 8), np.float64)
    assert not is_stack((4, 84, 84), np.complex64)


@given(st.integers(1, 9), st.sets(st.integers(0, 8), max_size=2))
def test_final_stacks_arrive_as_they_were(num_finals, whole):
    before, finals = _stacks(2, num_finals, 4, resets={(1, row) for row in whole})
    arrays = pack_finals("final", finals, before)
    if arrays is None:
        assert len([row for row in whole if row < num_finals]) > num_finals * 0.4
        return
    assert_array_equal(unpack_finals("final", arrays, before), finals)


@pytest.mark.parametrize("finals", [np.zeros((0, 4, 84, 84), np.uint8), np.zeros((3, 4), np.uint8)])
def test_no_finals_are_left_alone(finals):
    assert pack_finals("final", finals, finals) is None


def _changes():
    arrays = pack("obs", _stacks(8, 3, 4, resets={(2, 1), (5, 0)}))
    for part, array in arrays.items():
        yield {key: value for key, value in arrays.items() if key != part}
        yield arrays | {part: array[:-1]}
        yield arrays | {part: array.astype(np.float64)}
        yield arrays | {part: array[..., None]}
        yield arrays | {part: array.reshape(-1)[:0]}
        yield arrays | {part: np.array(array.reshape(-1)[0])}
    whole_at = arrays["obs/whole_at"]
    for wrong in ([15, 7], [7, 7], [2, 15], [-1, 15], [7, 24], [7, 2**40]):
        yield arrays | {"obs/whole_at": np.array(wrong, whole_at.dtype)}


@pytest.mark.parametrize("arrays", list(_changes()))
def test_arrays_that_do_not_fit_are_refused(arrays):
    with pytest.raises(BadMessage, match="obs/"):
        unpack("obs", arrays, np.zeros((8, 3, 4, *FRAME), np.uint8))


def test_finals_that_do_not_fit_are_refused():
    before, finals = _stacks(2, 4, 4, resets={(1, 2)})
    arrays = pack_finals("final", finals, before)
    for changed in (
        {},
        arrays | {"final/whole_at": np.array([4])},
        arrays | {"final/whole_at": np.array([-1])},
        arrays | {"final/newest": before},
        arrays | {"final/whole": finals},
    ):
        with pytest.raises(BadMessage, match="final/"):
            unpack_finals("final", changed, before)
