"""ArraySpec: dtype, shape and bounds of one of EnvPool's arrays, and what dm_env makes of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from gymnasium import spaces

_INT32 = np.iinfo(np.int32)
_LARGEST_DISCRETE = 2**20


@dataclass(frozen=True, slots=True, eq=False)
class ArraySpec:
    """An array as EnvPool describes it; a first length of -1 stands for the number of players."""

    dtype: Any
    shape: list[int]
    minimum: Any
    maximum: Any
    is_discrete: bool = False

    @classmethod
    def of_space(cls, space: spaces.Space[Any], has_players: bool) -> ArraySpec:
        """The spec of a space; actions have a row for each player."""
        if isinstance(space, spaces.Discrete):
            first = int(space.start)
            return cls(np.int32, [-1], first, first + int(space.n) - 1, is_discrete=True)
        assert isinstance(space, spaces.Box)
        shape = [-1, *space.shape] if has_players else list(space.shape)
        return cls(np.dtype(space.dtype).type, shape, _bound(space.low), _bound(space.high))

    @classmethod
    def of_info(cls, dtype: Any, shape: tuple[int, ...]) -> ArraySpec:
        """The spec of a column of infos."""
        limits = np.iinfo(dtype) if np.issubdtype(dtype, np.integer) else np.finfo(dtype)
        return cls(dtype, list(shape) if shape else [-1], limits.min, limits.max)

    @classmethod
    def of_env_ids(cls, shape: list[int]) -> ArraySpec:
        """The spec of indices of envs."""
        return cls(np.int32, shape, _INT32.min, _INT32.max)

    def to_dm_env(self, name: str) -> Any:
        """The spec as dm_env has it; what counts from 0 is a DiscreteArray."""
        from dm_env import specs

        if self._counts_from_0:
            return specs.DiscreteArray(int(self.maximum) + 1, dtype=self.dtype, name=name)
        shape = [length for length in self.shape if length != -1]
        return specs.BoundedArray(shape, self.dtype, self.minimum, self.maximum, name=name)

    @property
    def _counts_from_0(self) -> bool:
        is_number = abs(int(np.prod(self.shape))) == 1
        is_whole = np.issubdtype(self.dtype, np.integer)
        return bool(is_number and is_whole and self.minimum == 0 and self.maximum < _LARGEST_DISCRETE)

    def __repr__(self) -> str:
        """Return what the fields are, as EnvPool shows them."""
        return f"ArraySpec(shape={self.shape}, dtype={self.dtype}, minimum={self.minimum}, maximum={self.maximum})"


def _bound(values: Any) -> Any:
    """One number, if it is the same for all."""
    array = np.asarray(values)
    return array.flat[0].item() if array.size and (array == array.flat[0]).all() else array
