"""Stacked frames cross the wire once: a stack that is its predecessor, moved on by one frame, is sent as that frame.

K frames make a stack, oldest first. Whether a row really is its moved predecessor is checked bit by bit; rows that
are not (the first of an episode) are sent whole. Other arrays are left to the caller, who sends them as they are.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Any

import numpy as np

from envfleet.cluster.wire.codec import NAME_OF, BadMessage
from envfleet.contract.arrays import Array

_MIN_STACK, _MAX_STACK = 2, 16
_MIN_ROW_BYTES = 1024
_WORTHWHILE = 2 / 3  # of the plain size, at most


def is_stack(leaf_shape: tuple[int, ...], dtype: Any) -> bool:
    """Whether one observation of this shape [K, *frame] may be a stack of frames that is worth packing."""
    return (
        len(leaf_shape) >= 2
        and _MIN_STACK <= leaf_shape[0] <= _MAX_STACK
        and np.dtype(dtype) in NAME_OF
        and prod(leaf_shape) * np.dtype(dtype).itemsize >= _MIN_ROW_BYTES
    )


def pack(name: str, stacks: Array) -> dict[str, Array] | None:
    """The arrays to send for `stacks` [T1, N, K, *frame]; None if they are no stacks, or not a third is saved."""
    if stacks.ndim < 4 or len(stacks) < 2 or not stacks.shape[1] or not is_stack(stacks.shape[2:], stacks.dtype):
        return None
    num_times, num_envs, num_frames = stacks.shape[:3]
    num_rows = num_times * num_envs
    max_whole_rows = int(num_rows * _WORTHWHILE - num_envs - (num_rows - num_envs) / num_frames)
    rows = _words(stacks.reshape(num_times, num_envs, -1))
    shift = rows.shape[-1] // num_frames
    scratch: Array = np.empty((num_envs, rows.shape[-1] - shift), np.bool_)
    whole_at: list[Array] = []
    num_whole_rows = 0
    for time in range(1, num_times):
        different = _different(rows[time - 1], rows[time], shift, scratch)
        if len(different):
            whole_at.append(different + time * num_envs)
            num_whole_rows += len(different)
        if num_whole_rows > max_whole_rows:
            return None
    indices = np.concatenate(whole_at) if whole_at else np.zeros(0, np.int64)
    return {
        f"{name}/first": np.ascontiguousarray(stacks[0]),
        f"{name}/newest": np.ascontiguousarray(stacks[1:, :, -1]),
        f"{name}/whole_at": indices,
        f"{name}/whole": stacks[indices // num_envs, indices % num_envs],
    }


def parts(
    name: str, arrays: Mapping[str, Array], shape: tuple[int, ...], dtype: np.dtype[Any]
) -> tuple[Array, Array, Array, Array]:
    """What `pack` made of stacks of this shape: first, newest, whole_at, whole. Raises BadMessage if it is not that."""
    num_times, num_envs, *stack = shape
    first = _take(name, "first", arrays, (num_envs, *stack), dtype)
    newest = _take(name, "newest", arrays, (num_times - 1, num_envs, *stack[1:]), dtype)
    return first, newest, *_take_whole(name, arrays, tuple(stack), dtype, num_envs, num_times * num_envs)


def final_parts(
    name: str, arrays: Mapping[str, Array], shape: tuple[int, ...], dtype: np.dtype[Any]
) -> tuple[Array, Array, Array]:
    """What `pack_finals` made of stacks of this shape: newest, whole_at, whole. Raises BadMessage as `parts` does."""
    num_rows, *stack = shape
    newest = _take(name, "newest", arrays, (num_rows, *stack[1:]), dtype)
    return newest, *_take_whole(name, arrays, tuple(stack), dtype, 0, num_rows)


def unpack(name: str, arrays: Mapping[str, Array], out: Array) -> None:
    """Write what `pack` was given into `out` [T1, N, K, *frame]. Raises BadMessage if the arrays do not fit it."""
    num_times, num_envs = out.shape[:2]
    first, newest, whole_at, whole = parts(name, arrays, out.shape, out.dtype)
    stops = np.searchsorted(whole_at, np.arange(1, num_times + 1) * num_envs).tolist()
    out[0] = first
    for time in range(1, num_times):
        out[time, :, :-1] = out[time - 1, :, 1:]
        out[time, :, -1] = newest[time - 1]
        start, stop = stops[time - 1], stops[time]
        if start < stop:
            out[time, whole_at[start:stop] - time * num_envs] = whole[start:stop]


def pack_finals(name: str, finals: Array, before: Array) -> dict[str, Array] | None:
    """The arrays to send for `finals` [F, K, *frame], each of which follows a row of `before`; None as in `pack`."""
    if finals.ndim < 3 or not len(finals) or not is_stack(finals.shape[1:], finals.dtype):
        return None
    num_rows, num_frames = finals.shape[:2]
    before_rows, rows = _words(before.reshape(num_rows, -1)), _words(finals.reshape(num_rows, -1))
    shift = rows.shape[-1] // num_frames
    scratch: Array = np.empty((num_rows, rows.shape[-1] - shift), np.bool_)
    whole_at = _different(before_rows, rows, shift, scratch)
    if len(whole_at) + num_rows / num_frames > num_rows * _WORTHWHILE:
        return None
    newest = np.ascontiguousarray(finals[:, -1])
    return {f"{name}/newest": newest, f"{name}/whole_at": whole_at, f"{name}/whole": finals[whole_at]}


def unpack_finals(name: str, arrays: Mapping[str, Array], before: Array) -> Array:
    """What `pack_finals` was given, from the same `before` [F, K, *frame]. Raises BadMessage if they do not fit."""
    newest, whole_at, whole = final_parts(name, arrays, before.shape, before.dtype)
    finals: Array = np.empty_like(before, order="C")
    finals[:, :-1] = before[:, 1:]
    finals[:, -1] = newest
    finals[whole_at] = whole
    return finals


def _different(before: Array, after: Array, shift: int, scratch: Array) -> Array:
    """Which rows [N] of `after` are not those of `before`, moved by `shift` words."""
    np.equal(after[:, :-shift], before[:, shift:], out=scratch)
    return np.flatnonzero(~scratch.all(axis=1))


def _words(rows: Array) -> Array:
    """Rows as unsigned ints, so that bits are compared: a NaN equals itself, and -0.0 is not 0.0."""
    if rows.strides[-1] != rows.itemsize:
        rows = np.ascontiguousarray(rows)
    return rows.view(f"u{rows.itemsize}")


def _take(name: str, part: str, arrays: Mapping[str, Array], shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
    array = arrays.get(f"{name}/{part}")
    if array is None:
        raise BadMessage(f"array '{name}/{part}' is missing")
    if array.shape != shape or array.dtype != dtype:
        raise BadMessage(f"array '{name}/{part}' is {array.dtype} {array.shape}, not {dtype} {shape}")
    return array


def _take_whole(
    name: str, arrays: Mapping[str, Array], stack: tuple[int, ...], dtype: np.dtype[Any], low: int, high: int
) -> tuple[Array, Array]:
    """The places of whole rows, in [low, high) and rising, and the rows."""
    indices = arrays.get(f"{name}/whole_at")
    if indices is None or indices.ndim != 1:
        raise BadMessage(f"array '{name}/whole_at' is missing, or no list of rows")
    indices = _take(name, "whole_at", arrays, indices.shape, np.dtype(np.int64))
    if len(indices) and (indices[0] < low or indices[-1] >= high or not (indices[:-1] < indices[1:]).all()):
        raise BadMessage(f"array '{name}/whole_at' does not rise from at least {low} to less than {high}")
    return indices, _take(name, "whole", arrays, (len(indices), *stack), dtype)
