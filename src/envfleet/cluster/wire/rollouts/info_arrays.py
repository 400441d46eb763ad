"""Infos of a rollout on the wire: columns as arrays, whose keys are in the message, and values of other kinds as plain.

Column i is array `info.<i>` with its mask `info_mask.<i>`; without a mask all rows have it, and without the array it is
a dictionary, whose parts are columns of their own. Those of the last steps of episodes are `final_info.<i>`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import numpy as np

from envfleet.cluster.info_choice import MOST_INFO_BYTES, InfoChoice
from envfleet.cluster.wire.bounded_msgpack import decode_bounded
from envfleet.cluster.wire.codec import BadMessage, require_booleans
from envfleet.cluster.wire.messages import RolloutInfos
from envfleet.cluster.wire.plain_values import NotPlain, from_plain, to_plain
from envfleet.contract.arrays import Array, Arrays
from envfleet.contract.infos.flat import Dense, FlatInfos, Path, Sparse
from envfleet.contract.infos.store import MOST_DEPTH, MOST_KEY_CHARS, MOST_KEYS

STEPS, FINALS = "info", "final_info"
MOST_LEFT_OUT_CHARS = 1024
OF_NO_USE = "in values that are no numbers there are more parts than a message may have; choose fewer keys"


def packed(steps: FlatInfos, finals: FlatInfos, left_out: dict[str, str]) -> tuple[RolloutInfos, dict[str, Array]]:
    """What to send. What cannot be sent is added to `left_out`."""
    arrays: dict[str, Array] = {}
    objects: dict[str, dict[Path, Any]] = {}
    names = {}
    for prefix, flat in ((STEPS, steps), (FINALS, finals)):
        dense = {path: column for path, column in flat.items() if isinstance(column, Dense)}
        sparse = {path: column for path, column in flat.items() if isinstance(column, Sparse)}
        names[prefix] = [list(path) for path in dense]
        objects[prefix] = _plain_objects(sparse, left_out)
        for index, column in enumerate(dense.values()):
            if column.values is not None:
                arrays[f"{prefix}.{index}"] = column.values
            if column.values is None or not column.mask.all():
                arrays[f"{prefix}_mask.{index}"] = column.mask
    values = _bounded(objects, left_out)
    told = [f"{key!r} ({why})"[:MOST_LEFT_OUT_CHARS] for key, why in left_out.items()][:MOST_KEYS]
    return RolloutInfos(steps=names[STEPS], finals=names[FINALS], objects=values, left_out=told), arrays


def _plain_objects(columns: Mapping[Path, Sparse], left_out: dict[str, str]) -> dict[Path, Any]:
    plain: dict[Path, Any] = {}
    for path, column in columns.items():
        try:
            plain[path] = [list(path), to_plain(column.at), to_plain(column.values, f"info[{path[-1]!r}]")]
        except NotPlain as error:
            left_out["/".join(path)] = str(error)
    return plain


def _bounded(objects: Mapping[str, dict[Path, Any]], left_out: dict[str, str]) -> msgspec.Raw:
    """The bytes of all values. The key with the most of them is left out while there are too many for the head."""
    while True:
        raw = msgspec.msgpack.encode({prefix: list(each.values()) for prefix, each in objects.items() if each})
        try:
            decode_bounded(raw)
        except BadMessage:
            sizes = {
                (prefix, path): len(msgspec.msgpack.encode(plain))
                for prefix, each in objects.items()
                for path, plain in each.items()
            }
            prefix, path = max(sizes, key=sizes.__getitem__)
            del objects[prefix][path]
            left_out["/".join(path)] = OF_NO_USE
        else:
            return msgspec.Raw(raw)


# -- at the head --


def unpacked(
    sent: RolloutInfos, arrays: Arrays, choice: InfoChoice, num_steps: int, num_envs: int, num_finals: int
) -> tuple[FlatInfos, FlatInfos]:
    """The infos of the steps, and of the last steps of episodes. Raises BadMessage."""
    objects = decode_bounded(sent.objects)
    if not isinstance(objects, dict) or not objects.keys() <= {STEPS, FINALS}:
        raise BadMessage(f"values of infos must be a dictionary with {STEPS} and {FINALS}")
    if len(sent.left_out) > MOST_KEYS or any(len(each) > MOST_LEFT_OUT_CHARS for each in sent.left_out):
        raise BadMessage(f"more than {MOST_KEYS} infos were left out, or for reasons longer than {MOST_LEFT_OUT_CHARS}")
    if objects and not choice.has_objects:
        raise BadMessage("infos that are no numbers, which were not asked for")
    steps = _columns(STEPS, sent.steps, arrays, (num_steps, num_envs))
    finals = _columns(FINALS, sent.finals, arrays, (num_finals,))
    num_bytes = sum(array.nbytes for name, array in arrays.items() if name.startswith((f"{STEPS}.", f"{FINALS}.")))
    if not choice.has_objects and num_bytes > MOST_INFO_BYTES:
        raise BadMessage(f"infos of {num_bytes:,} bytes; at most {MOST_INFO_BYTES:,} if no keys were chosen")
    for flat, prefix, shape in ((steps, STEPS, (num_steps, num_envs)), (finals, FINALS, (num_finals,))):
        for path, column in _values(objects.get(prefix, []), shape):
            if path in flat:
                raise BadMessage(f"the info {path!r} comes twice")
            flat[path] = column
        _require_paths(flat, choice)
    return steps, finals


def _columns(prefix: str, names: Sequence[Sequence[str]], arrays: Arrays, shape: tuple[int, ...]) -> FlatInfos:
    if len(names) > MOST_KEYS:
        raise BadMessage(f"{len(names)} infos; at most {MOST_KEYS} are allowed")
    if names and 0 in shape:
        raise BadMessage("infos of the ends of episodes, of which there are none")
    flat: FlatInfos = {}
    for index, keys in enumerate(names):
        values, mask = arrays.get(f"{prefix}.{index}"), arrays.get(f"{prefix}_mask.{index}")
        if values is not None:
            if values.shape[: len(shape)] != shape:
                raise BadMessage(f"array '{prefix}.{index}' must begin with {shape}; got {values.shape}")
            require_booleans(f"{prefix}.{index}", values)
        if mask is None:
            if values is None:
                raise BadMessage(f"of the info {keys!r} neither values nor a mask has come")
            mask = np.ones(shape, np.bool_)
        elif mask.shape != shape or mask.dtype != np.bool_:
            raise BadMessage(f"array '{prefix}_mask.{index}' must be bool {shape}; got {mask.dtype} {mask.shape}")
        else:
            require_booleans(f"{prefix}_mask.{index}", mask)
        if tuple(keys) in flat:
            raise BadMessage(f"the info {keys!r} comes twice")
        flat[tuple(keys)] = Dense(values, mask)
    return flat


def _values(objects: Any, shape: tuple[int, ...]) -> list[tuple[Path, Sparse]]:
    if not isinstance(objects, list) or len(objects) > MOST_KEYS:
        raise BadMessage(f"values of infos must be a list of at most {MOST_KEYS}")
    found = []
    for each in objects:
        if not isinstance(each, list) or len(each) != 3 or not isinstance(each[0], list):
            raise BadMessage("values of an info must be its keys, places and values")
        keys, at, values = each[0], from_plain(each[1]), from_plain(each[2])
        if not all(isinstance(key, str) for key in keys):
            raise BadMessage("the keys of an info must be text")
        if not isinstance(at, np.ndarray) or at.dtype != np.int64 or at.shape[1:] != (len(shape),):
            raise BadMessage(f"the places of info {keys!r} must be int64 [K, {len(shape)}]")
        if not isinstance(values, list) or len(values) != len(at):
            raise BadMessage(f"info {keys!r} has another number of values than of places")
        if len(at) and ((at < 0).any() or (at >= shape).any()):
            raise BadMessage(f"info {keys!r} has values outside {shape}")
        found.append((tuple(keys), Sparse(at, values)))
    return found


def _require_paths(flat: FlatInfos, choice: InfoChoice) -> None:
    """Keys that were asked for, and dictionaries around those that are inside one."""
    for path in flat:
        if not 1 <= len(path) <= MOST_DEPTH + 1 or not all(len(key) <= MOST_KEY_CHARS for key in path):
            raise BadMessage(f"an info with {len(path)} keys, or one longer than {MOST_KEY_CHARS} characters")
        if choice.keys is not None and path[0] not in choice.keys:
            raise BadMessage(f"the info {path[0]!r} was not asked for")
        if path[-1].startswith("_") and (*path[:-1], path[-1][1:]) in flat:
            raise BadMessage(f"the info {path!r} has the name of the mask of another one")
        above = flat.get(path[:-1])
        if len(path) > 1 and not (isinstance(above, Dense) and above.values is None):
            raise BadMessage(f"the info {path!r} is inside {path[:-1]!r}, which is no dictionary")
