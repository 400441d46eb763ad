"""SpareArrays: large arrays that are used again, since fresh memory costs a page fault for each 4 kB."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

from envfleet.contract.arrays import Array

LEAST_BYTES = 1 << 20  # smaller ones are no trouble
MOST_KEPT = 8


def _num_own_references() -> int:
    """What getrefcount says of an array that only a list holds: interpreters differ."""
    for array in [np.empty(0)]:
        return sys.getrefcount(array)
    raise AssertionError("not reached")


NUM_OWN_REFERENCES = _num_own_references()


class SpareArrays:
    """Hands out arrays. One is free when nobody else refers to it: neither the outbox, nor ZeroMQ, nor a view of it."""

    def __init__(self) -> None:
        self._arrays: list[Array] = []

    def take(self, shape: tuple[int, ...], dtype: Any) -> Array:
        """An array with any content."""
        for array in self._arrays:
            if sys.getrefcount(array) == NUM_OWN_REFERENCES and array.shape == shape and array.dtype == dtype:
                return array
        made: Array = np.empty(shape, dtype)
        if made.nbytes >= LEAST_BYTES:
            self._arrays = [*self._arrays, made][-MOST_KEPT:]
        return made
