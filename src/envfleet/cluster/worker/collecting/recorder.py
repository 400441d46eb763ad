"""Recorder and Finals: what a worker keeps of the steps of a rollout until it is sent.

Collectors say where rows belong: a step of all columns (`t`), or the step and the column of each row. So both kinds of
collectors, of all envs at once and of those that are ready first, write through the same methods.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from envfleet.cluster.wire.codec import DTYPES, NAME_OF
from envfleet.cluster.wire.rollouts import stacks
from envfleet.cluster.wire.spare_arrays import SpareArrays
from envfleet.cluster.worker.collecting.policy_state import PolicyError
from envfleet.contract.arrays import Array
from envfleet.contract.errors import UsageError
from envfleet.contract.infos.table import Infos, InfoTable
from envfleet.contract.policy import Acted
from envfleet.contract.spaces import SpaceTree

ALL = slice(None)
Place = int | tuple[Array, Array]  # a step of all columns, or the step and the column of each row


class Recorder:
    """The arrays of one rollout while they are written: time first. A column is the rows of one env."""

    def __init__(
        self, obs_tree: SpaceTree, action_tree: SpaceTree, num_steps: int, num_columns: int, spares: SpareArrays
    ) -> None:
        shape = (num_steps, num_columns)
        self._obs_tree = obs_tree
        self._action_tree = action_tree
        self._shape = shape
        self._spares = spares
        self.obs = [spares.take((num_steps + 1, num_columns, *leaf.shape), leaf.dtype) for leaf in obs_tree.leaves]
        self.actions = [np.empty((*shape, *leaf.shape), leaf.dtype) for leaf in action_tree.leaves]
        self.rewards = np.empty(shape, np.float64)
        self.terminated = np.empty(shape, np.bool_)
        self.truncated = np.empty(shape, np.bool_)
        self.log_probs: Array | None = None
        self.extras: dict[str, Array] = {}
        self._has_room = False  # for what the policy gives: its first actions tell

    def write_obs(self, place: Place, obs: Any) -> None:
        """Write what the policy sees in a step; after the last step, what it would see next."""
        if self._obs_tree.is_one_array:
            self.obs[0][place] = obs
            return
        for leaf, value in zip(self.obs, self._obs_tree.flatten(obs), strict=True):
            leaf[place] = value

    def write_acted(self, place: Place, acted: Acted, num_rows: int) -> Any:
        """Write what the policy did. Returns the actions as the pool takes them."""
        actions = acted.actions
        try:
            leaves = self._action_tree.require_batch(actions, num_rows, "actions")
            for column, leaf in zip(self.actions, leaves, strict=True):
                column[place] = leaf
            if not self._has_room:
                self._make_room(acted)
            if self.log_probs is not None:
                self.log_probs[place] = acted.log_probs
            for name, column in self.extras.items():
                column[place] = acted.extras[name]
        except (UsageError, KeyError, ValueError, TypeError) as error:
            raise PolicyError(f"what the policy's act() returned cannot be used: {error}") from error
        return actions

    def write_results(self, place: Place, rewards: Array, terminated: Array, truncated: Array) -> None:
        """Write what the envs answered to the actions."""
        self.rewards[place] = rewards
        self.terminated[place] = terminated
        self.truncated[place] = truncated

    def final_obs(self, info: Infos, num_rows: int, rows: Array, steps: Sequence[int], columns: Array) -> list[Any]:
        """What episodes came to that ended in `rows` of a batch of `num_rows`, which belong to `steps` and `columns`.

        An env that could not even be reset after it failed has shown nothing new.
        """
        final = InfoTable(num_rows, info).final_obs
        shown = [None if final is None else final[row] for row in rows.tolist()]
        return [
            self._obs_tree.unflatten([leaf[step, column] for leaf in self.obs]) if obs is None else obs
            for obs, step, column in zip(shown, steps, columns, strict=True)
        ]

    def only(self, columns: Array) -> Recorder:
        """A copy of some columns."""
        copied = Recorder(self._obs_tree, self._action_tree, self._shape[0], len(columns), self._spares)
        for source, target in zip(self.obs, copied.obs, strict=True):
            np.take(source, columns, axis=1, out=target, mode="clip")  # "clip": straight into the target
        copied.actions = [leaf[:, columns] for leaf in self.actions]
        copied.rewards, copied.terminated = self.rewards[:, columns], self.terminated[:, columns]
        copied.truncated = self.truncated[:, columns]
        copied.log_probs = None if self.log_probs is None else self.log_probs[:, columns]
        copied.extras = {name: values[:, columns] for name, values in self.extras.items()}
        return copied

    def _make_room(self, acted: Acted) -> None:
        if acted.log_probs is not None:
            self.log_probs = np.empty(self._shape, np.float32)
        for name, values in acted.extras.items():
            array = np.asarray(values)
            if array.dtype not in NAME_OF:
                raise TypeError(f"extra {name!r} has dtype {array.dtype}; the wire knows {', '.join(DTYPES)}")
            self.extras[name] = np.empty((*self._shape, *array.shape[1:]), array.dtype)
        self._has_room = True

    def arrays(self, finals: Finals, final_leaves: Sequence[Array]) -> dict[str, Array]:
        """All arrays under the names they have on the wire. Stacked frames are sent once, not for each place.

        Args:
            finals: The ends of episodes.
            final_leaves: Their last observations, as finals.leaves() returns them.
        """
        arrays: dict[str, Array] = {f"action.{index}": column for index, column in enumerate(self.actions)}
        if self.log_probs is not None:
            arrays["log_probs"] = self.log_probs
        arrays |= {f"extra.{name}": column for name, column in self.extras.items()}
        arrays |= {"rewards": self.rewards, "terminated": self.terminated, "truncated": self.truncated}
        arrays |= finals.arrays
        steps, columns = arrays["final_steps"], arrays["final_envs"]
        for index, (leaf, final) in enumerate(zip(self.obs, final_leaves, strict=True)):
            packed = stacks.pack(f"obs.{index}", leaf) if stacks.is_stack(leaf.shape[2:], leaf.dtype) else None
            if packed is None:
                arrays |= {f"obs.{index}": leaf, f"final_obs.{index}": final}
                continue
            arrays |= packed
            packed_finals = stacks.pack_finals(f"final_obs.{index}", final, leaf[steps, columns])
            arrays |= packed_finals or {f"final_obs.{index}": final}
        return arrays


class RunningEpisodes:
    """What the episodes that run have come to, one for each env."""

    def __init__(self, num_envs: int) -> None:
        self._returns = np.zeros(num_envs)
        self._lengths = np.zeros(num_envs, np.int64)
        self._began_s = np.full(num_envs, time.perf_counter())

    def saved(self) -> dict[str, Array]:
        """For a checkpoint: returns, lengths, and seconds since the episodes began."""
        return {
            "returns": self._returns.copy(),
            "lengths": self._lengths.copy(),
            "seconds": time.perf_counter() - self._began_s,
        }

    def restore(self, saved: Mapping[str, Array]) -> None:
        """Go on from a checkpoint."""
        self._returns, self._lengths = saved["returns"].copy(), saved["lengths"].copy()
        self._began_s = time.perf_counter() - saved["seconds"]

    def add(self, rewards: Array, envs: Array | slice = ALL) -> None:
        """Count a step of these envs."""
        if envs is ALL:  # in place: less than half of the time
            self._returns += rewards
            self._lengths += 1
        else:
            self._returns[envs] += rewards
            self._lengths[envs] += 1

    def of(self, env_id: int) -> dict[str, Any]:
        """What the episode of an env has come to, in plain values."""
        return {"return": float(self._returns[env_id]), "length": int(self._lengths[env_id])}

    def restored(self, running: Mapping[int, Mapping[str, Any]]) -> None:
        """Some envs are in other episodes now; by env id, what of() gave, or nothing."""
        for env_id, each in running.items():
            self._returns[env_id], self._lengths[env_id] = each.get("return", 0.0), each.get("length", 0)
            self._began_s[env_id] = time.perf_counter()

    def end(self, envs: Array) -> tuple[list[float], list[int], list[float]]:
        """Returns, lengths and seconds of the episodes of these envs, which begin others now."""
        now_s = time.perf_counter()
        ended = self._returns[envs].tolist(), self._lengths[envs].tolist(), (now_s - self._began_s[envs]).tolist()
        self._returns[envs], self._lengths[envs], self._began_s[envs] = 0.0, 0, now_s
        return ended


@dataclass(slots=True)
class Final:
    """The end of an episode."""

    step: int
    column: int
    obs: Any  # what the env showed last
    state: dict[str, Array]  # what a recurrent policy remembered of the episode; empty: it is not recurrent
    episode_return: float
    episode_length: int
    seconds: float  # from the reset of its env to its last step
    value: float = 0.0  # of `obs`, once the policy was asked


@dataclass(slots=True)
class Finals:
    """Where episodes ended, and at what; in the order of steps, then of columns."""

    ends: list[Final] = field(default_factory=list)

    def add(
        self,
        steps: Sequence[int],
        columns: Array,
        obs: list[Any],
        state: dict[str, Array],
        episodes: RunningEpisodes,
        envs: Array,
    ) -> None:
        """Note the ends of the episodes of `envs`; `state` has a row for each."""
        states: list[dict[str, Array]] = [{} for _ in steps]
        for name, rows in state.items():
            for each, row in zip(states, rows, strict=True):
                each[name] = row
        self.ends.extend(map(Final, steps, columns.tolist(), obs, states, *episodes.end(envs)))

    def take(self, columns: Array) -> Finals:
        """Remove the ends in some columns and return them, with the positions of these columns as columns."""
        position = {column: index for index, column in enumerate(columns.tolist())}
        taken = [end for end in self.ends if end.column in position]
        self.ends = [end for end in self.ends if end.column not in position]
        for end in taken:
            end.column = position[end.column]
        return Finals(sorted(taken, key=lambda end: (end.step, end.column)))

    def state(self) -> dict[str, dict[str, Array]]:
        """What a recurrent policy remembered of these episodes, as an argument."""
        if not self.ends or not self.ends[0].state:
            return {}
        return {"state": {name: np.stack([end.state[name] for end in self.ends]) for name in self.ends[0].state}}

    def leaves(self, tree: SpaceTree) -> list[Array]:
        """The last observations, each leaf [F, ...]."""
        columns = [np.empty((len(self.ends), *leaf.shape), leaf.dtype) for leaf in tree.leaves]
        for row, end in enumerate(self.ends):
            if tree.is_one_array:
                columns[0][row] = end.obs
                continue
            for column, value in zip(columns, tree.flatten(end.obs), strict=True):
                column[row] = value
        return columns

    @property
    def values(self) -> Array:
        """[F] float32, of the last observations."""
        return np.array([end.value for end in self.ends], np.float32)

    @property
    def arrays(self) -> dict[str, Array]:
        """All but the observations and values, under the names they have on the wire."""
        return {
            "final_steps": np.array([end.step for end in self.ends], np.int64),
            "final_envs": np.array([end.column for end in self.ends], np.int64),
            "episode_returns": np.array([end.episode_return for end in self.ends], np.float64),
            "episode_lengths": np.array([end.episode_length for end in self.ends], np.int64),
            "episode_seconds": np.array([end.seconds for end in self.ends], np.float64),
        }
