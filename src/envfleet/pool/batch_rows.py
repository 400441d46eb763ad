"""Rows of what step() and recv() return."""

from __future__ import annotations

from typing import Any

from envfleet.contract.arrays import Array, BoolArray, FloatArray
from envfleet.contract.infos.table import Infos, InfoTable
from envfleet.contract.spaces import SpaceTree

StepResult = tuple[Any, FloatArray, BoolArray, BoolArray, Infos]


def rows_of_result(tree: SpaceTree, result: StepResult, rows: Array) -> StepResult:
    """The chosen rows, in that order, copied. `tree` is the observation space's."""
    obs, rewards, terminated, truncated, infos = result
    chosen = InfoTable(len(rewards), infos).select(rows)
    return tree.select(obs, rows), rewards[rows], terminated[rows], truncated[rows], chosen.columns
