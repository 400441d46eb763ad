"""Acting without chance: a policy's own deterministic mode, or the mode of the distribution that it shows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from gymnasium import spaces

from envfleet.contract.arrays import Array
from envfleet.contract.distributions import Bernoulli, Categorical, Distribution, MultiCategorical, mode
from envfleet.contract.errors import UsageError
from envfleet.contract.policy import Acted, ActsDeterministically, ExposesDistribution, Policy

Act = Callable[..., Acted]


def deterministic_act(policy: Policy, action_space: spaces.Space[Any]) -> Act:
    """Return the function with which a policy acts without chance.

    Args:
        policy: any.
        action_space: of one env.

    Returns:
        `act(obs)`, or `act(obs, state=...)` of a recurrent policy.

    Raises:
        UsageError: the policy has no deterministic mode. So does the function, if a distribution is missing or is of
            another kind than the space.
    """
    if isinstance(policy, ActsDeterministically):
        return policy.act_deterministically
    if isinstance(policy, ExposesDistribution) and _is_choice(action_space):
        return _ActsByDistribution(policy, action_space)
    raise _no_mode(policy, "it has no act_deterministically()")


class _ActsByDistribution:
    """For policies that show a distribution of choices. That of a Gaussian is not enough: it may be squashed."""

    def __init__(self, policy: Any, space: spaces.Space[Any]) -> None:
        self._policy = policy
        self._space = space

    def __call__(self, obs: Any, **state: Any) -> Acted:
        shown: Distribution | None = self._policy.distribution(obs, **state)
        if not _fits(shown, self._space):
            came = "nothing" if shown is None else f"a {shown.kind} distribution"
            raise _no_mode(self._policy, f"its distribution() shows {came} for actions of {self._space}")
        assert shown is not None
        acted: Acted = self._policy.act(obs, **state)  # for the state; what it draws is not used
        return acted._replace(actions=_as_actions(mode(shown), self._space), log_probs=None)


def _is_choice(space: spaces.Space[Any]) -> bool:
    return isinstance(space, spaces.Discrete | spaces.MultiDiscrete | spaces.MultiBinary)


def _fits(shown: Distribution | None, space: spaces.Space[Any]) -> bool:
    if isinstance(space, spaces.Discrete):
        return isinstance(shown, Categorical)
    return isinstance(shown, MultiCategorical if isinstance(space, spaces.MultiDiscrete) else Bernoulli)


def _as_actions(chosen: Array, space: Any) -> Array:
    first = getattr(space, "start", 0)
    return np.asarray(chosen.reshape(len(chosen), *space.shape) + first, space.dtype)


def _no_mode(policy: Any, why: str) -> UsageError:
    return UsageError(
        f"{type(policy).__name__} cannot act deterministically: {why}. Give it act_deterministically(obs) (a "
        f"FunctionPolicy: the argument act_deterministically=function), or evaluate with deterministic=False"
    )
