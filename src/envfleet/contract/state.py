"""EnvState: the saved state of one native env, in plain values: it can be pickled, and restored elsewhere."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class EnvState:
    """All that decides what an env does next: its own state, its place in the episode, its random generator."""

    env_name: str  # a state fits only envs of the same kind, built with the same arguments
    state: bytes  # as the C++ struct lies in memory
    num_steps: int  # in this episode
    has_ended: bool  # what comes next is a reset
    generator: dict[str, Any]  # as NumPy's bit generators give it
