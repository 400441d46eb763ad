"""FunctionPolicy: a policy made of plain functions."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, get_args

import numpy as np

from envfleet.contract.arrays import Array
from envfleet.contract.distributions import Distribution, from_arrays
from envfleet.contract.errors import UsageError
from envfleet.contract.policy import Acted
from envfleet.policies.checks import masked, num_rows_of, require_rows, require_weights


class FunctionPolicy:
    """A policy made of plain functions. Arrays may be those of any framework that NumPy can read, such as JAX.

    In rollouts with `action_mask=...` the functions act, log_prob and distribution get the masks as the keyword
    argument `action_mask`: [B, ...] bool, False for each action that is not allowed.

    Args:
        act: `act(obs)` returns `actions`, `(actions, log_probs)` or `(actions, log_probs, extras)`. Where the actions
            are themselves a tuple (of a Tuple space), it must return one of the last two.
        log_prob: `log_prob(obs, actions)` returns [B] log-probabilities; None: the policy has none.
        weights: arrays by name. If given, every function gets them as its first argument. The mapping is not copied, so
            the learner may go on changing it.
        values: `values(obs)` returns [B] values, which become `extras["values"]` unless act returns them itself.
        distribution: `distribution(obs)` returns a Categorical, MultiCategorical, Bernoulli or Gaussian of envfleet, or
            None. Divergences are then exact.
        act_deterministically: like `act`, without chance: for evaluations. None: where the actions are choices, the
            mode of `distribution`.

    Raises:
        UsageError: an argument is not a function, or `weights` is not a mapping.
    """

    def __init__(
        self,
        act: Callable[..., Any],
        log_prob: Callable[..., Any] | None = None,
        weights: Mapping[str, Any] | None = None,
        values: Callable[..., Any] | None = None,
        distribution: Callable[..., Any] | None = None,
        act_deterministically: Callable[..., Any] | None = None,
    ) -> None:
        functions = {"act": act, "log_prob": log_prob, "values": values, "distribution": distribution}
        functions["act_deterministically"] = act_deterministically
        for name, function in functions.items():
            if not callable(function) and (function is not None or name == "act"):
                raise UsageError(f"{name} must be a function; got {type(function).__name__}")
        if weights is not None and not isinstance(weights, Mapping):
            raise UsageError(f"weights must be a mapping of names to arrays; got {type(weights).__name__}")
        self._act, self._log_prob, self._values = act, log_prob, values
        self._distribution = distribution
        self._weights = weights
        self._mode = act_deterministically
        if act_deterministically is not None:  # whether it is ActsDeterministically shows in this method
            self.act_deterministically = self._act_deterministically

    def act(self, obs: Any, action_mask: Array | None = None) -> Acted:
        """Choose actions with the act function.

        Args:
            obs: B observations, a tree of [B, ...] arrays in the form of the observation space.
            action_mask: [B, ...] bool, False for each action that is not allowed; None: all are.

        Returns:
            The actions, log-probs and extras; None and {} for those that the function does not return.

        Raises:
            UsageError: the function returned something else, or log-probs or values of the wrong shape.
        """
        return self._acted(self._act, obs, action_mask)

    def _act_deterministically(self, obs: Any, action_mask: Array | None = None) -> Acted:
        assert self._mode is not None
        return self._acted(self._mode, obs, action_mask)

    def _acted(self, act: Callable[..., Any], obs: Any, action_mask: Array | None) -> Acted:
        actions, log_probs, extras = _acted(act(*self._leading(), obs, **masked(action_mask)))
        rows = None if log_probs is None else _float_rows(log_probs, num_rows_of(obs), "log_probs")
        arrays = {name: np.asarray(extra) for name, extra in extras.items()}
        if "values" not in arrays and (values := self.values(obs)) is not None:
            arrays["values"] = values
        return Acted(_arrays(actions), rows, arrays)

    def log_prob(self, obs: Any, actions: Any, action_mask: Array | None = None) -> Array:
        """Compute the log-probabilities of actions that were taken.

        Args:
            obs: B observations, a tree of [B, ...] arrays in the form of the observation space.
            actions: B actions, a tree of [B, ...] arrays in the form of the action space.
            action_mask: [B, ...] bool, False for each action that is not allowed; None: all are.

        Returns:
            [B] float32.

        Raises:
            UsageError: there is no log_prob function, or it returned the wrong shape.
        """
        if self._log_prob is None:
            raise UsageError("this policy has no log_prob function: FunctionPolicy(act, log_prob) takes one")
        log_probs = self._log_prob(*self._leading(), obs, actions, **masked(action_mask))
        return _float_rows(log_probs, num_rows_of(obs), "log_probs")

    def values(self, obs: Any) -> Array | None:
        """Estimate the values of observations.

        Args:
            obs: B observations, a tree of [B, ...] arrays in the form of the observation space.

        Returns:
            [B] float32; None without a values function.

        Raises:
            UsageError: the function returned the wrong shape.
        """
        if self._values is None:
            return None
        return _float_rows(self._values(*self._leading(), obs), num_rows_of(obs), "values")

    def distribution(self, obs: Any, action_mask: Array | None = None) -> Distribution | None:
        """Compute the distribution of the actions.

        Args:
            obs: B observations, a tree of [B, ...] arrays in the form of the observation space.
            action_mask: [B, ...] bool, False for each action that is not allowed; None: all are.

        Returns:
            The distribution for B rows; None if there is no distribution function, or it returned None.

        Raises:
            UsageError: the function returned something that is no distribution of envfleet.
        """
        if self._distribution is None:
            return None
        given = self._distribution(*self._leading(), obs, **masked(action_mask))
        if given is None or isinstance(given, Distribution):
            return None if given is None else from_arrays(given.kind, _arrays(given.arrays()))
        kinds = ", ".join(each.__name__ for each in get_args(Distribution))
        raise UsageError(f"distribution must return one of envfleet's ({kinds}) or None; got {type(given).__name__}")

    def get_weights(self) -> dict[str, Array]:
        """Return the weights as arrays of NumPy.

        Returns:
            The arrays by name; empty if the functions take no weights.
        """
        return {name: np.asarray(weight) for name, weight in (self._weights or {}).items()}

    def set_weights(self, weights: Mapping[str, Array]) -> None:
        """Replace the weights by copies of `weights`, in the dtypes they had.

        Args:
            weights: as get_weights() of another copy gives them.

        Raises:
            UsageError: names or shapes differ from those of this policy; nothing is changed.
        """
        own = self.get_weights()
        require_weights(weights, {name: weight.shape for name, weight in own.items()})
        if self._weights is not None:
            self._weights = {name: np.array(weights[name], dtype=weight.dtype) for name, weight in own.items()}

    def _leading(self) -> tuple[Any, ...]:
        return () if self._weights is None else (self._weights,)


def _acted(outcome: Any) -> tuple[Any, Any, Mapping[str, Any]]:
    if not isinstance(outcome, tuple):
        return outcome, None, {}
    if len(outcome) == 2:
        return outcome[0], outcome[1], {}
    if len(outcome) == 3 and isinstance(outcome[2], Mapping):
        return outcome[0], outcome[1], outcome[2]
    raise UsageError(
        f"act must return actions, (actions, log_probs) or (actions, log_probs, extras), extras being a dict; "
        f"got a tuple of {', '.join(type(part).__name__ for part in outcome) or 'nothing'}"
    )


def _arrays(tree: Any) -> Any:
    if isinstance(tree, Mapping):
        return {key: _arrays(part) for key, part in tree.items()}
    if isinstance(tree, tuple):
        return tuple(_arrays(part) for part in tree)
    return np.asarray(tree)


def _float_rows(values: Any, num_rows: int, name: str) -> Array:
    return require_rows(np.asarray(values, dtype=np.float32), num_rows, name)
