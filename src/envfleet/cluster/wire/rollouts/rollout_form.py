"""RolloutForm: which arrays the rows and rollouts of a worker consist of, checked against the spaces.

Pure. An observation leaf of a rollout has T + 1 rows: the last is what the envs show after the last step.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from envfleet.cluster.info_choice import InfoChoice
from envfleet.cluster.wire.codec import BadMessage, named, require_booleans
from envfleet.cluster.wire.messages import RolloutInfos
from envfleet.cluster.wire.plain_values import from_plain
from envfleet.cluster.wire.rollouts import info_arrays, stacks
from envfleet.cluster.wire.rollouts.collected import Collected, Rows
from envfleet.cluster.wire.rollouts.row_checks import RowChecks, SuspectRows, require_ends
from envfleet.contract.arrays import Array, Arrays
from envfleet.contract.distributions import from_arrays
from envfleet.contract.errors import UsageError
from envfleet.contract.spaces import Leaf, SpaceTree

MOST_EXTRAS = 64
FIXED = {"rewards": np.float64, "terminated": np.bool_, "truncated": np.bool_}


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
        self.obs_names = [f"obs.{index}" for index in range(len(obs.leaves))]
        self._rows: list[tuple[str, tuple[int, ...], Any]] = [
            (name, (num_envs, *leaf.shape), leaf.dtype) for name, leaf in zip(self.obs_names, obs.leaves, strict=True)
        ]
        self._rows += [(name, (num_envs,), np.dtype(dtype)) for name, dtype in FIXED.items()]

    def check_rows(self, worker: int, info: Any, arrays: Arrays) -> Rows:
        """The rows of a step or reset. Raises BadMessage."""
        for name, shape, dtype in self._rows:
            _require(arrays, name, shape, dtype)
        info = from_plain(info)
        if not isinstance(info, dict):
            raise BadMessage(f"info must be a dictionary; got {type(info).__name__}")
        seen = zip(self._checks.obs, (arrays[name] for name in self.obs_names), strict=True)
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
        if choice.action_mask is None and "action_mask" in arrays:
            raise BadMessage("array 'action_mask' came; no action masks were asked for")
        if choice.action_mask is not None:
            if "action_mask" not in arrays:
                raise BadMessage(f"array 'action_mask' is missing; the masks in {choice.action_mask!r} were asked for")
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
        for name, bounds, frame_bounds in zip(self.obs_names, self._checks.obs, self._checks.frames, strict=True):
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
