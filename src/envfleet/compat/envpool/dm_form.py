"""DMEnvPool: EnvPool's pools as a dm_env.Environment whose TimeSteps are batches."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np

from envfleet.compat.envpool.actions import env_ids_of
from envfleet.compat.envpool.batched_pool import BatchedPool
from envfleet.compat.envpool.named_tuples import nested_tuple
from envfleet.compat.envpool.rendering import RenderSettings
from envfleet.compat.envpool.rows import Rows
from envfleet.compat.envpool.spec import EnvSpec
from envfleet.contract.errors import MissingExtra

try:
    import dm_env
except ImportError:
    raise MissingExtra("make_dm() needs dm_env: pip install 'envfleet[dm-env]'") from None


class DMEnvPool(BatchedPool, dm_env.Environment):
    """A TimeStep has a row for each env in every field; `observation` is a namedtuple of observations and infos."""

    def __init__(self, spec: EnvSpec, render: RenderSettings | None = None) -> None:
        super().__init__(spec, render)
        self._lives = np.zeros(len(self), np.int32) if spec.settings.get("zero_discount_on_life_loss") else None

    def reset(self, env_id: Any = None) -> Any:
        """Reset all envs, or some.

        Args:
            env_id: Indices of some envs; None: all.

        Returns:
            A TimeStep with a row for each of these envs. Of an asynchronous pool: of the first that are ready.
        """
        return self._as_step(self._reset_rows(None if env_id is None else env_ids_of(env_id)))

    def observation_spec(self) -> Any:
        """Describe observations and infos of one env.

        Returns:
            A namedtuple of dm_env's specs.
        """
        return self.spec.observation_spec()

    def action_spec(self) -> Any:
        """Describe the actions of one env.

        Returns:
            A spec of dm_env's.
        """
        return self.spec.action_spec()

    def _as_step(self, rows: Rows) -> Any:
        ended = rows.terminated | rows.truncated
        first, mid, last = (
            np.int32(each) for each in (dm_env.StepType.FIRST, dm_env.StepType.MID, dm_env.StepType.LAST)
        )
        where = rows.library.functions.where
        step_type = where(ended, last, where(rows.is_first, first, mid))
        discount = (~ended).astype(np.float32)
        if self._lives is not None:
            lives = rows.columns["lives"]
            discount[(lives < self._lives[rows.env_ids]) & ~rows.is_first] = 0.0
            self._lives[rows.env_ids] = lives
        infos = rows.infos()
        del infos["elapsed_step"]
        observation = nested_tuple(
            "State", {"env_id": infos.pop("env_id"), "players": infos.pop("players"), "obs": rows.obs, **infos}
        )
        return dm_env.TimeStep(step_type, rows.rewards, discount, observation)

    def _as_reset(self, rows: Rows, return_info: bool) -> Any:
        return self._as_step(rows)


@cache
def dm_class(kind_name: str) -> type[DMEnvPool]:
    """EnvPool's class for one kind: "CartPole" -> CartPoleDMEnvPool."""
    return type(f"{kind_name}DMEnvPool", (DMEnvPool,), {})
