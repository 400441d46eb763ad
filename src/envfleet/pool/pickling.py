"""Pickles for other processes; what cannot be pickled is named."""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from typing import Any

import cloudpickle

from envfleet.contract.errors import UsageError
from envfleet.pool.building import EnvBuilder


def pickled(value: Any) -> bytes:
    """`value`; what pickle refuses (a lambda, a class of a notebook) by value."""
    try:
        return pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL)
    except Exception:
        return bytes(cloudpickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL))


def pickled_code(value: Any, name: str) -> bytes:
    """`value`, with what is defined in `__main__` by value: the reader has another `__main__`.

    Args:
        value: What is pickled.
        name: What the caller calls it; a message about a part of it goes on from there: `options['lock']`.
    """
    try:
        return bytes(cloudpickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL))
    except Exception as error:
        raise UsageError(
            f"{unpicklable_part(value, name)} cannot be passed to another process: {type(error).__name__}: {error}. "
            "Make what is bound to this process (a lock, an open file, a connection) inside the env, or choose "
            "backend='serial', which runs the envs in this process"
        ) from error


def picklable_part(info: Mapping[str, Any], name: str) -> tuple[dict[str, Any], list[str]]:
    """What of `info` can be pickled, and the names of what cannot, such as `info['lock']`."""
    part: dict[str, Any] = {}
    left_out: list[str] = []
    for key, value in info.items():
        try:
            pickled((key, value))
            part[key] = value
        except Exception:
            its_name = f"{name}[{key!r}]"
            if isinstance(value, dict):
                part[key], more = picklable_part(value, its_name)
                left_out += more
            else:
                left_out.append(its_name)
    return part, left_out


def unpicklable_part(value: Any, name: str) -> str:
    """The name of the innermost part of `value` that cannot be pickled."""
    parts: Mapping[str, Any] = {}
    if isinstance(value, EnvBuilder):
        parts = {"env": value.source, "env_kwargs": value.kwargs}
    elif isinstance(value, Mapping):
        parts = {f"{name}[{key!r}]": part for key, part in value.items()}
    elif isinstance(value, tuple) and hasattr(value, "_asdict"):
        parts = value._asdict()
    elif isinstance(value, list | tuple):
        parts = {f"{name}[{index}]": part for index, part in enumerate(value)}
    for part_name, part in parts.items():
        if not _can_be_pickled(part):
            return unpicklable_part(part, part_name)
    return name


def _can_be_pickled(value: Any) -> bool:
    try:
        cloudpickle.dumps(value)
    except Exception:
        return False
    return True
