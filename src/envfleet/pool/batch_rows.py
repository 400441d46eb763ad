"""Rows of what step() and recv() return."""

from __future__ import annotations

from typing import Any

from envfleet.contract.arrays import Array, BoolArray, FloatArray
from envfleet.contract.spaces import SpaceTree
from envfleet.pool.vector.infos import rows_of

StepResult = tuple[Any, FloatArray, BoolArray, BoolArray, dict[str, Any]]


def rows_of_result(tree: SpaceTree, result: StepResult, rows: Array) -> StepResult:
    """The chosen rows, in that order, copied. `tree` is the observation space's."""
    obs, rewards, terminated, truncated, infos = result
    leaves = [
        tuple(leaf[row] for row in rows.tolist()) if isinstance(leaf, tuple) else leaf[rows]
        for leaf in tree.flatten(obs)
    ]
    return tree.unflatten(leaves), rewards[rows], terminated[rows], truncated[rows], rows_of(infos, rows)
