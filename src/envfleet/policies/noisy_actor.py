"""GaussianNoise: a deterministic actor (TD3, DDPG) that explores with noise."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from envfleet.contract.arrays import Array
from envfleet.contract.distributions import Gaussian
from envfleet.contract.errors import UsageError
from envfleet.contract.policy import Acted
from envfleet.policies.checks import joined, num_rows_of, require_weights, split_weights
from envfleet.policies.seeding import SavesTorchGenerator
from envfleet.policies.torch.arrays import TorchBorder, state_arrays

# Without noise two actors would be infinitely far apart: log-probs and distributions are computed as if
# the noise were at least this share of half the range of actions (or this number, where they have no bounds).
STD_FLOOR = 1e-3


class GaussianNoise(SavesTorchGenerator):
    """An actor, as that of CleanRL's td3_continuous_action.py: `actor(obs) -> [B, ...]` actions, plus noise.

    `policy.std = 0.05` changes the noise, and travels to the workers with the weights. Log-probs are those of the
    Gaussian before clipping, at the clipped action: right for comparing policies, no true density at the bounds.

    Args:
        actor: the torch.nn.Module, on any device. It is used, not copied.
        std: standard deviation of the noise in units of the action, one number or one for each of its dimensions.
        low: lower bounds of the action space, a number or an array; actions are clipped to them.
        high: upper bounds.

    Raises:
        UsageError: `actor` is no torch.nn.Module, `low` is not below `high`, or `std` is negative or not finite.
        MissingExtra: PyTorch is not installed.
    """

    def __init__(self, actor: Any, std: Any, low: Any, high: Any) -> None:
        self._border = TorchBorder(actor, "GaussianNoise")
        self._torch = self._border.torch
        self.actor: Any = self._border.module
        self._low, self._high = np.asarray(low, np.float32), np.asarray(high, np.float32)
        if not (self._low < self._high).all():
            raise UsageError(f"low must be below high; got low={low}, high={high}")
        half_range = (self._high.astype(np.float64) - self._low) / 2
        self._std_floor = STD_FLOOR * np.where(np.isfinite(half_range), half_range, 1.0)
        self._generator: Any = None  # torch's own
        self._std = _checked_std(std)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the actor, std and the bounds; a copy has no seed."""
        return GaussianNoise, (self.actor, self._std, self._low, self._high)

    @property
    def std(self) -> Array:
        """Standard deviation of the noise, in units of the action."""
        return self._std

    @std.setter
    def std(self, std: Any) -> None:
        checked = _checked_std(std)
        if checked.shape not in ((), self._std.shape):
            raise UsageError(f"std must be one number or of shape {self._std.shape}; got {checked.shape}")
        self._std = np.broadcast_to(checked, self._std.shape).copy()

    def to_device(self, device: str) -> None:
        """Move the actor, and act on this device from now on.

        Args:
            device: such as "cuda", "cuda:1" or "mps".

        Raises:
            RuntimeError: torch finds no such device. Some builds of torch raise AssertionError.
        """
        self._border.to_device(device)

    def act(self, obs: Any) -> Acted:
        """Choose the actor's actions plus noise, clipped to the bounds.

        Args:
            obs: B observations, a tree of [B, ...] arrays in the form of the observation space.

        Returns:
            The actions and their log-probs.

        Raises:
            UsageError: a log-prob is NaN, or the actor's output is not [B, ...].
        """
        with self._torch.inference_mode():
            mean = self._mean(obs)
            noise = self._torch.randn(mean.shape, generator=self._generator).numpy()
        actions = np.clip(mean + (self._std * noise).astype(np.float32), self._low, self._high)
        log_probs = self._log_probs(mean, actions)
        self._border.require_no_nan(log_probs, obs, "log-probs")
        return Acted(actions, log_probs, {})

    def act_deterministically(self, obs: Any) -> Acted:
        """Choose the actor's actions, without noise, clipped to the bounds.

        Args:
            obs: B observations, a tree of [B, ...] arrays in the form of the observation space.

        Returns:
            The actions.

        Raises:
            UsageError: the actor's output is NaN, or is not [B, ...].
        """
        with self._torch.inference_mode():
            mean = self._mean(obs)
        self._border.require_no_nan(mean.reshape(len(mean), -1).sum(1, dtype=np.float32), obs, "actions")
        return Acted(np.clip(mean, self._low, self._high), None, {})

    def log_prob(self, obs: Any, actions: Any) -> Array:
        """Compute the log-probabilities of actions that were taken, under the Gaussian before clipping.

        Args:
            obs: B observations, a tree of [B, ...] arrays in the form of the observation space.
            actions: B actions, a tree of [B, ...] arrays in the form of the action space.

        Returns:
            [B] float32.

        Raises:
            UsageError: the actor's output is not [B, ...].
        """
        with self._torch.no_grad():  # not inference_mode(): see TorchPolicy.log_prob
            return self._log_probs(self._mean(obs), np.asarray(actions))

    def values(self, obs: Any) -> None:
        """Return None: learners of Q values compute their targets from the Q networks.

        Args:
            obs: B observations, a tree of [B, ...] arrays in the form of the observation space.
        """

    def distribution(self, obs: Any) -> Gaussian:
        """Compute the Gaussian before clipping, whose std is at least that of STD_FLOOR.

        Args:
            obs: B observations, a tree of [B, ...] arrays in the form of the observation space.

        Returns:
            The distribution for B rows.

        Raises:
            UsageError: the actor's output is not [B, ...].
        """
        with self._torch.no_grad():
            mean = self._mean(obs)
        log_std = np.broadcast_to(np.log(self._floored_std()), mean.shape).astype(np.float32)
        return Gaussian(mean.reshape(len(mean), -1), log_std.reshape(len(mean), -1))

    def get_weights(self) -> dict[str, Array]:
        """Return the state dict of the actor, and std.

        Returns:
            CPU arrays by name; views where that is possible.
        """
        return joined(actor=state_arrays(self.actor)) | {"std": self._std}

    def set_weights(self, weights: Mapping[str, Array]) -> None:
        """Copy `weights` into the actor, and take over std.

        Args:
            weights: as get_weights() of another copy gives them.

        Raises:
            UsageError: names or shapes differ from those of this policy; nothing is changed.
        """
        require_weights(weights, {name: array.shape for name, array in self.get_weights().items()})
        std = _checked_std(weights["std"])
        self._border.set_weights(split_weights(weights, "actor"))
        self._std = std

    def _mean(self, obs: Any) -> Array:
        mean: Array = self._border.arrays(self.actor(self._border.tensors(obs)).detach())
        if mean.ndim < 2 or len(mean) != num_rows_of(obs):
            raise UsageError(f"actor(obs) must be [{num_rows_of(obs)}, ...] actions; got {mean.shape}")
        return mean

    def _floored_std(self) -> Array:
        return np.maximum(self._std, self._std_floor)

    def _log_probs(self, mean: Array, actions: Array) -> Array:
        std = self._floored_std()
        each = -0.5 * ((actions.astype(np.float64) - mean) / std) ** 2 - np.log(std) - 0.5 * math.log(2 * math.pi)
        return np.asarray(each.reshape(len(mean), -1).sum(-1), np.float32)


def _checked_std(std: Any) -> Array:
    array = np.array(std, np.float64)
    if not (np.isfinite(array) & (array >= 0)).all():
        raise UsageError(f"std must be finite and not negative; got {std}")
    return array
