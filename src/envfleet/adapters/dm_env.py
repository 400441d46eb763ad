"""DmEnv: one env of a pool or a cluster as a `dm_env.Environment`, for Acme and other libraries of that form."""

from __future__ import annotations

from typing import Any

import numpy as np

from envfleet.adapters.explicit_resets import ExplicitResets
from envfleet.adapters.vector_source import VectorSource
from envfleet.contract.errors import InvalidAction, MissingExtra, UsageError
from envfleet.contract.spaces import SpaceTree

try:
    import dm_env
except ImportError as error:
    raise MissingExtra('DmEnv needs dm_env: pip install "envfleet[dm-env]"') from error

from envfleet.adapters.dm_specs import spec_of


class DmEnv(dm_env.Environment):
    """A pool or a cluster with one env, in dm_env's form.

    A terminated episode ends with discount 0, a truncated one with discount 1. step() before the first reset(), and
    after the last step of an episode, begins an episode and ignores its action.
    """

    def __init__(self, envs: Any) -> None:
        """Take a pool or a cluster with one env; close() closes it.

        Args:
            envs: An EnvPool or a ClusterEnv, made with `autoreset_mode="same_step"`.

        Raises:
            UsageError: It is neither, it has several envs, it does not reset in the same step, or a space has values
                that are no arrays.
        """
        self._source = VectorSource(envs, "DmEnv")
        if self._source.num_envs != 1:
            raise UsageError(f"DmEnv has one env, and these are {self._source.num_envs}: make them with num_envs=1")
        self._resets = ExplicitResets(self._source)
        self._obs = SpaceTree(self._source.single_observation_space)
        self._actions = SpaceTree(self._source.single_action_space)
        self._observation_spec = spec_of(self._source.single_observation_space, "observation")
        self._action_spec = spec_of(self._source.single_action_space, "action")
        self._must_reset = True

    def reset(self) -> dm_env.TimeStep:
        """Begin an episode, whatever state the last one is in.

        Returns:
            A TimeStep of type FIRST.

        Raises:
            EnvFailed: The env raised, or its process died.
        """
        obs, _ = self._resets.reset()
        self._must_reset = False
        return dm_env.restart(self._row(obs))

    def step(self, action: Any) -> dm_env.TimeStep:
        """Take one step; where there is no episode, begin one instead, and ignore the action.

        Args:
            action: In the form of `action_spec()`.

        Returns:
            A TimeStep.

        Raises:
            InvalidAction: The action does not fit its spec.
            EnvFailed: The env raised, or its process died.
        """
        if self._must_reset:
            return self.reset()
        step = self._resets.step(self._batch_of(action))
        obs, reward = self._row(step.obs), float(step.rewards[0])
        self._must_reset = bool(step.terminated[0] or step.truncated[0])
        if step.terminated[0]:
            return dm_env.termination(reward, obs)
        if step.truncated[0]:
            return dm_env.truncation(reward, obs)
        return dm_env.transition(reward, obs)

    def observation_spec(self) -> Any:
        """Say what observations are.

        Returns:
            A spec; for a Dict space a dict of specs, for a Tuple space a tuple of specs.
        """
        return self._observation_spec

    def action_spec(self) -> Any:
        """Say what actions are.

        Returns:
            A spec; for a Dict space a dict of specs, for a Tuple space a tuple of specs.
        """
        return self._action_spec

    def close(self) -> None:
        """Close the env; more than once does no harm."""
        self._source.close()

    def _batch_of(self, action: Any) -> Any:
        try:
            return self._actions.unflatten([np.asarray(value)[np.newaxis] for value in self._actions.flatten(action)])
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise InvalidAction(
                f"an action must have the form of {self._action_spec}; got {type(action).__name__} without {error}"
            ) from None

    def _row(self, obs: Any) -> Any:
        return self._obs.each_row(obs, [0])[0]
