"""GymnasiumEnvPool: EnvPool's pools as vector envs of Gymnasium."""

from __future__ import annotations

import warnings
from functools import cache
from typing import Any

import gymnasium
import numpy as np
from gymnasium.vector import AutoresetMode, VectorEnv

from envfleet.compat.envpool.actions import env_ids_of
from envfleet.compat.envpool.batched_pool import BatchedPool
from envfleet.compat.envpool.errors import WrongSetting
from envfleet.compat.envpool.rendering import RenderSettings
from envfleet.compat.envpool.rows import Rows
from envfleet.compat.envpool.spec import EnvSpec
from envfleet.contract.arrays import IntArray


class GymnasiumEnvPool(BatchedPool, VectorEnv[Any, Any, Any], gymnasium.Env[Any, Any]):  # type: ignore[misc]
    """Observations, rewards, terminations, truncations, infos. Its spaces are those of one env, as in EnvPool."""

    is_vector_env = True

    def __init__(self, spec: EnvSpec, render: RenderSettings | None = None) -> None:
        super().__init__(spec, render)
        self.num_envs = len(self)
        self.render_mode = self._render.mode
        self.metadata = {"render_modes": ["rgb_array"], "autoreset_mode": AutoresetMode.NEXT_STEP}
        self.observation_space = self.single_observation_space = spec.observation_space
        self.action_space = self.single_action_space = spec.action_space

    def reset(
        self, env_id: Any = None, *, seed: Any = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Reset all envs, or some.

        Args:
            env_id: Indices of some envs; None: all.
            seed: Not used, with a warning: EnvPool takes seeds in make().
            options: {"reset_mask": [num_envs] bool} chooses envs, too.

        Returns:
            Observations and infos, a row for each of these envs. Of an asynchronous pool: of the first that are ready.

        Raises:
            WrongSetting: Envs are chosen twice, or the options have something else.
        """
        if seed is not None:
            warnings.warn("reset(seed=...) is ignored, as in EnvPool: pass seed to make()", UserWarning, stacklevel=2)
        masked = _env_ids_of_mask(options, len(self))
        if env_id is not None and masked is not None:
            raise WrongSetting("choose envs by env_id or by options['reset_mask'], not by both")
        env_ids = masked if env_id is None else env_ids_of(env_id)
        reset: tuple[Any, dict[str, Any]] = self._as_reset(self._reset_rows(env_ids), return_info=True)
        return reset

    def close(self, **kwargs: Any) -> None:
        """Close the envs; a second time does nothing.

        Args:
            kwargs: Not used; Gymnasium's vector envs take some.
        """
        BatchedPool.close(self)
        self.closed = True

    def _as_step(self, rows: Rows) -> Any:
        return rows.obs, rows.rewards, rows.terminated, rows.truncated, self._infos(rows)

    def _as_reset(self, rows: Rows, return_info: bool) -> Any:
        return rows.obs, self._infos(rows)


@cache
def gymnasium_class(kind_name: str) -> type[GymnasiumEnvPool]:
    """EnvPool's class for one kind: "CartPole" -> CartPoleGymnasiumEnvPool."""
    return type(f"{kind_name}GymnasiumEnvPool", (GymnasiumEnvPool,), {})


def _env_ids_of_mask(options: dict[str, Any] | None, num_envs: int) -> IntArray | None:
    unknown = sorted(set(options or {}) - {"reset_mask"})
    if unknown:
        raise WrongSetting(f"reset() has the option 'reset_mask' only; got {', '.join(unknown)}")
    mask = None if options is None else options.get("reset_mask")
    if mask is None:
        return None
    mask = np.asarray(mask, np.bool_)
    if mask.shape != (num_envs,) or not mask.any():
        raise WrongSetting(f"reset_mask must choose at least one of {num_envs} envs; got shape {mask.shape}: {mask}")
    return np.flatnonzero(mask).astype(np.int32)
