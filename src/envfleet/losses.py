"""Losses for data that is older than the policy: GAE, V-trace and decoupled PPO, on tensors of any device.

T steps of N envs, time first. `gae` and `vtrace` take the arguments of `envfleet.gae` and `envfleet.vtrace`, which are
for arrays of NumPy. Nothing here waits for the device: no number comes back to the host.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from envfleet.contract.errors import MissingExtra, UsageError

try:
    import torch
except ImportError as error:
    raise MissingExtra("envfleet.losses needs PyTorch: pip install 'envfleet[torch]'") from error

Tensor = Any  # torch.Tensor


class Gae(NamedTuple):
    """Generalized advantage estimates."""

    advantages: Tensor  # [T, N]
    returns: Tensor  # [T, N] advantages + values: targets for the values


class Vtrace(NamedTuple):
    """V-trace's targets and advantages (Espeholt et al., 2018)."""

    value_targets: Tensor  # [T, N]
    advantages: Tensor  # [T, N] for the policy gradient, weighted by the clipped rho


def gae(
    rewards: Tensor,
    values: Tensor,
    next_values: Tensor,
    terminated: Tensor,
    truncated: Tensor,
    final_values: Tensor,
    *,
    gamma: float = 0.99,
    lam: float = 0.95,
) -> Gae:
    """Compute generalized advantage estimates (Schulman et al., 2016). No gradient flows through them.

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
        Advantages and returns, each [T, N], with the dtype of `values` on the device of `values`.

    Raises:
        UsageError: shapes or devices differ, or T is 0.
    """
    with torch.no_grad():
        following, goes_on = _following_values(rewards, values, next_values, terminated, truncated, final_values)
        deltas = rewards.to(values.dtype) + gamma * following - values
        advantages = _discounted_sums(deltas, torch.full_like(deltas, gamma * lam), goes_on)
        return Gae(advantages, advantages + values)


def vtrace(
    behaviour_log_probs: Tensor,
    target_log_probs: Tensor,
    rewards: Tensor,
    values: Tensor,
    next_values: Tensor,
    terminated: Tensor,
    truncated: Tensor,
    final_values: Tensor,
    *,
    gamma: float = 0.99,
    lam: float = 1.0,
    max_rho: float = 1.0,
    max_c: float = 1.0,
) -> Vtrace:
    """Compute V-trace targets, to learn from the actions of an older policy. No gradient flows through them.

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
        Targets of the values and advantages for the policy gradient, each [T, N], with the dtype of `values` on the
        device of `values`.

    Raises:
        UsageError: shapes or devices differ, or T is 0.
    """
    _require_shapes(rewards, behaviour_log_probs=behaviour_log_probs, target_log_probs=target_log_probs)
    with torch.no_grad():
        following, goes_on = _following_values(rewards, values, next_values, terminated, truncated, final_values)
        rewards = rewards.to(values.dtype)
        ratios = (target_log_probs - behaviour_log_probs).to(values.dtype).exp()
        rhos = ratios.clamp(max=max_rho)
        traces = gamma * lam * ratios.clamp(max=max_c)
        deltas = rhos * (rewards + gamma * following - values)
        targets = values + _discounted_sums(deltas, traces, goes_on)
        # The target of the next observation; where none follows in this episode, its value (0 after a termination).
        next_targets = torch.cat([targets[1:], next_values.to(values.dtype)[None]])
        next_targets = torch.where(goes_on, next_targets, following)
        return Vtrace(targets, rhos * (rewards + gamma * next_targets - values))


def ppo_decoupled_loss(
    log_probs: Tensor,
    start_log_probs: Tensor,
    behaviour_log_probs: Tensor,
    advantages: Tensor,
    *,
    clip_range: float = 0.2,
    max_weight: float = 2.0,
) -> Tensor:
    """Compute the policy loss of decoupled PPO, which learns from the actions of an older policy.

    The clip is around the learner's own policy at the start of the update, not around the policy that acted: so the
    learner may leave an old policy behind. Each row counts by pi_start / pi_behaviour, at most `max_weight`. On data of
    the newest policy both are the same, and the loss is PPO's.

    Args:
        log_probs: [...] of the actions, by the policy that is being trained: the gradient flows through these only.
        start_log_probs: [...] of the same actions, by that policy at the start of the update, before the first epoch.
        behaviour_log_probs: [...] of the same actions, by the policy that took them: `rollout.log_probs`.
        advantages: [...], normalized or not.
        clip_range: how far pi / pi_start may leave 1 before its gradient stops.
        max_weight: no row counts more than this.

    Returns:
        The mean over all rows, to be minimized.

    Raises:
        UsageError: shapes or devices differ.
    """
    for name, tensor in (
        ("start_log_probs", start_log_probs),
        ("behaviour_log_probs", behaviour_log_probs),
        ("advantages", advantages),
    ):
        if tensor.shape != log_probs.shape:
            raise UsageError(f"{name} must have the shape of log_probs, {_shape(log_probs)}; got {_shape(tensor)}")
        _require_device(name, tensor, "log_probs", log_probs)
    with torch.no_grad():
        weights = (start_log_probs - behaviour_log_probs).exp().clamp(max=max_weight)
        weighted = weights * advantages
    ratios = (log_probs - start_log_probs.detach()).exp()
    clipped = ratios.clamp(1 - clip_range, 1 + clip_range)
    return -torch.minimum(ratios * weighted, clipped * weighted).mean()


def _discounted_sums(deltas: Tensor, discounts: Tensor, goes_on: Tensor) -> Tensor:
    """[T, N]: each delta, and the sum after it within the episode times the discount."""
    sums = torch.empty_like(deltas)
    running = torch.zeros_like(deltas[0])
    for t in reversed(range(len(deltas))):
        running = deltas[t] + discounts[t] * torch.where(goes_on[t], running, 0.0)
        sums[t] = running
    return sums


def _following_values(
    rewards: Tensor, values: Tensor, next_values: Tensor, terminated: Tensor, truncated: Tensor, final_values: Tensor
) -> tuple[Tensor, Tensor]:
    """The value of what follows each step within its episode, and where the episode goes on."""
    _require_shapes(rewards, values=values, terminated=terminated, truncated=truncated, final_values=final_values)
    if next_values.shape != rewards.shape[1:]:
        raise UsageError(f"next_values must have shape {_shape(rewards)[1:]}; got {_shape(next_values)}")
    _require_device("next_values", next_values, "rewards", rewards)
    terminated, truncated = terminated.bool(), truncated.bool()
    following = torch.cat([values[1:], next_values.to(values.dtype)[None]])
    following = torch.where(truncated, final_values.to(values.dtype), following)
    return following.masked_fill(terminated, 0.0), ~(terminated | truncated)


def _require_shapes(rewards: Tensor, **tensors: Tensor) -> None:
    if rewards.ndim < 1 or len(rewards) < 1:
        raise UsageError(f"rewards must have shape [T, N] with T at least 1; got {_shape(rewards)}")
    for name, tensor in tensors.items():
        if tensor.shape != rewards.shape:
            raise UsageError(f"{name} must have the shape of rewards, {_shape(rewards)}; got {_shape(tensor)}")
        _require_device(name, tensor, "rewards", rewards)


def _require_device(name: str, tensor: Tensor, other: str, expected: Tensor) -> None:
    if tensor.device != expected.device:
        raise UsageError(
            f"{name} must be on the device of {other}, {expected.device}; it is on {tensor.device}: "
            f"rollout.to_torch(device) brings a rollout there"
        )


def _shape(tensor: Tensor) -> tuple[int, ...]:
    return tuple(tensor.shape)
