"""Rows of what step() and recv() return."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from envfleet.contract.spaces import SpaceTree
from envfleet.pool.vector.infos import rows_of

StepResult = tuple[Any, NDArray[np.float64], NDArray[np.bool_], NDArray[np.bool_], dict[str, Any]]


def rows_of_result(tree: SpaceTree, result: StepResult, rows: NDArray[Any]) -> StepResult:
    """The chosen rows, in that order, copied. `tree` is the observation space's."""
    obs, rewards, terminated, truncated, infos = result
    leaves = [
        tuple(leaf[row] for row in rows.tolist()) if isinstance(leaf, tuple) else leaf[rows]
        for leaf in tree.flatten(obs)
    ]
    return tree.unflatten(leaves), rewards[rows], terminated[rows], truncated[rows], rows_of(infos, rows)
