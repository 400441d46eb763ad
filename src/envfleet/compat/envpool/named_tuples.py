"""Namedtuples in which EnvPool hands out nested values: `observation.players.env_id`."""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Mapping
from functools import cache
from typing import Any


def nested_tuple(name: str, values: Mapping[str, Any]) -> Any:
    """A namedtuple of `values`; a "." in a name, or a dict, makes another one inside."""
    tree: dict[str, Any] = {}
    for key, value in values.items():
        outer, _, inner = key.partition(".")
        if inner:
            tree.setdefault(outer, {})[inner] = value
        else:
            tree[key] = value
    parts = [nested_tuple(key, value) if isinstance(value, Mapping) else value for key, value in tree.items()]
    return _tuple_class(name, tuple(tree))(*parts)


@cache
def _tuple_class(name: str, fields: tuple[str, ...]) -> Any:
    return namedtuple(name, fields)
