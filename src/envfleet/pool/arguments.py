"""Arguments of a VectorEnv's methods, checked: seeds, autoreset modes, reset masks, env indices, attributes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from gymnasium.vector import AutoresetMode
from numpy.typing import ArrayLike

from envfleet.contract.arrays import BoolArray
from envfleet.contract.episode import Autoreset
from envfleet.contract.errors import UsageError


def seeds_of(seed: int | Sequence[int | None] | None, num_envs: int) -> list[int | None]:
    """A seed for each env: `seed + i` for env i, or `seed[i]`."""
    if seed is None:
        return [None] * num_envs
    if isinstance(seed, int | np.integer):
        seeds: list[int | None] = [int(seed) + env_id for env_id in range(num_envs)]
    elif isinstance(seed, str) or not (isinstance(seed, Sequence) or (isinstance(seed, np.ndarray) and seed.ndim == 1)):
        raise UsageError(
            f"seed must be a whole number, a list with a seed (or None) for each env, or None; got {seed!r}"
        )
    else:
        seeds = list(seed)
    if len(seeds) != num_envs:
        raise UsageError(f"a list of seeds must have num_envs={num_envs} entries; got {len(seeds)}")
    for each in seeds:
        if each is not None and not (isinstance(each, int | np.integer) and 0 <= each < 2**64):
            raise UsageError(f"seeds must be whole numbers between 0 and 2**64 - 1; got {each!r}")
    return [None if each is None else int(each) for each in seeds]


def take_reset_mask(options: dict[str, Any], num_envs: int) -> BoolArray | None:
    """Take the mask out of the options (which are ours): envs must not see it."""
    if "reset_mask" not in options:
        return None
    mask = options.pop("reset_mask")
    if not isinstance(mask, np.ndarray) or mask.dtype != np.bool_ or mask.shape != (num_envs,):
        got = f"{mask.dtype} {mask.shape}" if isinstance(mask, np.ndarray) else type(mask).__name__
        raise UsageError(f"reset_mask must be a NumPy array of {num_envs} bool; got {got}")
    if not mask.any():
        raise UsageError("reset_mask must choose at least one env; all its entries are False")
    return mask


def some_env_ids(env_ids: ArrayLike, num_envs: int) -> list[int]:
    """Indices of some envs, in any order, each once."""
    ids = np.asarray(env_ids)
    if ids.ndim != 1 or ids.dtype.kind not in "iu" or not len(ids):
        raise UsageError(f"env_ids must be a vector of env indices; got shape {ids.shape}, dtype {ids.dtype}")
    chosen: list[int] = ids.tolist()
    if min(chosen) < 0 or max(chosen) >= num_envs:
        raise UsageError(f"env_ids must be between 0 and {num_envs - 1}; got {chosen}")
    if len(set(chosen)) < len(chosen):
        raise UsageError(f"env_ids name an env twice: {chosen}")
    return chosen


def values_for(values: Any, num_envs: int) -> list[Any]:
    """What set_attr() sets: a list or tuple has a value for each env, anything else is for all of them."""
    each = list(values) if isinstance(values, list | tuple) else [values] * num_envs
    if len(each) != num_envs:
        raise UsageError(f"set_attr() needs a value for each of {num_envs} envs, or one for all; got {len(each)}")
    return each


def autoreset_of(mode: AutoresetMode | Autoreset | str) -> Autoreset:
    """The mode, in any of the ways to say it."""
    if isinstance(mode, Autoreset):
        return mode
    value = mode.value if isinstance(mode, AutoresetMode) else mode
    for each in Autoreset:
        if value in (each.value, each.name, each.name.lower()):
            return each
    known = ", ".join(repr(each.name.lower()) for each in Autoreset)
    raise UsageError(f"autoreset_mode must be one of {known}, or Gymnasium's AutoresetMode; got {mode!r}")
