"""Collector: T steps of a worker's pool with the policy beside it -> the arrays of a rollout."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from envfleet.cluster import stacks
from envfleet.cluster.codec import DTYPES, NAME_OF
from envfleet.cluster.spare_arrays import SpareArrays
from envfleet.contract.errors import EnvFailed, UsageError
from envfleet.contract.policy import Acted, Policy
from envfleet.contract.spaces import SpaceTree
from envfleet.pool.pool import EnvPool

Array = np.ndarray[Any, Any]
Arrays = dict[str, Array]


class PolicyError(Exception):
    """The policy raised, or gave something that cannot be used. The cause is chained."""


class Collector:
    """Keeps what must last from one rollout to the next: the observation to act on, and the running episodes."""

    def __init__(self, pool: EnvPool, first_obs: Any) -> None:
        """`first_obs` is what the pool shows now; its envs reset themselves in the step that ends an episode."""
        self._pool = pool
        self._obs_tree = SpaceTree(pool.single_observation_space)
        self._action_tree = SpaceTree(pool.single_action_space)
        self._obs = first_obs
        self._spares = SpareArrays()
        self._returns = np.zeros(pool.num_envs)
        self._lengths = np.zeros(pool.num_envs, np.int64)
        self._stacks = [stacks.is_stack(leaf.shape, leaf.dtype) for leaf in self._obs_tree.leaves if leaf.dtype]

    def collect(
        self, policy: Policy, num_steps: int, failures: list[Exception], between_steps: Callable[[], None]
    ) -> Arrays:
        """The arrays of a rollout. Envs that fail have truncated rows, and are told of in `failures`."""
        pool, num_envs = self._pool, self._pool.num_envs
        recorder = _Recorder(self._obs_tree, self._action_tree, num_steps, num_envs, self._spares)
        finals = _Finals()
        for t in range(num_steps):
            between_steps()
            recorder.write_obs(t, self._obs)
            acted = _act(policy, self._obs)
            actions = recorder.write_acted(t, acted)
            self._obs, rewards, terminated, truncated, info = _step(pool, actions, failures)
            recorder.rewards[t] = rewards
            recorder.terminated[t] = terminated
            recorder.truncated[t] = truncated
            self._returns += rewards
            self._lengths += 1
            ended = terminated | truncated
            if ended.any():
                rows = np.flatnonzero(ended)
                final_obs = self._final_obs(info, rows, recorder, t)
                finals.add(t, rows, final_obs, self._returns[rows], self._lengths[rows])
                self._returns[rows] = 0.0
                self._lengths[rows] = 0
        recorder.write_obs(num_steps, self._obs)
        return self._arrays(policy, recorder, finals)

    def _final_obs(self, info: dict[str, Any], rows: Array, recorder: _Recorder, t: int) -> list[Any]:
        """What episodes came to. An env that could not even be reset after it failed has shown nothing new."""
        column = info.get("final_obs", [None] * self._pool.num_envs)
        return [
            self._obs_tree.unflatten([leaf[t, row] for leaf in recorder.obs]) if column[row] is None else column[row]
            for row in rows
        ]

    def _arrays(self, policy: Policy, recorder: _Recorder, finals: _Finals) -> Arrays:
        arrays = recorder.arrays
        steps, envs = finals.places()
        arrays |= {
            "final_steps": steps,
            "final_envs": envs,
            "episode_returns": np.array(finals.returns, np.float64),
            "episode_lengths": np.array(finals.lengths, np.int64),
        }
        final_leaves = finals.leaves(self._obs_tree)
        if "extra.values" in arrays:
            next_values = _values(policy, self._obs, self._pool.num_envs)
            if next_values is not None:
                arrays["next_values"] = next_values
                arrays["final_values"] = (
                    _checked_values(policy, self._obs_tree.unflatten(final_leaves), len(steps))
                    if len(steps)
                    else np.zeros(0, np.float32)
                )
        for index, leaf in enumerate(recorder.obs):
            self._add_obs(arrays, index, leaf, final_leaves[index], steps, envs)
        return arrays

    def _add_obs(self, arrays: Arrays, index: int, obs: Array, final: Array, steps: Array, envs: Array) -> None:
        """Stacked frames are sent once, not once for each place in the stack."""
        packed = stacks.pack(f"obs.{index}", obs) if self._stacks[index] else None
        if packed is None:
            arrays |= {f"obs.{index}": obs, f"final_obs.{index}": final}
            return
        arrays |= packed
        arrays |= stacks.pack_finals(f"final_obs.{index}", final, obs[steps, envs]) or {f"final_obs.{index}": final}


class _Recorder:
    """The arrays of one rollout while they are written: time first."""

    def __init__(
        self, obs_tree: SpaceTree, action_tree: SpaceTree, num_steps: int, num_envs: int, spares: SpareArrays
    ) -> None:
        shape = (num_steps, num_envs)
        self._obs_tree = obs_tree
        self._action_tree = action_tree
        self._shape = shape
        self.obs = [spares.take((num_steps + 1, num_envs, *leaf.shape), leaf.dtype) for leaf in obs_tree.leaves]
        self.actions = [np.empty((*shape, *leaf.shape), leaf.dtype) for leaf in action_tree.leaves]
        self.rewards = np.empty(shape, np.float64)
        self.terminated = np.empty(shape, np.bool_)
        self.truncated = np.empty(shape, np.bool_)
        self.log_probs: Array | None = None
        self.extras: dict[str, Array] = {}

    def write_obs(self, t: int, obs: Any) -> None:
        if self._obs_tree.is_one_array:
            self.obs[0][t] = obs
            return
        for leaf, value in zip(self.obs, self._obs_tree.flatten(obs), strict=True):
            leaf[t] = value

    def write_acted(self, t: int, acted: Acted) -> Any:
        """Returns the actions as the pool takes them."""
        actions = acted.actions
        try:
            leaves = self._action_tree.require_batch(actions, self._shape[1], "actions")
            for column, leaf in zip(self.actions, leaves, strict=True):
                column[t] = leaf
            if t == 0:
                self._make_room(acted)
            if self.log_probs is not None:
                self.log_probs[t] = acted.log_probs
            for name, column in self.extras.items():
                column[t] = acted.extras[name]
        except (UsageError, KeyError, ValueError, TypeError) as error:
            raise PolicyError(f"what the policy's act() returned cannot be used: {error}") from error
        return actions

    def _make_room(self, acted: Acted) -> None:
        if acted.log_probs is not None:
            self.log_probs = np.empty(self._shape, np.float32)
        for name, values in acted.extras.items():
            array = np.asarray(values)
            if array.dtype not in NAME_OF:
                raise TypeError(f"extra {name!r} has dtype {array.dtype}; the wire knows {', '.join(DTYPES)}")
            self.extras[name] = np.empty((*self._shape, *array.shape[1:]), array.dtype)

    @property
    def arrays(self) -> Arrays:
        """All but the observations, under the names they have on the wire."""
        arrays: Arrays = {f"action.{index}": column for index, column in enumerate(self.actions)}
        if self.log_probs is not None:
            arrays["log_probs"] = self.log_probs
        arrays |= {f"extra.{name}": column for name, column in self.extras.items()}
        return arrays | {"rewards": self.rewards, "terminated": self.terminated, "truncated": self.truncated}


class _Finals:
    """Where episodes ended, and at what."""

    def __init__(self) -> None:
        self._steps: list[int] = []
        self._envs: list[int] = []
        self._obs: list[Any] = []
        self.returns: list[float] = []
        self.lengths: list[int] = []

    def add(self, t: int, rows: Array, obs: list[Any], returns: Array, lengths: Array) -> None:
        self._steps += [t] * len(rows)
        self._envs += rows.tolist()
        self._obs += obs
        self.returns += returns.tolist()
        self.lengths += lengths.tolist()

    def places(self) -> tuple[Array, Array]:
        return np.array(self._steps, np.int64), np.array(self._envs, np.int64)

    def leaves(self, tree: SpaceTree) -> list[Array]:
        columns = [np.empty((len(self._obs), *leaf.shape), leaf.dtype) for leaf in tree.leaves]
        for row, obs in enumerate(self._obs):
            for column, value in zip(columns, tree.flatten(obs), strict=True):
                column[row] = value
        return columns


def _act(policy: Policy, obs: Any) -> Acted:
    try:
        return policy.act(obs)
    except Exception as error:
        raise PolicyError(f"the policy's act() raised {type(error).__name__}: {error}") from error


def _values(policy: Policy, obs: Any, num_rows: int) -> Array | None:
    try:
        values = policy.values(obs)
    except Exception as error:
        raise PolicyError(f"the policy's values() raised {type(error).__name__}: {error}") from error
    if values is None:
        return None
    array = np.asarray(values, np.float32)
    if array.shape != (num_rows,):
        raise PolicyError(f"the policy's values() must have shape ({num_rows},); got {array.shape}")
    return array


def _checked_values(policy: Policy, obs: Any, num_rows: int) -> Array:
    values = _values(policy, obs, num_rows)
    if values is None:
        raise PolicyError("the policy's values() returned None this time, but not before")
    return values


def _step(pool: EnvPool, actions: Any, failures: list[Exception]) -> Any:
    """One step. An env that failed has a row all the same; whoever asked for the rollout hears of it."""
    try:
        return pool.step(actions)
    except EnvFailed as error:
        failures.append(error)
    while True:
        try:
            return pool.recv()
        except EnvFailed as error:
            failures.append(error)
