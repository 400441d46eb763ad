"""MujocoInfos: the first state of an episode, which EnvPool's test builds have in the infos of MuJoCo's envs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from envfleet.contract.arrays import Array

_FIRST_STATE = ("qpos0", "qvel0")


class MujocoInfos(dict[str, Any]):
    """Infos with the keys of EnvPool's releases. `qpos0` and `qvel0` are looked up when they are asked for."""

    def __init__(self, infos: Mapping[str, Any], first_state: Callable[[], tuple[Array, Array]]) -> None:
        """`first_state` returns [N, nq] and [N, nv], or raises KeyError if it is too late."""
        super().__init__(infos)
        self._first_state = first_state

    def __missing__(self, name: str) -> Any:
        """Return what only EnvPool's test builds have."""
        if name not in _FIRST_STATE:
            raise KeyError(name)
        self.update(zip(_FIRST_STATE, self._first_state(), strict=True))
        return self[name]
