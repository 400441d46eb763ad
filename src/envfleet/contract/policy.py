"""Policy: what chooses actions on a worker, and whose probabilities the learner asks for. Any framework can meet it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, runtime_checkable

from envfleet.contract.arrays import Array
from envfleet.contract.distributions import Distribution

State = Mapping[str, Array]  # what a recurrent policy remembers, by name, a row for each env


class Acted(NamedTuple):
    """What a policy did with B observations."""

    actions: Any  # tree of [B, ...] in the form of the action space
    log_probs: Array | None  # [B] float32; None: the policy has no probabilities
    extras: Mapping[str, Array]  # each [B, ...]; "values" is what bootstrapping looks for
    state: State | None = None  # after these observations, each [B, ...]; of recurrent policies only


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


@runtime_checkable
class ExposesDistribution(Protocol):
    """A policy that shows from which distribution it draws: divergences are exact then, and not estimated."""

    def distribution(self, obs: Any) -> Distribution | None:
        """Of the actions for B observations; None if this one does not show it after all."""
        ...


@runtime_checkable
class Recurrent(Protocol):
    """A policy that remembers. Its other methods take `state=` as well, and act() returns the next one.

    The worker keeps the state, and puts rows back to the initial one where episodes end.
    """

    def initial_state(self, num_rows: int) -> State:
        """What it remembers before an episode's first observation, for so many envs."""
        ...


@runtime_checkable
class Seedable(Protocol):
    """A policy with random numbers of its own. Python's, NumPy's and torch's global ones are seeded anyway."""

    def seed(self, seed: int) -> None:
        """Begin this sequence of random numbers."""
        ...


@dataclass(frozen=True, slots=True)
class PolicyCode:
    """How a worker builds its copy of a policy: a pickle made by the head, or an import path and plain arguments."""

    pickled: bytes | None = None  # of a callable without arguments that returns the Policy
    factory: str | None = None  # "package.module:function": returns a Policy, or what EnvFleet can make one of
    kwargs: Mapping[str, Any] = field(default_factory=dict)  # of the factory; plain values
