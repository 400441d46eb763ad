"""Rows and rollouts that workers send: which arrays they consist of, checked against the spaces, joined in env order.

Pure. An observation leaf of a rollout has T + 1 rows: the last is what the envs show after the last step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from envfleet.cluster.info_choice import InfoChoice
from envfleet.cluster.wire.codec import BadMessage, require_booleans
from envfleet.cluster.wire.messages import RolloutInfos
from envfleet.cluster.wire.plain_values import from_plain
from envfleet.cluster.wire.rollouts import info_arrays, stacks
from envfleet.cluster.wire.rollouts.row_checks import NONE_SUSPECT, RowChecks, SuspectRows, require_ends
from envfleet.contract.arrays import Array, Arrays
from envfleet.contract.distributions import from_arrays
from envfleet.contract.errors import UsageError
from envfleet.contract.infos.flat import FlatInfos, joined, nested
from envfleet.contract.infos.table import InfoTable
from envfleet.contract.rollout import Rollout
from envfleet.contract.spaces import Leaf, SpaceTree

MOST_EXTRAS = 64
FIXED = {"rewards": np.float64, "terminated": np.bool_, "truncated": np.bool_}


@dataclass(frozen=True, slots=True)
class Collected:
    """One worker's rollout, checked. A column is the rows of one env."""

    worker: int
    version: int  # of the newest column
    lag: int  # of that version, when the rollout was accepted; after taken(): then
    num_steps: int
    arrays: Arrays
    distribution: str | None = None  # the kind of that in the arrays "probe."
    suspects: SuspectRows = NONE_SUSPECT
    env_ids: Array | None = None  # [N] of its columns, counted within the worker; None: all envs
    versions: Array | None = None  # [N] of its columns; None: `version` of all
    infos: FlatInfos = field(default_factory=dict)  # [T, N, ...]
    final_infos: FlatInfos = field(default_factory=dict)  # [F, ...]

    @property
    def oldest_version(self) -> int:
        """The version of the oldest column."""
        return self.version if self.versions is None else int(self.versions.min())

    @property
    def num_columns(self) -> int:
        """N: columns of the rollout."""
        return int(self.arrays["rewards"].shape[1])

    @property
    def column_versions(self) -> Array:
        """[N] int64: the version of each column."""
        return np.full(self.num_columns, self.version) if self.versions is None else self.versions

    @property
    def column_env_ids(self) -> Array:
        """[N] int64: the env of each column, counted within the worker."""
        return np.arange(self.num_columns) if self.env_ids is None else self.env_ids

    def taken(self, newest_version: int) -> Collected:
        """The same rollout with its lag at the moment at which the learner takes it."""
        lag = newest_version - self.version
        return self if lag == self.lag else replace(self, lag=lag)


@dataclass(frozen=True, slots=True)
class Rows:
    """One worker's rows of a step or reset, checked."""

    worker: int
    info: dict[str, Any]
    arrays: Arrays
    suspects: SuspectRows = NONE_SUSPECT


class RolloutForm:
    """What rows and rollouts of one worker must look like."""

    def __init__(self, obs: SpaceTree, actions: SpaceTree, num_envs: int, num_probes: int = 0) -> None:
        """`num_envs` of one worker; `num_probes` rows of its rollouts show more of the policy."""
        self._num_probes = num_probes
        self.obs = obs
        self.actions = actions
        self.num_envs = num_envs
        self.newest_change = 0  # that was made while envs run
        self._checks = RowChecks(obs, actions)
        self._obs_names = [f"obs.{index}" for index in range(len(obs.leaves))]
        self._rows: list[tuple[str, tuple[int, ...], Any]] = [
            (name, (num_envs, *leaf.shape), leaf.dtype) for name, leaf in zip(self._obs_names, obs.leaves, strict=True)
        ]
        self._rows += [(name, (num_envs,), np.dtype(dtype)) for name, dtype in FIXED.items()]

    def check_rows(self, worker: int, info: Any, arrays: Arrays) -> Rows:
        """The rows of a step or reset. Raises BadMessage."""
        for name, shape, dtype in self._rows:
            _require(arrays, name, shape, dtype)
        info = from_plain(info)
        if not isinstance(info, dict):
            raise BadMessage(f"info must be a dictionary; got {type(info).__name__}")
        seen = zip(self._checks.obs, (arrays[name] for name in self._obs_names), strict=True)
        return Rows(worker, info, arrays, self._checks.suspects(seen, (), arrays))

    def check_rollout(
        self,
        worker: int,
        version: int,
        lag: int,
        num_steps: int,
        arrays: Arrays,
        distribution: str | None = None,
        num_steps_before: int | None = None,
        num_columns: int | None = None,
    ) -> Collected:
        """A rollout of `num_steps`. Raises BadMessage.

        `num_steps_before` have been ordered of the same process before; None: not known. `num_columns` of the envs that
        were ready first, each with a version of its own; None: all envs, with one version.
        """
        env_ids, versions = None, None
        num_probed = num_rows = self.num_envs
        if num_columns is not None:
            env_ids, versions = self._checked_columns(arrays, num_columns, version)
            num_probed, num_rows = int(np.count_nonzero(versions == version)), num_columns
        shape = (num_steps, num_rows)
        self._check_obs((num_steps + 1, num_rows), arrays)
        for index, leaf in enumerate(self.actions.leaves):
            _require(arrays, f"action.{index}", (*shape, *leaf.shape), leaf.dtype)
        self._checks.require_actions([arrays[f"action.{index}"] for index in range(len(self.actions.leaves))])
        for name, dtype in FIXED.items():
            _require(arrays, name, shape, np.dtype(dtype))
        if "log_probs" in arrays:
            _require(arrays, "log_probs", shape, np.dtype(np.float32))
        extras = [name for name in arrays if name.startswith("extra.")]
        if len(extras) > MOST_EXTRAS:
            raise BadMessage(f"{len(extras)} extras; at most {MOST_EXTRAS} are allowed")
        for name in extras:
            _require(arrays, name, (*shape, *arrays[name].shape[2:]), arrays[name].dtype)
        num_finals = self._check_finals(shape, arrays)
        require_ends(arrays, num_steps_before)
        self._check_changes(shape, arrays)
        if "next_values" in arrays:
            _require(arrays, "next_values", (num_rows,), np.dtype(np.float32))
            _require(arrays, "final_values", (num_finals,), np.dtype(np.float32))
        self._check_policy(arrays, num_rows, min(self._num_probes, num_steps * num_probed), distribution)
        suspects = self._suspects(arrays)
        if env_ids is not None:
            suspects = suspects.of_envs(env_ids)
        return Collected(worker, version, lag, num_steps, arrays, distribution, suspects, env_ids, versions)

    def _check_obs(self, shape: tuple[int, int], arrays: Arrays) -> None:
        for index, leaf in enumerate(self.obs.leaves):
            if f"obs.{index}" in arrays:
                _require(arrays, f"obs.{index}", (*shape, *leaf.shape), leaf.dtype)
            elif stacks.is_stack(leaf.shape, _dtype(leaf)):
                stacks.parts(f"obs.{index}", arrays, (*shape, *leaf.shape), _dtype(leaf))
            else:
                raise BadMessage(f"array 'obs.{index}' is missing")

    def _checked_columns(self, arrays: Arrays, num_columns: int, newest: int) -> tuple[Array, Array]:
        """The env and the version of each column, in the order of envs; `newest` is the version of the newest one."""
        for name in ("env_ids", "versions"):
            _require(arrays, name, (num_columns,), np.dtype(np.int64))
        env_ids, versions = arrays["env_ids"], arrays["versions"]
        if env_ids[0] < 0 or env_ids[-1] >= self.num_envs or (np.diff(env_ids) <= 0).any():
            expected = f"{num_columns} of the worker's {self.num_envs} envs, in ascending order"
            raise BadMessage(f"array 'env_ids' must have {expected}; got {env_ids.tolist()}")
        if versions.min() < 0 or versions.max() != newest:
            raise BadMessage(f"array 'versions' must have {newest} as its newest version; got {versions.tolist()}")
        return env_ids, versions

    def with_infos(self, collected: Collected, sent: RolloutInfos, choice: InfoChoice) -> Collected:
        """The same rollout with its infos and action masks. Raises BadMessage if others were asked for."""
        arrays, shape = collected.arrays, (collected.num_steps, collected.num_columns)
        steps, finals = info_arrays.unpacked(sent, arrays, choice, *shape, len(arrays["final_steps"]))
        if ("action_mask" in arrays) != (choice.action_mask is not None):
            raise BadMessage(f"the action masks asked for are {choice.action_mask!r}, and they came or not")
        if choice.action_mask is not None:
            _require(arrays, "action_mask", (*shape, *arrays["action_mask"].shape[2:]), np.dtype(np.bool_))
        return replace(collected, infos=steps, final_infos=finals)

    def _check_changes(self, shape: tuple[int, int], arrays: Arrays) -> None:
        if "changes" not in arrays:
            return
        _require(arrays, "changes", shape, np.dtype(np.int64))
        if arrays["changes"].min() < 0 or arrays["changes"].max() > self.newest_change:
            raise BadMessage(f"array 'changes' has numbers outside 0 to {self.newest_change}")

    def _suspects(self, arrays: Arrays) -> SuspectRows:
        """Of what each step came to; the first observation was looked at when it came as the last of a rollout."""
        seen, finals = [], []
        for name, bounds, frame_bounds in zip(self._obs_names, self._checks.obs, self._checks.frames, strict=True):
            seen.append((bounds, arrays[name][1:]) if name in arrays else (frame_bounds, arrays[f"{name}/newest"]))
            final = f"final_{name}"
            finals.append((bounds, arrays[final]) if final in arrays else (frame_bounds, arrays[f"{final}/newest"]))
        return self._checks.suspects(seen, finals, arrays)

    def _check_policy(self, arrays: Arrays, num_rows: int, num_probes: int, distribution: str | None) -> None:
        """What a recurrent policy remembers, and what a policy shows of itself on the probed rows."""
        shown = named(arrays, "probe.")
        parts = (
            (named(arrays, "state."), num_rows),
            (named(arrays, "probe_state."), num_probes),
            (shown, num_probes),
        )
        for part, expected in parts:
            if len(part) > MOST_EXTRAS:
                raise BadMessage(f"{len(part)} arrays of the policy; at most {MOST_EXTRAS} are allowed")
            for name, array in part.items():
                if array.shape[:1] != (expected,):
                    raise BadMessage(f"array {name!r} of the policy must have {expected} rows; got {array.shape}")
                require_booleans(name, array)
        if distribution is not None:
            try:
                from_arrays(distribution, shown)
            except UsageError as error:
                raise BadMessage(str(error)) from error
            if any(array.dtype not in (np.float32, np.float64) or array.ndim != 2 for array in shown.values()):
                raise BadMessage("a distribution consists of float32 or float64, with two dimensions")
            if "log_std" in shown and shown["log_std"].shape != shown["mean"].shape:
                raise BadMessage(f"mean {shown['mean'].shape} and log_std {shown['log_std'].shape} must be alike")
        remembered = {name: (rows.shape[1:], rows.dtype) for name, rows in named(arrays, "state.").items()}
        probed = {name: (rows.shape[1:], rows.dtype) for name, rows in named(arrays, "probe_state.").items()}
        if probed and probed != remembered:
            raise BadMessage(f"the state of probed rows must be like that of all, {remembered}; got {probed}")

    def _check_finals(self, shape: tuple[int, int], arrays: Arrays) -> int:
        steps = arrays.get("final_steps")
        num_finals = 0 if steps is None or steps.ndim != 1 else len(steps)
        for name, most in (("final_steps", shape[0]), ("final_envs", shape[1])):
            _require(arrays, name, (num_finals,), np.dtype(np.int64))
            if num_finals and (arrays[name].min() < 0 or arrays[name].max() >= most):
                raise BadMessage(f"array {name!r} has numbers outside 0 to {most - 1}")
        _require(arrays, "episode_returns", (num_finals,), np.dtype(np.float64))
        _require(arrays, "episode_lengths", (num_finals,), np.dtype(np.int64))
        _require(arrays, "episode_seconds", (num_finals,), np.dtype(np.float64))
        if not (arrays["episode_seconds"] >= 0).all():
            raise BadMessage("an episode that took less than 0 seconds")
        for index, leaf in enumerate(self.obs.leaves):
            if f"final_obs.{index}" in arrays:
                _require(arrays, f"final_obs.{index}", (num_finals, *leaf.shape), leaf.dtype)
            elif stacks.is_stack(leaf.shape, _dtype(leaf)):
                stacks.final_parts(f"final_obs.{index}", arrays, (num_finals, *leaf.shape), _dtype(leaf))
            else:
                raise BadMessage(f"array 'final_obs.{index}' is missing")
        return num_finals

    # -- joining --

    def join_rows(self, parts: Sequence[Rows]) -> tuple[Any, Array, Array, Array, dict[str, Any]]:
        """Rows of several workers, in the order given, as a VectorEnv's step() returns them."""
        leaves = [np.concatenate([part.arrays[name] for part in parts]) for name in self._obs_names]
        obs = leaves[0] if self.obs.is_one_array else self.obs.unflatten(leaves)
        rewards, terminated, truncated = [np.concatenate([part.arrays[name] for part in parts]) for name in FIXED]
        info = InfoTable.join([InfoTable(self.num_envs, part.info) for part in parts]).columns
        return obs, rewards, terminated, truncated, info

    def join_rollouts(self, parts: Sequence[Collected]) -> Rollout:
        """Rollouts of several workers, side by side in the order given."""
        num_steps = parts[0].num_steps
        offsets = [0, *np.cumsum([part.num_columns for part in parts]).tolist()]
        full_obs = [self._joined_obs(index, leaf, parts, offsets) for index, leaf in enumerate(self.obs.leaves)]
        final_steps = _joined(parts, "final_steps")
        final_envs = np.concatenate(
            [part.arrays["final_envs"] + offset for part, offset in zip(parts, offsets, strict=False)]
        )
        has_values = all("next_values" in part.arrays for part in parts)
        final_values = None
        if has_values:
            final_values = np.zeros((num_steps, offsets[-1]), np.float32)
            final_values[final_steps, final_envs] = _joined(parts, "final_values")
        return Rollout(
            obs=self.obs.unflatten([array[:-1] for array in full_obs]),
            actions=self.actions.unflatten(
                [_joined(parts, f"action.{index}", axis=1) for index in range(len(self.actions.leaves))]
            ),
            log_probs=_joined(parts, "log_probs", axis=1) if all("log_probs" in p.arrays for p in parts) else None,
            extras={name.removeprefix("extra."): _joined(parts, name, axis=1) for name in self._common_extras(parts)},
            rewards=_joined(parts, "rewards", axis=1),
            terminations=_joined(parts, "terminated", axis=1),
            truncations=_joined(parts, "truncated", axis=1),
            next_obs=self.obs.unflatten([array[-1] for array in full_obs]),
            next_values=_joined(parts, "next_values") if has_values else None,
            final_values=final_values,
            final_steps=final_steps,
            final_envs=final_envs,
            final_obs=self.obs.unflatten(
                [self._final_obs(index, parts, offsets, full_obs[index]) for index in range(len(self.obs.leaves))]
            ),
            episode_returns=_joined(parts, "episode_returns"),
            episode_lengths=_joined(parts, "episode_lengths"),
            episode_seconds=_joined(parts, "episode_seconds"),
            infos=nested(joined([part.infos for part in parts], [part.arrays["rewards"].shape for part in parts], 1)),
            final_infos=nested(
                joined([part.final_infos for part in parts], [part.arrays["final_steps"].shape for part in parts], 0)
            ),
            action_masks=self._joined_masks(parts),
            env_ids=np.concatenate([part.column_env_ids + part.worker * self.num_envs for part in parts]),
            states=self._joined_states(parts),
            changes=self._joined_changes(parts),
            **_joined_versions(parts),
        )

    def _joined_changes(self, parts: Sequence[Collected]) -> Array | None:
        if not any("changes" in part.arrays for part in parts):
            return None
        none = [np.zeros((part.num_steps, part.num_columns), np.int64) for part in parts]
        return np.concatenate(
            [part.arrays.get("changes", each) for part, each in zip(parts, none, strict=True)], axis=1
        )

    @staticmethod
    def _joined_masks(parts: Sequence[Collected]) -> Array | None:
        shapes = {part.arrays["action_mask"].shape[2:] if "action_mask" in part.arrays else None for part in parts}
        if None in shapes or len(shapes) > 1:
            return None
        return _joined(parts, "action_mask", axis=1)

    @staticmethod
    def _joined_states(parts: Sequence[Collected]) -> dict[str, Array] | None:
        states = [named(part.arrays, "state.") for part in parts]
        forms = {tuple((name, rows.shape[1:], rows.dtype) for name, rows in state.items()) for state in states}
        if not states[0] or len(forms) > 1:
            return None
        return {name: np.concatenate([state[name] for state in states]) for name in states[0]}

    def _joined_obs(self, index: int, leaf: Leaf, parts: Sequence[Collected], offsets: Sequence[int]) -> Array:
        """[T + 1, N, ...]"""
        name = f"obs.{index}"
        if len(parts) == 1 and name in parts[0].arrays:
            return parts[0].arrays[name]  # as it came, without a copy: it cannot be written
        if all(name in part.arrays for part in parts):
            return _joined(parts, name, axis=1)
        joined = np.empty((parts[0].num_steps + 1, offsets[-1], *leaf.shape), leaf.dtype)
        for part, first, end in zip(parts, offsets, offsets[1:], strict=False):
            rows = joined[:, first:end]
            if name in part.arrays:
                rows[...] = part.arrays[name]
            else:
                stacks.unpack(name, part.arrays, rows)
        return joined

    def _final_obs(self, index: int, parts: Sequence[Collected], offsets: Sequence[int], full_obs: Array) -> Array:
        name = f"final_obs.{index}"
        finals = []
        for part, offset in zip(parts, offsets, strict=False):
            if name in part.arrays:
                finals.append(part.arrays[name])
                continue
            steps, envs = part.arrays["final_steps"], part.arrays["final_envs"] + offset
            finals.append(stacks.unpack_finals(name, part.arrays, full_obs[steps, envs]))
        return finals[0] if len(finals) == 1 else np.concatenate(finals)

    @staticmethod
    def _common_extras(parts: Sequence[Collected]) -> list[str]:
        first = parts[0].arrays
        return [
            name
            for name in first
            if name.startswith("extra.")
            and all(
                name in part.arrays
                and part.arrays[name].shape[2:] == first[name].shape[2:]
                and part.arrays[name].dtype == first[name].dtype
                for part in parts
            )
        ]


def named(arrays: Arrays, prefix: str) -> dict[str, Array]:
    """The arrays whose names begin so, without that."""
    return {name.removeprefix(prefix): array for name, array in arrays.items() if name.startswith(prefix)}


def _dtype(leaf: Leaf) -> np.dtype[Any]:
    assert leaf.dtype is not None  # a cluster carries array spaces only
    return leaf.dtype


def _require(arrays: Arrays, name: str, shape: tuple[int, ...], dtype: np.dtype[Any] | None) -> None:
    array = arrays.get(name)
    if array is None:
        raise BadMessage(f"array {name!r} is missing")
    if array.shape != shape or array.dtype != dtype:
        raise BadMessage(f"array {name!r} must be {dtype} {shape}; got {array.dtype} {array.shape}")
    require_booleans(name, array)


def _joined_versions(parts: Sequence[Collected]) -> dict[str, Array]:
    """Workers, versions and lags of the rollout's parts, and the part of each column."""
    workers: list[int] = []
    versions: list[int] = []
    lags: list[int] = []
    columns: list[Array] = []
    for each in parts:
        own, index = np.unique(each.column_versions, return_inverse=True)
        columns.append(index + len(workers))
        workers += [each.worker] * len(own)
        versions += own.tolist()
        lags += (each.version + each.lag - own).tolist()
    named_columns = {"workers": workers, "versions": versions, "lags": lags}
    return {name: np.array(values) for name, values in named_columns.items()} | {"parts": np.concatenate(columns)}


def _joined(parts: Sequence[Collected], name: str, axis: int = 0) -> Array:
    """A new array."""
    return np.concatenate([part.arrays[name] for part in parts], axis=axis)
