"""TensorForm: a Gymnasium space in TorchRL's words, and its values as tensors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from gymnasium import spaces

from envfleet.contract.arrays import Array
from envfleet.contract.errors import MissingExtra, UsageError
from envfleet.contract.spaces import Leaf, SpaceTree

try:
    import torch
    from tensordict import TensorDict
    from torchrl.data import Binary, Bounded, Categorical, Composite, MultiCategorical, MultiOneHot, OneHot, Unbounded
except ImportError as error:
    raise MissingExtra('the adapter for TorchRL needs it: pip install "envfleet[torchrl]"') from error

Key = tuple[str, ...]


class TensorForm:
    """The values of a space, N rows of them, as entries of a TensorDict.

    The parts of a Tuple have the keys "0", "1" and so on, below the key of the tuple. Numbers of Discrete and
    MultiDiscrete spaces begin at 0 in TorchRL. Those of a space with another `start` are moved.
    """

    def __init__(self, space: spaces.Space[Any], name: str, *, is_nested: bool, one_hot: bool, device: Any) -> None:
        """Look whether TorchRL has specs for the space.

        Args:
            space: Of one env.
            name: Key of its values. Those of a Dict have keys of their own, below this one if `is_nested`.
            is_nested: Whether the keys of a Dict are below `name`.
            one_hot: Whether numbers of Discrete and MultiDiscrete spaces become one-hot vectors.
            device: Where tensors are; None: the CPU.

        Raises:
            UsageError: TorchRL has no spec for the space.
        """
        self._tree = SpaceTree(space)
        self._one_hot = one_hot
        self._device = device
        root = (name,) if is_nested or not isinstance(space, spaces.Dict) else ()
        self._keys: list[Key] = [(*root, *map(str, leaf.path)) for leaf in self._tree.leaves]
        self._specs = [self._leaf_spec(leaf, name) for leaf in self._tree.leaves]

    def spec(self, num_rows: int) -> Any:
        """The spec of `num_rows` rows, a Composite."""
        spec = Composite(shape=(num_rows,), device=self._device)
        for key, each in zip(self._keys, self._specs, strict=True):
            spec[key] = each.expand(num_rows, *each.shape)
        return spec

    def tensors(self, batch: Any) -> Any:
        """A TensorDict of a batch of values. Tensors share memory with arrays that are writable and contiguous."""
        leaves = self._tree.flatten(batch)
        rows = TensorDict({}, batch_size=[len(leaves[0])], device=self._device)
        for key, leaf, values in zip(self._keys, self._tree.leaves, leaves, strict=True):
            rows[key] = self._to_tensor(leaf.space, values)
        return rows

    def batch(self, rows: Any) -> Any:
        """A batch of values, in the form of the space, of a TensorDict."""
        return self._tree.unflatten(
            [
                self._to_array(leaf.space, rows.get(key).detach().cpu())
                for key, leaf in zip(self._keys, self._tree.leaves, strict=True)
            ]
        )

    def _leaf_spec(self, leaf: Leaf, name: str) -> Any:
        space, device = leaf.space, self._device
        if isinstance(space, spaces.Discrete):
            return OneHot(int(space.n), device=device) if self._one_hot else Categorical(int(space.n), device=device)
        if isinstance(space, spaces.MultiDiscrete) and len(space.nvec.shape) == 1:
            nvec = torch.as_tensor(space.nvec)
            return MultiOneHot(nvec.tolist(), device=device) if self._one_hot else MultiCategorical(nvec, device=device)
        if isinstance(space, spaces.MultiBinary):
            return Binary(space.shape[-1], shape=space.shape, device=device)
        if not isinstance(space, spaces.Box):
            raise UsageError(f"TorchRL has no spec for {leaf.name_in(name)}, {space}: wrap the env to change it")
        dtype = torch.from_numpy(np.empty(0, space.dtype)).dtype
        if np.isinf(space.low).all() and np.isinf(space.high).all():
            return Unbounded(space.shape, dtype=dtype, device=device)
        return Bounded(
            torch.from_numpy(space.low), torch.from_numpy(space.high), space.shape, dtype=dtype, device=device
        )

    def _to_tensor(self, space: spaces.Space[Any], values: Array) -> Any:
        if isinstance(space, spaces.Discrete | spaces.MultiDiscrete):
            numbers = torch.as_tensor(values - space.start, dtype=torch.int64, device=self._device)
            if not self._one_hot:
                return numbers
            counts = [int(space.n)] if isinstance(space, spaces.Discrete) else space.nvec.tolist()
            parts = numbers.reshape(len(numbers), -1).unbind(-1)
            one_hot = torch.nn.functional.one_hot
            return torch.cat([one_hot(part, count) for part, count in zip(parts, counts, strict=True)], -1).bool()
        return tensor_of(values, self._device)

    def _to_array(self, space: spaces.Space[Any], tensor: Any) -> Array:
        if isinstance(space, spaces.Discrete):
            numbers = tensor.long().argmax(-1) if self._one_hot else tensor
            return np.asarray(numbers.numpy() + space.start, space.dtype)
        if isinstance(space, spaces.MultiDiscrete):
            if self._one_hot:
                parts = tensor.long().split(space.nvec.tolist(), -1)
                tensor = torch.stack([part.argmax(-1) for part in parts], -1)
            return np.asarray(tensor.numpy() + space.start, space.dtype)
        return np.asarray(tensor.numpy())


def tensor_of(array: Array, device: Any) -> Any:
    """A tensor, which shares memory with an array that is writable and contiguous."""
    array = np.ascontiguousarray(array)
    return torch.from_numpy(array if array.flags.writeable else array.copy()).to(device)


def entries_of(tree: Any, name: str, *, is_nested: bool) -> dict[Key, Any]:
    """The leaves of a tree of tensors, by the keys that a TensorForm gives them."""
    if isinstance(tree, tuple):
        tree, is_nested = {str(index): part for index, part in enumerate(tree)}, True
    if not isinstance(tree, Mapping):
        return {(name,): tree}
    root = (name,) if is_nested else ()
    return {(*root, *key): leaf for part in tree for key, leaf in entries_of(tree[part], part, is_nested=True).items()}
