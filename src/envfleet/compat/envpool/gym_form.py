"""EnvPool's pools as scripts for OpenAI's gym know them.

EnvPool before 1.0 looked at the version of gym: before 0.26, reset() returned observations alone, step() four values.
Scripts of that time are recognised by the gym that they have imported, or by `gym_reset_return_info=False`.
"""

from __future__ import annotations

import sys
from functools import cache
from types import ModuleType
from typing import Any

import numpy as np
from gymnasium import spaces

from envfleet.compat.envpool.actions import env_ids_of
from envfleet.compat.envpool.batched_pool import BatchedPool
from envfleet.compat.envpool.rendering import RenderSettings
from envfleet.compat.envpool.rows import Rows
from envfleet.compat.envpool.spec import EnvSpec

_FIVE_VALUES_SINCE = (0, 26)


class GymEnvPool(BatchedPool):
    """A pool with the spaces of `gym`, if that is imported, and its form of reset() and step()."""

    gym: ModuleType | None = None
    has_five_values = False

    def __init__(self, spec: EnvSpec, render: RenderSettings | None = None) -> None:
        super().__init__(spec, render)
        self.num_envs = len(self)
        self.observation_space = _space_of(spec.observation_space, self.gym)
        self.action_space = _space_of(spec.action_space, self.gym)

    def reset(self, env_id: Any = None, **kwargs: Any) -> Any:
        """Reset all envs, or some.

        Args:
            env_id: Indices of some envs; None: all.
            kwargs: Not used; gym's wrappers pass some.

        Returns:
            Observations; with infos since gym 0.26, or if make() was told `gym_reset_return_info=True`.
        """
        rows = self._reset_rows(None if env_id is None else env_ids_of(env_id))
        return self._as_reset(rows, return_info=bool(self._settings["gym_reset_return_info"]))

    def _as_step(self, rows: Rows) -> Any:
        if self.has_five_values:
            return rows.obs, rows.rewards, rows.terminated, rows.truncated, self._infos(rows)
        return rows.obs, rows.rewards, rows.terminated | rows.truncated, self._infos(rows)

    def _as_reset(self, rows: Rows, return_info: bool) -> Any:
        return (rows.obs, self._infos(rows)) if return_info or self.has_five_values else rows.obs

    def _infos(self, rows: Rows) -> dict[str, Any]:
        infos = super()._infos(rows)
        if not self.has_five_values:
            infos["TimeLimit.truncated"] = rows.truncated
        return infos


def imported_gym() -> ModuleType | None:
    """OpenAI's gym, if the script has imported it."""
    return sys.modules.get("gym")


def is_old(gym: ModuleType | None) -> bool:
    """Is it a gym before 0.26?"""
    if gym is None:
        return False
    major, minor, *_ = str(gym.__version__).split(".")
    return (int(major), int(minor)) < _FIVE_VALUES_SINCE


@cache
def gym_class(kind_name: str, gym: ModuleType | None, has_five_values: bool) -> type[GymEnvPool]:
    """EnvPool's class for one kind: "CartPole" -> CartPoleGymEnvPool, which is a gym.Env if there is a gym."""
    bases = (GymEnvPool,) if gym is None else (GymEnvPool, gym.Env)
    return type(f"{kind_name}GymEnvPool", bases, {"gym": gym, "has_five_values": has_five_values})


def _space_of(space: spaces.Space[Any], gym: ModuleType | None) -> Any:
    """The same space, of gym's."""
    if gym is None:
        return space
    if isinstance(space, spaces.Discrete):
        return gym.spaces.Discrete(int(space.n))
    assert isinstance(space, spaces.Box)
    return gym.spaces.Box(space.low, space.high, dtype=np.dtype(space.dtype).type)
