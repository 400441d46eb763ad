"""EnvState <-> what a message carries. Nothing here unpickles: the bytes of a state stay bytes."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import fields
from typing import Any

from envfleet.cluster.wire.codec import BadMessage
from envfleet.cluster.wire.plain_values import from_plain, to_plain
from envfleet.contract.state import EnvState

MOST_NAME_CHARS = 4096
MOST_STEPS = 2**53  # of an episode

_FIELDS = {"env_name": str, "state": bytes, "num_steps": int, "has_ended": bool, "generator": dict, "running": dict}


def states_to_plain(states: Sequence[EnvState | None]) -> Any:
    """What `states_from_plain` makes these states of again."""
    return to_plain(
        [None if each is None else {part.name: getattr(each, part.name) for part in fields(each)} for each in states],
        "states",
    )


def states_from_plain(plain: Any) -> list[EnvState]:
    """The states of an order, which come from the head."""
    return [_state(each) for each in from_plain(plain)]


def checked_states(values: Sequence[Any], env_ids: Collection[int]) -> list[EnvState | None]:
    """The states in an answer: a value for each env of the worker, of which `env_ids` were asked for.

    Raises:
        BadMessage: A state is missing, or is none.
    """
    chosen = set(env_ids)
    return [_state(value) if env_id in chosen else None for env_id, value in enumerate(values)]


def _state(value: Any) -> EnvState:
    if type(value) is not dict or value.keys() != _FIELDS.keys():
        raise BadMessage("a saved state has other fields than EnvState")
    for name, kind in _FIELDS.items():
        if type(value[name]) is not kind:
            raise BadMessage(f"{name} of a saved state is {type(value[name]).__name__}, not {kind.__name__}")
    state = EnvState(**value)
    if len(state.env_name) > MOST_NAME_CHARS or not 0 <= state.num_steps <= MOST_STEPS:
        raise BadMessage("a saved state has a name or a number of steps that no env has")
    if not 0 <= running_length(state) <= MOST_STEPS:
        raise BadMessage("a saved state tells of an episode with a length that none has")
    return state


def running_length(state: EnvState) -> int:
    """Steps of the running episode, as the worker that saved the state has counted them."""
    length = state.running.get("length", 0)
    return length if type(length) is int else -1
