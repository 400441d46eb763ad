"""PolicyState and Probing: what a policy remembers of a worker's envs, and what it shows of itself on probed rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from envfleet.contract.arrays import Array
from envfleet.contract.policy import ExposesDistribution, Policy, Recurrent
from envfleet.contract.spaces import SpaceTree

Arrays = dict[str, Array]


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

    def begin_rollout(self) -> None:
        """Ask the policy for its initial state again: it may be learned, and have come with new weights."""
        policy, num_envs = self.policy, self._num_envs
        if isinstance(policy, Recurrent):
            try:
                initial = policy.initial_state(num_envs)
            except Exception as error:
                raise PolicyError(f"the policy's initial_state() raised {type(error).__name__}: {error}") from error
            self._initial = {name: np.asarray(rows) for name, rows in initial.items()}
            wrong = {name: rows.shape for name, rows in self._initial.items() if rows.shape[:1] != (num_envs,)}
            if wrong:
                raise PolicyError(f"initial_state({num_envs}) must give arrays of [{num_envs}, ...]; got {wrong}")

    def argument(self) -> dict[str, Any]:
        """The keyword arguments of the policy's methods beside the observations of all envs."""
        return {} if self._state is None else {"state": self._state}

    def rows(self, rows: Array) -> dict[str, Array]:
        """A copy of the state of some envs."""
        return {name: array[rows] for name, array in (self._state or {}).items()}

    def remember(self, state: Mapping[str, Array] | None) -> None:
        """Keep the state that act() returned."""
        if self._initial is None:
            return
        dtypes = {name: rows.dtype for name, rows in self._initial.items()}
        came = {name: np.asarray(rows, dtypes.get(name)) for name, rows in (state or {}).items()}
        expected = {name: rows.shape for name, rows in self._initial.items()}
        if {name: rows.shape for name, rows in came.items()} != expected:
            raise PolicyError(
                f"the state that act() returns must be that of initial_state(), {expected}; "
                f"got { {name: rows.shape for name, rows in came.items()} or None }"
            )
        self._state = came

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
        self._states: list[Arrays] = []

    def see(self, t: int, memory: PolicyState) -> None:
        """Keep the state of a recurrent policy before step t, of the rows that are probed."""
        if not memory.argument():
            return
        first, last = np.searchsorted(self._rows, (t * self._num_envs, (t + 1) * self._num_envs))
        if first < last:
            self._states.append(memory.rows(self._rows[first:last] - t * self._num_envs))

    def shown(
        self, policy: Policy, obs_tree: SpaceTree, obs: Sequence[Array], action_masks: Array | None = None
    ) -> tuple[Arrays, str | None]:
        """The arrays for the head, and the kind of distribution; `obs` are leaves of [T + 1, N, ...]."""
        if not len(self._rows):
            return {}, None
        state: Arrays = {}
        if self._states:
            state = {name: np.concatenate([each[name] for each in self._states]) for name in self._states[0]}
        arrays = {f"probe_state.{name}": rows for name, rows in state.items()}
        if not isinstance(policy, ExposesDistribution):
            return arrays, None
        rows = [leaf.reshape(-1, *leaf.shape[2:])[self._rows] for leaf in obs]
        arguments: dict[str, Any] = {"state": state} if state else {}
        if action_masks is not None:
            arguments["action_mask"] = action_masks.reshape(-1, *action_masks.shape[2:])[self._rows]
        try:
            distribution = policy.distribution(obs_tree.unflatten(rows), **arguments)
        except Exception as error:
            raise PolicyError(f"the policy's distribution() raised {type(error).__name__}: {error}") from error
        if distribution is None:
            return arrays, None
        arrays |= {f"probe.{name}": np.ascontiguousarray(each) for name, each in distribution.arrays().items()}
        return arrays, distribution.kind
