"""Probing: what a worker's policy shows of itself on the probed rows of a rollout, for the head to compare."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from envfleet.cluster.worker.policy_state import PolicyError, PolicyState
from envfleet.contract.arrays import Array
from envfleet.contract.policy import ExposesDistribution, Policy
from envfleet.contract.spaces import SpaceTree

Arrays = dict[str, Array]


class Probing:
    """Of one rollout."""

    def __init__(self, rows: Array, num_envs: int) -> None:
        """`rows` as probe_rows() counts them."""
        self._rows = rows
        self._num_envs = num_envs
        self._states: list[Arrays] = []

    def see(self, t: int, memory: PolicyState) -> None:
        """Before step t: what a recurrent policy remembers of the rows that are probed."""
        if not memory.argument():
            return
        first, last = np.searchsorted(self._rows, (t * self._num_envs, (t + 1) * self._num_envs))
        if first < last:
            self._states.append(memory.rows(self._rows[first:last] - t * self._num_envs))

    def shown(self, policy: Policy, obs_tree: SpaceTree, obs: Sequence[Array]) -> tuple[Arrays, str | None]:
        """The arrays, and the kind of distribution; `obs` are leaves of [T + 1, N, ...]."""
        if not len(self._rows):
            return {}, None
        state: Arrays = {}
        if self._states:
            state = {name: np.concatenate([each[name] for each in self._states]) for name in self._states[0]}
        arrays = {f"probe_state.{name}": rows for name, rows in state.items()}
        if not isinstance(policy, ExposesDistribution):
            return arrays, None
        rows = [leaf.reshape(-1, *leaf.shape[2:])[self._rows] for leaf in obs]
        try:
            distribution = policy.distribution(obs_tree.unflatten(rows), **({"state": state} if state else {}))
        except Exception as error:
            raise PolicyError(f"the policy's distribution() raised {type(error).__name__}: {error}") from error
        if distribution is None:
            return arrays, None
        arrays |= {f"probe.{name}": np.ascontiguousarray(each) for name, each in distribution.arrays().items()}
        return arrays, distribution.kind
