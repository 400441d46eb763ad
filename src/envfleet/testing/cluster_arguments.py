"""cluster_arguments: settings of a cluster by their names alone, sorted into the arguments of ClusterEnv."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from envfleet.cluster.network import Network
from envfleet.cluster.timing import Timing
from envfleet.contract.pool_config import PoolSettings

_HOMES: dict[str, tuple[str, str]] = {  # argument of ClusterEnv, and the name there
    **{field.name: ("pool", field.name) for field in dataclasses.fields(PoolSettings)},
    **{field.name: ("timing", field.name) for field in dataclasses.fields(Timing)},
    **{field.name: ("network", field.name) for field in dataclasses.fields(Network)},
    "pool_workers": ("pool", "num_workers"),
    "pool_timeout_s": ("pool", "timeout_s"),
}
del _HOMES["num_workers"]  # of the cluster


def cluster_arguments(*settings: Mapping[str, Any], **more: Any) -> dict[str, Any]:
    """The arguments of ClusterEnv for settings such as `heartbeat_s`, whatever value they belong to; the last counts.

    `timeout_s` is the cluster's; that of each pool is `pool_timeout_s`, and its workers are `pool_workers`.
    """
    arguments: dict[str, Any] = {}
    for given in (*settings, more):
        for name, value in given.items():
            if name in _HOMES:
                argument, its_name = _HOMES[name]
                arguments[argument] = {**arguments.get(argument, {}), its_name: value}
            elif isinstance(value, Mapping) and name in ("pool", "timing", "network"):
                arguments[name] = {**arguments.get(name, {}), **value}
            else:
                arguments[name] = value
    return arguments
