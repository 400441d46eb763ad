"""A Gymnasium space <-> its description in a message header; the bounds of a Box are among the message's arrays."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
from gymnasium import spaces

from envfleet.cluster.wire.codec import DTYPES, BadMessage, require_booleans
from envfleet.cluster.wire.messages import Limits
from envfleet.contract.arrays import Array
from envfleet.contract.errors import UsageError

Space = spaces.Space[Any]
MAX_BOUNDS_BYTES = 1 << 26  # of all spaces in one description: what a description of a few bytes can make us allocate
MAX_DEPTH = 32
MAX_DIMS = 32
MOST_SPACES = Limits().num_arrays  # in one description: each leaf is an array of every rollout


def describe_space(space: Space, prefix: str) -> tuple[dict[str, Any], dict[str, Array]]:
    """The description, and the arrays to send with it, whose names start with `prefix`."""
    arrays: dict[str, Array] = {}
    return _describe(space, prefix, arrays), arrays


def space_of(description: Any, arrays: Mapping[str, Array], prefix: str) -> Space:
    """The inverse of `describe_space`. Raises BadMessage for anything that it does not make."""
    try:
        return _Reader(arrays).space(description, prefix, 0)
    except (KeyError, ValueError, TypeError, OverflowError, AssertionError, Warning) as error:
        raise BadMessage(f"no description of a space: {error!r}") from None


def _describe(space: Space, name: str, arrays: dict[str, Array]) -> dict[str, Any]:
    if isinstance(space, spaces.Box):
        return _describe_box(space, name, arrays)
    if isinstance(space, spaces.Discrete):
        return {"kind": "discrete", "n": int(space.n), "start": int(space.start), "dtype": _dtype_name(space)}
    if isinstance(space, spaces.MultiDiscrete):
        arrays[f"{name}/nvec"] = space.nvec
        arrays[f"{name}/start"] = space.start
        return {"kind": "multi_discrete", "dtype": _dtype_name(space)}
    if isinstance(space, spaces.MultiBinary):
        return {"kind": "multi_binary", "n": space.n if isinstance(space.n, int) else list(space.n)}
    if isinstance(space, spaces.Dict):
        if not all(isinstance(key, str) for key in space.spaces):
            raise UsageError(f"a cluster carries Dict spaces with text as keys; got {list(space.spaces)}")
        parts = enumerate(space.spaces.values())
        described = [_describe(part, f"{name}/{index}", arrays) for index, part in parts]
        return {"kind": "dict", "keys": list(space.spaces), "parts": described}
    if isinstance(space, spaces.Tuple):
        parts = enumerate(space.spaces)
        return {"kind": "tuple", "parts": [_describe(part, f"{name}/{index}", arrays) for index, part in parts]}
    raise UsageError(
        f"a cluster carries array spaces only: Box, Discrete, MultiDiscrete, MultiBinary, and Dict and Tuple "
        f"of them; got {type(space).__name__}"
    )


def _describe_box(space: spaces.Box, name: str, arrays: dict[str, Array]) -> dict[str, Any]:
    box: dict[str, Any] = {"kind": "box", "shape": list(space.shape), "dtype": _dtype_name(space)}
    for side in ("low", "high", "bounded_below", "bounded_above"):
        bounds: Array = getattr(space, side)
        if bounds.size and (bounds == bounds.flat[0]).all():
            box[side] = bounds.flat[0].item()
        else:
            box[side] = None
            arrays[f"{name}/{side}"] = bounds
    return box


def _dtype_name(space: Space) -> str:
    name = np.dtype(space.dtype).name
    if name not in DTYPES:
        raise UsageError(f"{space} has dtype {space.dtype}; the wire knows {', '.join(DTYPES)}")
    return name


@dataclass(slots=True)
class _Reader:
    arrays: Mapping[str, Array]
    num_bytes_left: int = MAX_BOUNDS_BYTES
    num_spaces_left: int = MOST_SPACES

    def space(self, description: Any, name: str, depth: int) -> Space:
        self._count(depth)
        if not isinstance(description, dict):
            raise BadMessage(f"a space described by a {type(description).__name__}")
        kind = description["kind"]
        if kind == "box":
            return self._box(description, name)
        if kind == "discrete":
            return _discrete(description)
        if kind == "multi_discrete":
            nvec, start = self._array(f"{name}/nvec"), self._array(f"{name}/start")
            return spaces.MultiDiscrete(nvec, _dtype(description).type, start=start)
        if kind == "multi_binary":
            n = description["n"]
            self._reserve(_shape([n] if isinstance(n, int) else n), np.dtype(np.int8))
            return spaces.MultiBinary(n)
        if kind == "tuple":
            return spaces.Tuple(self._parts(description, name, depth))
        if kind == "dict":
            keys, parts = description["keys"], self._parts(description, name, depth)
            if not all(isinstance(key, str) for key in keys) or len(set(keys)) != len(parts):
                raise BadMessage(f"a Dict space with the keys {keys!r} and {len(parts)} parts")
            return spaces.Dict(OrderedDict(zip(keys, parts, strict=True)))
        raise BadMessage(f"a space of kind {kind!r}")

    def _count(self, depth: int) -> None:
        if depth > MAX_DEPTH:
            raise BadMessage(f"a space is nested deeper than {MAX_DEPTH} levels")
        self.num_spaces_left -= 1
        if self.num_spaces_left < 0:
            raise BadMessage(f"a space that consists of over {MOST_SPACES} spaces")

    def _parts(self, description: dict[str, Any], name: str, depth: int) -> list[Space]:
        return [self.space(part, f"{name}/{index}", depth + 1) for index, part in enumerate(description["parts"])]

    def _box(self, description: dict[str, Any], name: str) -> spaces.Box:
        shape, dtype = _shape(description["shape"]), _dtype(description)
        self._reserve(shape, dtype)
        low = self._bounds(description, name, "low", shape, dtype)
        high = self._bounds(description, name, "high", shape, dtype)
        if not (low <= high).all():
            raise BadMessage("a Box whose low is above its high")
        box = spaces.Box(low, high, shape, dtype.type)
        # Ints have no infinity: a side without a bound looks like one whose bound is the dtype's own.
        box.bounded_below = self._bounds(description, name, "bounded_below", shape, np.dtype(np.bool_))
        box.bounded_above = self._bounds(description, name, "bounded_above", shape, np.dtype(np.bool_))
        return box

    def _bounds(
        self, description: dict[str, Any], name: str, side: str, shape: tuple[int, ...], dtype: np.dtype[Any]
    ) -> Array:
        value = description[side]
        if value is None:
            bounds = self._array(f"{name}/{side}")
            if bounds.shape != shape or bounds.dtype != dtype:
                raise BadMessage(f"array '{name}/{side}' is {bounds.dtype} {bounds.shape}, not {dtype} {shape}")
            return bounds
        if not isinstance(value, bool | int | float):
            raise BadMessage(f"{side} of a Box is {value!r}")
        bounds = np.full(shape, value, dtype)
        if bounds.size and bounds.flat[0].item() != value:
            raise BadMessage(f"{side} of a Box is {value!r}, which {dtype} does not hold")
        return bounds

    def _array(self, name: str) -> Array:
        """A copy: spaces may be written to, messages not."""
        if name not in self.arrays:
            raise BadMessage(f"the array {name!r} of a space is missing")
        array = np.array(self.arrays[name])
        require_booleans(name, array)
        return array

    def _reserve(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> None:
        self.num_bytes_left -= prod(shape) * dtype.itemsize
        if self.num_bytes_left < 0:
            raise BadMessage(f"a space of shape {shape}: with it the spaces' bounds take over {MAX_BOUNDS_BYTES} bytes")


def _discrete(description: dict[str, Any]) -> spaces.Discrete:
    n, start, dtype = description["n"], description["start"], _dtype(description)
    if type(n) is not int or type(start) is not int:
        raise BadMessage(f"a Discrete space with n={n!r}, start={start!r}")
    return spaces.Discrete(n, start=start, dtype=dtype.type)


def _dtype(description: dict[str, Any]) -> np.dtype[Any]:
    name = description["dtype"]
    if not isinstance(name, str) or name not in DTYPES:
        raise BadMessage(f"a space of dtype {name!r}; known: {', '.join(DTYPES)}")
    return DTYPES[name]


def _shape(shape: Any) -> tuple[int, ...]:
    if (
        not isinstance(shape, list | tuple)
        or len(shape) > MAX_DIMS
        or not all(type(n) is int and n >= 0 for n in shape)
    ):
        raise BadMessage(f"a space of shape {shape!r}")
    return tuple(shape)
