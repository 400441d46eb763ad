"""Advantages and targets from rollouts: GAE, and V-trace for data that is older than the policy. Pure NumPy.

T steps of N envs, time first. A return never continues into the next episode. Where an episode was truncated, the
value of its final observation stands for the rest of it; where it was terminated, nothing does.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from envfleet.contract.arrays import Array, BoolArray, FloatArray
from envfleet.contract.errors import UsageError
from envfleet.contract.rollout import Rollout


class Gae(NamedTuple):
    """Generalized advantage estimates."""

    advantages: FloatArray  # [T, N]
    returns: FloatArray  # [T, N] advantages + values: targets for the values


class Vtrace(NamedTuple):
    """V-trace's targets and advantages (Espeholt et al., 2018)."""

    value_targets: FloatArray  # [T, N]
    advantages: FloatArray  # [T, N] for the policy gradient, weighted by the clipped rho


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
) -> Gae:
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
    advantages = np.empty_like(deltas)
    running = np.zeros(deltas.shape[1:])
    for t in reversed(range(len(deltas))):
        running = deltas[t] + gamma * lam * np.where(ended[t], 0.0, running)
        advantages[t] = running
    return Gae(advantages, advantages + values)


def gae_of(rollout: Rollout, *, gamma: float = 0.99, lam: float = 0.95) -> Gae:
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
) -> Vtrace:
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
    _require_shapes(rewards, behaviour_log_probs=behaviour_log_probs, target_log_probs=target_log_probs)
    following, ended = _following_values(rewards, values, next_values, terminated, truncated, final_values)
    with np.errstate(over="ignore"):  # a ratio of infinity is clipped like any other
        ratios = np.exp(np.asarray(target_log_probs, np.float64) - behaviour_log_probs)
    rhos = np.minimum(ratios, max_rho)
    traces = lam * np.minimum(ratios, max_c)
    deltas = rhos * (rewards + gamma * following - values)
    corrections = np.empty_like(deltas)  # v_t - V(x_t)
    running = np.zeros(deltas.shape[1:])
    for t in reversed(range(len(deltas))):
        running = deltas[t] + gamma * traces[t] * np.where(ended[t], 0.0, running)
        corrections[t] = running
    targets = values + corrections
    # The target of the next observation; where none follows in this episode, its value (0 after a termination).
    next_targets = np.concatenate([targets[1:], np.asarray(next_values, np.float64)[None]])
    next_targets = np.where(ended, following, next_targets)
    return Vtrace(targets, rhos * (rewards + gamma * next_targets - values))


def _following_values(
    rewards: Array, values: Array, next_values: Array, terminated: Array, truncated: Array, final_values: Array
) -> tuple[FloatArray, BoolArray]:
    """The value of what follows each step within its episode, and where episodes end."""
    _require_shapes(rewards, values=values, terminated=terminated, truncated=truncated, final_values=final_values)
    if np.shape(next_values) != np.shape(rewards)[1:]:
        raise UsageError(f"next_values must have shape {np.shape(rewards)[1:]}; got {np.shape(next_values)}")
    ended = np.asarray(terminated, np.bool_) | np.asarray(truncated, np.bool_)
    following = np.concatenate([np.asarray(values, np.float64)[1:], np.asarray(next_values, np.float64)[None]])
    following = np.where(ended, final_values, following)
    return np.where(terminated, 0.0, following), ended


def _require_shapes(rewards: Array, **arrays: Array) -> None:
    if np.ndim(rewards) < 1 or len(rewards) < 1:
        raise UsageError(f"rewards must have shape [T, N] with T at least 1; got {np.shape(rewards)}")
    for name, array in arrays.items():
        if np.shape(array) != np.shape(rewards):
            raise UsageError(f"{name} must have the shape of rewards, {np.shape(rewards)}; got {np.shape(array)}")
