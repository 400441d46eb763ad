"""PolicyState: what a recurrent policy remembers of a worker's envs. Of other policies: nothing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from envfleet.contract.arrays import Array
from envfleet.contract.policy import Policy, Recurrent


class PolicyError(Exception):
    """The policy raised, or gave something that cannot be used. The cause is chained."""


class PolicyState:
    """One row for each env. It outlasts rollouts, and new weights; an episode's end puts its row back to the start."""

    def __init__(self, policy: Policy, num_envs: int) -> None:
        """Nothing was seen yet."""
        self.policy = policy
        self._num_envs = num_envs
        self._initial: dict[str, Array] | None = None
        self.begin_rollout()
        self._state: dict[str, Array] | None = None
        if self._initial is not None:  # a copy: the policy may change it in place
            self._state = {name: rows.copy() for name, rows in self._initial.items()}

    def begin_rollout(self) -> None:
        """What episodes begin with may be learned, and have come with new weights."""
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
        """What the policy's methods are given beside the observations of all envs."""
        return {} if self._state is None else {"state": self._state}

    def rows(self, rows: Array) -> dict[str, Array]:
        """A copy of some rows."""
        return {name: array[rows] for name, array in (self._state or {}).items()}

    def remember(self, state: Mapping[str, Array] | None) -> None:
        """Take over what act() returned."""
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
        """The episodes of these rows have ended."""
        if self._initial is None or self._state is None:
            return
        self._state = {name: np.array(array) for name, array in self._state.items()}
        for name, array in self._state.items():
            array[rows] = self._initial[name][rows]
