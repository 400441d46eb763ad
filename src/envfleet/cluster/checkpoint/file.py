"""The file of a checkpoint: a header of plain values, raw arrays behind it, and a hash of it all. Written atomically.

    "ENVFLEET", format (uint32), 0 (uint32), size of the header (uint64)    all numbers little-endian
    header: MessagePack, [content, [[position, size] of each array]]; positions count from the first array
    the bytes of each array, at a multiple of 64
    blake2b of all bytes before it, 32 bytes

What `content` means, and which array is what, is not known here. Nothing in a file is ever executed or unpickled here.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from envfleet.contract.arrays import Array
from envfleet.contract.errors import CheckpointError

FORMAT = 1
MAGIC = b"ENVFLEET"
_START = struct.Struct("<8sIIQ")
_DIGEST_BYTES = 32
_ALIGNMENT = 64
_NUM_ATTEMPTS = 100  # to find a name for the new file
KEPT = "A checkpoint that was there before stays as it was"

Path_ = str | os.PathLike[str]


def write_file(path: Path_, content: Any, arrays: Sequence[Array]) -> None:
    """Write a checkpoint. A process that is killed meanwhile leaves the file that was there before.

    Args:
        path: Of the file. Folders that are missing are made.
        content: What MessagePack can carry.
        arrays: Each one-dimensional, of uint8.

    Raises:
        CheckpointError: The file cannot be written; the one that was there before stays as it was.
    """
    target = Path(path)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        _remove_left_over(target)
        with _new_file(target) as (descriptor, unfinished):
            with open(descriptor, "wb", buffering=1 << 20, closefd=False) as file:
                _write(file, content, arrays)
                file.flush()
                os.fsync(descriptor)
            os.replace(unfinished, target)
        _sync_folder(target.parent)
    except OSError as error:
        raise CheckpointError(f"{target} cannot be written: {error}. {KEPT}") from error


def read_file(path: Path_) -> tuple[Any, list[Array]]:
    """Read a checkpoint, and check its hash before anything is made of it.

    Args:
        path: Of the file.

    Returns:
        The content, and the arrays: views of one block of memory, of uint8.

    Raises:
        CheckpointError: There is no such file, it is no checkpoint, is damaged, or is of a newer version.
    """
    try:
        data = np.fromfile(path, np.uint8)
    except FileNotFoundError:
        raise CheckpointError(f"there is no checkpoint {os.fspath(path)}: save() makes one") from None
    except OSError as error:
        raise CheckpointError(f"{os.fspath(path)} cannot be read: {error}") from error
    raw = data.data
    if len(raw) < _START.size or bytes(raw[: len(MAGIC)]) != MAGIC:
        raise CheckpointError(f"{os.fspath(path)} is no checkpoint of EnvFleet, or its beginning is missing")
    _, file_format, _, header_bytes = _START.unpack_from(raw)
    if file_format > FORMAT:
        raise CheckpointError(
            f"{os.fspath(path)} has format {file_format}; this version of EnvFleet reads formats up to {FORMAT}: "
            "install the version that wrote it, or a newer one"
        )
    end = len(raw) - _DIGEST_BYTES
    if end < _START.size or _digest(raw[:end]) != bytes(raw[end:]):
        raise CheckpointError(
            f"{os.fspath(path)} is damaged or cut off: its {len(raw):,} bytes do not have the hash at its end. Resume "
            "from an earlier checkpoint"
        )
    try:
        content, places = msgspec.msgpack.decode(raw[_START.size : _START.size + header_bytes])
        arrays = data[_aligned(_START.size + header_bytes) : end]
        return content, [_part(arrays, start, size) for start, size in places]
    except (msgspec.DecodeError, ValueError, TypeError) as error:
        raise CheckpointError(f"{os.fspath(path)} cannot be read: {error}") from None


def _part(data: Array, start: int, size: int) -> Array:
    if not 0 <= start <= start + size <= len(data):
        raise ValueError(f"an array from {start} to {start + size} among {len(data)} bytes")
    return data[start : start + size]


def _write(file: Any, content: Any, arrays: Sequence[Array]) -> None:
    places = _places(arrays)
    header = msgspec.msgpack.encode([content, places])
    hashed = hashlib.blake2b(digest_size=_DIGEST_BYTES)
    position = 0

    def put(part: Any) -> None:
        nonlocal position
        hashed.update(part)
        file.write(part)
        position += len(part)

    put(_START.pack(MAGIC, FORMAT, 0, len(header)))
    put(header)
    first = _aligned(position)
    for (start, _), array in zip(places, arrays, strict=True):
        put(bytes(first + start - position))
        put(np.ascontiguousarray(array).data)
    file.write(hashed.digest())


def _places(arrays: Sequence[Array]) -> list[tuple[int, int]]:
    places, start = [], 0
    for array in arrays:
        places.append((start, array.nbytes))
        start = _aligned(start + array.nbytes)
    return places


def _aligned(position: int) -> int:
    return -(-position // _ALIGNMENT) * _ALIGNMENT


def _digest(data: memoryview) -> bytes:
    return hashlib.blake2b(data, digest_size=_DIGEST_BYTES).digest()


# -- files that are being written --


@contextlib.contextmanager
def _new_file(target: Path) -> Iterator[tuple[int, Path]]:
    """A file beside the target, locked while this process lives; removed at the end if it was not renamed."""
    for attempt in range(_NUM_ATTEMPTS):
        unfinished = target.with_name(f".{target.name}.{os.getpid()}-{attempt}.unfinished")
        try:
            descriptor = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        except FileExistsError:
            continue
        try:
            _lock(descriptor)
            if os.fstat(descriptor).st_nlink:  # otherwise another save() took it for one that was left over
                yield descriptor, unfinished
                return
        except BaseException:
            with contextlib.suppress(OSError):
                unfinished.unlink()
            raise
        finally:
            os.close(descriptor)
    raise FileExistsError(f"{target.parent} has {_NUM_ATTEMPTS} unfinished files of this process")


def _remove_left_over(target: Path) -> None:
    """Remove what saves of processes that are dead have left: nobody has a lock on it."""
    for unfinished in target.parent.glob(f".{_literal(target.name)}.*.unfinished"):
        with contextlib.suppress(OSError):
            descriptor = os.open(unfinished, os.O_WRONLY | os.O_CLOEXEC)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                unfinished.unlink()
            finally:
                os.close(descriptor)


def _literal(name: str) -> str:
    return "".join(f"[{letter}]" if letter in "*?[" else letter for letter in name)


def _lock(descriptor: int) -> None:
    with contextlib.suppress(OSError):  # a file system without locks: nobody else can take one either
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)


def _sync_folder(folder: Path) -> None:
    """The new name must survive a power cut, too."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
