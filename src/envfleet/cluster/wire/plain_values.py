"""Plain Python values with NumPy in them <-> what a message header can carry: infos, attributes, arguments.

None, bools, numbers, text, bytes and dictionaries with text as keys travel as they are. Everything else is a list
whose first entry says what it is: ["tuple", ...], ["array", dtype, shape, bytes], ... Nothing here can run code.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import msgspec
import numpy as np

from envfleet.cluster.wire.bounded_msgpack import decode_bounded
from envfleet.cluster.wire.codec import DTYPES, NAME_OF, BadMessage, require_booleans
from envfleet.contract.arrays import Array
from envfleet.contract.errors import UsageError

MAX_DEPTH = 64
_MAX_DIMS = 32
_MOST_ALIKE = 64  # keys of one dictionary with the same hash: (-1, -2) and (-2, -1) have, but few others by chance
_MIN_INT, _MAX_INT = -(2**63), 2**64 - 1
_Path = tuple["_Path", str] | None  # ((None, "['sim']"), "[3]")


class NotPlain(UsageError):
    """A value that cannot cross the wire; the text names its place and its type."""


def to_plain(value: Any, name: str = "value") -> Any:
    """What `from_plain` makes `value` of again. `name` stands for it in messages: "info['sim'][3] is a ...".

    Subclasses of Python's plain types arrive as those (a namedtuple as tuple), arrays in the machine's byte order.
    """
    return _to_plain(value, (None, name), 0)


def from_plain(value: Any) -> Any:
    """The inverse of `to_plain`. Raises BadMessage for anything that `to_plain` does not make."""
    try:
        return _from_plain(value, 0)
    except (ValueError, TypeError, OverflowError) as error:
        raise BadMessage(f"no plain value: {error}") from None


def read_plain(raw: bytes | msgspec.Raw) -> Any:
    """What `to_plain` was given, from the bytes of a message. Raises BadMessage, before much is made of them."""
    return from_plain(decode_bounded(raw))


# -- to plain --


def _to_plain(value: Any, path: _Path, depth: int) -> Any:
    convert = _CONVERTERS.get(type(value))
    if convert is not None:
        return convert(value, path, depth)
    if isinstance(value, np.generic) and value.dtype in NAME_OF:
        return ["scalar", NAME_OF[value.dtype], value.tobytes()]
    if isinstance(value, np.ndarray) and type(value) is not np.ndarray:
        raise _not_plain(value, path)  # a masked array is more than its values
    for kind, convert in _CONVERTERS.items():  # a subclass: IntEnum, namedtuple, OrderedDict, np.str_
        if isinstance(value, kind):
            return convert(value, path, depth)
    raise _not_plain(value, path)


def _plain_none(value: Any, path: _Path, depth: int) -> Any:
    return value


def _plain_int(value: int, path: _Path, depth: int) -> Any:
    return int(value) if _MIN_INT <= value <= _MAX_INT else ["int", hex(value)]


def _plain_text(value: str, path: _Path, depth: int) -> Any:
    if not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError:  # half of a surrogate pair, as in file names that are no UTF-8
            raise NotPlain(f"{_text(path)} is text that UTF-8 does not have: {value!a}") from None
    return str.__str__(value)


def _plain_dict(value: dict[Any, Any], path: _Path, depth: int) -> Any:
    _require_depth(path, depth)
    items = value.items()
    if all(type(key) is str for key in value):
        return {
            _plain_text(key, (path, f" key {key!r}"), depth): _to_plain(item, (path, f"[{key!r}]"), depth + 1)
            for key, item in items
        }
    plain: list[Any] = ["dict"]
    for key, item in items:
        plain.append(_to_plain(key, (path, f" key {key!r}"), depth + 1))
        plain.append(_to_plain(item, (path, f"[{key!r}]"), depth + 1))
    return plain


def _plain_list(value: Sequence[Any], path: _Path, depth: int) -> Any:
    return ["list", *_plain_items(value, path, depth)]


def _plain_tuple(value: Sequence[Any], path: _Path, depth: int) -> Any:
    return ["tuple", *_plain_items(value, path, depth)]


def _plain_items(items: Sequence[Any], path: _Path, depth: int) -> list[Any]:
    _require_depth(path, depth)
    return [_to_plain(item, (path, f"[{index}]"), depth + 1) for index, item in enumerate(items)]


def _plain_array(value: Array, path: _Path, depth: int) -> Any:
    if value.dtype == np.object_:
        return ["objects", value.shape, _plain_items(value.reshape(-1).tolist(), path, depth)]
    native = value.dtype.newbyteorder("=")
    if native not in NAME_OF:
        raise NotPlain(f"{_text(path)} is an array of dtype {value.dtype}; the wire knows {', '.join(DTYPES)}")
    return ["array", NAME_OF[native], value.shape, value.astype(native, copy=False).tobytes()]


_CONVERTERS: dict[type, Callable[[Any, _Path, int], Any]] = {
    type(None): _plain_none,
    bool: _plain_none,
    int: _plain_int,
    float: lambda value, path, depth: float(value),
    str: _plain_text,
    bytes: lambda value, path, depth: bytes(value),
    dict: _plain_dict,
    list: _plain_list,
    tuple: _plain_tuple,
    np.ndarray: _plain_array,
}


def _require_depth(path: _Path, depth: int) -> None:
    if depth >= MAX_DEPTH:
        raise NotPlain(f"{_text(path)} is nested deeper than {MAX_DEPTH} levels; does it contain itself?")


def _not_plain(value: Any, path: _Path) -> NotPlain:
    kind = type(value)
    module = "" if kind.__module__ == "builtins" else f"{kind.__module__}."
    return NotPlain(
        f"{_text(path)} is a {module}{kind.__qualname__}; "
        "a cluster carries None, numbers, text, bytes, lists, tuples, dictionaries and NumPy arrays of them"
    )


def _text(path: _Path) -> str:
    parts = []
    while path is not None:
        path, part = path
        parts.append(part)
    return "".join(reversed(parts))


# -- from plain --


def _from_plain(value: Any, depth: int) -> Any:
    kind = type(value)
    if kind in _AS_THEY_ARE:
        return value
    if depth > MAX_DEPTH:
        raise BadMessage(f"a value is nested deeper than {MAX_DEPTH} levels")
    if kind is dict:
        return {_text_key(key): _from_plain(item, depth + 1) for key, item in value.items()}
    if kind is not list and kind is not tuple:
        raise BadMessage(f"a value of type {kind.__name__}, which the wire does not know")
    if not value or type(value[0]) is not str:
        raise BadMessage("a list without its kind in front")
    read = _READERS.get(value[0])
    if read is None:
        raise BadMessage(f"a value of kind {value[0]!r}; known: {', '.join(_READERS)}")
    return read(value[1:], depth + 1)


def _text_key(key: Any) -> str:
    if type(key) is not str:
        raise BadMessage(f"a dictionary with the key {key!r}; keys are text here")
    return key


def _read_list(fields: Sequence[Any], depth: int) -> list[Any]:
    return [_from_plain(item, depth) for item in fields]


def _read_tuple(fields: Sequence[Any], depth: int) -> tuple[Any, ...]:
    return tuple(_from_plain(item, depth) for item in fields)


def _read_dict(fields: Sequence[Any], depth: int) -> dict[Any, Any]:
    keys = [_from_plain(key, depth) for key in fields[::2]]
    values = [_from_plain(item, depth) for item in fields[1::2]]
    hashes = Counter(map(hash, keys))
    if hashes and max(hashes.values()) > _MOST_ALIKE:
        raise BadMessage(f"a dictionary with {len(keys)} keys, of which more than {_MOST_ALIKE} have the same hash")
    return dict(zip(keys, values, strict=True))


def _read_int(fields: Sequence[Any], depth: int) -> int:
    (text,) = fields
    return int(text, 16)


def _read_scalar(fields: Sequence[Any], depth: int) -> Any:
    name, raw = fields
    return _read_array((name, (), raw), depth)[()]


def _read_array(fields: Sequence[Any], depth: int) -> Array:
    name, shape, raw = fields
    if type(name) is not str or name not in DTYPES or type(raw) is not bytes:
        raise BadMessage(f"an array of dtype {name!r}, its values as {type(raw).__name__}")
    shape, dtype = _shape(shape), DTYPES[name]
    if prod(shape) * dtype.itemsize != len(raw):
        raise BadMessage(f"an array of {name} {shape} takes {prod(shape) * dtype.itemsize} bytes; {len(raw)} came")
    array: Array = np.ndarray(shape, dtype, raw).copy()
    require_booleans("in a value", array)
    return array


def _read_objects(fields: Sequence[Any], depth: int) -> Array:
    shape, items = fields
    shape = _shape(shape)
    if not isinstance(items, list | tuple) or prod(shape) != len(items):
        raise BadMessage(f"an array of objects of shape {shape} with another number of them")
    array: Array = np.empty(len(items), dtype=object)
    for index, item in enumerate(items):
        array[index] = _from_plain(item, depth)
    return array.reshape(shape)


def _shape(shape: Any) -> tuple[int, ...]:
    if (
        not isinstance(shape, list | tuple)
        or len(shape) > _MAX_DIMS
        or not all(type(dim) is int and dim >= 0 for dim in shape)
    ):
        raise BadMessage(f"an array of shape {shape!r}")
    return tuple(shape)


_AS_THEY_ARE = {type(None), bool, int, float, str, bytes}
_READERS: dict[str, Callable[[Sequence[Any], int], Any]] = {
    "list": _read_list,
    "tuple": _read_tuple,
    "dict": _read_dict,
    "int": _read_int,
    "scalar": _read_scalar,
    "array": _read_array,
    "objects": _read_objects,
}
