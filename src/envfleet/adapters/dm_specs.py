"""Specs of dm_env for Gymnasium's spaces."""

from __future__ import annotations

from typing import Any

import numpy as np
from gymnasium import spaces

from envfleet.contract.errors import MissingExtra, UsageError

try:
    from dm_env import specs
except ImportError as error:
    raise MissingExtra('specs of dm_env need dm_env: pip install "envfleet[dm-env]"') from error


def spec_of(space: spaces.Space[Any], name: str) -> Any:
    """Say in dm_env's words which values a space has.

    Values are the same in both: a Discrete space that does not begin at 0 is an array with bounds, because dm_env's
    DiscreteArray always begins at 0.

    Args:
        space: One of Gymnasium's: Box, Discrete, MultiDiscrete, MultiBinary, or a Dict or Tuple of these.
        name: What error texts of dm_env call the value; parts of a Dict or Tuple are called "name/part".

    Returns:
        A spec; for a Dict a dict of specs, for a Tuple a tuple of specs.

    Raises:
        UsageError: The space has values that are no arrays (Text, Graph, Sequence, ...).
    """
    if isinstance(space, spaces.Dict):
        return {key: spec_of(part, f"{name}/{key}") for key, part in space.spaces.items()}
    if isinstance(space, spaces.Tuple):
        return tuple(spec_of(part, f"{name}/{index}") for index, part in enumerate(space.spaces))
    if isinstance(space, spaces.Discrete) and space.start == 0:
        return specs.DiscreteArray(int(space.n), dtype=space.dtype, name=name)
    if isinstance(space, spaces.Discrete):
        return specs.BoundedArray((), space.dtype, space.start, space.start + space.n - 1, name)
    if isinstance(space, spaces.MultiDiscrete):
        return specs.BoundedArray(space.shape, space.dtype, space.start, space.start + space.nvec - 1, name)
    if isinstance(space, spaces.MultiBinary):
        return specs.BoundedArray(space.shape, space.dtype, 0, 1, name)
    if not isinstance(space, spaces.Box):
        raise UsageError(f"dm_env has specs for arrays only; {name} has the space {space}: wrap the env to change it")
    if np.isneginf(space.low).all() and np.isposinf(space.high).all():
        return specs.Array(space.shape, space.dtype, name)  # generate_value() of a spec with bounds would be -inf
    return specs.BoundedArray(space.shape, space.dtype, space.low, space.high, name)
