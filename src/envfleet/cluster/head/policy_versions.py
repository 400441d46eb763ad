"""PolicyVersions: code and newest weights of the policy that workers pull, each encoded once. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from envfleet.cluster.wire.codec import DTYPES, NAME_OF, encode
from envfleet.cluster.wire.messages import Code, Weights
from envfleet.cluster.wire.plain_values import to_plain
from envfleet.cluster.wire.weights import digest, from_bfloat16, to_bfloat16
from envfleet.contract.arrays import Array
from envfleet.contract.errors import UsageError
from envfleet.contract.policy import PolicyCode

Frames = list[Any]

LEAST_BFLOAT16 = 256  # numbers in an array: smaller ones keep their precision


class PolicyVersions:
    """The newest policy. `code_id` and `version` only grow: a worker that holds lower ones is behind."""

    def __init__(self, is_bfloat16: bool = False) -> None:
        """Begin without a policy. `is_bfloat16`: large float32 arrays travel with half their bits."""
        self.code_id = 0
        self.version = 0
        self._is_bfloat16 = is_bfloat16
        self._weights: dict[str, Array] = {}
        self._code_frames: Frames = []
        self._is_published = False
        self._weight_frames: Frames = []  # empty until a worker pulls them

    def set_code(self, code: PolicyCode) -> None:
        """Make another policy the newest; its weights must be published next."""
        self.code_id += 1
        self._set_code_frames(code)
        self._is_published = False

    def _set_code_frames(self, code: PolicyCode) -> None:
        message = Code(code_id=self.code_id, factory=code.factory, kwargs=to_plain(dict(code.kwargs)))
        arrays = {} if code.pickled is None else {"pickled": np.frombuffer(code.pickled, np.uint8)}
        self._code_frames, self._weight_frames = encode(message, arrays), []

    def publish(self, weights: Mapping[str, Array]) -> bool:
        """Copy these weights as the newest version. Returns whether they differ from the last ones."""
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

    def restore(self, code_id: int, version: int, weights: Mapping[str, Array]) -> None:
        """Go on after this version. Its code comes with adopt_code(): a checkpoint has none."""
        self.code_id, self.version = code_id, version
        self._weights, self._is_published = dict(weights), version > 0

    def adopt_code(self, code: PolicyCode, weights: Mapping[str, Array]) -> None:
        """The code of the policy whose weights were restored; `weights` are the agent's own, of any version.

        Raises:
            UsageError: The agent is another policy.
        """
        ours, theirs = _forms(self._weights), _forms(weights)
        if ours != theirs:
            differing = sorted(name for name in {**ours, **theirs} if ours.get(name) != theirs.get(name))
            first = differing[0]
            raise UsageError(
                f"this agent is not the policy of the checkpoint: {len(differing)} of its weights differ, the first is "
                f"{first!r}: {ours.get(first, 'none')} there, {theirs.get(first, 'none')} here. Build the agent as it "
                "was; for another one start without resume, and take weights from envfleet.load_checkpoint(path)"
            )
        self._set_code_frames(code)

    def are_alike(self, weights: Mapping[str, Array]) -> bool:
        """Whether weights have the names, dtypes and shapes of the newest ones."""
        return _forms(self._weights) == _forms(weights)

    @property
    def weights(self) -> Mapping[str, Array]:
        """The newest weights; empty: nothing is published."""
        return self._weights

    def code_frames(self) -> Frames | None:
        """The message with the code; None: nothing is published."""
        return self._code_frames or None

    def weight_frames(self) -> Frames | None:
        """The message with the newest weights, the same one for all workers; None: nothing is published."""
        if self._is_published and not self._weight_frames:
            self._weight_frames = encode(*self.packed_weights())
        return self._weight_frames or None

    def packed_weights(self) -> tuple[Weights, dict[str, Array]]:
        """The newest weights as they travel."""
        halves = {name: to_bfloat16(each) for name, each in self._weights.items() if self._is_halved(each)}
        sent = {**self._weights, **halves}
        held = {**self._weights, **{name: from_bfloat16(each) for name, each in halves.items()}}
        message = Weights(version=self.version, code_id=self.code_id, digest=digest(held), bfloat16=list(halves))
        return message, sent

    def _is_halved(self, array: Array) -> bool:
        return self._is_bfloat16 and array.dtype == np.float32 and array.size >= LEAST_BFLOAT16


def _forms(weights: Mapping[str, Array]) -> dict[str, str]:
    return {name: f"{np.asarray(each).dtype} {np.shape(each)}" for name, each in weights.items()}


def _are_equal(held: Mapping[str, Array], given: Mapping[str, Array]) -> bool:
    """Whether the weights are equal, bit for bit."""
    return held.keys() == given.keys() and all(
        array.dtype == given[name].dtype
        and array.shape == given[name].shape
        and np.array_equal(
            array.reshape(-1).view(np.uint8), np.ascontiguousarray(given[name]).reshape(-1).view(np.uint8)
        )
        for name, array in held.items()
    )
