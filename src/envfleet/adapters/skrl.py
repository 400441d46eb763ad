"""SkrlEnv: a pool or a cluster as an env of skrl (for PyTorch)."""

from __future__ import annotations

from typing import Any

import numpy as np
from gymnasium import spaces

from envfleet.adapters.explicit_resets import ExplicitResets
from envfleet.adapters.vector_source import VectorSource
from envfleet.contract.errors import MissingExtra, UsageError
from envfleet.contract.spaces import SpaceTree

try:
    import torch
    from skrl.envs.wrappers.torch import Wrapper
    from skrl.utils.spaces.torch import (
        flatten_tensorized_space,
        tensorize_space,
        unflatten_tensorized_space,
        untensorize_space,
    )
except ImportError as error:
    raise MissingExtra('SkrlEnv needs skrl: pip install "envfleet[skrl]"') from error


class SkrlEnv(Wrapper):
    """The envs of a pool, or of a cluster, in skrl's form.

    Several envs reset themselves: an observation that follows the last step of an episode is the first one of the next,
    since skrl's trainers act on what step() returned. What the agent is to store as the next observation of that last
    step is another one, `give_final_observations_to(agent)`. A single env is reset by skrl's trainers.
    """

    def __init__(self, envs: Any) -> None:
        """Take a pool or a cluster; close() closes it.

        Args:
            envs: An EnvPool or a ClusterEnv, made with `autoreset_mode="same_step"`. Its own seed counts, not skrl's.

        Raises:
            UsageError: It is neither, it does not reset in the same step, or it is asynchronous.
        """
        self._source = VectorSource(envs, "SkrlEnv")
        self._actions = SpaceTree(self._source.single_action_space)
        super().__init__(envs)
        self._resets = ExplicitResets(self._source)
        self._final_rows: Any = None  # envs whose episode ended in the last step
        self._final_observations: Any = None  # their last observations

    @property
    def observation_space(self) -> spaces.Space[Any]:
        """The space of one env's observations."""
        return self._source.single_observation_space

    @property
    def action_space(self) -> spaces.Space[Any]:
        """The space of one env's actions."""
        return self._source.single_action_space

    def reset(self) -> tuple[Any, dict[str, Any]]:
        """Reset all envs.

        Returns:
            Observations, a row for each env, and infos.

        Raises:
            EnvFailed: An env raised, or its process died.
        """
        self._final_rows = None
        obs, _ = self._resets.reset()
        return self._tensor(obs), {}

    def step(self, actions: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        """Step all envs.

        Args:
            actions: A tensor with a row for each env.

        Returns:
            Observations, rewards, terminations and truncations, each a tensor with a row for each env, and infos.

        Raises:
            InvalidAction: The actions do not fit the action space.
            EnvFailed: An env raised, or its process died.
        """
        step = self._resets.step(self._batch_of(actions))
        rewards = torch.tensor(step.rewards, dtype=torch.float32, device=self.device).view(-1, 1)
        terminated, truncated = (
            torch.tensor(flags, device=self.device).view(-1, 1) for flags in (step.terminated, step.truncated)
        )
        observations = self._tensor(step.obs)
        ended = np.flatnonzero(step.step.ended)
        self._final_rows = None
        if len(ended) and self.num_envs > 1:
            self._final_rows = torch.as_tensor(ended, device=self.device)
            self._final_observations = observations[self._final_rows]
            first, _ = self._resets.reset(ended)
            observations[self._final_rows] = self._tensor(first)
        return observations, rewards, terminated, truncated, step.step.table.columns

    def give_final_observations_to(self, agent: Any) -> None:
        """Have an agent store the last observation of each episode as what followed its last step.

        Without this, values of truncated episodes are bootstrapped from the first observation of the next one.

        Args:
            agent: One of skrl's, which acts for all envs.
        """
        record = agent.record_transition

        def record_transition(*, next_observations: Any, **others: Any) -> None:
            record(next_observations=self._shown(next_observations), **others)

        agent.record_transition = record_transition

    def state(self) -> None:
        """Return nothing: these envs have no state besides what they show.

        Returns:
            None.
        """
        return None

    def render(self, *args: Any, **kwargs: Any) -> Any:
        """Render all envs.

        Args:
            args: Passed to each env.
            kwargs: Passed to each env.

        Returns:
            A frame for each env; None if they were made without a render mode.
        """
        if self._source.render_mode is None:
            return None
        return self._source.call(range(self._source.num_envs), "render", *args, **kwargs)

    def close(self) -> None:
        """Close the envs; more than once does no harm."""
        self._source.close()

    def _shown(self, next_observations: Any) -> Any:
        if self._final_rows is None:
            return next_observations
        if len(next_observations) != self._source.num_envs:
            raise UsageError(
                f"the agent has {len(next_observations)} of {self._source.num_envs} envs: final observations can only "
                "be given to an agent that has all of them"
            )
        shown = next_observations.clone()
        shown[self._final_rows] = self._final_observations
        return shown

    def _tensor(self, obs: Any) -> Any:
        return flatten_tensorized_space(tensorize_space(self.observation_space, obs, device=self.device))

    def _batch_of(self, actions: Any) -> Any:
        batch = untensorize_space(
            self.action_space, unflatten_tensorized_space(self.action_space, actions), squeeze_batch_dimension=False
        )
        leaves = zip(self._actions.leaves, self._actions.flatten(batch), strict=True)
        return self._actions.unflatten([np.reshape(value, (-1, *leaf.shape)) for leaf, value in leaves])
