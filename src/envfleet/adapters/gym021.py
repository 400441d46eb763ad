"""Gym021: a pool or a cluster with the forms that vector envs had in Gym 0.21.

Half of CleanRL's scripts are of that time: `reset()` returns observations alone, `step()` four values, infos are a list
with a dictionary for each env, and the last observation of an episode is its `info["terminal_observation"]`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from gymnasium.vector.utils import batch_space

from envfleet.adapters.episode_statistics import EPISODE, EpisodeStatistics
from envfleet.adapters.vector_source import VectorSource
from envfleet.contract.arrays import BoolArray, FloatArray
from envfleet.contract.infos.table import Info


class Gym021:
    """Envs that reset in the step that ends their episode, in the manner of Gym 0.21.

    The info of an env whose episode has ended has `terminal_observation`, `episode` ("r", "l", "t") and, where the
    episode was cut short, `TimeLimit.truncated`.
    """

    def __init__(self, envs: Any) -> None:
        """Take the envs, which close() closes.

        Args:
            envs: A pool or a ClusterEnv with `autoreset_mode="same_step"`.

        Raises:
            UsageError: The envs do not reset in the same step, come in batches of some, or are no envs.
        """
        self._source = VectorSource(envs, "Gym021")
        self._statistics = EpisodeStatistics(self._source.num_envs, self._source.has_own_rewards)
        self._seeds: Any = None
        self.num_envs = self._source.num_envs
        self.single_observation_space = self._source.single_observation_space
        self.single_action_space = self._source.single_action_space
        self.observation_space = batch_space(self.single_observation_space, self.num_envs)
        self.action_space = batch_space(self.single_action_space, self.num_envs)
        self.metadata = dict(envs.metadata)
        self.spec = getattr(envs, "spec", None)

    def seed(self, seed: int | Sequence[int | None] | None = None) -> None:
        """Seed the envs at their next reset.

        Args:
            seed: Env i is seeded with `seed + i`, or with `seed[i]`. None: the generators go on.
        """
        self._seeds = seed

    def reset(self) -> Any:
        """Reset all envs.

        Returns:
            Observations of all envs.
        """
        obs, _ = self._source.reset(self._seeds)
        self._seeds = None
        self._statistics.reset()
        return obs

    def step(self, actions: Any) -> tuple[Any, FloatArray, BoolArray, list[Info]]:
        """Step all envs.

        Args:
            actions: A row for each env.

        Returns:
            Observations, rewards, whether each episode has ended, and an info for each env.

        Raises:
            EnvFailed: An env raised.
        """
        step = self._source.step(actions)
        episodes = self._statistics.add(step)
        infos = step.infos(list(episodes))
        for row, episode in episodes.items():
            infos[row] = {EPISODE: episode, **infos[row], "terminal_observation": step.final_obs(row)}
            if step.truncated[row]:
                infos[row]["TimeLimit.truncated"] = not step.terminated[row]
        return step.obs, step.rewards, np.array(step.ended), infos

    def render(self) -> list[Any]:
        """Draw all envs; they must be made with a `render_mode`.

        Returns:
            A frame of each env.
        """
        return self._source.call(range(self.num_envs), "render")

    def close(self) -> None:
        """Close the envs; more than once does no harm."""
        self._source.close()
