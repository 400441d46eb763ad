"""Rows: a batch of EnvPool's, before it takes the form of gymnasium, gym or dm_env; Progress counts the steps."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from envfleet.compat.envpool.array_library import NUMPY, ArrayLibrary
from envfleet.contract.arrays import Array, BoolArray, IntArray

if TYPE_CHECKING:
    from envfleet.pool.xla_pool import XlaPool


class Rows(NamedTuple):
    """What EnvPool knows of each env of a batch."""

    env_ids: IntArray  # [N]
    obs: Array  # [N, ...]
    rewards: Array  # [N] float32
    terminated: BoolArray  # [N]
    truncated: BoolArray  # [N]
    is_first: BoolArray  # [N]: the row of a reset
    elapsed_step: IntArray  # [N]: steps of the episode; of Atari games, of the game
    columns: dict[str, Array]  # infos of the env
    library: ArrayLibrary = NUMPY  # whose arrays these are

    def infos(self) -> dict[str, Any]:
        """The infos as EnvPool nests them."""
        env_ids = self.env_ids
        return {
            "env_id": env_ids,
            "players": {"env_id": env_ids.copy()},
            **self.columns,
            "elapsed_step": self.elapsed_step,
        }


class Progress:
    """How far the episode of each env is. A row is that of a reset if the env was reset, or had ended before."""

    def __init__(self, num_envs: int) -> None:
        self._will_be_first = np.ones(num_envs, np.bool_)
        self._num_steps = np.zeros(num_envs, np.int32)

    def were_reset(self, env_ids: IntArray | None) -> None:
        """The next row of these envs is that of a reset; None: of all."""
        self._will_be_first[... if env_ids is None else env_ids] = True

    def seen(self, env_ids: IntArray, ended: BoolArray) -> tuple[BoolArray, IntArray]:
        """Take note of a batch; whether each row is that of a reset, and the steps of its episode."""
        is_first = self._will_be_first[env_ids]
        num_steps = np.where(is_first, np.int32(0), self._num_steps[env_ids] + np.int32(1))
        self._num_steps[env_ids] = num_steps
        self._will_be_first[env_ids] = ended
        return is_first, num_steps


class EngineProgress:
    """The same, of a pool that compiled programs of JAX step, too: its engine counts the steps."""

    def __init__(self, pool: XlaPool) -> None:
        self._pool = pool

    def were_reset(self, env_ids: IntArray | None) -> None:
        """See Progress. The engine knows."""

    def seen(self, env_ids: IntArray, ended: BoolArray) -> tuple[BoolArray, IntArray]:
        """See Progress."""
        num_steps = self._pool.episode_steps(env_ids)
        return num_steps == 0, num_steps


def joined(parts: list[Rows], order: Array) -> Rows:
    """The rows of several batches as one, in this order."""

    def column(arrays: Iterable[Array]) -> Array:
        return np.concatenate(list(arrays))[order]

    names = [name for name in Rows._fields if name not in ("columns", "library")]
    fields: dict[str, Any] = {name: column(getattr(part, name) for part in parts) for name in names}
    columns = {name: column(part.columns[name] for part in parts) for name in parts[0].columns}
    return Rows(**fields, columns=columns, library=NUMPY)
