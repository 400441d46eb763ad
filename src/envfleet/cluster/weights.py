"""Versions: the policy that the head holds for its workers: its code, and its newest weights, encoded once. Pure."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from envfleet.cluster.codec import DTYPES, NAME_OF, BadMessage, encode
from envfleet.cluster.messages import Code, Weights
from envfleet.cluster.values_wire import to_plain
from envfleet.contract.errors import UsageError
from envfleet.contract.policy import PolicyCode

Array = np.ndarray[Any, Any]
Frames = list[Any]

LEAST_BFLOAT16 = 256  # numbers in an array: less is not worth its precision


class Versions:
    """The newest policy. Both numbers only grow: a worker that holds others knows that it is behind."""

    def __init__(self, is_bfloat16: bool = False) -> None:
        """Nothing is published yet. `is_bfloat16`: large float32 arrays travel with half their bits."""
        self.code_id = 0
        self.version = 0
        self._is_bfloat16 = is_bfloat16
        self._weights: dict[str, Array] = {}
        self._code_frames: Frames = []
        self._is_published = False
        self._weight_frames: Frames = []  # empty until somebody asks for them

    def set_code(self, code: PolicyCode) -> None:
        """Another policy from now on; weights must follow."""
        self.code_id += 1
        message = Code(code_id=self.code_id, factory=code.factory, kwargs=to_plain(dict(code.kwargs)))
        arrays = {} if code.pickled is None else {"pickled": np.frombuffer(code.pickled, np.uint8)}
        self._code_frames, self._weight_frames = encode(message, arrays), []
        self._is_published = False

    def publish(self, weights: Mapping[str, Array]) -> bool:
        """New weights, which are copied: the learner goes on changing its own. False: they are what they were."""
        given = {name: np.asarray(array) for name, array in weights.items()}
        wrong = [f"{name} ({array.dtype})" for name, array in given.items() if array.dtype not in NAME_OF]
        if wrong:
            raise UsageError(f"weights of these dtypes cannot be sent: {', '.join(wrong)}; known: {', '.join(DTYPES)}")
        if self._is_published and _are_equal(self._weights, given):
            return False
        self.version += 1
        self._weights = {name: np.array(array, order="C") for name, array in given.items()}
        self._weight_frames = []
        self._is_published = True
        return True

    def code_frames(self) -> Frames | None:
        """The message with the code; None: nothing is published."""
        return self._code_frames or None

    def weight_frames(self) -> Frames | None:
        """The message with the newest weights, the same one for all who ask; None: nothing is published."""
        if self._is_published and not self._weight_frames:
            self._weight_frames = self._encoded()
        return self._weight_frames or None

    def _encoded(self) -> Frames:
        halves = {name: to_bfloat16(each) for name, each in self._weights.items() if self._is_halved(each)}
        sent = {**self._weights, **halves}
        held = {**self._weights, **{name: from_bfloat16(each) for name, each in halves.items()}}
        message = Weights(version=self.version, code_id=self.code_id, digest=digest(held), bfloat16=list(halves))
        return encode(message, sent)

    def _is_halved(self, array: Array) -> bool:
        return self._is_bfloat16 and array.dtype == np.float32 and array.size >= LEAST_BFLOAT16


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
    """As float32."""
    return (halves.astype(np.uint32) << np.uint32(16)).view(np.float32)


def _are_equal(held: Mapping[str, Array], given: Mapping[str, Array]) -> bool:
    """Bit for bit."""
    return held.keys() == given.keys() and all(
        array.dtype == given[name].dtype
        and array.shape == given[name].shape
        and np.array_equal(
            array.reshape(-1).view(np.uint8), np.ascontiguousarray(given[name]).reshape(-1).view(np.uint8)
        )
        for name, array in held.items()
    )
