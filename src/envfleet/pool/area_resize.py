"""AreaResize: makes images smaller, each new pixel the mean of the area it stands for. For images of any size.

(Atari's screens have native/imaging, which is faster, and limited to their size.)
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]


class AreaResize:
    """From one size to another that is not larger either way. Sums are whole numbers: the mean is exact, and rounded
    half to even. OpenCV's INTER_AREA is the same but for single pixels half-way between two values.
    """

    def __init__(self, from_size: tuple[int, int], to_size: tuple[int, int]) -> None:
        """Sizes are (height, width)."""
        self._rows = _taps(from_size[0], to_size[0])
        self._columns = _taps(from_size[1], to_size[1])
        self._area = _cell_units(from_size[0], to_size[0]) * _cell_units(from_size[1], to_size[1])

    def __call__(self, image: Array) -> Array:
        """`image` is [height, width, ...] of uint8."""
        sums = np.zeros((), np.int32)
        for sources, weights in self._rows:
            sums = sums + image[sources] * weights.reshape(-1, *(1,) * (image.ndim - 1))
        sums, rows = np.zeros((), np.int64), sums
        for sources, weights in self._columns:
            sums = sums + rows[:, sources] * weights.reshape(-1, *(1,) * (image.ndim - 2))
        resized: Array = np.rint(sums / self._area).astype(np.uint8)
        return resized


def _cell_units(num_from: int, num_to: int) -> int:
    """The length of a new pixel, in units of which an old one has `num_to / gcd`."""
    return num_from // math.gcd(num_from, num_to)


def _taps(num_from: int, num_to: int) -> list[tuple[Array, Array]]:
    """For the 1st, 2nd, ... old pixel under each new one: which it is, and how many units of it are covered."""
    cell, old = _cell_units(num_from, num_to), num_to // math.gcd(num_from, num_to)
    begins = np.arange(num_to) * cell
    first = begins // old
    taps = []
    for tap in range(-(-cell // old) + 1):
        source = first + tap
        covered = np.minimum((source + 1) * old, begins + cell) - np.maximum(source * old, begins)
        taps.append((np.minimum(source, num_from - 1), np.maximum(covered, 0).astype(np.int32)))
    return [(sources, weights) for sources, weights in taps if weights.any()]
