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
    """Chooses actions for a batch of B observations. Arrays of NumPy go in and come out.

    A policy for rollouts with `action_mask=...` takes `action_mask`, too, in act(), log_prob() and distribution():
    [B, ...] bool, False for each action that is not allowed.
    """

    def act(self, obs: Any) -> Acted:
        """Choose actions.

        Args:
            obs: B observations, a tree of [B, ...] arrays in the form of the observation space.

        Returns:
            The actions and, where the policy has them, log-probs and extras.
        """
        ...

    def log_prob(self, obs: Any, actions: Any) -> Array:
        """Compute the log-probabilities of actions that were taken.

        Args:
            obs: B observations, a tree of [B, ...] arrays in the form of the observation space.
            actions: B actions, a tree of [B, ...] arrays in the form of the action space.

        Returns:
            [B] log-probabilities.
        """
        ...

    def values(self, obs: Any) -> Array | None:
        """Estimate the values of observations.

        Args:
            obs: B observations, a tree of [B, ...] arrays in the form of the observation space.

        Returns:
            [B] values; None if the policy has no value function.
        """
        ...

    def get_weights(self) -> dict[str, Array]:
        """Return the weights as named arrays.

        Returns:
            The arrays by name. They may be views: copy them if you keep them.
        """
        ...

    def set_weights(self, weights: Mapping[str, Array]) -> None:
        """Replace the weights.

        Args:
            weights: as get_weights() of another copy gives them. The arrays are read-only, and must not be kept.

        Raises:
            UsageError: names or shapes differ from those of this policy.
        """
        ...


@runtime_checkable
class ExposesDistribution(Protocol):
    """A policy that shows the distribution it draws from: divergences are then exact, not estimated."""

    def distribution(self, obs: Any) -> Distribution | None:
        """Compute the distribution of the actions.

        Args:
            obs: B observations, a tree of [B, ...] arrays in the form of the observation space.

        Returns:
            The distribution for B rows; None if it cannot be shown.
        """
        ...


@runtime_checkable
class ActsDeterministically(Protocol):
    """A policy that can act without chance: evaluations ask for it."""

    def act_deterministically(self, obs: Any) -> Acted:
        """Choose the mode of what act() draws from: the most likely choice, the mean, the best by its Q value.

        Masks and normalisation apply as in act(). Recurrent policies take `state=`, and return the next one.

        Args:
            obs: B observations, a tree of [B, ...] arrays in the form of the observation space.

        Returns:
            The actions: the same ones for the same observations, weights and state.
        """
        ...


@runtime_checkable
class Recurrent(Protocol):
    """A policy that remembers. Its other methods take `state=` as well, and act() returns the next state.

    The worker keeps the state, and sets rows back to the initial state where episodes end.
    """

    def initial_state(self, num_rows: int) -> State:
        """Return what the policy remembers before an episode's first observation.

        Args:
            num_rows: number of envs.

        Returns:
            The state by name, each [num_rows, ...].
        """
        ...


@runtime_checkable
class Seedable(Protocol):
    """A policy with its own random numbers. The global generators of Python, NumPy and torch are seeded anyway."""

    def seed(self, seed: int) -> None:
        """Restart the policy's random numbers.

        Args:
            seed: of the new sequence.
        """
        ...


@runtime_checkable
class MovesToDevice(Protocol):
    """A policy that acts on a device of its worker: `ClusterEnv(worker_device="cuda")`. Others are not told of it."""

    def to_device(self, device: str) -> None:
        """Act on this device from now on. Called once, on the worker, after the policy was built.

        Arrays of NumPy go in and come out, as before.

        Args:
            device: such as "cuda", "cuda:1" or "mps".
        """
        ...


@runtime_checkable
class SavesRandomState(Protocol):
    """A policy with its own random numbers that go on after a resume from a checkpoint."""

    def get_random_state(self) -> bytes | None:
        """Return the state of the policy's random numbers.

        Returns:
            Bytes for set_random_state(); None: it was never seeded.
        """
        ...

    def set_random_state(self, state: bytes | None) -> None:
        """Go on with random numbers from a saved state.

        Args:
            state: what get_random_state() of another copy returned.
        """
        ...


@dataclass(frozen=True, slots=True)
class PolicyCode:
    """How a worker builds its copy of a policy: a pickle made by the head, or an import path and plain arguments."""

    pickled: bytes | None = None  # of a callable without arguments that returns the Policy
    factory: str | None = None  # "package.module:function": returns a Policy, or what EnvFleet can make one of
    kwargs: Mapping[str, Any] = field(default_factory=dict)  # of the factory; plain values
