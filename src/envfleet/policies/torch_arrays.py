"""Between NumPy and torch: observations to tensors, tensors to arrays, and a module's weights as named arrays."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import chain
from typing import Any

import numpy as np

from envfleet._native import core
from envfleet.contract.arrays import Array
from envfleet.contract.errors import MissingExtra, UsageError
from envfleet.policies.checks import require_rows, require_weights


class TorchBorder:
    """Conversions between arrays and the tensors of one module. `owner` is named in the error if `module` is none."""

    def __init__(self, module: Any, owner: str) -> None:
        self.torch = import_torch()
        if not isinstance(module, self.torch.nn.Module):
            raise UsageError(f"{owner} takes a torch.nn.Module; got {type(module).__name__}")
        # torch.compile() wraps forward() only, and prefixes the names of weights.
        self.module: Any = getattr(module, "_orig_mod", module)
        self._moved_to: Any = None  # the torch.device of to_device()
        self._find_anchor()

    def to_device(self, device: str) -> None:
        """Move the module. What torch raises, if there is no such device, is passed on."""
        self._moved_to = self.torch.device(device)
        self.module.to(self._moved_to)
        if self._anchor is None:  # or a device that is not there would not be noticed
            self.torch.zeros(1, device=self._moved_to)
        self._find_anchor()

    def _find_anchor(self) -> None:
        """A tensor that is where the module is, also after the learner has moved it; None: there is none."""
        self._anchor = next(chain(self.module.parameters(), self.module.buffers()), None)

    @property
    def device(self) -> Any:
        """The torch.device on which the module acts; that of its first weight."""
        if self._anchor is not None:
            return self._anchor.device
        return self._moved_to or self.torch.device("cpu")

    def tensors(self, tree: Any) -> Any:
        """Convert a tree of arrays to tensors on the module's device; float64 becomes float32."""
        if isinstance(tree, np.ndarray):
            array = tree.astype(np.float32) if tree.dtype.char == "d" else _writable(tree)
            tensor = self.torch.from_numpy(array)
            is_on_cpu = self._moved_to is None if self._anchor is None else self._anchor.is_cpu
            return tensor if is_on_cpu else tensor.to(self.device)
        if isinstance(tree, Mapping):
            return {key: self.tensors(part) for key, part in tree.items()}
        if isinstance(tree, tuple):
            return tuple(self.tensors(part) for part in tree)
        return self.tensors(np.asarray(tree))

    def mask_argument(self, action_mask: Array | None) -> dict[str, Any]:
        """The keyword argument of a module's method that gets action masks; nothing if there are none."""
        return {} if action_mask is None else {"action_mask": self.tensors(action_mask)}

    def arrays(self, tree: Any) -> Any:
        """Convert a tree of tensors to arrays."""
        if isinstance(tree, self.torch.Tensor):
            if tree.dtype is self.torch.bfloat16:
                tree = tree.float()
            return (tree if tree.is_cpu else tree.cpu()).numpy()
        if isinstance(tree, Mapping):
            return {key: self.arrays(part) for key, part in tree.items()}
        if isinstance(tree, tuple):
            return tuple(self.arrays(part) for part in tree)
        return np.asarray(tree)

    def rows(self, tensor: Any, num_rows: int, name: str) -> Array:
        """Convert a tensor of [B] or [B, 1] to [B] float32."""
        if tensor.dtype is not self.torch.float32:
            tensor = tensor.float()
        return require_rows((tensor if tensor.is_cpu else tensor.cpu()).numpy(), num_rows, name)

    def set_weights(self, weights: Mapping[str, Array]) -> None:
        """Copy `weights` into the module; UsageError, and no change, if they do not fit."""
        state = self.module.state_dict()
        require_weights(weights, {name: tuple(tensor.shape) for name, tensor in state.items()})
        with self.torch.no_grad():
            for name, tensor in state.items():
                tensor.copy_(self.torch.from_numpy(_writable(np.asarray(weights[name]))))

    def require_no_nan(self, rows: Array, obs: Any, name: str) -> None:
        """Raise UsageError if one of the [B] rows is NaN; the message says the likely cause."""
        # Any ufunc of NumPy's costs ten times as much here, between calls of torch that evict it from the caches.
        if core.has_nan(np.ascontiguousarray(rows)):
            raise UsageError(f"the policy's {name} are NaN in rows {_nan_rows(rows)}: {self._cause_of_nan(obs)}")

    def _cause_of_nan(self, obs: Any) -> str:
        wrong = [name for name, array in state_arrays(self.module).items() if not np.isfinite(array).all()]
        if wrong:
            return f"the weights {', '.join(wrong)} are not finite, so the learner has diverged"
        if not all(np.isfinite(array).all() for array in _float_leaves(obs)):
            return "the observations are not finite"
        return "weights and observations are finite, so the module itself makes them"


def state_arrays(module: Any) -> dict[str, Array]:
    """Return the state dict of a torch module as CPU arrays; views where that is possible."""
    return tensor_arrays(module.state_dict())


def tensor_arrays(tensors: Mapping[str, Any]) -> dict[str, Array]:
    """Convert named tensors to CPU arrays. NumPy has no bfloat16 or float8: they become float32, without loss.

    Those of another device come in one transfer for each dtype, because each one waits for the device.
    """
    torch = import_torch()
    for name, tensor in tensors.items():
        if not isinstance(tensor, torch.Tensor):
            raise UsageError(f"weights must be tensors; {name!r} is {type(tensor).__name__}")
        if isinstance(tensor, torch.nn.parameter.UninitializedTensorMixin):
            raise UsageError(f"{name!r} has no shape yet: call the module once before you pass it on")
        if tensor.is_meta:
            raise UsageError(
                f"{name!r} is on the device 'meta', and has no data: call to_empty(device=...) and load it"
            )
    held = {name: tensor.detach() for name, tensor in tensors.items()}
    held |= _brought_to_cpu(torch, {name: tensor for name, tensor in held.items() if not tensor.is_cpu})
    arrays = {}
    for name, tensor in held.items():
        if tensor.is_floating_point() and tensor.dtype not in (torch.float16, torch.float32, torch.float64):
            tensor = tensor.float()
        arrays[name] = tensor.numpy()
    return arrays


def _brought_to_cpu(torch: Any, tensors: Mapping[str, Any]) -> dict[str, Any]:
    """The same tensors on the CPU; those of one device and dtype are views of one block."""
    blocks: dict[Any, dict[str, Any]] = {}
    for name, tensor in tensors.items():
        blocks.setdefault((tensor.device, tensor.dtype), {})[name] = tensor
    found: dict[str, Any] = {}
    for block in blocks.values():
        sizes = [tensor.numel() for tensor in block.values()]
        parts = torch.cat([tensor.reshape(-1) for tensor in block.values()]).cpu().split(sizes)
        found |= {name: part.view(tensors[name].shape) for name, part in zip(block, parts, strict=True)}
    return found


def import_torch() -> Any:
    """Return the torch package; MissingExtra if it is not installed."""
    try:
        import torch
    except ImportError as error:
        raise MissingExtra("a torch policy needs PyTorch: pip install 'envfleet[torch]'") from error
    return torch


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
