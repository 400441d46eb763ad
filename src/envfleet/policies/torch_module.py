"""TorchPolicy: a torch module in the form of CleanRL, as it is, with NumPy arrays in and out."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from functools import partial
from typing import Any

from envfleet.contract.arrays import Array
from envfleet.contract.distributions import Distribution
from envfleet.contract.errors import UsageError
from envfleet.contract.policy import Acted
from envfleet.policies.checks import num_rows_of
from envfleet.policies.torch_arrays import TorchBorder, state_arrays
from envfleet.policies.torch_distributions import as_distribution
from envfleet.policies.torch_modes import OWN_METHOD, modes_instead_of_samples
from envfleet.policies.tracing import Acting, traced_acting


class TorchPolicy:
    """A module with `get_action_and_value(obs, action=None) -> action, log_prob, entropy, value`, as CleanRL writes it.

    `get_value(obs)` is used for values where there is one. Log-probs and values may be None, if the module has none.
    `get_distribution(obs)` makes divergences exact: it returns a torch Categorical, Bernoulli or Normal (Independent
    and tanh-squashed ones, too), or a list of Categoricals. Observations are not copied for the module, so it must not
    change them in place. In rollouts with `action_mask=...` get_action_and_value and get_distribution get the masks as
    the keyword argument `action_mask`, a tensor of [B, ...] bool. The module is used in the mode it is in: with
    BatchNorm or Dropout, call `eval()` on it first.

    Args:
        module: the torch.nn.Module, on any device. It is used, not copied.
        traced: record the operations on the first observations, and repeat just these from then on. Faster for small
            networks; only for modules whose operations do not depend on the values of the observations. Not used in
            rollouts with `action_mask=...`.

    Raises:
        UsageError: `module` is no torch.nn.Module, or has no get_action_and_value.
        MissingExtra: PyTorch is not installed.
    """

    def __init__(self, module: Any, *, traced: bool = False) -> None:
        self._border = TorchBorder(module, "TorchPolicy")
        self._torch = self._border.torch
        self.module: Any = self._border.module
        if not callable(getattr(self.module, "get_action_and_value", None)):
            raise UsageError(
                f"{type(self.module).__name__} has no get_action_and_value(obs, action=None) "
                f"-> action, log_prob, entropy, value"
            )
        self._is_traced = traced
        self._acting: dict[tuple[Any, ...], Acting | None] = {}  # by shape and dtype of the observations

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the module and the argument `traced`."""
        return partial(TorchPolicy, traced=self._is_traced), (self.module,)

    def act(self, obs: Any, action_mask: Array | None = None) -> Acted:
        """Sample actions.

        Args:
            obs: B observations, a tree of [B, ...] arrays in the form of the observation space.
            action_mask: [B, ...] bool, False for each action that is not allowed; None: all are.

        Returns:
            The actions, their log-probs and, where the module has values, `extras["values"]`.

        Raises:
            UsageError: a log-prob is NaN, or an output has the wrong shape.
        """
        with self._torch.inference_mode():
            return self._acted(obs, *self._act(self._border.tensors(obs), self._border.mask_argument(action_mask)))

    def act_deterministically(self, obs: Any, action_mask: Array | None = None) -> Acted:
        """Choose the modes of what get_action_and_value draws from, or what get_deterministic_action(obs) returns.

        Args:
            obs: B observations, a tree of [B, ...] arrays in the form of the observation space.
            action_mask: [B, ...] bool, False for each action that is not allowed; None: all are.

        Returns:
            The actions, their log-probs and, where the module has values, `extras["values"]`; from
            get_deterministic_action(obs) the actions only.

        Raises:
            UsageError: the module draws from something whose mode is not known, a log-prob is NaN, or an output has
                the wrong shape.
        """
        own = getattr(self.module, OWN_METHOD, None)
        with self._torch.inference_mode():
            tensors, masks = self._border.tensors(obs), self._border.mask_argument(action_mask)
            if own is not None:
                return self._acted(obs, own(tensors, **masks), None, None)
            with modes_instead_of_samples(self._torch, self.module):
                actions, log_probs, _, values = _four(self.module.get_action_and_value(tensors, **masks))
            return self._acted(obs, actions, log_probs, values)

    def _acted(self, obs: Any, actions: Any, log_probs: Any, values: Any) -> Acted:
        """Tensors as arrays; called in inference mode."""
        border, num_rows = self._border, num_rows_of(obs)
        taken = border.arrays(actions)
        rows = None if log_probs is None else border.rows(log_probs, num_rows, "log_probs")
        extras = {} if values is None else {"values": border.rows(values, num_rows, "values")}
        if rows is not None:
            border.require_no_nan(rows, obs, "log-probs")
        return Acted(taken, rows, extras)

    def _act(self, obs: Any, mask: dict[str, Any]) -> tuple[Any, Any, Any]:
        if self._is_traced and not mask and isinstance(obs, self._torch.Tensor):
            key = (*obs.shape, obs.dtype)
            if key not in self._acting:
                with self._torch.inference_mode(False):
                    self._acting[key] = traced_acting(self._torch, self.module, obs.clone())
            acting = self._acting[key]
            if acting is not None:
                return acting(obs)
        actions, log_probs, _, values = _four(self.module.get_action_and_value(obs, **mask))
        return actions, log_probs, values

    def log_prob(self, obs: Any, actions: Any, action_mask: Array | None = None) -> Array:
        """Compute the log-probabilities of actions that were taken.

        Args:
            obs: B observations, a tree of [B, ...] arrays in the form of the observation space.
            actions: B actions, a tree of [B, ...] arrays in the form of the action space.
            action_mask: [B, ...] bool, False for each action that is not allowed; None: all are.

        Returns:
            [B] float32.

        Raises:
            UsageError: the module gives no log-probs, or they have the wrong shape.
        """
        # Not inference_mode(): this module may be the learner's, and what it keeps must stay fit for training.
        with self._torch.no_grad():
            tensors = self._border.tensors(obs), self._border.tensors(actions)
            mask = self._border.mask_argument(action_mask)
            _, log_probs, _, _ = _four(self.module.get_action_and_value(*tensors, **mask))
            if log_probs is None:
                raise UsageError(f"get_action_and_value of {type(self.module).__name__} gives no log-probs")
            return self._border.rows(log_probs, num_rows_of(obs), "log_probs")

    def values(self, obs: Any) -> Array | None:
        """Estimate the values of observations, with get_value or else get_action_and_value.

        Args:
            obs: B observations, a tree of [B, ...] arrays in the form of the observation space.

        Returns:
            [B] float32; None if the module has no values.

        Raises:
            UsageError: an output of the module has the wrong shape.
        """
        get_value = getattr(self.module, "get_value", None)
        with self._torch.no_grad():
            tensors = self._border.tensors(obs)
            values = get_value(tensors) if get_value else _four(self.module.get_action_and_value(tensors))[3]
            return None if values is None else self._border.rows(values, num_rows_of(obs), "values")

    def distribution(self, obs: Any, action_mask: Array | None = None) -> Distribution | None:
        """Compute the distribution of the actions, with get_distribution.

        Args:
            obs: B observations, a tree of [B, ...] arrays in the form of the observation space.
            action_mask: [B, ...] bool, False for each action that is not allowed; None: all are.

        Returns:
            The distribution for B rows; None if the module has none, or one of another kind.
        """
        get_distribution = getattr(self.module, "get_distribution", None)
        if get_distribution is None:
            return None
        with self._torch.no_grad():
            shown = get_distribution(self._border.tensors(obs), **self._border.mask_argument(action_mask))
            return as_distribution(shown, num_rows_of(obs))

    def get_weights(self) -> dict[str, Array]:
        """Return the state dict of the module.

        Returns:
            CPU arrays by name; views where that is possible.
        """
        return state_arrays(self.module)

    def set_weights(self, weights: Mapping[str, Array]) -> None:
        """Copy `weights` into the module.

        Args:
            weights: as get_weights() of another copy gives them.

        Raises:
            UsageError: names or shapes differ from those of this policy; nothing is changed.
        """
        self._border.set_weights(weights)


def prepare_worker(num_threads: int) -> None:
    """Set up torch for acting in this process, after the policy was built. Does nothing if torch was not imported.

    Distributions check their arguments by default, which takes much of the time of acting on few rows. The switch is
    global, so it is set in a worker's process and never in the learner's. TorchPolicy.act() looks for NaN itself.

    Args:
        num_threads: of torch, for one operation.
    """
    torch = sys.modules.get("torch")
    if torch is None:
        return
    torch.set_num_threads(num_threads)
    torch.distributions.Distribution.set_default_validate_args(False)


def _four(outcome: Any) -> Any:
    if not isinstance(outcome, (tuple, list)) or len(outcome) != 4:
        came = f"{len(outcome)} values" if isinstance(outcome, (tuple, list)) else type(outcome).__name__
        raise UsageError(f"get_action_and_value must return action, log_prob, entropy, value; got {came}")
    return outcome
