"""A worker's state in a checkpoint: bytes that only workers read, and what waits in them until the policy is built.

No pickle: plain values, as `cluster/wire/plain_values.py` has them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from envfleet.cluster.wire.messages import Weights
from envfleet.cluster.wire.plain_values import from_plain, to_plain
from envfleet.contract.arrays import Array, Arrays
from envfleet.contract.policy import Policy, SavesRandomState, Seedable

OWN_NUMBERS = (
    "the policy draws from a generator of its own, and has no get_random_state() and set_random_state(): after a "
    "resume its random numbers begin anew"
)


@dataclass(frozen=True, slots=True)
class SavedPolicy:
    """What a worker that goes on from a checkpoint needs when it has built its policy."""

    weights: Weights
    arrays: Arrays
    is_seeded: bool
    random_state: bytes | None  # of the policy's own generator


def encoded(values: dict[str, Any]) -> Array:
    """Plain values as bytes."""
    return np.frombuffer(msgspec.msgpack.encode(to_plain(values, "state")), np.uint8)


def decoded(state: Array) -> dict[str, Any]:
    """The inverse of encoded(). The head is trusted."""
    values: dict[str, Any] = from_plain(msgspec.msgpack.decode(state.data))
    return values


def saved_sequence(seeds: np.random.SeedSequence) -> dict[str, Any]:
    """A sequence of seeds, and how many were taken from it."""
    entropy = seeds.entropy
    taken = seeds.n_children_spawned
    return {"entropy": entropy if isinstance(entropy, int | None) else list(entropy), "num_taken": taken}


def sequence_of(saved: dict[str, Any]) -> np.random.SeedSequence:
    """The inverse of saved_sequence()."""
    return np.random.SeedSequence(saved["entropy"], n_children_spawned=saved["num_taken"])


def lacks_random_state(policy: Policy) -> bool:
    """Whether the policy's own random numbers cannot be saved."""
    return isinstance(policy, Seedable) and not isinstance(policy, SavesRandomState)
