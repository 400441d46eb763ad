"""Rows of what step() and recv() return."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from envfleet.contract.infos import Infos, InfoTable
from envfleet.contract.spaces import SpaceTree

StepResult = tuple[Any, NDArray[np.float64], NDArray[np.bool_], NDArray[np.bool_], Infos]


def rows_of_result(tree: SpaceTree, result: StepResult, rows: NDArray[Any]) -> StepResult:
    """The chosen rows, in that order, copied. `tree` is the observation space's."""
    obs, rewards, terminated, truncated, infos = result
    chosen = InfoTable(len(rewards), infos).select(rows)
    return tree.select(obs, rows), rewards[rows], terminated[rows], truncated[rows], chosen.columns
