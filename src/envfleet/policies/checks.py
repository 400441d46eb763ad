"""Checks of every policy's arrays, whatever the framework."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from envfleet.contract.arrays import Array
from envfleet.contract.errors import UsageError


def num_rows_of(tree: Any) -> int:
    """Return B of a tree of [B, ...]. A tuple of objects (a batch of a Text space) has a row for each object."""
    if isinstance(tree, np.ndarray):
        return len(tree)
    if isinstance(tree, Mapping) and tree:
        return num_rows_of(next(iter(tree.values())))
    if isinstance(tree, tuple) and tree and isinstance(tree[0], (np.ndarray, Mapping, tuple)):
        return num_rows_of(tree[0])
    return len(tree)


def masked(action_mask: Any) -> dict[str, Any]:
    """Return the keyword argument of a function of the user's that gets action masks; nothing if there are none."""
    return {} if action_mask is None else {"action_mask": action_mask}


def require_rows(array: Array, num_rows: int, name: str) -> Array:
    """Check that an array has one number for each row.

    Args:
        array: [B] or [B, 1].
        num_rows: B.
        name: what the error calls the array.

    Returns:
        The array as [B].

    Raises:
        UsageError: it has another shape.
    """
    shape = array.shape
    if shape == (num_rows,):
        return array
    if shape == (num_rows, 1):
        return array.reshape(num_rows)
    per_dimension = name == "log_probs" and len(shape) > 1 and shape[0] == num_rows
    advice = ": sum the log-probs over the dimensions of the action, as in log_prob.sum(1)" if per_dimension else ""
    raise UsageError(f"{name} of the policy must have shape ({num_rows},) or ({num_rows}, 1); got {shape}{advice}")


def require_weights(given: Mapping[str, Array], own_shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Check that weights fit a policy.

    Args:
        given: the weights.
        own_shapes: name and shape of each weight that the policy has.

    Raises:
        UsageError: names or shapes differ; the message lists which.
    """
    wrong = []
    if missing := [name for name in own_shapes if name not in given]:
        wrong.append(f"missing: {_listed(missing)}")
    if unexpected := [name for name in given if name not in own_shapes]:
        wrong.append(f"unexpected: {_listed(unexpected)}")
    if misshaped := [
        f"{name} {np.shape(given[name])} instead of {shape}"
        for name, shape in own_shapes.items()
        if name in given and np.shape(given[name]) != shape
    ]:
        wrong.append(f"of another shape: {_listed(misshaped)}")
    if wrong:
        raise UsageError(f"the weights do not fit this policy; {'; '.join(wrong)}")


def joined(**parts: Mapping[str, Array]) -> dict[str, Array]:
    """Put the weights of a policy's parts into one mapping: `part.name`."""
    return {f"{part}.{name}": array for part, weights in parts.items() for name, array in weights.items()}


def split_weights(weights: Mapping[str, Array], part: str) -> dict[str, Array]:
    """Return the weights of one part, under its own names: the opposite of joined()."""
    prefix = f"{part}."
    return {name.removeprefix(prefix): array for name, array in weights.items() if name.startswith(prefix)}


def _listed(names: list[str]) -> str:
    return ", ".join(names[:10]) + (f" and {len(names) - 10} more" if len(names) > 10 else "")
