"""RLGamesVecEnv: a pool or a cluster as a vector env of rl_games; register() makes it known there by a name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from gymnasium import spaces

from envfleet.adapters.vector_source import VectorSource, without_finals
from envfleet.contract.arrays import Array, BoolArray, FloatArray
from envfleet.contract.errors import MissingExtra, UsageError
from envfleet.contract.infos.table import InfoTable
from envfleet.contract.spaces import SpaceTree
from envfleet.pool.make import make

try:
    from rl_games.common import env_configurations, vecenv
    from rl_games.common.ivecenv import IVecEnv
except ImportError as error:
    raise MissingExtra("RLGamesVecEnv needs rl_games: pip install rl_games") from error

VECENV_TYPE = "ENVFLEET"

MakeEnvs = Callable[..., Any]  # make_envs(num_envs, **env_config) -> EnvPool or ClusterEnv


class RLGamesVecEnv(IVecEnv):
    """The envs of a pool, or of a cluster, in rl_games' form.

    After the last step of an episode the observation is the first one of the next, as rl_games expects it.
    `infos["time_outs"]` says which episodes were truncated; with `value_bootstrap: True` rl_games adds a value there.
    Observations of float64 become float32.
    """

    def __init__(self, envs: Any) -> None:
        """Take a pool or a cluster; close() closes it.

        Args:
            envs: An EnvPool or a ClusterEnv, made with `autoreset_mode="same_step"`.

        Raises:
            UsageError: It is neither, it does not reset in the same step, it is asynchronous, or its observations are
                neither arrays nor dicts of arrays.
        """
        self._source = VectorSource(envs, "RLGamesVecEnv")
        self._obs = SpaceTree(self._source.single_observation_space)
        if any(leaf.dtype is None or len(leaf.path) > 1 or 0 in leaf.path for leaf in self._obs.leaves):
            raise UsageError(
                "rl_games takes arrays or dicts of arrays as observations; got "
                f"{self._source.single_observation_space}: wrap the env to change them"
            )
        self.observation_space = _in_float32(self._source.single_observation_space)
        self.action_space = self._source.single_action_space

    def reset(self) -> Any:
        """Reset all envs.

        Returns:
            Observations, a row for each env.

        Raises:
            EnvFailed: An env raised, or its process died.
        """
        obs, _ = self._source.reset()
        return self._arrays(obs)

    def step(self, actions: Array) -> tuple[Any, FloatArray, BoolArray, dict[str, Any]]:
        """Step all envs.

        Args:
            actions: A row for each env.

        Returns:
            Observations, rewards, ends of episodes and infos: those of the envs, as columns, and "time_outs".

        Raises:
            InvalidAction: The actions do not fit the action space.
            EnvFailed: An env raised, or its process died.
        """
        if isinstance(self.action_space, spaces.Discrete):
            actions = actions.reshape(-1)
        step = self._source.step(self._source.batch_of(actions))
        columns, ended_rows = step.table.columns, np.flatnonzero(step.ended).tolist()
        if ended_rows:  # of them the last step's: rl_games reads scores there
            infos_by_row = {row: without_finals(info) for row, info in enumerate(step.infos(ended_rows))}
            columns = InfoTable.from_rows(infos_by_row, self._source.num_envs).columns
        infos = {**columns, "time_outs": step.truncated & ~step.terminated}
        return self._arrays(step.obs), step.rewards, step.ended, infos

    def get_env_info(self) -> dict[str, Any]:
        """Say what rl_games builds its networks and buffers from.

        Returns:
            The spaces of one env.
        """
        return {"action_space": self.action_space, "observation_space": self.observation_space}

    def get_number_of_agents(self) -> int:
        """Count the agents of an env.

        Returns:
            One.
        """
        return 1

    def close(self) -> None:
        """Close the envs; more than once does no harm."""
        self._source.close()

    def _arrays(self, obs: Any) -> Any:
        # Copies: rl_games makes tensors of them, which share their memory and outlive the step.
        return self._obs.unflatten(
            [np.array(leaf, np.float32 if leaf.dtype == np.float64 else leaf.dtype) for leaf in self._obs.flatten(obs)]
        )


def register(name: str = "envfleet", make_envs: MakeEnvs | None = None) -> None:
    """Have rl_games know envs by a name, the `env_name` of its configurations.

    Args:
        name: The `env_name`.
        make_envs: Called as `make_envs(num_envs, **env_config)`, it returns a pool or a cluster that resets in the same
            step. rl_games puts `seed` into `env_config`. None: `envfleet.make(num_envs=num_envs, **env_config)`, so
            that `env_config` has `env: HalfCheetah-v5`, say.
    """
    build = _make_pool if make_envs is None else make_envs
    env_configurations.register(
        name,
        {
            "vecenv_type": VECENV_TYPE,
            "env_creator": lambda num_actors=1, **env_config: RLGamesVecEnv(build(num_actors, **env_config)),
        },
    )
    vecenv.register(VECENV_TYPE, _create)


def _create(config_name: str, num_actors: int, **env_config: Any) -> RLGamesVecEnv:
    created: RLGamesVecEnv = env_configurations.configurations[config_name]["env_creator"](
        num_actors=num_actors, **env_config
    )
    return created


def _make_pool(num_envs: int, **env_config: Any) -> Any:
    return make(num_envs=num_envs, **{"autoreset_mode": "same_step", **env_config})


def _in_float32(space: spaces.Space[Any]) -> spaces.Space[Any]:
    if isinstance(space, spaces.Dict):
        return spaces.Dict({key: _in_float32(part) for key, part in space.spaces.items()})
    if isinstance(space, spaces.Box) and space.dtype == np.float64:
        with np.errstate(over="ignore"):  # bounds beyond float32 become infinite
            return spaces.Box(space.low.astype(np.float32), space.high.astype(np.float32), dtype=np.float32)
    return space
