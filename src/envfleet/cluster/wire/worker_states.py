"""SavedState: what a worker says for a checkpoint: which arrays it consists of, and what is checked. Pure.

What the bytes of a state mean, workers alone know: the head keeps them, and gives them back.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from envfleet.cluster.wire.codec import BadMessage
from envfleet.cluster.wire.evaluations import WEIGHT
from envfleet.cluster.wire.messages import SaveState, StateReady
from envfleet.cluster.wire.rollouts import named
from envfleet.contract.arrays import Array, Arrays

STATE = "state"  # the name of the array


@dataclass(frozen=True, slots=True)
class SavedState:
    """One worker between two orders."""

    state: Array  # uint8
    code_id: int  # of its policy; 0: none
    version: int  # of its weights; -1: none
    weights: Arrays  # empty: those of the version that the order named, or none
    has_env_states: bool
    left_out: list[str]


def checked_state(message: StateReady, arrays: Arrays, order: SaveState) -> SavedState:
    """The state in the answer to an order. Raises BadMessage."""
    state = arrays.get(STATE)
    if state is None or state.dtype != np.uint8 or state.ndim != 1:
        raise BadMessage(f"array {STATE!r} must be uint8 of one dimension, and be there")
    if not -1 <= message.version <= order.version or message.code_id < 0:
        raise BadMessage(f"the state of version {message.version}; possible: -1 to {order.version}, the newest")
    weights = named(arrays, WEIGHT)
    if len(weights) + 1 != len(arrays):
        others = sorted(name for name in arrays if name != STATE and not name.startswith(WEIGHT))
        raise BadMessage(f"a state consists of the arrays {STATE!r} and {WEIGHT}...; got {others[:10]}")
    if weights and message.version in (-1, order.version):
        raise BadMessage(f"the state brings weights of version {message.version}, which were not asked for")
    return SavedState(state, message.code_id, message.version, weights, message.has_env_states, list(message.left_out))
