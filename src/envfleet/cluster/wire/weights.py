"""Weights on the wire: their digest, and float32 sent as bfloat16. Both ends use it."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import numpy as np

from envfleet.cluster.wire.codec import BadMessage
from envfleet.cluster.wire.messages import Weights
from envfleet.contract.arrays import Array


def unpacked(message: Weights, arrays: Mapping[str, Array]) -> dict[str, Array]:
    """The weights in a message."""
    halves = {name: arrays.get(name) for name in message.bfloat16}
    for name, array in halves.items():
        if array is None or array.dtype != np.uint16:
            raise BadMessage(f"array {name!r} must be uint16: it is said to be the upper halves of float32")
    return {**arrays, **{name: from_bfloat16(each) for name, each in halves.items() if each is not None}}


def digest(weights: Mapping[str, Array]) -> bytes:
    """The same for two sets of weights only if they have the same names, dtypes, shapes and bits."""
    hashed = hashlib.blake2b(digest_size=16)
    for name in sorted(weights):
        array = np.ascontiguousarray(weights[name])
        hashed.update(f"{name}\0{array.dtype.str}{np.shape(weights[name])}\0".encode())
        hashed.update(array.reshape(-1).view(np.uint8).data)
    return hashed.digest()


def to_bfloat16(array: Array) -> Array:
    """The upper halves of float32, rounded to the nearest, ties to even."""
    bits = np.ascontiguousarray(array, np.float32).reshape(-1).view(np.uint32)
    rounded = (bits + (np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1)))) >> np.uint32(16)
    quiet_nan = (bits >> np.uint32(16)) | np.uint32(0x0040)
    is_nan = (bits & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000)
    return np.where(is_nan, quiet_nan, rounded).astype(np.uint16).reshape(np.shape(array))


def from_bfloat16(halves: Array) -> Array:
    """Return values that travelled as bfloat16 as float32."""
    return (halves.astype(np.uint32) << np.uint32(16)).view(np.float32)
