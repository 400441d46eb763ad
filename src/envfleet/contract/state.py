"""EnvState: the saved state of one env, in plain values: it can be pickled, sent, and restored elsewhere."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from envfleet.contract.errors import UsageError


@dataclass(frozen=True, slots=True)
class EnvState:
    """All that decides what an env does next: its own state, its place in the episode, its random generator.

    Only the process that runs a Python env unpickles `state`: processes that carry it need not trust it.
    """

    env_name: str  # a state fits only envs of the same kind, built with the same arguments
    state: bytes  # native: as the C++ struct lies in memory; Python: a pickle, with the generator and last observation
    num_steps: int  # in this episode
    has_ended: bool  # what comes next is a reset
    generator: dict[str, Any]  # native: as NumPy's bit generators give it; Python: empty
    running: dict[str, Any] = field(default_factory=dict)  # what a cluster's worker knows of the episode; else empty


def require_fitting(states_of: Sequence[str], env_names: Sequence[str], env_ids: Sequence[int]) -> None:
    """Refuse states of other kinds of envs.

    Args:
        states_of: `EnvState.env_name` of each state.
        env_names: The same of each env that is to be put into it.
        env_ids: Indices of these envs.

    Raises:
        UsageError: One does not fit; the text names the first.
    """
    if len(states_of) != len(env_ids):
        raise UsageError(f"a state for each env: expected {len(env_ids)}, got {len(states_of)}")
    for state_of, env_name, env_id in zip(states_of, env_names, env_ids, strict=True):
        if state_of != env_name:
            raise UsageError(
                f"no state was restored: this is the state of a {state_of}, for env {env_id}, which is a {env_name}"
            )
