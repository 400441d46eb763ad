"""Policy: what chooses actions on a worker, and whose probabilities the learner asks for. Any framework can meet it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np

Array = np.ndarray[Any, Any]


class Acted(NamedTuple):
    """What a policy did with B observations."""

    actions: Any  # tree of [B, ...] in the form of the action space
    log_probs: Array | None  # [B] float32; None: the policy has no probabilities
    extras: Mapping[str, Array]  # each [B, ...]; "values" is what bootstrapping looks for


@runtime_checkable
class Policy(Protocol):
    """Chooses actions for a batch of observations. NumPy in, NumPy out."""

    def act(self, obs: Any) -> Acted:
        """Actions for B observations (a tree of [B, ...] in the form of the observation space)."""
        ...

    def log_prob(self, obs: Any, actions: Any) -> Array:
        """[B] log-probabilities of actions that were taken."""
        ...

    def values(self, obs: Any) -> Array | None:
        """[B] values of observations; None if the policy has no value function."""
        ...

    def get_weights(self) -> dict[str, Array]:
        """The weights as named arrays. They may be views: who keeps them copies them."""
        ...

    def set_weights(self, weights: Mapping[str, Array]) -> None:
        """Take over weights that another copy of this policy gave. The arrays are read-only, and not to be kept."""
        ...


@dataclass(frozen=True, slots=True)
class PolicyCode:
    """How a worker builds its copy of a policy: a pickle made by the head, or an import path and plain arguments."""

    pickled: bytes | None = None  # of a callable without arguments that returns the Policy
    factory: str | None = None  # "package.module:function": returns a Policy, or what EnvFleet can make one of
    kwargs: Mapping[str, Any] = field(default_factory=dict)  # of the factory; plain values
