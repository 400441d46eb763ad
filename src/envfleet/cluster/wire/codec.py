"""A message and its arrays <-> frames: one header, then the bytes of each array, without a copy. No sockets.

Small arrays ride in the header: a frame of their own would cost more than the copy.

The header says what each frame holds; every number in it is checked before anything is made of it. Nothing here can
run code: there is no pickle, and dtypes are taken from a fixed list.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from math import prod
from typing import Annotated, Any, Generic, TypeVar

import msgspec
import numpy as np

from envfleet.cluster.wire.messages import Limits
from envfleet.contract.arrays import Array, Arrays
from envfleet.contract.errors import ClusterError, MissingExtra, UsageError

Frame = bytes | memoryview | Array  # whatever has a contiguous buffer
Message = TypeVar("Message", bound=msgspec.Struct)

_DTYPE_NAMES = "bool int8 int16 int32 int64 uint8 uint16 uint32 uint64 float16 float32 float64"
DTYPES = {name: np.dtype(name) for name in _DTYPE_NAMES.split()}
COMPRESSIONS = ("zstd",)
NAME_OF = {dtype: name for name, dtype in DTYPES.items()}  # dtype.name is slow
_MIN_PACKED_BYTES = 4096
_LIMITS = Limits()
_MAX_INLINE_BYTES = 4096
_MAX_INLINE_TOTAL_BYTES = 1 << 20
_ZSTD_LEVEL = 1
_MOST_DIMS_READ = 64  # NumPy has no more; Limits allow less


class BadMessage(ClusterError):
    """Frames that are no message of this protocol; the text says what is wrong with them."""


class _ArrayHeader(msgspec.Struct, frozen=True, array_like=True, gc=False):
    name: str
    dtype: str
    shape: Annotated[tuple[Annotated[int, msgspec.Meta(ge=0)], ...], msgspec.Meta(max_length=_MOST_DIMS_READ)]
    packed: bool = False  # the frame is compressed with zstd
    inline: bytes | None = None  # there is no frame: here it is


def encode(
    message: msgspec.Struct, arrays: Mapping[str, Array] | None = None, compression: str | None = None
) -> list[Frame]:
    """The frames to send. Arrays are not copied if they are contiguous: do not change them until they are sent.

    With compression "zstd" the larger arrays of uint8 (images) are packed, where that makes them smaller.
    """
    if not arrays:
        header = _encoder.encode((message, ()))
        _require_within_limits([header])
        return [header]
    pack = None if compression is None else _packer(compression)
    headers: list[tuple[Any, ...]] = []
    frames: list[Frame] = [b""]
    num_inline_bytes = 0
    for name, array in arrays.items():
        dtype = NAME_OF.get(array.dtype)
        if dtype is None:
            array, dtype = _native_order(name, array)
        if array.nbytes <= _MAX_INLINE_BYTES and num_inline_bytes < _MAX_INLINE_TOTAL_BYTES:
            num_inline_bytes += array.nbytes
            headers.append((name, dtype, array.shape, False, array.tobytes()))
            continue
        if not array.flags.c_contiguous:
            array = np.ascontiguousarray(array)
        if pack is not None and dtype == "uint8" and array.nbytes >= _MIN_PACKED_BYTES:
            packed = pack(array.reshape(-1).data)
            if len(packed) < array.nbytes:
                headers.append((name, dtype, array.shape, True))
                frames.append(packed)
                continue
        headers.append((name, dtype, array.shape))
        frames.append(array)
    frames[0] = _encoder.encode((message, headers))
    _require_within_limits(frames)
    return frames


def _require_within_limits(frames: Sequence[Any]) -> None:
    """What the other side would drop, and would be sent again for ever, is not sent at all."""
    header_bytes = len(frames[0])
    frame_bytes = [len(frame) if isinstance(frame, bytes) else frame.nbytes for frame in frames[1:]]
    if (
        header_bytes > _LIMITS.header_bytes
        or len(frame_bytes) > _LIMITS.num_arrays
        or max(frame_bytes, default=0) > _LIMITS.frame_bytes
        or header_bytes + sum(frame_bytes) > _LIMITS.total_bytes
    ):
        raise UsageError(
            f"a message of {header_bytes + sum(frame_bytes):,} bytes in {len(frame_bytes)} arrays is too large: "
            f"docs/protocol.md has the limits"
        )


class Decoder(Generic[Message]):
    """Decodes the messages of one direction. Raises BadMessage, and nothing else, whatever the frames hold."""

    def __init__(self, messages: Any, limits: Limits | None = None) -> None:
        """`messages` is a union of tagged structs."""
        self._limits = limits or Limits()
        # msgspec asks for the length before it makes anything: 4 bytes are enough for a header of 64.
        headers = Annotated[tuple[_ArrayHeader, ...], msgspec.Meta(max_length=_LIMITS.num_arrays)]
        self._decode_header = msgspec.msgpack.Decoder(tuple[messages, headers]).decode

    def decode(self, frames: Sequence[Any]) -> tuple[Message, dict[str, Array]]:
        """The message and its arrays, which cannot be written: they are views of the frames.

        Two kinds are no views: what was compressed, and small arrays whose bytes ZeroMQ did not align.
        """
        buffers = [memoryview(frame) for frame in frames]
        self._require_sizes(buffers)
        try:
            message, headers = self._decode_header(buffers[0])
        except Exception as error:  # truncated, of another type, too deep, no UTF-8, ...: all the sender's fault
            raise BadMessage(f"the header is no message of this protocol: {error}") from None
        if len(headers) > self._limits.num_arrays:
            raise BadMessage(f"{len(headers)} arrays; at most {self._limits.num_arrays} are allowed")
        num_frames = sum(header.inline is None for header in headers)
        if num_frames != len(buffers) - 1:
            raise BadMessage(f"the header tells of {num_frames} frames; {len(buffers) - 1} came")
        arrays: dict[str, Array] = {}
        num_bytes_left = self._limits.total_bytes
        frame_of = iter(buffers[1:])
        for header in headers:
            inline, dtype = header.inline, DTYPES.get(header.dtype)
            if inline and dtype and len(header.shape) <= 4 and len(inline) == dtype.itemsize * prod(header.shape):
                arrays[header.name] = np.ndarray(
                    header.shape, dtype, inline
                )  # bytes are aligned, and cannot be written
                num_bytes_left -= len(inline)
                continue
            buffer = next(frame_of) if header.inline is None else memoryview(header.inline)
            array = _array(header, buffer, self._limits, num_bytes_left)
            num_bytes_left -= array.nbytes
            arrays[header.name] = array
        if len(arrays) != len(headers):
            names = [header.name for header in headers]
            raise BadMessage(f"array {next(name for name in names if names.count(name) > 1)!r} comes twice")
        return message, arrays

    def _require_sizes(self, buffers: Sequence[memoryview]) -> None:
        limits = self._limits
        if not buffers:
            raise BadMessage("a message has at least one frame")
        if len(buffers) > limits.num_arrays + 1:
            raise BadMessage(f"{len(buffers) - 1} arrays; at most {limits.num_arrays} are allowed")
        if buffers[0].nbytes > limits.header_bytes:
            raise BadMessage(f"a header of {buffers[0].nbytes} bytes; at most {limits.header_bytes} are allowed")
        total_bytes = 0
        for buffer in buffers:
            if buffer.nbytes > limits.frame_bytes:
                raise BadMessage(f"a frame of {buffer.nbytes} bytes; at most {limits.frame_bytes} are allowed")
            total_bytes += buffer.nbytes
        if total_bytes > limits.total_bytes:
            raise BadMessage(f"a message of {total_bytes} bytes; at most {limits.total_bytes} are allowed")


def named(arrays: Arrays, prefix: str) -> dict[str, Array]:
    """The arrays whose names begin with `prefix`, by the rest of their names."""
    return {name.removeprefix(prefix): array for name, array in arrays.items() if name.startswith(prefix)}


def require_booleans(name: str, array: Array) -> None:
    """Refuse bytes that are neither 0 nor 1 in an array of bool: NumPy itself takes them for both at once."""
    if array.dtype.char == "?" and array.tobytes().translate(None, b"\0\1"):
        raise BadMessage(f"array {name!r} of bool has bytes that are neither 0 nor 1")


def _array(header: _ArrayHeader, buffer: memoryview, limits: Limits, num_bytes_left: int) -> Array:
    shape = header.shape
    dtype = DTYPES.get(header.dtype)
    if dtype is None:
        raise BadMessage(f"array {header.name!r} has dtype {header.dtype!r}; known: {', '.join(DTYPES)}")
    if len(shape) > limits.num_dims:
        raise BadMessage(f"array {header.name!r} has shape {shape}; at most {limits.num_dims} dimensions are allowed")
    num_bytes = dtype.itemsize * prod(shape)
    if header.packed:
        if num_bytes > min(limits.frame_bytes, num_bytes_left):
            raise BadMessage(f"array {header.name!r} of {header.dtype} {shape} would unpack to {num_bytes} bytes")
        buffer = memoryview(_unpacked(header.name, buffer, num_bytes))
    if num_bytes != buffer.nbytes:
        raise BadMessage(
            f"array {header.name!r} of {header.dtype} {shape} takes {num_bytes} bytes; {buffer.nbytes} came"
        )
    try:
        array: Array = np.ndarray(shape, dtype, buffer if num_bytes else b"")
    except (ValueError, OverflowError) as error:  # dimensions that NumPy cannot have beside a 0
        raise BadMessage(f"array {header.name!r} has shape {shape}: {error}") from None
    flags = array.flags
    if not flags.aligned:
        array = array.copy()
        flags = array.flags
    if flags.writeable:
        flags.writeable = False
    return array


def _native_order(name: str, array: Array) -> tuple[Array, str]:
    dtype = array.dtype.newbyteorder("=")
    if dtype not in NAME_OF:
        raise UsageError(f"array {name!r} has dtype {array.dtype}; the wire knows {', '.join(DTYPES)}")
    return array.astype(dtype, copy=False), NAME_OF[dtype]


def _packer(compression: str) -> Any:
    if compression not in COMPRESSIONS:
        raise UsageError(f"no compression is called {compression!r}; known: {', '.join(COMPRESSIONS)}")
    try:
        return _zstandard().ZstdCompressor(level=_ZSTD_LEVEL).compress
    except ImportError as error:
        raise MissingExtra("compression='zstd' needs zstandard: pip install 'envfleet[zstd]'") from error


def _unpacked(name: str, buffer: memoryview, num_bytes: int) -> bytes:
    """Exactly `num_bytes`. The size in the frame is checked first, because zstd allocates that much."""
    try:
        zstandard = _zstandard()
    except ImportError:
        raise BadMessage(
            f"array {name!r} is compressed, and zstandard is not installed here: pip install 'envfleet[zstd]'"
        ) from None
    try:
        if zstandard.frame_content_size(buffer) != num_bytes:
            raise BadMessage(f"array {name!r} does not unpack to the {num_bytes} bytes its header tells of")
        unpacked: bytes = zstandard.ZstdDecompressor().decompress(buffer)
    except zstandard.ZstdError as error:
        raise BadMessage(f"array {name!r} does not unpack: {error}") from None
    return unpacked


def _zstandard() -> Any:
    return importlib.import_module("zstandard")


_encoder = msgspec.msgpack.Encoder()
