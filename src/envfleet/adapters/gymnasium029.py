"""Gymnasium029: a pool or a cluster with the forms that vector envs had in Gymnasium 0.27 to 0.29.

Scripts of that time, CleanRL's among them, read `infos["final_observation"]` and `infos["final_info"]`, and find the
return of an episode in the final info of its env.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space

from envfleet.adapters.episode_statistics import EPISODE, EpisodeStatistics
from envfleet.adapters.vector_source import VectorSource
from envfleet.contract.arrays import Array, BoolArray, FloatArray
from envfleet.contract.infos.table import Info, Infos, InfoTable


class Gymnasium029(VectorEnv[Any, Any, Any]):
    """Envs that reset in the step that ends their episode, with the infos of Gymnasium 0.29.

    In a step that ends episodes `infos["final_observation"]` and `infos["final_info"]` are arrays of objects: the last
    observation and the last info in rows whose episode has ended, None in the others; `infos["_final_observation"]` and
    `infos["_final_info"]` are the masks. A final info has `info["episode"]`: "r", "l" and "t", as
    RecordEpisodeStatistics writes them.
    """

    def __init__(self, envs: Any) -> None:
        """Take the envs, which close() closes.

        Args:
            envs: A pool or a ClusterEnv with `autoreset_mode="same_step"`.

        Raises:
            UsageError: The envs do not reset in the same step, come in batches of some, or are no envs.
        """
        self._source = VectorSource(envs, "Gymnasium029")
        self._statistics = EpisodeStatistics(self._source.num_envs, self._source.has_own_rewards)
        self.num_envs = self._source.num_envs
        self.single_observation_space = self._source.single_observation_space
        self.single_action_space = self._source.single_action_space
        self.observation_space = batch_space(self.single_observation_space, self.num_envs)
        self.action_space = batch_space(self.single_action_space, self.num_envs)
        self.render_mode = self._source.render_mode
        self.spec = getattr(envs, "spec", None)
        self.metadata = {**envs.metadata, "autoreset_mode": AutoresetMode.SAME_STEP}

    def reset(
        self, *, seed: int | Sequence[int | None] | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, Infos]:
        """Reset all envs.

        Args:
            seed: Env i is seeded with `seed + i`, or with `seed[i]`. None: with the pool's own seed at the first reset,
                later the generators go on.
            options: Passed to each env.

        Returns:
            Observations of all envs, and infos.
        """
        mask = (options or {}).get("reset_mask")
        obs, table = self._source.reset(seed, options)
        self._statistics.reset(slice(None) if mask is None else mask)
        return obs, {key: _as_objects(value, self.num_envs) for key, value in table.columns.items()}

    def step(self, actions: Any) -> tuple[Any, FloatArray, BoolArray, BoolArray, Infos]:
        """Step all envs.

        Args:
            actions: A row for each env.

        Returns:
            Observations, rewards, terminations, truncations and infos.

        Raises:
            EnvFailed: An env raised.
        """
        step = self._source.step(actions)
        episodes = self._statistics.add(step)
        infos = {
            key: _as_objects(value, self.num_envs)
            for key, value in step.table.columns.items()
            if key not in ("final_obs", "_final_obs", "final_info", "_final_info")
        }
        if episodes:
            final_infos: dict[int, Info] = {
                row: {EPISODE: each, **step.final_info(row)} for row, each in episodes.items()
            }
            infos["final_observation"] = _object_array({row: step.final_obs(row) for row in episodes}, self.num_envs)
            infos["final_info"] = _object_array(final_infos, self.num_envs)
            infos["_final_observation"] = infos["_final_info"] = step.ended
        return step.obs, step.rewards, step.terminated, step.truncated, infos

    def render(self) -> tuple[Any, ...] | None:
        """Draw all envs; they must be made with a `render_mode`.

        Returns:
            A frame of each env.
        """
        return tuple(self._source.call(range(self.num_envs), "render"))

    def call(self, name: str, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        """Call a method of each env, or get an attribute.

        Args:
            name: Name of the method or attribute.
            args: Positional arguments of the method.
            kwargs: Named arguments of the method.

        Returns:
            A result for each env.
        """
        return tuple(self._source.call(range(self.num_envs), name, *args, **kwargs))

    def get_attr(self, name: str) -> tuple[Any, ...]:
        """Get an attribute of each env.

        Args:
            name: Name of the attribute.

        Returns:
            A value for each env.
        """
        return self.call(name)

    def close_extras(self, **kwargs: Any) -> None:
        """Close the envs; called by close().

        Args:
            kwargs: Not used; Gymnasium's close() passes its own on.
        """
        self._source.close()


def _as_objects(value: Any, num_envs: int) -> Any:
    """A dictionary of columns was an array of dictionaries in Gymnasium 0.29; all else is as it was."""
    if not isinstance(value, dict):
        return value
    return _object_array({row: info for row, info in enumerate(InfoTable(num_envs, value).rows()) if info}, num_envs)


def _object_array(values: dict[int, Any], num_envs: int) -> Array:
    array = np.empty(num_envs, object)  # of None
    for row, value in values.items():
        array[row] = value
    return array
