"""From torch.distributions to the distributions that EnvFleet compares."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from envfleet.contract.arrays import Array
from envfleet.contract.distributions import Bernoulli, Categorical, Distribution, Gaussian, MultiCategorical
from envfleet.policies.torch.arrays import import_torch


def as_distribution(given: Any, num_rows: int) -> Distribution | None:
    """Convert a distribution of torch to one that EnvFleet compares.

    A tanh-squashed Gaussian becomes the Gaussian before the squashing, if what follows it is the same for all rows and
    weights.

    Args:
        given: a torch distribution, or a list of Categoricals.
        num_rows: B.

    Returns:
        The distribution as arrays; None if it is of another kind, and cannot be compared exactly.
    """
    torch = import_torch()
    kinds = torch.distributions
    if isinstance(given, (list, tuple)):
        parts = [as_distribution(part, num_rows) for part in given]
        choices = [part.logits for part in parts if isinstance(part, Categorical)]
        return MultiCategorical(tuple(choices)) if parts and len(choices) == len(parts) else None
    while isinstance(given, kinds.Independent):
        given = given.base_dist
    if isinstance(given, kinds.TransformedDistribution):
        return _under_squashing(torch, given, num_rows)
    if not isinstance(given, (kinds.Categorical, kinds.Bernoulli, kinds.Normal)):
        return None
    if len(given.batch_shape) == 0 or given.batch_shape[0] != num_rows:
        return None
    if isinstance(given, kinds.Normal):
        return _gaussian(given.loc, given.scale, num_rows)
    logits = _array(given.logits)
    if isinstance(given, kinds.Bernoulli):
        return Bernoulli(logits.reshape(num_rows, -1))
    if logits.ndim == 2:
        return Categorical(logits)
    logits = logits.reshape(num_rows, -1, logits.shape[-1])
    return MultiCategorical(tuple(logits[:, index] for index in range(logits.shape[1])))


def _under_squashing(torch: Any, given: Any, num_rows: int) -> Distribution | None:
    base = given.base_dist
    while isinstance(base, torch.distributions.Independent):
        base = base.base_dist
    if not isinstance(base, torch.distributions.Normal):
        return None
    mean, std = base.loc, base.scale
    is_squashed = False
    for transform in _flat(torch, given.transforms):
        if isinstance(transform, torch.distributions.TanhTransform):
            is_squashed = True
        elif not isinstance(transform, torch.distributions.AffineTransform):
            return None
        elif not is_squashed:
            # It may well be the network's own mean and deviation.
            mean, std = transform.loc + transform.scale * mean, abs(transform.scale) * std
        elif not all(_is_constant(torch, each, mean.dim()) for each in (transform.loc, transform.scale)):
            return None
    mean, std = torch.broadcast_tensors(mean, std)
    return _gaussian(mean, std, num_rows) if mean.dim() and len(mean) == num_rows else None


def _flat(torch: Any, transforms: Sequence[Any]) -> list[Any]:
    flat = []
    for transform in transforms:
        if isinstance(transform, torch.distributions.ComposeTransform):
            flat += _flat(torch, transform.parts)
        elif isinstance(transform, torch.distributions.IndependentTransform):
            flat += _flat(torch, [transform.base_transform])
        else:
            flat.append(transform)
    return flat


def _is_constant(torch: Any, value: Any, num_dims: int) -> bool:
    """Whether this scale or offset is one for all rows, and is not learned."""
    if not isinstance(value, torch.Tensor):
        return True
    return not value.requires_grad and (value.dim() < num_dims or value.shape[0] == 1)


def _gaussian(mean: Any, std: Any, num_rows: int) -> Gaussian:
    return Gaussian(_array(mean).reshape(num_rows, -1), _array(std.log()).reshape(num_rows, -1))


def _array(tensor: Any) -> Array:
    array: Array = tensor.detach().float().cpu().numpy()
    return array
