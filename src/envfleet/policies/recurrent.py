"""RecurrentTorchPolicy: a torch module with an LSTM or GRU, in the form of CleanRL's ppo_atari_lstm.py."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from envfleet.contract.arrays import Array
from envfleet.contract.distributions import Distribution
from envfleet.contract.errors import UsageError
from envfleet.contract.policy import Acted, State
from envfleet.policies.checks import num_rows_of
from envfleet.policies.torch_arrays import TorchBorder, state_arrays
from envfleet.policies.torch_distributions import as_distribution
from envfleet.policies.torch_modes import OWN_METHOD, modes_instead_of_samples

FORM = (
    "get_action_and_value(obs, lstm_state, done, action=None) -> action, log_prob, entropy, value, lstm_state "
    "and get_value(obs, lstm_state, done)"
)


class RecurrentTorchPolicy:
    """A module with `get_action_and_value(obs, lstm_state, done, action=None)` that returns five things.

    They are action, log_prob, entropy, value and the next lstm_state: a tuple of tensors [layers, B, hidden], or one
    such tensor (GRU). `get_value(obs, lstm_state, done)` and `get_distribution(obs, lstm_state, done)` are used
    where the module has them. `done` is always zero: the worker resets the state itself where episodes end.

    In this class the state is a dict: "h" and, if there are two tensors, "c", each [B, layers, hidden]. An episode
    starts with the module's own `initial_state(num_envs)`, or else with zeros in the shape of its LSTM or GRU.

    Args:
        module: the torch.nn.Module, on any device. It is used, not copied.

    Raises:
        UsageError: `module` has not this form, or the shape of its state is not known.
        MissingExtra: PyTorch is not installed.
    """

    def __init__(self, module: Any) -> None:
        self._border = TorchBorder(module, "RecurrentTorchPolicy")
        self._torch = self._border.torch
        self.module: Any = self._border.module
        if not is_recurrent(self.module):
            raise UsageError(f"a recurrent module must have {FORM}; {type(self.module).__name__} has not")
        first = self._first_state(1)
        self._is_tuple = isinstance(first, tuple)
        self._names = _names(len(first) if self._is_tuple else 1)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the module alone."""
        return RecurrentTorchPolicy, (self.module,)

    def to_device(self, device: str) -> None:
        """Move the module, and act on this device from now on.

        Args:
            device: such as "cuda", "cuda:1" or "mps".

        Raises:
            RuntimeError: torch finds no such device. Some builds of torch raise AssertionError.
        """
        self._border.to_device(device)

    def initial_state(self, num_rows: int) -> dict[str, Array]:
        """Return what the policy remembers before an episode's first observation.

        Args:
            num_rows: number of envs.

        Returns:
            The state by name, each [num_rows, layers, hidden].
        """
        with self._torch.no_grad():
            return self._state_arrays(self._first_state(num_rows), num_rows)

    def act(self, obs: Any, state: State | None = None, action_mask: Array | None = None) -> Acted:
        """Sample actions.

        Args:
            obs: B observations, a tree of [B, ...] arrays in the form of the observation space.
            state: what the policy remembered before these observations, by name, each [B, ...].
            action_mask: [B, ...] bool, False for each action that is not allowed; None: all are.

        Returns:
            The actions, their log-probs, extras and the state after them.

        Raises:
            UsageError: `state` is missing or has another form, a log-prob is NaN, or an output has the wrong shape.
        """
        return self._acted(self._sampled, obs, state, action_mask)

    def act_deterministically(self, obs: Any, state: State | None = None, action_mask: Array | None = None) -> Acted:
        """Choose the modes of what get_action_and_value draws from.

        If the module has get_deterministic_action(obs, lstm_state, done), it returns the actions and the next
        lstm_state instead.

        Args:
            obs: B observations, a tree of [B, ...] arrays in the form of the observation space.
            state: what the policy remembered before these observations, by name, each [B, ...].
            action_mask: [B, ...] bool, False for each action that is not allowed; None: all are.

        Returns:
            The actions, their log-probs, extras and the state after them.

        Raises:
            UsageError: `state` is missing or has another form, the module draws from something whose mode is not
                known, a log-prob is NaN, or an output has the wrong shape.
        """
        return self._acted(self._most_likely, obs, state, action_mask)

    def _sampled(self, *given: Any, **mask: Any) -> Any:
        return _five(self.module.get_action_and_value(*given, **mask))

    def _most_likely(self, *given: Any, **mask: Any) -> Any:
        own = getattr(self.module, OWN_METHOD, None)
        if own is not None:
            actions, after = own(*given, **mask)
            return actions, None, None, None, after
        with modes_instead_of_samples(self._torch, self.module):
            return self._sampled(*given, **mask)

    def _acted(self, choose: Callable[..., Any], obs: Any, state: State | None, action_mask: Array | None) -> Acted:
        """Act with what `choose(obs, lstm_state, done)` returns: the five that get_action_and_value does."""
        border, num_rows = self._border, num_rows_of(obs)
        with self._torch.inference_mode():
            given = border.tensors(obs), *self._remembered(state, num_rows)
            actions, log_probs, _, values, after = choose(*given, **border.mask_argument(action_mask))
            taken = border.arrays(actions)
            rows = None if log_probs is None else border.rows(log_probs, num_rows, "log_probs")
            extras = {} if values is None else {"values": border.rows(values, num_rows, "values")}
            next_state = self._state_arrays(after, num_rows)
        if rows is not None:
            border.require_no_nan(rows, obs, "log-probs")
        return Acted(taken, rows, extras, next_state)

    def log_prob(self, obs: Any, actions: Any, state: State | None = None, action_mask: Array | None = None) -> Array:
        """Compute the log-probabilities of actions that were taken.

        Args:
            obs: B observations, a tree of [B, ...] arrays in the form of the observation space.
            actions: B actions, a tree of [B, ...] arrays in the form of the action space.
            state: what the policy remembered before these observations, by name, each [B, ...].
            action_mask: [B, ...] bool, False for each action that is not allowed; None: all are.

        Returns:
            [B] float32.

        Raises:
            UsageError: `state` is missing or has another form, or the module gives no log-probs.
        """
        num_rows = num_rows_of(obs)
        with self._torch.no_grad():  # not inference_mode(): see TorchPolicy.log_prob
            given = self._border.tensors(obs), *self._remembered(state, num_rows), self._border.tensors(actions)
            mask = self._border.mask_argument(action_mask)
            log_probs = _five(self.module.get_action_and_value(*given, **mask))[1]
            if log_probs is None:
                raise UsageError(f"get_action_and_value of {type(self.module).__name__} gives no log-probs")
            return self._border.rows(log_probs, num_rows, "log_probs")

    def values(self, obs: Any, state: State | None = None) -> Array | None:
        """Estimate the values of observations, with get_value or else get_action_and_value.

        Args:
            obs: B observations, a tree of [B, ...] arrays in the form of the observation space.
            state: what the policy remembered before these observations, by name, each [B, ...].

        Returns:
            [B] float32; None if the module has no values.

        Raises:
            UsageError: `state` is missing or has another form.
        """
        num_rows, get_value = num_rows_of(obs), getattr(self.module, "get_value", None)
        with self._torch.no_grad():
            given = self._border.tensors(obs), *self._remembered(state, num_rows)
            values = get_value(*given) if get_value else _five(self.module.get_action_and_value(*given))[3]
            return None if values is None else self._border.rows(values, num_rows, "values")

    def distribution(
        self, obs: Any, state: State | None = None, action_mask: Array | None = None
    ) -> Distribution | None:
        """Compute the distribution of the actions, with get_distribution.

        Args:
            obs: B observations, a tree of [B, ...] arrays in the form of the observation space.
            state: what the policy remembered before these observations, by name, each [B, ...].
            action_mask: [B, ...] bool, False for each action that is not allowed; None: all are.

        Returns:
            The distribution for B rows; None if the module has none, or one of another kind.

        Raises:
            UsageError: `state` is missing or has another form.
        """
        num_rows, get_distribution = num_rows_of(obs), getattr(self.module, "get_distribution", None)
        if get_distribution is None:
            return None
        with self._torch.no_grad():
            given = self._border.tensors(obs), *self._remembered(state, num_rows)
            shown = get_distribution(*given, **self._border.mask_argument(action_mask))
            return as_distribution(shown, num_rows)

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

    def _first_state(self, num_rows: int) -> Any:
        own = getattr(self.module, "initial_state", None)
        if own is not None:
            return own(num_rows)
        torch = self._torch
        memories = [each for each in self.module.modules() if isinstance(each, (torch.nn.LSTM, torch.nn.GRU))]
        if len(memories) != 1:
            raise UsageError(
                f"{type(self.module).__name__} has {len(memories)} nn.LSTM or nn.GRU, so the shape of its state is not "
                f"known; give it initial_state(num_envs), which returns what lstm_state is before an episode"
            )
        memory = memories[0]
        num_layers = memory.num_layers * (2 if memory.bidirectional else 1)
        weight = memory.weight_hh_l0

        def zeros(size: int) -> Any:
            return torch.zeros(num_layers, num_rows, size, dtype=weight.dtype, device=weight.device)

        hidden = zeros(memory.proj_size or memory.hidden_size)
        return (hidden, zeros(memory.hidden_size)) if isinstance(memory, torch.nn.LSTM) else hidden

    def _remembered(self, state: State | None, num_rows: int) -> tuple[Any, Any]:
        """`lstm_state` and `done` as the module takes them."""
        if state is None:
            raise UsageError("this policy is recurrent: pass state=, which initial_state(num_rows) and act() return")
        if sorted(state) != sorted(self._names):
            raise UsageError(f"this policy's state has {', '.join(self._names)}; got {', '.join(state) or 'nothing'}")
        for name, array in state.items():
            if len(array) != num_rows:
                raise UsageError(
                    f"state {name!r} must have a row for each of {num_rows} observations; got {len(array)}"
                )
        parts = [self._border.tensors(state[name]).transpose(0, 1).contiguous() for name in self._names]
        done = self._torch.zeros(num_rows, device=parts[0].device)
        return (tuple(parts) if self._is_tuple else parts[0]), done

    def _state_arrays(self, state: Any, num_rows: int) -> dict[str, Array]:
        parts = state if isinstance(state, tuple) else (state,)
        for part in parts:
            if part.dim() < 2 or part.shape[1] != num_rows:
                raise UsageError(f"lstm_state must be [layers, {num_rows}, hidden]; got {tuple(part.shape)}")
        return {
            name: np.ascontiguousarray(self._border.arrays(part.transpose(0, 1)))
            for name, part in zip(self._names, parts, strict=True)
        }


def is_recurrent(module: Any) -> bool:
    """Whether get_action_and_value takes a state and done before the action, as that of ppo_atari_lstm.py does."""
    method = getattr(getattr(module, "_orig_mod", module), "get_action_and_value", None)
    if method is None:
        return False
    try:
        parameters = list(inspect.signature(method).parameters.values())
    except (TypeError, ValueError):
        return False
    positional = [each for each in parameters if each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD)]
    num_required = sum(each.default is each.empty for each in positional)
    return num_required == 3 or [each.name for each in positional[3:4]] == ["action"]


def _names(num_parts: int) -> tuple[str, ...]:
    return ("h", "c") if num_parts == 2 else ("h", *(f"h{index}" for index in range(1, num_parts)))


def _five(outcome: Any) -> Any:
    if not isinstance(outcome, (tuple, list)) or len(outcome) != 5:
        came = f"{len(outcome)} values" if isinstance(outcome, (tuple, list)) else type(outcome).__name__
        raise UsageError(f"get_action_and_value must return action, log_prob, entropy, value, lstm_state; got {came}")
    return outcome
