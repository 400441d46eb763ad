"""Distributions over actions, as arrays: what a policy may show of itself, and the divergence between two of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from envfleet.contract.arrays import Array
from envfleet.contract.errors import UsageError

HIGHEST_LOGIT = 1e30  # inf counts as this: inf - inf says nothing


@dataclass(frozen=True, slots=True)
class Categorical:
    """One of K actions. Logits need not be normalised; a masked action has -inf or a very low logit."""

    kind: ClassVar[str] = "categorical"
    logits: Array  # [B, K]

    def arrays(self) -> dict[str, Array]:
        """Return the arrays of the distribution, as they travel.

        Returns:
            By name, each [B, ...]: `logits`.
        """
        return {"logits": self.logits}


@dataclass(frozen=True, slots=True)
class MultiCategorical:
    """Several independent choices at once."""

    kind: ClassVar[str] = "multi_categorical"
    logits: tuple[Array, ...]  # each [B, K of this choice]

    def arrays(self) -> dict[str, Array]:
        """Return the arrays of the distribution, as they travel.

        Returns:
            By name, each [B, ...]: `logits.0`, `logits.1`, ...: one for each choice.
        """
        return {f"logits.{index}": each for index, each in enumerate(self.logits)}


@dataclass(frozen=True, slots=True)
class Bernoulli:
    """D independent switches."""

    kind: ClassVar[str] = "bernoulli"
    logits: Array  # [B, D], of "on"

    def arrays(self) -> dict[str, Array]:
        """Return the arrays of the distribution, as they travel.

        Returns:
            By name, each [B, ...]: `logits`.
        """
        return {"logits": self.logits}


@dataclass(frozen=True, slots=True)
class Gaussian:
    """D independent numbers.

    A squashed Gaussian (tanh, scaled to the bounds of the action) is given as the Gaussian before the squashing: a
    one-to-one function does not change a divergence.
    """

    kind: ClassVar[str] = "gaussian"
    mean: Array  # [B, D]
    log_std: Array  # [B, D]

    def arrays(self) -> dict[str, Array]:
        """Return the arrays of the distribution, as they travel.

        Returns:
            By name, each [B, ...]: `mean` and `log_std`.
        """
        return {"mean": self.mean, "log_std": self.log_std}


Distribution = Categorical | MultiCategorical | Bernoulli | Gaussian


def from_arrays(kind: str, arrays: Mapping[str, Array]) -> Distribution:
    """Build a distribution from its kind and arrays.

    Args:
        kind: `.kind` of the distribution.
        arrays: what `.arrays()` returned.

    Returns:
        The distribution.

    Raises:
        UsageError: no distribution of this kind consists of these arrays.
    """
    names = set(arrays)
    if kind == Categorical.kind and names == {"logits"}:
        return Categorical(arrays["logits"])
    if kind == Bernoulli.kind and names == {"logits"}:
        return Bernoulli(arrays["logits"])
    if kind == Gaussian.kind and names == {"mean", "log_std"}:
        return Gaussian(arrays["mean"], arrays["log_std"])
    if kind == MultiCategorical.kind and arrays and names == {f"logits.{index}" for index in range(len(arrays))}:
        return MultiCategorical(tuple(arrays[f"logits.{index}"] for index in range(len(arrays))))
    raise UsageError(f"no distribution of kind {kind!r} consists of {', '.join(sorted(names)) or 'nothing'}")


def kl(p: Distribution, q: Distribution) -> Array:
    """Compute KL(p || q) of each row exactly, in float64.

    Args:
        p: a distribution for B rows.
        q: another of the same kind and shape.

    Returns:
        [B] float64; inf where q excludes an action that p may choose.

    Raises:
        UsageError: kinds or shapes differ.
    """
    if isinstance(p, Gaussian) and isinstance(q, Gaussian):
        _require_same_shape(p.mean, q.mean)
        return _gaussian_kl(*(np.asarray(each, np.float64) for each in (p.mean, p.log_std, q.mean, q.log_std)))
    if isinstance(p, Categorical) and isinstance(q, Categorical):
        return _categorical_kl(p.logits, q.logits)
    if isinstance(p, MultiCategorical) and isinstance(q, MultiCategorical) and len(p.logits) == len(q.logits):
        parts = [_categorical_kl(one, other) for one, other in zip(p.logits, q.logits, strict=True)]
        return np.asarray(np.sum(parts, axis=0))
    if isinstance(p, Bernoulli) and isinstance(q, Bernoulli):
        # A switch is a choice between "off", whose logit is 0, and "on".
        two = [np.stack([np.zeros_like(each.logits), each.logits], -1) for each in (p, q)]
        return np.asarray(_categorical_kl(*two).sum(-1))
    raise UsageError(f"a {p.kind} and a {q.kind} distribution cannot be compared, or differ in their parts")


def mode(distribution: Distribution) -> Array:
    """Return what is most likely in each row. Of equals the first; a switch is on if that is more likely than not.

    Args:
        distribution: for B rows.

    Returns:
        [B] indices of a Categorical, [B, number of choices] of a MultiCategorical; [B, D] of a Bernoulli (int8) and of
        a Gaussian.
    """
    if isinstance(distribution, Categorical):
        return np.asarray(distribution.logits.argmax(-1))
    if isinstance(distribution, MultiCategorical):
        return np.stack([logits.argmax(-1) for logits in distribution.logits], axis=-1)
    if isinstance(distribution, Bernoulli):
        return np.asarray(distribution.logits > 0, np.int8)
    return distribution.mean


def k3(log_probs: Array, other_log_probs: Array) -> Array:
    """Estimate KL(p || q) of each row from one action drawn from p.

    Args:
        log_probs: [B] log-probs of the actions under p.
        other_log_probs: [B] log-probs of the same actions under q.

    Returns:
        [B] float64, never negative.
    """
    log_ratio = np.asarray(other_log_probs, np.float64) - np.asarray(log_probs, np.float64)
    return np.asarray(np.expm1(log_ratio) - log_ratio)


def _categorical_kl(p: Array, q: Array) -> Array:
    _require_same_shape(p, q)
    log_p, log_q = _log_softmax(p), _log_softmax(q)
    with np.errstate(invalid="ignore"):
        terms = np.exp(log_p) * (log_p - log_q)
    return np.asarray(np.maximum(np.where(log_p == -np.inf, 0.0, terms).sum(-1), 0.0))


def _gaussian_kl(p_mean: Array, p_log_std: Array, q_mean: Array, q_log_std: Array) -> Array:
    log_ratio = p_log_std - q_log_std
    distance = (p_mean - q_mean) * np.exp(-q_log_std)
    each = 0.5 * (np.expm1(2 * log_ratio) + distance**2) - log_ratio
    return np.asarray(np.maximum(each.reshape(len(p_mean), -1).sum(-1), 0.0))


def _log_softmax(logits: Array) -> Array:
    logits = np.clip(np.asarray(logits, np.float64), None, HIGHEST_LOGIT)
    shifted = logits - logits.max(-1, keepdims=True)
    return np.asarray(shifted - np.log(np.exp(shifted).sum(-1, keepdims=True)))


def _require_same_shape(p: Array, q: Array) -> None:
    if p.shape != q.shape:
        raise UsageError(f"distributions of different shapes cannot be compared: {p.shape} and {q.shape}")
