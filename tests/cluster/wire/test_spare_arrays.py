"""SpareArrays: memory is used again only when nobody refers to it."""

import numpy as np

from envfleet.cluster.wire.spare_arrays import MOST_KEPT, SpareArrays

LARGE = (3, 1 << 20)


def address(array):
    return array.__array_interface__["data"][0]


def test_an_array_that_nobody_holds_is_handed_out_again():
    spares = SpareArrays()
    where = address(spares.take(LARGE, np.uint8))
    assert address(spares.take(LARGE, np.uint8)) == where


def test_an_array_that_somebody_holds_is_not():
    spares = SpareArrays()
    first = spares.take(LARGE, np.uint8)
    assert address(spares.take(LARGE, np.uint8)) != address(first)
    where, view = address(first), first[1:].reshape(-1)
    del first
    assert address(spares.take(LARGE, np.uint8)) != where
    buffer = memoryview(view)
    del view
    assert address(spares.take(LARGE, np.uint8)) != where
    del buffer
    assert where in {address(each) for each in (spares.take(LARGE, np.uint8), spares.take(LARGE, np.uint8))}


def test_only_the_same_shape_and_dtype_is_used_again():
    spares = SpareArrays()
    where = address(spares.take(LARGE, np.uint8))
    assert address(spares.take(LARGE, np.int8)) != where
    assert spares.take((1 << 20, 3), np.uint8).shape == (1 << 20, 3)


def test_few_are_kept_and_small_ones_never():
    spares = SpareArrays()
    held = [spares.take(LARGE, np.uint8) for _ in range(2 * MOST_KEPT)]
    assert len({address(each) for each in held}) == 2 * MOST_KEPT
    assert len(spares._arrays) == MOST_KEPT
    small = SpareArrays()
    small.take((4,), np.uint8)
    assert small._arrays == []
