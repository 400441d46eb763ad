"""Normalisation whose statistics live at the head: of observations, inside the policy; of rewards, beside it."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import numpy as np
from gymnasium import spaces

from envfleet.contract.arrays import Array
from envfleet.contract.distributions import Distribution
from envfleet.contract.errors import UsageError
from envfleet.contract.policy import (
    Acted,
    ActsDeterministically,
    ExposesDistribution,
    MovesToDevice,
    Recurrent,
    SavesRandomState,
    Seedable,
)
from envfleet.contract.rollout import Rollout
from envfleet.contract.spaces import Leaf, SpaceTree
from envfleet.policies.adapting import as_policy
from envfleet.policies.by_path import PolicySpec
from envfleet.policies.checks import joined, require_weights, split_weights


class RunningMoments:
    """Mean and (population) variance of all rows seen so far, each [*shape] float64; 0 and 1 before the first row."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        self.mean, self.var, self.count = np.zeros(shape), np.ones(shape), 0.0

    def update(self, rows: Array) -> None:
        """Add rows to the statistics. The result is exact, whatever the batches (Chan et al.).

        Args:
            rows: [..., *shape].

        Raises:
            UsageError: a row is not finite.
        """
        rows = rows.reshape(-1, *self.mean.shape)
        if len(rows) == 0:
            return
        mean, var = rows.mean(0, dtype=np.float64), rows.var(0, dtype=np.float64)
        if not np.isfinite(mean).all():
            raise UsageError("values that are not finite cannot be normalised: the mean would never be finite again")
        total, delta = self.count + len(rows), mean - self.mean
        self.var = (self.count * self.var + len(rows) * var + delta**2 * (self.count * len(rows) / total)) / total
        self.mean = self.mean + delta * (len(rows) / total)
        self.count = total


class NormalizedPolicy:
    """Any agent, which sees observations with mean 0 and variance 1. Parts that are no floats stay as they are.

    The learner calls `policy.update(rollout)`, and `policy.normalize(obs)` on the raw observations of rollouts before
    it passes them to its network. The statistics travel to the workers with the agent's weights, and change only in
    update(). The methods of a Policy take raw observations.

    Args:
        agent: what a cluster accepts as an agent, except a PolicySpec.
        observation_space: of one env.
        clip: normalised observations are clipped to [-clip, clip].
        epsilon: added to the variance.

    Raises:
        UsageError: the agent is none or a PolicySpec, the space has no Box of floats, or a number is not positive.
    """

    def __init__(
        self, agent: Any, observation_space: spaces.Space[Any], clip: float = 10.0, epsilon: float = 1e-8
    ) -> None:
        if not isinstance(observation_space, spaces.Space):
            raise UsageError(f"observation_space must be a space of Gymnasium; got {type(observation_space).__name__}")
        if not (clip > 0 and epsilon > 0):
            raise UsageError(f"clip and epsilon must be positive; got clip={clip}, epsilon={epsilon}")
        if isinstance(agent, PolicySpec):
            raise UsageError(
                "NormalizedPolicy shares its weights with its agent, and a PolicySpec has none to share: make one "
                "PolicySpec of a factory that returns a NormalizedPolicy"
            )
        self.agent = agent
        self._policy: Any = as_policy(agent)
        self._tree = SpaceTree(observation_space)
        self._clip, self._epsilon = clip, epsilon
        self._moments = [RunningMoments(leaf.shape) if _is_float(leaf) else None for leaf in self._tree.leaves]
        if not any(self._moments):
            raise UsageError(f"{observation_space} has no Box of floats, so there is nothing to normalise")
        # What it is beside a Policy shows in these methods: it has them only if the agent does.
        if isinstance(self._policy, ActsDeterministically):
            self.act_deterministically = self._act_deterministically
        if isinstance(self._policy, Recurrent):
            self.initial_state = self._policy.initial_state
        if isinstance(self._policy, Seedable):
            self.seed = self._policy.seed
        if isinstance(self._policy, MovesToDevice):
            self.to_device = self._policy.to_device
        if isinstance(self._policy, SavesRandomState):
            self.get_random_state = self._policy.get_random_state
            self.set_random_state = self._policy.set_random_state

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the agent and the present statistics."""
        made = (self._policy, self._tree.space, self._clip, self._epsilon)
        return NormalizedPolicy, made, {"_moments": self._moments}

    def update(self, rollout: Rollout) -> None:
        """Add the observations of a rollout to the statistics.

        Args:
            rollout: with arrays or tensors.

        Raises:
            UsageError: an observation is not finite.
        """
        for moments, leaf in zip(self._moments, self._tree.flatten(rollout.obs), strict=True):
            if moments is not None:
                moments.update(_array(leaf))

    def normalize(self, obs: Any) -> Any:
        """Normalise and clip observations.

        Args:
            obs: a tree of [..., *shape] arrays or tensors.

        Returns:
            The same tree as float32; tensors stay tensors.
        """
        leaves = zip(self._moments, self._tree.flatten(obs), strict=True)
        return self._tree.unflatten(
            [leaf if moments is None else self._normal(moments, leaf) for moments, leaf in leaves]
        )

    def act(self, obs: Any, **state: Any) -> Acted:
        """Choose the agent's actions for normalised observations.

        Args:
            obs: B observations, a tree of [B, ...] arrays in the form of the observation space.
            **state: `state=` of a recurrent agent.

        Returns:
            What act() of the agent returns.
        """
        acted: Acted = self._policy.act(self.normalize(obs), **state)
        return acted

    def log_prob(self, obs: Any, actions: Any, **state: Any) -> Array:
        """Compute the log-probabilities of actions that were taken.

        Args:
            obs: B observations, a tree of [B, ...] arrays in the form of the observation space.
            actions: B actions, a tree of [B, ...] arrays in the form of the action space.
            **state: `state=` of a recurrent agent.

        Returns:
            [B] log-probabilities.
        """
        log_probs: Array = self._policy.log_prob(self.normalize(obs), actions, **state)
        return log_probs

    def values(self, obs: Any, **state: Any) -> Array | None:
        """Estimate the values of observations.

        Args:
            obs: B observations, a tree of [B, ...] arrays in the form of the observation space.
            **state: `state=` of a recurrent agent.

        Returns:
            [B] values; None if the agent has none.
        """
        values: Array | None = self._policy.values(self.normalize(obs), **state)
        return values

    def distribution(self, obs: Any, **state: Any) -> Distribution | None:
        """Compute the distribution of the actions.

        Args:
            obs: B observations, a tree of [B, ...] arrays in the form of the observation space.
            **state: `state=` of a recurrent agent.

        Returns:
            The agent's distribution; None if it does not show one.
        """
        if not isinstance(self._policy, ExposesDistribution):
            return None
        distribution: Distribution | None = self._policy.distribution(self.normalize(obs), **state)
        return distribution

    def get_weights(self) -> dict[str, Array]:
        """Return the weights of the agent, and the statistics.

        Returns:
            The arrays by name. They may be views: copy them if you keep them.
        """
        return joined(agent=self._policy.get_weights(), normalizer=self._statistics())

    def set_weights(self, weights: Mapping[str, Array]) -> None:
        """Replace the weights of the agent, and the statistics.

        Args:
            weights: as get_weights() of another copy gives them.

        Raises:
            UsageError: names or shapes differ from those of this policy; nothing is changed.
        """
        require_weights(weights, {name: array.shape for name, array in self.get_weights().items()})
        self._policy.set_weights(split_weights(weights, "agent"))
        given = split_weights(weights, "normalizer")
        for leaf, moments in zip(self._tree.leaves, self._moments, strict=True):
            if moments is not None:
                name = leaf.name_in("obs")
                moments.mean, moments.var = (np.array(given[f"{name}.{what}"], np.float64) for what in ("mean", "var"))
                moments.count = float(given[f"{name}.count"])

    def _act_deterministically(self, obs: Any, **state: Any) -> Acted:
        acted: Acted = self._policy.act_deterministically(self.normalize(obs), **state)
        return acted

    def _statistics(self) -> dict[str, Array]:
        arrays: dict[str, Array] = {}
        for leaf, moments in zip(self._tree.leaves, self._moments, strict=True):
            if moments is not None:
                name = leaf.name_in("obs")
                arrays |= {f"{name}.mean": moments.mean, f"{name}.var": moments.var}
                arrays[f"{name}.count"] = np.array(moments.count)
        return arrays

    def _normal(self, moments: RunningMoments, leaf: Any) -> Any:
        centred = (_array(leaf) - moments.mean) / np.sqrt(moments.var + self._epsilon)
        normal = np.clip(centred, -self._clip, self._clip).astype(np.float32)
        torch = sys.modules.get("torch")
        if torch is not None and isinstance(leaf, torch.Tensor):
            return torch.from_numpy(normal).to(leaf.device)
        return normal


class RewardScaler:
    """Divides rewards by the standard deviation of the discounted return so far, as Gymnasium's NormalizeReward does.

    Returns of unfinished episodes are kept by env id, so rollouts may come from one worker at a time. An episode
    starts with a return of 0, whether the one before it was terminated or truncated.

    Args:
        discount: the learner's gamma.
        epsilon: added to the variance.

    Raises:
        UsageError: `discount` is not from 0 to 1, or `epsilon` is not positive.
    """

    def __init__(self, discount: float, epsilon: float = 1e-8) -> None:
        if not 0 <= discount <= 1:
            raise UsageError(f"discount must be from 0 to 1; got {discount}")
        if epsilon <= 0:
            raise UsageError(f"epsilon must be positive; got {epsilon}")
        self._discount, self._epsilon = discount, epsilon
        self._moments = RunningMoments(())
        self._returns = np.zeros(0)  # by env id

    @property
    def std(self) -> float:
        """The number that rewards are divided by."""
        return float(np.sqrt(self._moments.var + self._epsilon))

    def update(self, rollout: Rollout) -> None:
        """Add the rewards of a rollout to the statistics. Each env's rollouts must come in order.

        Args:
            rollout: with arrays or tensors.

        Raises:
            UsageError: a reward is not finite.
        """
        env_ids, rewards = _array(rollout.env_ids), _array(rollout.rewards)
        ended = _array(rollout.terminations) | _array(rollout.truncations)
        num_missing = int(env_ids.max(initial=-1)) + 1 - len(self._returns)
        if num_missing > 0:
            self._returns = np.concatenate([self._returns, np.zeros(num_missing)])
        running, returns = self._returns[env_ids], np.empty(rewards.shape)
        for t, reward in enumerate(rewards):
            running = running * self._discount + reward
            returns[t] = running
            running = np.where(ended[t], 0.0, running)
        self._moments.update(returns)
        self._returns[env_ids] = running

    def state_dict(self) -> dict[str, Any]:
        """Return the statistics, for `extra` of a checkpoint.

        Returns:
            Arrays and numbers by name, for load_state_dict().
        """
        moments = self._moments
        return {
            "mean": moments.mean.copy(),
            "var": moments.var.copy(),
            "count": moments.count,
            "returns": self._returns.copy(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on with statistics of another scaler.

        Args:
            state: what state_dict() returned.

        Raises:
            UsageError: a part of it is missing.
        """
        try:
            mean, var, count, returns = (state[name] for name in ("mean", "var", "count", "returns"))
        except KeyError as error:
            raise UsageError(f"the state of a RewardScaler has {error}; got {sorted(state)}") from None
        moments = self._moments
        moments.mean, moments.var, moments.count = np.array(mean), np.array(var), float(count)
        self._returns = np.array(returns, np.float64)

    def scale(self, rewards: Any) -> Any:
        """Divide rewards by std.

        Args:
            rewards: an array or tensor of any shape.

        Returns:
            The same, divided.
        """
        return rewards / self.std


def _is_float(leaf: Leaf) -> bool:
    return isinstance(leaf.space, spaces.Box) and leaf.dtype is not None and leaf.dtype.kind == "f"


def _array(leaf: Any) -> Array:
    torch = sys.modules.get("torch")
    return np.asarray(leaf.detach().cpu() if torch is not None and isinstance(leaf, torch.Tensor) else leaf)
