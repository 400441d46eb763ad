"""Losses for data that is older than the policy: GAE, V-trace and decoupled PPO, on tensors of any device.

T steps of N envs, time first. `gae` and `vtrace` take the arguments of `envfleet.gae` and `envfleet.vtrace`, which are
for arrays of NumPy. Nothing here waits for the device: no number comes back to the host.
"""

from __future__ import annotations

from typing import Any

from envfleet.contract.errors import MissingExtra, UsageError
from envfleet.contract.returns import Gae, Vtrace, require_shapes

try:
    import torch
except ImportError as error:
    raise MissingExtra("envfleet.losses needs PyTorch: pip install 'envfleet[torch]'") from error

Tensor = Any  # torch.Tensor


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
) -> Gae[Tensor]:
    """Compute generalized advantage estimates of tensors. No gradient flows through them.

    Arguments and errors are those of `envfleet.gae`.

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
) -> Vtrace[Tensor]:
    """Compute V-trace targets of tensors, to learn from the actions of an older policy. No gradient flows through them.

    Arguments and errors are those of `envfleet.vtrace`.

    Returns:
        Targets of the values and advantages for the policy gradient, each [T, N], with the dtype of `values` on the
        device of `values`.

    Raises:
        UsageError: shapes or devices differ, or T is 0.
    """
    log_probs = {"behaviour_log_probs": behaviour_log_probs, "target_log_probs": target_log_probs}
    require_shapes(rewards, **log_probs)
    _require_device("rewards", rewards, **log_probs)
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
        _require_device("log_probs", log_probs, **{name: tensor})
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
    flags = {"terminated": terminated, "truncated": truncated}
    require_shapes(rewards, next_values, values=values, **flags, final_values=final_values)
    _require_device("rewards", rewards, next_values=next_values, values=values, **flags, final_values=final_values)
    terminated, truncated = terminated.bool(), truncated.bool()
    following = torch.cat([values[1:], next_values.to(values.dtype)[None]])
    following = torch.where(truncated, final_values.to(values.dtype), following)
    return following.masked_fill(terminated, 0.0), ~(terminated | truncated)


def _require_device(name: str, expected: Tensor, **tensors: Tensor) -> None:
    for each, tensor in tensors.items():
        if tensor.device != expected.device:
            raise UsageError(
                f"{each} must be on the device of {name}, {expected.device}; it is on {tensor.device}: "
                f"rollout.to_torch(device) brings a rollout there"
            )


def _shape(tensor: Tensor) -> tuple[int, ...]:
    return tuple(tensor.shape)
