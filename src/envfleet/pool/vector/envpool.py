"""EnvPoolVector: a task of EnvPool, in the form that vectorized.py gives to other vector envs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from envfleet.contract.arrays import Array
from envfleet.contract.episode import Autoreset
from envfleet.contract.errors import UsageError
from envfleet.pool.vector.vectorized import LARGEST_SEED, Rows, StepRows, info_table, require_drawing


class EnvPoolVector:
    """A task of EnvPool. It takes seeds only when it is built, so a reset with seeds builds it anew."""

    own_mode = Autoreset.NEXT_STEP
    reuses_arrays = False

    def __init__(self, build: Callable[[list[int]], Any], num_envs: int) -> None:
        """`build` makes it from a seed for each env."""
        self._build = build
        self._num_envs = num_envs
        self.env = build(_with_chance([None] * num_envs))

    def reset(self, seeds: Sequence[int | None], options: dict[str, Any] | None) -> Rows:
        """Reset all envs; with seeds, build the task anew."""
        if any(seed is not None for seed in seeds):
            self.env.close()
            self.env = self._build(_with_chance(seeds))
        obs, infos = self.env.reset()
        return obs, info_table(infos, self._num_envs)

    def reset_some(self, env_ids: Array, seeds: Sequence[int | None], options: dict[str, Any] | None) -> Rows:
        """Reset some envs, without seeds, and return their rows only."""
        if any(seed is not None for seed in seeds):
            raise UsageError("EnvPool takes seeds only when it is built: reset all envs, or some of them without seeds")
        obs, infos = self.env.reset(np.asarray(env_ids, np.int32))
        return obs, info_table(infos, len(env_ids))

    def step(self, actions: Any) -> StepRows:
        """Step all envs; EnvPool wants discrete actions as int32."""
        if isinstance(actions, np.ndarray) and actions.dtype == np.int64:
            actions = actions.astype(np.int32)
        obs, rewards, terminated, truncated, infos = self.env.step(actions)
        return obs, rewards, terminated, truncated, info_table(infos, self._num_envs)

    def why_not_some(self) -> str | None:
        """None: EnvPool resets any envs alone."""
        return None

    def render(self, env_ids: Sequence[int]) -> list[Any]:
        """The frames of some envs, drawn by EnvPool."""
        require_drawing(self.env)
        frames = self.env.render(np.asarray(env_ids, np.int32))
        return [None] * len(env_ids) if frames is None else list(frames)


def _with_chance(seeds: Sequence[int | None]) -> list[int]:
    """Where there is no seed, a random one."""
    chance = np.random.SeedSequence().generate_state(len(seeds)).tolist()
    return [(other if seed is None else seed) % LARGEST_SEED for seed, other in zip(seeds, chance, strict=True)]
