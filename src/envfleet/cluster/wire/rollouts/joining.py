"""join_rows and join_rollouts: what several workers have sent, side by side in env order. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from envfleet.cluster.wire.codec import named
from envfleet.cluster.wire.rollouts import stacks
from envfleet.cluster.wire.rollouts.collected import Collected, Rows
from envfleet.cluster.wire.rollouts.rollout_form import FIXED, RolloutForm
from envfleet.contract.arrays import Array
from envfleet.contract.infos.flat import joined, nested
from envfleet.contract.infos.table import InfoTable
from envfleet.contract.rollout import Rollout
from envfleet.contract.spaces import Leaf


def join_rows(form: RolloutForm, parts: Sequence[Rows]) -> tuple[Any, Array, Array, Array, dict[str, Any]]:
    """Rows of several workers, in the order given, as a VectorEnv's step() returns them."""
    leaves = [np.concatenate([part.arrays[name] for part in parts]) for name in form.obs_names]
    obs = leaves[0] if form.obs.is_one_array else form.obs.unflatten(leaves)
    rewards, terminated, truncated = [np.concatenate([part.arrays[name] for part in parts]) for name in FIXED]
    info = InfoTable.join([InfoTable(form.num_envs, part.info) for part in parts]).columns
    return obs, rewards, terminated, truncated, info


def join_rollouts(form: RolloutForm, parts: Sequence[Collected]) -> Rollout:
    """Rollouts of several workers, side by side in the order given."""
    num_steps = parts[0].num_steps
    offsets = [0, *np.cumsum([part.num_columns for part in parts]).tolist()]
    full_obs = [_joined_obs(index, leaf, parts, offsets) for index, leaf in enumerate(form.obs.leaves)]
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
        obs=form.obs.unflatten([array[:-1] for array in full_obs]),
        actions=form.actions.unflatten(
            [_joined(parts, f"action.{index}", axis=1) for index in range(len(form.actions.leaves))]
        ),
        log_probs=_joined(parts, "log_probs", axis=1) if all("log_probs" in p.arrays for p in parts) else None,
        extras={name.removeprefix("extra."): _joined(parts, name, axis=1) for name in _common_extras(parts)},
        rewards=_joined(parts, "rewards", axis=1),
        terminations=_joined(parts, "terminated", axis=1),
        truncations=_joined(parts, "truncated", axis=1),
        next_obs=form.obs.unflatten([array[-1] for array in full_obs]),
        next_values=_joined(parts, "next_values") if has_values else None,
        final_values=final_values,
        final_steps=final_steps,
        final_envs=final_envs,
        final_obs=form.obs.unflatten(
            [_final_obs(index, parts, offsets, full_obs[index]) for index in range(len(form.obs.leaves))]
        ),
        episode_returns=_joined(parts, "episode_returns"),
        episode_lengths=_joined(parts, "episode_lengths"),
        episode_seconds=_joined(parts, "episode_seconds"),
        infos=nested(joined([part.infos for part in parts], [part.arrays["rewards"].shape for part in parts], 1)),
        final_infos=nested(
            joined([part.final_infos for part in parts], [part.arrays["final_steps"].shape for part in parts], 0)
        ),
        action_masks=_joined_masks(parts),
        env_ids=np.concatenate([part.column_env_ids + part.worker * form.num_envs for part in parts]),
        states=_joined_states(parts),
        changes=_joined_changes(parts),
        **_joined_versions(parts),
    )


def _joined_changes(parts: Sequence[Collected]) -> Array | None:
    if not any("changes" in part.arrays for part in parts):
        return None
    none = [np.zeros((part.num_steps, part.num_columns), np.int64) for part in parts]
    return np.concatenate([part.arrays.get("changes", each) for part, each in zip(parts, none, strict=True)], axis=1)


def _joined_masks(parts: Sequence[Collected]) -> Array | None:
    shapes = {part.arrays["action_mask"].shape[2:] if "action_mask" in part.arrays else None for part in parts}
    if None in shapes or len(shapes) > 1:
        return None
    return _joined(parts, "action_mask", axis=1)


def _joined_states(parts: Sequence[Collected]) -> dict[str, Array] | None:
    states = [named(part.arrays, "state.") for part in parts]
    forms = {tuple((name, rows.shape[1:], rows.dtype) for name, rows in state.items()) for state in states}
    if not states[0] or len(forms) > 1:
        return None
    return {name: np.concatenate([state[name] for state in states]) for name in states[0]}


def _joined_obs(index: int, leaf: Leaf, parts: Sequence[Collected], offsets: Sequence[int]) -> Array:
    """A leaf of the observations of all steps and envs: [T + 1, N, ...]."""
    name = f"obs.{index}"
    if len(parts) == 1 and name in parts[0].arrays:
        return parts[0].arrays[name]  # as it came, without a copy: it cannot be written
    if all(name in part.arrays for part in parts):
        return _joined(parts, name, axis=1)
    full = np.empty((parts[0].num_steps + 1, offsets[-1], *leaf.shape), leaf.dtype)
    for part, first, end in zip(parts, offsets, offsets[1:], strict=False):
        rows = full[:, first:end]
        if name in part.arrays:
            rows[...] = part.arrays[name]
        else:
            stacks.unpack(name, part.arrays, rows)
    return full


def _final_obs(index: int, parts: Sequence[Collected], offsets: Sequence[int], full_obs: Array) -> Array:
    name = f"final_obs.{index}"
    finals = []
    for part, offset in zip(parts, offsets, strict=False):
        if name in part.arrays:
            finals.append(part.arrays[name])
            continue
        steps, envs = part.arrays["final_steps"], part.arrays["final_envs"] + offset
        finals.append(stacks.unpack_finals(name, part.arrays, full_obs[steps, envs]))
    return finals[0] if len(finals) == 1 else np.concatenate(finals)


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
    """The arrays of this name of all parts, joined along `axis`: a new array."""
    return np.concatenate([part.arrays[name] for part in parts], axis=axis)
