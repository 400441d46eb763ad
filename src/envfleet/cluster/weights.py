"""Versions: the policy that the head holds for its workers: its code, and its newest weights, encoded once. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from envfleet.cluster.codec import encode
from envfleet.cluster.messages import Code, Weights
from envfleet.cluster.values_wire import to_plain
from envfleet.contract.policy import PolicyCode

Array = np.ndarray[Any, Any]
Frames = list[Any]


class Versions:
    """The newest policy. Both numbers only grow: a worker that holds others knows that it is behind."""

    def __init__(self) -> None:
        """Nothing is published yet."""
        self.code_id = 0
        self.version = 0
        self._weights: dict[str, Array] = {}
        self._code_frames: Frames = []
        self._weight_frames: Frames = []

    def set_code(self, code: PolicyCode) -> None:
        """Another policy from now on; weights must follow."""
        self.code_id += 1
        message = Code(code_id=self.code_id, factory=code.factory, kwargs=to_plain(dict(code.kwargs)))
        arrays = {} if code.pickled is None else {"pickled": np.frombuffer(code.pickled, np.uint8)}
        self._code_frames = encode(message, arrays)
        self._weights = {}
        self._weight_frames = []

    def publish(self, weights: Mapping[str, Array]) -> bool:
        """New weights, which are copied: the learner goes on changing its own. False: they are what they were."""
        if self._weight_frames and _are_equal(self._weights, weights):
            return False
        self.version += 1
        self._weights = {name: np.array(array, order="C") for name, array in weights.items()}
        self._weight_frames = encode(Weights(version=self.version, code_id=self.code_id), self._weights)
        return True

    def code_frames(self) -> Frames | None:
        """The message with the code; None: nothing is published."""
        return self._code_frames or None

    def weight_frames(self) -> Frames | None:
        """The message with the newest weights; None: nothing is published."""
        return self._weight_frames or None


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
