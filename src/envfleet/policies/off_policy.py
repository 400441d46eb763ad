"""Policies of off-policy learners: a Q network with epsilon-greedy exploration, and a tanh-squashed Gaussian actor."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from envfleet.contract.arrays import Array
from envfleet.contract.distributions import Categorical, Gaussian
from envfleet.contract.errors import UsageError
from envfleet.contract.policy import Acted
from envfleet.policies.checks import joined, num_rows_of, require_weights, split_weights
from envfleet.policies.seeding import SavesTorchGenerator
from envfleet.policies.torch.arrays import TorchBorder, state_arrays

# With epsilon = 0 all but one action would have probability 0, and two such policies an infinite divergence: their
# probabilities are computed with at least this one for each action; with more than 100 actions it is less, 0.1 in all.
PROBABILITY_FLOOR = 1e-3

# Closer to 1, float32 is too coarse to invert tanh: actions keep this distance from the bounds.
SQUASHED_LIMIT = 1 - 1e-6


class EpsilonGreedy(SavesTorchGenerator):
    """A Q network, as that of CleanRL's dqn.py: `q_network(obs) -> [B, K]`. For Discrete action spaces.

    With probability `epsilon` the action is any of the K, else the best. `policy.epsilon = 0.05` changes that, and
    travels to the workers with the weights.

    Args:
        q_network: the torch.nn.Module, on any device. It is used, not copied.
        epsilon: probability of a random action.
        start: the first action, as in Discrete(n, start=...).

    Raises:
        UsageError: `q_network` is no torch.nn.Module, or `epsilon` is not from 0 to 1.
        MissingExtra: PyTorch is not installed.
    """

    def __init__(self, q_network: Any, epsilon: float = 0.1, *, start: int = 0) -> None:
        self._border = TorchBorder(q_network, "EpsilonGreedy")
        self._torch = self._border.torch
        self.q_network: Any = self._border.module
        self._start = start
        self._generator: Any = None  # torch's own
        self._epsilon = _checked_epsilon(epsilon)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the network and epsilon; a copy has no seed."""
        return _epsilon_greedy, (self.q_network, self.epsilon, self._start)

    @property
    def epsilon(self) -> float:
        """Probability of a random action."""
        return self._epsilon

    @epsilon.setter
    def epsilon(self, epsilon: float) -> None:
        self._epsilon = _checked_epsilon(epsilon)

    def to_device(self, device: str) -> None:
        """Move the network, and act on this device from now on.

        Args:
            device: such as "cuda", "cuda:1" or "mps".

        Raises:
            RuntimeError: torch finds no such device. Some builds of torch raise AssertionError.
        """
        self._border.to_device(device)

    def act(self, obs: Any, action_mask: Array | None = None) -> Acted:
        """Choose the best action of each row or, with probability epsilon, any.

        Args:
            obs: B observations, a tree of [B, ...] arrays in the form of the observation space.
            action_mask: [B, ...] bool, False for each action that is not allowed; None: all are.

        Returns:
            The actions and their log-probs.

        Raises:
            UsageError: a Q value is NaN, or the network's output is not [B, K].
        """
        torch, generator = self._torch, self._generator
        with torch.inference_mode():
            q_values, allowed = self._q_values(obs, action_mask)
            num_rows, num_actions = q_values.shape
            best = q_values.argmax(1).cpu()
            explores = torch.rand(num_rows, generator=generator, dtype=torch.float64) < self._epsilon
            if allowed is None:
                drawn = torch.randint(num_actions, (num_rows,), generator=generator)
            else:
                drawn = torch.multinomial(allowed.double(), 1, generator=generator).squeeze(1)
            chosen = torch.where(explores, drawn, best)
            log_probs = self._log_probs(best, chosen, num_actions, allowed)
            return Acted(chosen.numpy() + self._start, log_probs, {})

    def act_deterministically(self, obs: Any, action_mask: Array | None = None) -> Acted:
        """Choose the best action of each row, whatever epsilon is.

        Args:
            obs: B observations, a tree of [B, ...] arrays in the form of the observation space.
            action_mask: [B, ...] bool, False for each action that is not allowed; None: all are.

        Returns:
            The actions.

        Raises:
            UsageError: a Q value is NaN, or the network's output is not [B, K].
        """
        with self._torch.inference_mode():
            q_values, _ = self._q_values(obs, action_mask)
            return Acted(q_values.argmax(1).cpu().numpy() + self._start, None, {})

    def log_prob(self, obs: Any, actions: Any, action_mask: Array | None = None) -> Array:
        """Compute the log-probabilities of actions that were taken; none is below that of PROBABILITY_FLOOR.

        Args:
            obs: B observations, a tree of [B, ...] arrays in the form of the observation space.
            actions: B actions, a tree of [B, ...] arrays in the form of the action space.
            action_mask: [B, ...] bool, False for each action that is not allowed; None: all are.

        Returns:
            [B] float32.

        Raises:
            UsageError: a Q value is NaN, or the network's output is not [B, K].
        """
        with self._torch.no_grad():  # not inference_mode(): see TorchPolicy.log_prob
            q_values, allowed = self._q_values(obs, action_mask)
            chosen = self._torch.from_numpy(np.asarray(actions, np.int64) - self._start)
            return self._log_probs(q_values.argmax(1).cpu(), chosen, q_values.shape[1], allowed)

    def values(self, obs: Any) -> None:
        """Return None: learners of Q values compute their targets from the Q networks.

        Args:
            obs: B observations, a tree of [B, ...] arrays in the form of the observation space.
        """

    def distribution(self, obs: Any, action_mask: Array | None = None) -> Categorical:
        """Compute the distribution of the actions: exactly epsilon-greedy, except for PROBABILITY_FLOOR.

        Args:
            obs: B observations, a tree of [B, ...] arrays in the form of the observation space.
            action_mask: [B, ...] bool, False for each action that is not allowed; None: all are.

        Returns:
            The distribution for B rows.

        Raises:
            UsageError: a Q value is NaN, or the network's output is not [B, K].
        """
        with self._torch.no_grad():
            q_values, allowed = self._q_values(obs, action_mask)
            best = q_values.argmax(1).cpu().numpy()
        num_rows, num_actions = q_values.shape
        of_best, of_others = self._floored_log_probs(num_actions if allowed is None else allowed.sum(1).numpy())
        logits = np.empty((num_rows, num_actions), np.float32)
        logits[...] = np.reshape(of_others, (-1, 1))
        logits[np.arange(num_rows), best] = of_best
        if allowed is not None:
            logits[~allowed.numpy()] = -np.inf
        return Categorical(logits)

    def get_weights(self) -> dict[str, Array]:
        """Return the state dict of the network, and epsilon.

        Returns:
            CPU arrays by name; views where that is possible.
        """
        return joined(q_network=state_arrays(self.q_network)) | {"epsilon": np.array(self._epsilon)}

    def set_weights(self, weights: Mapping[str, Array]) -> None:
        """Copy `weights` into the network, and take over epsilon.

        Args:
            weights: as get_weights() of another copy gives them.

        Raises:
            UsageError: names or shapes differ from those of this policy; nothing is changed.
        """
        require_weights(weights, {name: array.shape for name, array in self.get_weights().items()})
        epsilon = _checked_epsilon(weights["epsilon"])
        self._border.set_weights(split_weights(weights, "q_network"))
        self._epsilon = epsilon

    def _q_values(self, obs: Any, action_mask: Array | None) -> tuple[Any, Any]:
        """Q values, -inf for what is not allowed, and what is allowed, on the CPU; None: everything."""
        num_rows = num_rows_of(obs)
        q_values = self.q_network(self._border.tensors(obs))
        if q_values.dim() != 2 or len(q_values) != num_rows:
            raise UsageError(f"q_network(obs) must be [{num_rows}, number of actions]; got {tuple(q_values.shape)}")
        self._border.require_no_nan(self._border.rows(q_values.amax(1), num_rows, "Q values"), obs, "Q values")
        if action_mask is None:
            return q_values, None
        if action_mask.shape != tuple(q_values.shape) or not action_mask.any(1).all():
            raise UsageError(
                f"action_mask must be {tuple(q_values.shape)}, with an allowed action in each row; got "
                f"{action_mask.shape}, with {int((~action_mask.any(-1)).sum())} rows that allow none"
            )
        allowed = self._torch.from_numpy(np.array(action_mask, np.bool_))
        return q_values.masked_fill(~allowed.to(q_values.device), -math.inf), allowed

    def _log_probs(self, best: Any, chosen: Any, num_actions: int, allowed: Any) -> Array:
        of_best, of_others = self._floored_log_probs(num_actions if allowed is None else allowed.sum(1).numpy())
        is_best = (best == chosen).numpy()
        log_probs: Array = np.where(is_best, of_best, of_others).astype(np.float32)
        return log_probs

    def _floored_log_probs(self, num_actions: Any) -> tuple[Any, Any]:
        """Of the best action, and of each other; `num_actions` is a number, or one for each row."""
        floored_epsilon = np.maximum(self._epsilon, np.minimum(PROBABILITY_FLOOR * num_actions, 0.1))
        of_others = floored_epsilon / num_actions
        return np.log(1 - floored_epsilon + of_others), np.log(of_others)


class SquashedGaussian(SavesTorchGenerator):
    """An actor, as that of CleanRL's sac_continuous_action.py: `actor(obs) -> mean, log_std`, each [B, D].

    Actions are `tanh(sample) * action_scale + action_bias`, which are buffers of the actor (1 and 0 if it has none).
    Log-probs are exact; an action at the bounds counts as one just inside them (SQUASHED_LIMIT).

    Args:
        actor: the torch.nn.Module, on any device. It is used, not copied.

    Raises:
        UsageError: `actor` is no torch.nn.Module.
        MissingExtra: PyTorch is not installed.
    """

    def __init__(self, actor: Any) -> None:
        self._border = TorchBorder(actor, "SquashedGaussian")
        self._torch = self._border.torch
        self.actor: Any = self._border.module
        self._generator: Any = None  # torch's own

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the actor; a copy has no seed."""
        return SquashedGaussian, (self.actor,)

    def to_device(self, device: str) -> None:
        """Move the actor, and act on this device from now on.

        Args:
            device: such as "cuda", "cuda:1" or "mps".

        Raises:
            RuntimeError: torch finds no such device. Some builds of torch raise AssertionError.
        """
        self._border.to_device(device)

    def act(self, obs: Any) -> Acted:
        """Sample actions.

        Args:
            obs: B observations, a tree of [B, ...] arrays in the form of the observation space.

        Returns:
            The actions and their log-probs.

        Raises:
            UsageError: a log-prob is NaN, or the actor's outputs are not [B, D].
        """
        torch = self._torch
        with torch.inference_mode():
            mean, log_std = self._mean_and_log_std(obs)
            noise = torch.randn(mean.shape, generator=self._generator, dtype=mean.dtype)
            squashed = torch.tanh(mean + log_std.exp() * noise.to(mean.device)).clamp(-SQUASHED_LIMIT, SQUASHED_LIMIT)
            scale, bias = self._scale_and_bias(mean.device)
            actions = squashed * scale + bias
            log_probs = self._log_probs(mean, log_std, actions)
            taken = self._border.arrays(actions)
        self._border.require_no_nan(log_probs, obs, "log-probs")
        return Acted(taken, log_probs, {})

    def act_deterministically(self, obs: Any) -> Acted:
        """Choose the squashed mean.

        Args:
            obs: B observations, a tree of [B, ...] arrays in the form of the observation space.

        Returns:
            The actions.

        Raises:
            UsageError: an action is NaN, or the actor's outputs are not [B, D].
        """
        torch = self._torch
        with torch.inference_mode():
            mean, _ = self._mean_and_log_std(obs)
            scale, bias = self._scale_and_bias(mean.device)
            actions = torch.tanh(mean).clamp(-SQUASHED_LIMIT, SQUASHED_LIMIT) * scale + bias
            taken = self._border.arrays(actions)
            sums = self._border.rows(actions.sum(1), len(mean), "actions")
        self._border.require_no_nan(sums, obs, "actions")
        return Acted(taken, None, {})

    def log_prob(self, obs: Any, actions: Any) -> Array:
        """Compute the log-probabilities of actions that were taken.

        Args:
            obs: B observations, a tree of [B, ...] arrays in the form of the observation space.
            actions: B actions, a tree of [B, ...] arrays in the form of the action space.

        Returns:
            [B] float32.

        Raises:
            UsageError: the actor's outputs are not [B, D].
        """
        with self._torch.no_grad():  # not inference_mode(): see TorchPolicy.log_prob
            return self._log_probs(*self._mean_and_log_std(obs), self._border.tensors(actions))

    def values(self, obs: Any) -> None:
        """Return None: learners of Q values compute their targets from the Q networks.

        Args:
            obs: B observations, a tree of [B, ...] arrays in the form of the observation space.
        """

    def distribution(self, obs: Any) -> Gaussian:
        """Compute the Gaussian before the squashing, which does not change divergences.

        Args:
            obs: B observations, a tree of [B, ...] arrays in the form of the observation space.

        Returns:
            The distribution for B rows.

        Raises:
            UsageError: the actor's outputs are not [B, D].
        """
        with self._torch.no_grad():
            mean, log_std = self._mean_and_log_std(obs)
            return Gaussian(self._border.arrays(mean), self._border.arrays(log_std))

    def get_weights(self) -> dict[str, Array]:
        """Return the state dict of the actor.

        Returns:
            CPU arrays by name; views where that is possible.
        """
        return state_arrays(self.actor)

    def set_weights(self, weights: Mapping[str, Array]) -> None:
        """Copy `weights` into the actor.

        Args:
            weights: as get_weights() of another copy gives them.

        Raises:
            UsageError: names or shapes differ from those of this policy; nothing is changed.
        """
        self._border.set_weights(weights)

    def _mean_and_log_std(self, obs: Any) -> tuple[Any, Any]:
        outcome, num_rows = self.actor(self._border.tensors(obs)), num_rows_of(obs)
        if not isinstance(outcome, (tuple, list)) or len(outcome) != 2:
            raise UsageError(f"actor(obs) must return mean and log_std, each [B, D]; got {type(outcome).__name__}")
        mean, log_std = self._torch.broadcast_tensors(*outcome)
        if mean.dim() != 2 or len(mean) != num_rows:
            raise UsageError(f"mean and log_std of the actor must be [{num_rows}, D]; got {tuple(mean.shape)}")
        return mean, log_std

    def _scale_and_bias(self, device: Any) -> tuple[Any, Any]:
        """As tensors on this device; the actor may have numbers, or tensors that are no buffers and do not move."""
        scale, bias = getattr(self.actor, "action_scale", 1.0), getattr(self.actor, "action_bias", 0.0)
        return self._torch.as_tensor(scale, device=device), self._torch.as_tensor(bias, device=device)

    def _log_probs(self, mean: Any, log_std: Any, actions: Any) -> Array:
        """From the action itself, also when acting: what float32 has rounded is then the same at both ends."""
        torch = self._torch
        if not mean.is_cpu:  # some accelerators have no float64
            mean, log_std, actions = torch.stack([mean, log_std, actions.to(mean.dtype)]).cpu()
        scale, bias = (each.double() for each in self._scale_and_bias("cpu"))
        squashed = ((actions.double() - bias) / scale).clamp(-SQUASHED_LIMIT, SQUASHED_LIMIT)
        distance = (torch.atanh(squashed) - mean.double()) * torch.exp(-log_std.double())
        each = -0.5 * distance**2 - log_std - 0.5 * math.log(2 * math.pi)
        each = each - torch.log1p(-(squashed**2)) - torch.log(scale)
        return self._border.rows(each.sum(1), len(mean), "log_probs")


def _epsilon_greedy(q_network: Any, epsilon: float, start: int) -> EpsilonGreedy:
    return EpsilonGreedy(q_network, epsilon, start=start)


def _checked_epsilon(epsilon: Any) -> float:
    if not 0 <= epsilon <= 1:
        raise UsageError(f"epsilon must be a probability, from 0 to 1; got {epsilon}")
    return float(epsilon)
