"""MessagePack of any form -> Python values, whose memory is bounded by the bytes that came, and whose keys are text.

One byte can be an empty list, which takes 64 bytes: the parts are counted before one of them is made. Dictionaries
are only made with text as keys: Python hashes text with a secret, while ints can be chosen so that all collide.
"""

from __future__ import annotations

from typing import Any

import msgspec

from envfleet.cluster.wire.codec import BadMessage

MOST_PARTS = 1 << 18  # of one value, whatever its size: 19 MB if each were an empty dictionary
BYTES_OF_A_PART = 8  # for this many bytes of a value one more part is allowed: a float takes 9

_EMPTY_MAP = 0x80
_TEXTS = {0xD9: 1, 0xDA: 2, 0xDB: 4}  # first byte -> bytes of the length that follows
_BLOBS = {**_TEXTS, 0xC4: 1, 0xC5: 2, 0xC6: 4}
_EXTENSIONS = {0xC7: 1, 0xC8: 2, 0xC9: 4}  # their type is one byte more
_LISTS = {0xDC: 2, 0xDD: 4}
_MAPS = {0xDE: 2, 0xDF: 4}
_NUMBERS = {
    **dict.fromkeys((0xCC, 0xD0), 2),
    **dict.fromkeys((0xCD, 0xD1, 0xD4), 3),
    0xD5: 4,
    **dict.fromkeys((0xCA, 0xCE, 0xD2), 5),
    0xD6: 6,
    **dict.fromkeys((0xCB, 0xCF, 0xD3), 9),
    0xD7: 10,
    0xD8: 18,
}


def _fixed_size(first: int) -> int:
    if 0xA0 <= first <= 0xBF:  # short text
        return 1 + (first & 0x1F)
    is_one_byte = first <= 0x7F or first >= 0xE0 or first in (0xC0, 0xC2, 0xC3)
    return 1 if is_one_byte else _NUMBERS.get(first, 0)


_FIXED_SIZES = [_fixed_size(first) for first in range(256)]  # with the first byte; 0: it is not known from that alone
_IS_TEXT = [0xA0 <= first <= 0xBF or first in _TEXTS for first in range(256)]


def decode_bounded(raw: bytes | msgspec.Raw) -> Any:
    """The value in `raw`. Raises BadMessage, and nothing else, whatever it holds."""
    data = memoryview(raw)
    if len(data) == 1 and data[0] == _EMPTY_MAP:
        return {}  # most infos
    _require_bounded(data)
    try:
        return msgspec.msgpack.decode(data)
    except Exception as error:  # too deep, no UTF-8, ...
        raise BadMessage(f"no value: {error}") from None


def _require_bounded(data: memoryview) -> None:
    """Walk through the value without making anything of it."""
    most_parts = num_parts_left = MOST_PARTS + len(data) // BYTES_OF_A_PART
    size, position = len(data), 0
    left, is_map = 1, False  # parts of the list or dictionary that we are in
    outer: list[tuple[int, bool]] = []
    while left or outer:
        if not left:
            left, is_map = outer.pop()
            continue
        if position >= size:
            raise BadMessage("a value ends before all its parts have come")
        first = data[position]
        if is_map and left % 2 == 0 and not _IS_TEXT[first]:
            raise BadMessage(f"a dictionary has a key that is no text: its first byte is {first:#04x}")
        left -= 1
        if fixed_size := _FIXED_SIZES[first]:
            position += fixed_size
        elif width := _BLOBS.get(first):
            position += 1 + width + _length(data, position, width)
        elif width := _EXTENSIONS.get(first):
            position += 2 + width + _length(data, position, width)
        else:
            outer.append((left, is_map))
            left, is_map, num_bytes = _container(data, position, first)
            position += num_bytes
            num_parts_left -= left
            if num_parts_left < 0:
                raise BadMessage(
                    f"a value of {size:,} bytes has more than {most_parts:,} entries in its lists and dictionaries; "
                    "return numbers in a NumPy array, which counts as one entry"
                )


def _container(data: memoryview, position: int, first: int) -> tuple[int, bool, int]:
    """Its number of parts; whether every other one of them is a key; the bytes of its own."""
    if first <= 0x8F:
        return 2 * (first & 0x0F), True, 1
    if first <= 0x9F:
        return first & 0x0F, False, 1
    if width := _LISTS.get(first):
        return _length(data, position, width), False, 1 + width
    if width := _MAPS.get(first):
        return 2 * _length(data, position, width), True, 1 + width
    raise BadMessage(f"a value begins with the byte {first:#04x}, which MessagePack does not have")


def _length(data: memoryview, position: int, width: int) -> int:
    return int.from_bytes(data[position + 1 : position + 1 + width], "big")
