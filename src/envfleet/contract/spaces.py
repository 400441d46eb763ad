"""SpaceTree: the flat list of arrays ("leaves") that values of a Gymnasium space consist of."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np
from gymnasium import spaces

from envfleet._native import core
from envfleet.contract.arrays import Array
from envfleet.contract.errors import InvalidAction

ARRAY_SPACES = (spaces.Box, spaces.Discrete, spaces.MultiDiscrete, spaces.MultiBinary)


@dataclass(frozen=True, slots=True)
class Leaf:
    """One array of a space's values or, for spaces whose values are no arrays (Text, Graph, ...), one object."""

    path: tuple[str | int, ...]  # keys that lead to it; () if the space itself is the leaf
    space: spaces.Space[Any]
    shape: tuple[int, ...]  # () for objects
    dtype: np.dtype[Any] | None  # None: an object

    def name_in(self, root: str) -> str:
        """Return how error texts write the leaf: `obs['camera'][0]`."""
        return root + "".join(f"[{key!r}]" for key in self.path)


class SpaceTree:
    """A space as leaves, in the order of its keys. Dict and Tuple spaces are trees; everything else is a leaf.

    The same tree serves one env's value and a batch of them: a batch of a Dict is a Dict of batches.
    """

    def __init__(self, space: spaces.Space[Any]) -> None:
        self.space = space
        self.leaves: tuple[Leaf, ...] = tuple(_leaves(space, ()))
        self.is_one_array = len(self.leaves) == 1 and not self.leaves[0].path and self.leaves[0].dtype is not None
        self.array_leaves: tuple[int, ...] = tuple(i for i, leaf in enumerate(self.leaves) if leaf.dtype is not None)
        self.object_leaves: tuple[int, ...] = tuple(i for i, leaf in enumerate(self.leaves) if leaf.dtype is None)

    def flatten(self, value: Any) -> list[Any]:
        """Return the values of the leaves, in order.

        Args:
            value: in the form of the space.

        Returns:
            A list with one value for each leaf.

        Raises:
            KeyError, IndexError, TypeError: `value` has another form.
        """
        values = []
        for leaf in self.leaves:
            leaf_value = value
            for key in leaf.path:
                leaf_value = leaf_value[key]
            values.append(leaf_value)
        return values

    def unflatten(self, leaf_values: Sequence[Any]) -> Any:
        """Build a value from those of its leaves: the opposite of flatten().

        Args:
            leaf_values: one for each leaf, in order.

        Returns:
            The value in the form of the space.
        """
        return leaf_values[0] if self.is_one_array else _unflatten(self.space, iter(leaf_values))

    def each_row(self, batch: Any, rows: Iterable[int]) -> list[Any]:
        """The values of single rows of a batch; arrays are views of it."""
        if self.is_one_array:
            return [batch[row] for row in rows]
        columns = self.flatten(batch)
        return [self.unflatten([column[row] for column in columns]) for row in rows]

    def select(self, batch: Any, rows: np.ndarray[Any, Any]) -> Any:
        """The batch of these rows, in this order, copied."""
        return self.unflatten(
            [
                tuple(column[row] for row in rows.tolist()) if isinstance(column, tuple) else column[rows]
                for column in self.flatten(batch)
            ]
        )

    def empty(self, make_array: Callable[[tuple[int, ...], np.dtype[Any]], Any]) -> Any:
        """Build a value of new arrays.

        Args:
            make_array: called as make_array(shape, dtype) for each leaf that is an array.

        Returns:
            The value; None stands for objects.
        """
        return self.unflatten(
            [None if leaf.dtype is None else make_array(leaf.shape, leaf.dtype) for leaf in self.leaves]
        )

    def require_batch(self, value: Any, num_rows: int, name: str) -> list[Any]:
        """Check a batch that the user gave.

        Args:
            value: in the form of the space, with a row for each env.
            num_rows: number of envs.
            name: what the error calls the batch.

        Returns:
            The values of the leaves; arrays may still have another dtype that converts safely.

        Raises:
            InvalidAction: form, shape or dtype is wrong, or a Box has NaN.
        """
        if self.is_one_array:
            return [_require_array(value, self.leaves[0], num_rows, name)]
        return [
            _require_objects(leaf_value, num_rows, leaf.name_in(name))
            if leaf.dtype is None
            else _require_array(leaf_value, leaf, num_rows, leaf.name_in(name))
            for leaf, leaf_value in zip(self.leaves, self.require_parts(value, name), strict=True)
        ]

    def require_parts(self, value: Any, name: str) -> list[Any]:
        """Return the values of the leaves of a batch that the user gave; they are not looked at.

        Args:
            value: in the form of the space.
            name: what the error calls the batch.

        Returns:
            A list with one value for each leaf.

        Raises:
            InvalidAction: the form is another one.
        """
        try:
            return self.flatten(value)
        except (KeyError, IndexError, TypeError) as error:
            raise InvalidAction(
                f"{name} must have the form of {self.space}, a batch for each of its parts; "
                f"got {type(value).__name__} without {error}"
            ) from None

    def refuse_value(self, leaf: int, row: int, value: Any, name: str) -> NoReturn:
        """Raise the error for a value that is outside the space of a leaf.

        Args:
            leaf: index of the leaf.
            row: row of the batch.
            value: the wrong one.
            name: what the error calls the batch.

        Raises:
            InvalidAction: always.
        """
        refused = self.leaves[leaf]
        raise InvalidAction(f"{refused.name_in(name)}, row {row}: {refused.space} has no value {value}")


def _leaves(space: spaces.Space[Any], path: tuple[str | int, ...]) -> Iterator[Leaf]:
    if isinstance(space, spaces.Dict):
        for key, part in space.spaces.items():
            yield from _leaves(part, (*path, key))
    elif isinstance(space, spaces.Tuple):
        for index, part in enumerate(space.spaces):
            yield from _leaves(part, (*path, index))
    elif isinstance(space, ARRAY_SPACES):
        assert space.shape is not None
        yield Leaf(path, space, tuple(space.shape), np.dtype(space.dtype))
    else:
        yield Leaf(path, space, (), None)


def _unflatten(space: spaces.Space[Any], values: Iterator[Any]) -> Any:
    if isinstance(space, spaces.Dict):
        return {key: _unflatten(part, values) for key, part in space.spaces.items()}
    if isinstance(space, spaces.Tuple):
        return tuple(_unflatten(part, values) for part in space.spaces)
    return next(values)


def _require_array(value: Any, leaf: Leaf, num_rows: int, name: str) -> Array:
    array = np.asarray(value)
    require_form(array.shape, array.dtype, leaf, num_rows, name)
    if array.dtype.kind == "f" and isinstance(leaf.space, spaces.Box) and has_nan(array):
        rows = sorted({int(row) for row in np.nonzero(np.isnan(array))[0]})
        raise InvalidAction(f"{name} has NaN in rows {rows}, which {leaf.space} does not allow")
    return array


def require_form(shape: tuple[int, ...], dtype: np.dtype[Any], leaf: Leaf, num_rows: int, name: str) -> None:
    """Raise InvalidAction unless an array of this shape and dtype can be a batch of the leaf's values."""
    expected = (num_rows, *leaf.shape)
    if shape != expected:
        raise InvalidAction(f"{name} must have shape {expected}, one row for each env; got {shape}")
    if dtype != leaf.dtype and not np.can_cast(dtype, leaf.dtype or object, "same_kind"):
        raise InvalidAction(f"{name} must have dtype {leaf.dtype}; got {dtype}, which does not convert safely")


def has_nan(array: Array) -> bool:
    """Return whether an array of floats holds NaN."""
    if array.dtype.char in "fd" and array.flags.c_contiguous and array.flags.aligned and array.dtype.isnative:
        return core.has_nan(array)
    return bool(np.isnan(array).any())


def _require_objects(value: Any, num_rows: int, name: str) -> list[Any]:
    if not isinstance(value, list | tuple) or len(value) != num_rows:
        got = f"{len(value)} of them" if isinstance(value, list | tuple) else type(value).__name__
        raise InvalidAction(f"{name} must be a tuple of {num_rows} values, one for each env; got {got}")
    return list(value)
