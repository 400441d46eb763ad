"""Trees of values <-> plain values and arrays of bytes, as a checkpoint's file has them. Pure; nothing can run code.

None, bools, numbers, text, bytes and dictionaries with text as keys stay as they are. Everything else is a list whose
first entry says what it is: ["tuple", ...], ["array", number, dtype, shape], ["tensor", number, dtype, shape], ...
(`cluster/wire/plain_values.py` is another thing: its arrays ride in the header, it knows no tensors, any key, and
reads what an attacker may have sent.)
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from math import prod
from typing import Any

import numpy as np

from envfleet.contract.arrays import Array
from envfleet.contract.errors import CheckpointError, MissingExtra, UsageError

MAX_DEPTH = 64
_ARRAY_KINDS = "biufcSUmM"
_MIN_INT, _MAX_INT = -(2**63), 2**64 - 1


def packed(value: Any, name: str) -> tuple[Any, list[Array]]:
    """What `unpacked` makes the value of again.

    Args:
        value: Dictionaries with text or ints as keys, lists, tuples, numbers, text, bytes, None, arrays of NumPy and
            tensors of torch, on any device. Subclasses come back as these.
        name: Stands for the value in errors: "extra['optimizer'] is a ...".

    Returns:
        Plain values, and an array of uint8 for each array and tensor: a view, where that is possible.

    Raises:
        UsageError: A part is none of these; the text names it.
    """
    arrays: list[Array] = []
    return _packed(value, name, 0, arrays), arrays


def unpacked(plain: Any, arrays: Sequence[Array]) -> Any:
    """The inverse of `packed`. Arrays are copies; tensors are on the CPU.

    Args:
        plain: What `packed` returned.
        arrays: Likewise.

    Returns:
        The value.

    Raises:
        CheckpointError: It is none that `packed` makes.
        MissingExtra: There are tensors, and torch is not installed.
    """
    try:
        return _unpacked(plain, arrays)
    except (ValueError, TypeError, IndexError, AttributeError, OverflowError) as error:
        raise CheckpointError(f"a value of this checkpoint cannot be read: {error}") from error


# -- to plain values --


def _packed(value: Any, path: str, depth: int, arrays: list[Array]) -> Any:
    if value is None or isinstance(value, bool | bytes | str | np.generic | int | float):
        return _packed_scalar(value, path)
    if depth >= MAX_DEPTH:
        raise UsageError(f"{path} is nested deeper than {MAX_DEPTH} levels; does it contain itself?")
    if isinstance(value, dict):
        return _packed_dict(value, path, depth, arrays)
    if isinstance(value, list | tuple):
        kind = "list" if isinstance(value, list) else "tuple"
        return [kind, *(_packed(item, f"{path}[{i}]", depth + 1, arrays) for i, item in enumerate(value))]
    if type(value) is np.ndarray:
        dtype, native = _array_form(value, path)
        arrays.append(_bytes_of(native))
        return ["array", len(arrays) - 1, dtype, list(value.shape)]
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.Tensor):
        arrays.append(_tensor_bytes(torch, value, path))
        return ["tensor", len(arrays) - 1, str(value.dtype).removeprefix("torch."), list(value.shape)]
    raise UsageError(
        f"{path} is a {_kind(value)}; a checkpoint carries None, numbers, text, bytes, lists, tuples, dictionaries "
        "with text or ints as keys, NumPy arrays and torch tensors"
    )


def _packed_scalar(value: Any, path: str) -> Any:
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, bytes):
        return bytes(value)
    if isinstance(value, str):
        return _text(value, path)
    if isinstance(value, np.generic):  # before float, which float64 is
        dtype, array = _array_form(np.asarray(value), path)
        return ["scalar", dtype, array.tobytes()]
    if isinstance(value, float):
        return float(value)
    return int(value) if _MIN_INT <= value <= _MAX_INT else ["int", hex(value)]


def _packed_dict(value: dict[Any, Any], path: str, depth: int, arrays: list[Array]) -> Any:
    for key in value:
        if type(key) is not int and not isinstance(key, str):
            raise UsageError(f"{path} has the key {key!r}, a {_kind(key)}; keys are text or ints")
    items = [
        (_packed(key, f"{path} key {key!r}", depth + 1, arrays), _packed(item, f"{path}[{key!r}]", depth + 1, arrays))
        for key, item in value.items()
    ]
    if all(isinstance(key, str) for key in value):
        return dict(items)
    return ["dict", *(part for item in items for part in item)]


def _text(value: str, path: str) -> str:
    try:
        value.encode()
    except UnicodeEncodeError:
        raise UsageError(f"{path} is text that UTF-8 does not have: {value!a}") from None
    return str.__str__(value)


def _array_form(array: Array, path: str) -> tuple[str, Array]:
    """The name of its dtype, and the array in the byte order of a file."""
    if array.dtype.kind not in _ARRAY_KINDS or array.dtype.names is not None:
        raise UsageError(f"{path} is an array of dtype {array.dtype}; a checkpoint carries numbers, text and times")
    dtype = array.dtype.newbyteorder("<")
    return dtype.str, array.astype(dtype, copy=False)


def _bytes_of(array: Array) -> Array:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8) if array.size else _NOTHING


def _tensor_bytes(torch: Any, tensor: Any, path: str) -> Array:
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_meta:
        form = "without values" if tensor.is_meta else f"of layout {tensor.layout}, {tensor.dtype}"
        raise UsageError(f"{path} is a tensor {form}; a checkpoint carries dense ones")
    if not tensor.numel():
        return _NOTHING
    flat = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous().reshape(-1)
    array: Array = flat.view(torch.uint8).numpy()
    return array


def _kind(value: Any) -> str:
    kind = type(value)
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


_NOTHING: Array = np.zeros(0, np.uint8)


# -- from plain values --


def _unpacked(plain: Any, arrays: Sequence[Array]) -> Any:
    if isinstance(plain, dict):
        return {key: _unpacked(item, arrays) for key, item in plain.items()}
    if not isinstance(plain, list):
        return plain
    kind, *parts = plain
    if kind == "list":
        return [_unpacked(item, arrays) for item in parts]
    if kind == "tuple":
        return tuple(_unpacked(item, arrays) for item in parts)
    if kind == "dict":
        values = [_unpacked(item, arrays) for item in parts]
        return dict(zip(values[::2], values[1::2], strict=True))
    if kind == "int":
        return int(parts[0], 16)
    if kind == "scalar":
        return _array(np.frombuffer(parts[1], np.uint8), _dtype(parts[0]), ())[()]
    number, dtype, shape = parts
    if kind == "array":
        return _array(arrays[number], _dtype(dtype), tuple(shape))
    if kind == "tensor":
        return _tensor(arrays[number], dtype, shape)
    raise ValueError(f"a value of kind {kind!r}")


def _dtype(name: str) -> np.dtype[Any]:
    dtype = np.dtype(name)
    if dtype.kind not in _ARRAY_KINDS or dtype.names is not None:
        raise ValueError(f"an array of dtype {name!r}")
    return dtype


def _array(raw: Array, dtype: np.dtype[Any], shape: tuple[int, ...]) -> Array:
    if prod(shape) * dtype.itemsize != raw.nbytes:
        raise ValueError(f"an array of {dtype} {shape} in {raw.nbytes} bytes")
    return np.ndarray(shape, dtype, raw.data if raw.nbytes else b"").astype(dtype.newbyteorder("="), copy=True)


def _tensor(raw: Array, dtype: str, shape: list[int]) -> Any:
    try:
        torch = importlib.import_module("torch")
    except ImportError as error:
        raise MissingExtra("this checkpoint has tensors: pip install 'envfleet[torch]'") from error
    kind = getattr(torch, dtype)
    if not isinstance(kind, torch.dtype) or prod(shape) * kind.itemsize != raw.nbytes:
        raise ValueError(f"a tensor of {dtype} {shape} in {raw.nbytes} bytes")
    if not raw.nbytes:
        return torch.empty(shape, dtype=kind)
    return torch.from_numpy(raw.copy()).view(kind).reshape(shape)
