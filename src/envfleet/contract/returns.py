"""Advantages and targets from rollouts: GAE, and V-trace for data that is older than the policy. Pure NumPy.

T steps of N envs, time first. A return never continues into the next episode. Where an episode was truncated, the
value of its final observation stands for the rest of it; where it was terminated, nothing does.
"""

from __future__ import annotations

from typing import Any, Generic, NamedTuple

import numpy as np

from envfleet.contract.arrays import Array, ArrayT, BoolArray, FloatArray
from envfleet.contract.errors import UsageError
from envfleet.contract.rollout import Rollout


class Gae(NamedTuple, Generic[ArrayT]):
    """Generalized advantage estimates: arrays of NumPy, or tensors."""

    advantages: ArrayT  # [T, N]
    returns: ArrayT  # [T, N] advantages + values: targets for the values


class Vtrace(NamedTuple, Generic[ArrayT]):
    """V-trace's targets and advantages (Espeholt et al., 2018): arrays of NumPy, or tensors."""

    value_targets: ArrayT  # [T, N]
    advantages: ArrayT  # [T, N] for the policy gradient, weighted by the clipped rho


def gae(
    rewards: Array,
    values: Array,
    next_values: Array,
    terminated: Array,
    truncated: Array,
    final_values: Array,
    *,
    gamma: float = 0.99,
    lam: float = 0.95,
) -> Gae[FloatArray]:
    """Compute generalized advantage estimates (Schulman et al., 2016).

    Args:
        rewards: [T, N].
        values: [T, N] of the observation before each step.
        next_values: [N] of the observation after the last step.
        terminated: [T, N] bool.
        truncated: [T, N] bool.
        final_values: [T, N] of the final observation where an episode ended; ignored elsewhere.
        gamma: discount.
        lam: 0: one-step advantages; 1: whole returns.

    Returns:
        Advantages and returns, each [T, N] float64.

    Raises:
        UsageError: shapes differ, or T is 0.
    """
    following, ended = _following_values(rewards, values, next_values, terminated, truncated, final_values)
    deltas = rewards + gamma * following - values
    advantages = _discounted_sums(deltas, np.full_like(deltas, gamma * lam), ended)
    return Gae(advantages, advantages + values)


def gae_of(rollout: Rollout, *, gamma: float = 0.99, lam: float = 0.95) -> Gae[FloatArray]:
    """Compute gae() of a rollout, with the values that the policy gave when it acted.

    Args:
        rollout: with arrays of NumPy.
        gamma: discount.
        lam: as for gae().

    Returns:
        Advantages and returns, each [T, N] float64.

    Raises:
        UsageError: the rollout has no values.
    """
    values, next_values, final_values = rollout.extras.get("values"), rollout.next_values, rollout.final_values
    if values is None or next_values is None or final_values is None:
        raise UsageError(
            "GAE needs values: the policy's act() must give extras['values'], and its values() must not be None; "
            f"extras of this rollout: {', '.join(rollout.extras) or 'none'}"
        )
    rewards, terminated, truncated = rollout.rewards, rollout.terminations, rollout.truncations
    return gae(rewards, values, next_values, terminated, truncated, final_values, gamma=gamma, lam=lam)


def vtrace(
    behaviour_log_probs: Array,
    target_log_probs: Array,
    rewards: Array,
    values: Array,
    next_values: Array,
    terminated: Array,
    truncated: Array,
    final_values: Array,
    *,
    gamma: float = 0.99,
    lam: float = 1.0,
    max_rho: float = 1.0,
    max_c: float = 1.0,
) -> Vtrace[FloatArray]:
    """Compute V-trace targets, to learn from the actions of an older policy (Espeholt et al., 2018).

    Args:
        behaviour_log_probs: [T, N] of the actions, by the policy that took them.
        target_log_probs: [T, N] of the same actions, by the learner's policy.
        rewards: [T, N].
        values: [T, N] by the learner.
        next_values: [N] by the learner.
        terminated: [T, N] bool.
        truncated: [T, N] bool.
        final_values: [T, N] of the final observation where an episode ended; ignored elsewhere.
        gamma: discount.
        lam: 1: IMPALA's own; less trusts values more.
        max_rho: limit of the importance weights of the advantages.
        max_c: limit of the importance weights of the traces.

    Returns:
        Targets of the values and advantages for the policy gradient, each [T, N] float64.

    Raises:
        UsageError: shapes differ, or T is 0.
    """
    require_shapes(rewards, behaviour_log_probs=behaviour_log_probs, target_log_probs=target_log_probs)
    following, ended = _following_values(rewards, values, next_values, terminated, truncated, final_values)
    with np.errstate(over="ignore"):  # a ratio of infinity is clipped like any other
        ratios = np.exp(np.asarray(target_log_probs, np.float64) - behaviour_log_probs)
    rhos = np.minimum(ratios, max_rho)
    traces = gamma * (lam * np.minimum(ratios, max_c))
    deltas = rhos * (rewards + gamma * following - values)
    targets = values + _discounted_sums(deltas, traces, ended)
    # The target of the next observation; where none follows in this episode, its value (0 after a termination).
    next_targets = np.concatenate([targets[1:], np.asarray(next_values, np.float64)[None]])
    next_targets = np.where(ended, following, next_targets)
    return Vtrace(targets, rhos * (rewards + gamma * next_targets - values))


def require_shapes(rewards: Any, next_values: Any = None, **others: Any) -> None:
    """Refuse arrays or tensors that do not have the shape of `rewards`; `next_values` have no time axis."""
    shape = tuple(np.shape(rewards))
    if not shape or not shape[0]:
        raise UsageError(f"rewards must have shape [T, N] with T at least 1; got {shape}")
    for name, each in others.items():
        if np.shape(each) != shape:
            raise UsageError(f"{name} must have the shape of rewards, {shape}; got {tuple(np.shape(each))}")
    if next_values is not None and np.shape(next_values) != shape[1:]:
        raise UsageError(f"next_values must have shape {shape[1:]}; got {tuple(np.shape(next_values))}")


def _discounted_sums(deltas: FloatArray, discounts: FloatArray, ended: BoolArray) -> FloatArray:
    """[T, N]: each delta, and the sum after it within the episode times the discount."""
    sums = np.empty_like(deltas)
    running = np.zeros(deltas.shape[1:])
    for t in reversed(range(len(deltas))):
        running = deltas[t] + discounts[t] * np.where(ended[t], 0.0, running)
        sums[t] = running
    return sums


def _following_values(
    rewards: Array, values: Array, next_values: Array, terminated: Array, truncated: Array, final_values: Array
) -> tuple[FloatArray, BoolArray]:
    """The value of what follows each step within its episode, and where episodes end."""
    flags = {"terminated": terminated, "truncated": truncated}
    require_shapes(rewards, next_values, values=values, **flags, final_values=final_values)
    ended = np.asarray(terminated, np.bool_) | np.asarray(truncated, np.bool_)
    following = np.concatenate([np.asarray(values, np.float64)[1:], np.asarray(next_values, np.float64)[None]])
    following = np.where(ended, final_values, following)
    return np.where(terminated, 0.0, following), ended
