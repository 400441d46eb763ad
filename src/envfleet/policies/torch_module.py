"""TorchPolicy: a torch module in the form of CleanRL, as it is, with NumPy arrays in and out."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from functools import partial
from itertools import chain
from typing import Any

import numpy as np

from envfleet._native import has_nan
from envfleet.contract.errors import MissingExtra, UsageError
from envfleet.contract.policy import Acted
from envfleet.policies.checks import num_rows_of, require_rows, require_weights
from envfleet.policies.tracing import Acting, traced_acting

Array = np.ndarray[Any, Any]


class TorchPolicy:
    """A module with `get_action_and_value(obs, action=None) -> action, log_prob, entropy, value`.

    `get_value(obs)` is used for values where there is one. Log-probs and values may be None, if the module has none.
    Observations are not copied for the module, so it must not change them in place.
    """

    def __init__(self, module: Any, *, traced: bool = False) -> None:
        """The module is used, not copied; it may be on any device.

        `traced`: record what it does with the first observations, and do just that from then on, which is up to three
        times as fast for small networks. For modules whose operations do not depend on the observations' values.
        """
        self._torch = _torch()
        if not isinstance(module, self._torch.nn.Module):
            raise UsageError(f"TorchPolicy takes a torch.nn.Module; got {type(module).__name__}")
        # torch.compile() wraps forward() only, and prefixes the names of weights.
        self.module: Any = getattr(module, "_orig_mod", module)
        if not callable(getattr(self.module, "get_action_and_value", None)):
            raise UsageError(
                f"{type(self.module).__name__} has no get_action_and_value(obs, action=None) "
                f"-> action, log_prob, entropy, value"
            )
        self._is_traced = traced
        self._acting: dict[tuple[Any, ...], Acting | None] = {}  # by shape and dtype of the observations
        self._anchor = next(chain(self.module.parameters(), self.module.buffers()), None)  # is where the module is

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickled as its module."""
        return partial(TorchPolicy, traced=self._is_traced), (self.module,)

    def act(self, obs: Any) -> Acted:
        """Sample actions."""
        num_rows = num_rows_of(obs)
        with self._torch.inference_mode():
            actions, log_probs, values = self._act(self._tensors(obs))
            taken = self._arrays(actions)
            rows = None if log_probs is None else self._rows(log_probs, num_rows, "log_probs")
            extras = {} if values is None else {"values": self._rows(values, num_rows, "values")}
        # Any ufunc of NumPy's costs ten times as much here, between calls of torch that evict it from the caches.
        if rows is not None and has_nan(np.ascontiguousarray(rows)):
            raise UsageError(f"the policy's log-probs are NaN in rows {_nan_rows(rows)}: {self._cause_of_nan(obs)}")
        return Acted(taken, rows, extras)

    def _act(self, obs: Any) -> tuple[Any, Any, Any]:
        if self._is_traced and isinstance(obs, self._torch.Tensor):
            key = (*obs.shape, obs.dtype)
            if key not in self._acting:
                with self._torch.inference_mode(False):
                    self._acting[key] = traced_acting(self._torch, self.module, obs.clone())
            acting = self._acting[key]
            if acting is not None:
                return acting(obs)
        actions, log_probs, _, values = _four(self.module.get_action_and_value(obs))
        return actions, log_probs, values

    def log_prob(self, obs: Any, actions: Any) -> Array:
        """[B] log-probabilities of actions that were taken."""
        # Not inference_mode(): this module may be the learner's, and what it keeps must stay fit for training.
        with self._torch.no_grad():
            _, log_probs, _, _ = _four(self.module.get_action_and_value(self._tensors(obs), self._tensors(actions)))
            if log_probs is None:
                raise UsageError(f"get_action_and_value of {type(self.module).__name__} gives no log-probs")
            return self._rows(log_probs, num_rows_of(obs), "log_probs")

    def values(self, obs: Any) -> Array | None:
        """[B] values, by get_value or else get_action_and_value; None if the module has none."""
        get_value = getattr(self.module, "get_value", None)
        with self._torch.no_grad():
            tensors = self._tensors(obs)
            values = get_value(tensors) if get_value else _four(self.module.get_action_and_value(tensors))[3]
            return None if values is None else self._rows(values, num_rows_of(obs), "values")

    def get_weights(self) -> dict[str, Array]:
        """The state dict as CPU arrays: views where that is possible."""
        return state_arrays(self.module)

    def set_weights(self, weights: Mapping[str, Array]) -> None:
        """Copy `weights` into the module; all of them, or none if they do not fit."""
        state = self.module.state_dict()
        require_weights(weights, {name: tuple(tensor.shape) for name, tensor in state.items()})
        with self._torch.no_grad():
            for name, tensor in state.items():
                tensor.copy_(self._torch.from_numpy(_writable(np.asarray(weights[name]))))

    def _tensors(self, tree: Any) -> Any:
        if isinstance(tree, np.ndarray):
            array = tree.astype(np.float32) if tree.dtype.char == "d" else _writable(tree)
            tensor = self._torch.from_numpy(array)
            return tensor if self._anchor is None or self._anchor.is_cpu else tensor.to(self._anchor.device)
        if isinstance(tree, Mapping):
            return {key: self._tensors(part) for key, part in tree.items()}
        if isinstance(tree, tuple):
            return tuple(self._tensors(part) for part in tree)
        return self._tensors(np.asarray(tree))

    def _arrays(self, tree: Any) -> Any:
        if isinstance(tree, self._torch.Tensor):
            if tree.dtype is self._torch.bfloat16:
                tree = tree.float()
            return (tree if tree.is_cpu else tree.cpu()).numpy()
        if isinstance(tree, Mapping):
            return {key: self._arrays(part) for key, part in tree.items()}
        if isinstance(tree, tuple):
            return tuple(self._arrays(part) for part in tree)
        return np.asarray(tree)

    def _rows(self, tensor: Any, num_rows: int, name: str) -> Array:
        if tensor.dtype is not self._torch.float32:
            tensor = tensor.float()
        return require_rows((tensor if tensor.is_cpu else tensor.cpu()).numpy(), num_rows, name)

    def _cause_of_nan(self, obs: Any) -> str:
        wrong = [name for name, array in self.get_weights().items() if not np.isfinite(array).all()]
        if wrong:
            return f"the weights {', '.join(wrong)} are not finite, so the learner has diverged"
        if not all(np.isfinite(array).all() for array in _float_leaves(obs)):
            return "the observations are not finite"
        return "weights and observations are finite, so the module itself makes them"


def state_arrays(module: Any) -> dict[str, Array]:
    """The state dict of a torch module as CPU arrays; views where that is possible."""
    return tensor_arrays(module.state_dict())


def tensor_arrays(tensors: Mapping[str, Any]) -> dict[str, Array]:
    """Named tensors as CPU arrays. NumPy has no bfloat16 or float8: they become float32, which holds them exactly."""
    torch = _torch()
    arrays = {}
    for name, tensor in tensors.items():
        if not isinstance(tensor, torch.Tensor):
            raise UsageError(f"{name!r} is {type(tensor).__name__}; weights are tensors: the workers get nothing else")
        if isinstance(tensor, torch.nn.parameter.UninitializedTensorMixin):
            raise UsageError(f"{name!r} has no shape yet: call the module once before you hand it over")
        tensor = tensor.detach().cpu()
        if tensor.is_floating_point() and tensor.dtype not in (torch.float16, torch.float32, torch.float64):
            tensor = tensor.float()
        arrays[name] = tensor.numpy()
    return arrays


def prepare_worker(num_threads: int) -> None:
    """Set up torch for acting in this process, once the policy is built. Does nothing if it did not import torch.

    Checking the arguments of distributions takes a good part of the time of acting on few rows, and the switch is
    global: it belongs to a worker's process, never to the learner's. TorchPolicy.act() looks for NaN itself.
    """
    torch = sys.modules.get("torch")
    if torch is None:
        return
    torch.set_num_threads(num_threads)
    torch.distributions.Distribution.set_default_validate_args(False)


def _torch() -> Any:
    try:
        import torch
    except ImportError as error:
        raise MissingExtra("a torch policy needs PyTorch: pip install 'envfleet[torch]'") from error
    return torch


def _four(outcome: Any) -> Any:
    if not isinstance(outcome, (tuple, list)) or len(outcome) != 4:
        came = f"{len(outcome)} values" if isinstance(outcome, (tuple, list)) else type(outcome).__name__
        raise UsageError(f"get_action_and_value must return action, log_prob, entropy, value; got {came}")
    return outcome


def _writable(array: Array) -> Array:
    """Torch has no read-only tensors, and warns of them."""
    return array if array.flags.writeable else array.copy()


def _nan_rows(rows: Array) -> str:
    found = np.flatnonzero(np.isnan(rows)).tolist()
    return ", ".join(map(str, found[:8])) + (", ..." if len(found) > 8 else "")


def _float_leaves(tree: Any) -> list[Array]:
    if isinstance(tree, Mapping):
        return [leaf for part in tree.values() for leaf in _float_leaves(part)]
    if isinstance(tree, tuple):
        return [leaf for part in tree for leaf in _float_leaves(part)]
    return [tree] if np.asarray(tree).dtype.kind == "f" else []
