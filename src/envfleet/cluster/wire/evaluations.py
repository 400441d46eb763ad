"""Episodes that a worker has played for an evaluation: which arrays they consist of, and what is checked. Pure."""

from __future__ import annotations

import numpy as np

from envfleet.cluster.wire.codec import BadMessage, require_booleans
from envfleet.cluster.wire.messages import Evaluate, EvaluationReady
from envfleet.cluster.wire.plain_values import read_plain
from envfleet.contract.arrays import Array, Arrays
from envfleet.contract.evaluation import Episodes

CODE, WEIGHT = "code.", "weight."  # prefixes of the arrays of an order
_FIXED = {"returns": np.float64, "lengths": np.int64, "terminated": np.bool_, "truncated": np.bool_}


def arrays_of(episodes: Episodes) -> dict[str, Array]:
    """The arrays of an answer."""
    frames = {f"frames.{index}": each for index, each in enumerate(episodes.frames)}
    return {name: getattr(episodes, name) for name in _FIXED} | frames


def checked_episodes(message: EvaluationReady, arrays: Arrays, order: Evaluate) -> Episodes:
    """The episodes in the answer to an order. Raises BadMessage."""
    num_episodes = len(order.seeds)
    expected = {*_FIXED, *(f"frames.{index}" for index in range(order.num_recorded))}
    if set(arrays) != expected:
        raise BadMessage(f"an evaluation consists of the arrays {sorted(expected)}; got {sorted(arrays)}")
    for name, dtype in _FIXED.items():
        array = arrays[name]
        if array.shape != (num_episodes,) or array.dtype != dtype:
            wanted = f"{np.dtype(dtype)} ({num_episodes},)"
            raise BadMessage(f"array {name!r} must be {wanted}; got {array.dtype} {array.shape}")
        require_booleans(name, array)
    if (arrays["lengths"] < 1).any():
        raise BadMessage("an episode has at least one step")
    if not (arrays["terminated"] | arrays["truncated"]).all():
        raise BadMessage("an episode that did not end is not whole")
    frames = [arrays[f"frames.{index}"] for index in range(order.num_recorded)]
    for index, each in enumerate(frames):
        length = int(arrays["lengths"][index])
        if each.ndim < 3 or each.dtype != np.uint8 or len(each) != length + 1:
            wanted = f"uint8 ({length + 1}, height, width, ...)"
            raise BadMessage(f"array 'frames.{index}' must be {wanted}; got {each.dtype} {each.shape}")
    infos = read_plain(message.infos)
    if not isinstance(infos, list) or len(infos) != num_episodes or not all(_is_info(each) for each in infos):
        raise BadMessage(f"a list of {num_episodes} infos was expected")
    return Episodes(**{name: arrays[name] for name in _FIXED}, infos=infos, frames=frames)


def _is_info(value: object) -> bool:
    return isinstance(value, dict) and all(isinstance(key, str) for key in value)
