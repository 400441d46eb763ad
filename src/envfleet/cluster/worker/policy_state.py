"""PolicyState and Probing: what a policy remembers of a worker's envs, and what it shows of itself on probed rows.

Beside them: how a worker asks its policy, so that every error of the policy is a PolicyError.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np

from envfleet.contract.arrays import Array
from envfleet.contract.policy import ExposesDistribution, Policy, Recurrent
from envfleet.contract.spaces import SpaceTree

Result = TypeVar("Result")


class PolicyError(Exception):
    """The policy raised, or gave something that cannot be used. The cause is chained."""


class PolicyState:
    """The state of a recurrent policy, one row for each env; other policies have none.

    It outlasts rollouts and new weights; the end of an episode sets its row back to the initial state.
    """

    def __init__(self, policy: Policy, num_envs: int) -> None:
        self.policy = policy
        self._num_envs = num_envs
        self._initial: dict[str, Array] | None = None
        self.begin_rollout()
        self._state: dict[str, Array] | None = None
        if self._initial is not None:  # a copy: the policy may change it in place
            self._state = {name: rows.copy() for name, rows in self._initial.items()}

    @property
    def saved(self) -> dict[str, Array] | None:
        """For a checkpoint: what the policy remembers of each env; None: it is not recurrent."""
        return None if self._state is None else {name: np.array(rows) for name, rows in self._state.items()}

    def restore(self, state: Mapping[str, Array]) -> None:
        """Go on from a checkpoint."""
        self.remember(state)

    def begin_rollout(self) -> None:
        """Ask the policy for its initial state again: it may be learned, and have come with new weights."""
        self.begin_with(initial_state_of(self.policy, self._num_envs))

    def begin_with(self, initial: dict[str, Array] | None) -> None:
        """Use another initial state from now on; that of another version."""
        self._initial = initial

    def argument(self, rows: Array | None = None) -> dict[str, Any]:
        """The keyword arguments of the policy's methods beside the observations of all envs, or of some."""
        if self._state is None:
            return {}
        return {"state": self._state if rows is None else self.rows(rows)}

    def rows(self, rows: Array) -> dict[str, Array]:
        """A copy of the state of some envs."""
        return {name: array[rows] for name, array in (self._state or {}).items()}

    def remember(self, state: Mapping[str, Array] | None, rows: Array | None = None) -> None:
        """Keep the state that act() returned, of all envs or of some."""
        if self._initial is None or self._state is None:
            return
        dtypes = {name: values.dtype for name, values in self._initial.items()}
        came = {name: np.asarray(values, dtypes.get(name)) for name, values in (state or {}).items()}
        num_rows = self._num_envs if rows is None else len(rows)
        expected = {name: (num_rows, *values.shape[1:]) for name, values in self._initial.items()}
        if {name: rows.shape for name, rows in came.items()} != expected:
            raise PolicyError(
                f"the state that act() returns must be that of initial_state(), {expected}; "
                f"got { {name: rows.shape for name, rows in came.items()} or None }"
            )
        if rows is None:
            self._state = came
            return
        for name, values in came.items():
            self._state[name][rows] = values

    def forget(self, rows: Array) -> None:
        """Set the rows of envs whose episodes have ended back to the initial state."""
        if self._initial is None or self._state is None:
            return
        self._state = {name: np.array(array) for name, array in self._state.items()}
        for name, array in self._state.items():
            array[rows] = self._initial[name][rows]


class Probing:
    """What the policy shows of itself on the probed rows of one rollout, for the head to compare."""

    def __init__(self, rows: Array, num_envs: int) -> None:
        """Begin a rollout; `rows` are indices as probe_rows() returns them."""
        self._rows = rows
        self._num_envs = num_envs
        self._states: list[dict[str, Array]] = []

    def see(self, t: int, memory: PolicyState) -> None:
        """Keep the state of a recurrent policy before step t, of the rows that are probed."""
        if not memory.argument():
            return
        first, last = np.searchsorted(self._rows, (t * self._num_envs, (t + 1) * self._num_envs))
        if first < last:
            self._states.append(memory.rows(self._rows[first:last] - t * self._num_envs))

    def shown(
        self, policy: Policy, obs_tree: SpaceTree, obs: Sequence[Array], action_masks: Array | None = None
    ) -> tuple[dict[str, Array], str | None]:
        """The arrays for the head, and the kind of distribution; `obs` are leaves of [T + 1, N, ...]."""
        if not len(self._rows):
            return {}, None
        state: dict[str, Array] = {}
        if self._states:
            state = {name: np.concatenate([each[name] for each in self._states]) for name in self._states[0]}
        rows = [leaf.reshape(-1, *leaf.shape[2:])[self._rows] for leaf in obs]
        masks = None if action_masks is None else action_masks.reshape(-1, *action_masks.shape[2:])[self._rows]
        return shown_by(policy, obs_tree.unflatten(rows), state, masks)


def shown_by(
    policy: Policy, obs: Any, state: dict[str, Array], action_masks: Array | None
) -> tuple[dict[str, Array], str | None]:
    """What the policy shows of itself on some rows: the arrays for the head, and the kind of distribution."""
    arrays = {f"probe_state.{name}": rows for name, rows in state.items()}
    if not isinstance(policy, ExposesDistribution):
        return arrays, None
    arguments: dict[str, Any] = {"state": state} if state else {}
    if action_masks is not None:
        arguments["action_mask"] = action_masks
    distribution = asked(policy.distribution, obs, **arguments)
    if distribution is None:
        return arrays, None
    arrays |= {f"probe.{name}": np.ascontiguousarray(each) for name, each in distribution.arrays().items()}
    return arrays, distribution.kind


def initial_state_of(policy: Policy, num_envs: int) -> dict[str, Array] | None:
    """What the policy remembers before an episode begins, a row for each env; None: it is not recurrent."""
    if not isinstance(policy, Recurrent):
        return None
    initial = {name: np.asarray(rows) for name, rows in asked(policy.initial_state, num_envs).items()}
    wrong = {name: rows.shape for name, rows in initial.items() if rows.shape[:1] != (num_envs,)}
    if wrong:
        raise PolicyError(f"initial_state({num_envs}) must give arrays of [{num_envs}, ...]; got {wrong}")
    return initial


def asked(method: Callable[..., Result], *args: Any, **kwargs: Any) -> Result:
    """What the policy says. Raises PolicyError."""
    try:
        return method(*args, **kwargs)
    except Exception as error:
        name = getattr(method, "__name__", "method")  # a partial or a callable object has none
        raise PolicyError(f"the policy's {name}() raised {type(error).__name__}: {error}") from error


def values_of(policy: Policy, obs: Any, state: dict[str, Any], num_rows: int) -> Array | None:
    """[num_rows] float32: the values of observations; None: the policy has none."""
    values = asked(policy.values, obs, **state)
    if values is None:
        return None
    array = np.asarray(values, np.float32)
    if array.shape != (num_rows,):
        raise PolicyError(f"the policy's values() must have shape ({num_rows},); got {array.shape}")
    return array


def checked_values(policy: Policy, obs: Any, state: dict[str, Any], num_rows: int) -> Array:
    """[num_rows] float32: the values of observations, of a policy that has had some before."""
    values = values_of(policy, obs, state, num_rows)
    if values is None:
        raise PolicyError("the policy's values() returned None this time, but not before")
    return values
