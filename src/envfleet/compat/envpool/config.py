"""Settings of a pool as EnvPool has them: every argument by its name, checked."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from envfleet.compat.envpool.errors import UnknownSetting, WrongSetting
from envfleet.compat.envpool.kind import COMMON, INT32_MAX, Kind

Settings = dict[str, Any]  # every argument by its name, in EnvPool's order


def defaults_of(kind: Kind) -> Settings:
    """All arguments of a kind, in EnvPool's order, with their defaults."""
    return {**COMMON, **kind.defaults}


def settings_of(kind: Kind, given: Mapping[str, Any]) -> Settings:
    """The defaults of a kind with what was given instead.

    Args:
        kind: The kind of env.
        given: Arguments by EnvPool's names.

    Returns:
        All arguments, checked. `batch_size` is never 0, and a sequence of seeds is `env_seed`.

    Raises:
        UnknownSetting: The kind has no such argument.
        WrongSetting: A value is outside its limits.
    """
    known = defaults_of(kind)
    unknown = [name for name in given if name not in known]
    if unknown:
        raise UnknownSetting(f"{kind.name} has no argument {', '.join(unknown)} in EnvPool; known: {', '.join(known)}")
    settings = {**known, **given}
    for name, least in (("num_envs", 1), ("batch_size", 0), ("num_threads", 0), ("max_num_players", 1)):
        settings[name] = _whole(name, settings[name], least)
    settings["max_episode_steps"] = _whole("max_episode_steps", settings["max_episode_steps"], 1, INT32_MAX)
    num_envs = settings["num_envs"]
    if settings["batch_size"] > num_envs:
        raise WrongSetting(f"batch_size must be between 0 and num_envs={num_envs}; got {settings['batch_size']}")
    settings["batch_size"] = settings["batch_size"] or num_envs
    if settings["max_num_players"] != 1:
        raise WrongSetting(f"these envs have one player; got max_num_players={settings['max_num_players']}")
    if _is_sequence(settings["seed"]):
        if len(settings["env_seed"]):
            raise WrongSetting("a list of seeds is given twice: pass it as seed or as env_seed")
        settings["env_seed"], settings["seed"] = settings["seed"], 0
    settings["seed"] = _seed(settings["seed"])
    settings["env_seed"] = [_seed(each) for each in settings["env_seed"]]
    if settings["env_seed"] and len(settings["env_seed"]) != num_envs:
        raise WrongSetting(
            f"a list of seeds must have an entry for each of num_envs={num_envs} envs; got {len(settings['env_seed'])}"
        )
    return settings


def seeds_of(settings: Settings) -> list[int]:
    """A seed for each env: `env_seed`, or seed + i. EnvPool's may be negative, ours count on from 2**32 down."""
    seeds = settings["env_seed"] or range(settings["seed"], settings["seed"] + settings["num_envs"])
    return [seed % 2**32 for seed in seeds]


def _is_sequence(value: Any) -> bool:
    return (isinstance(value, Sequence) and not isinstance(value, str | bytes)) or isinstance(value, np.ndarray)


def _whole(name: str, value: Any, at_least: int, at_most: int | None = None) -> int:
    try:
        number = operator.index(value)
    except TypeError:
        number = None
    if number is None or number < at_least or (at_most is not None and number > at_most):
        limits = f"of at least {at_least}" if at_most is None else f"from {at_least} to {at_most}"
        raise WrongSetting(f"{name} must be a whole number {limits}; got {value!r}")
    return number


def _seed(value: Any) -> int:
    return _whole("seed", value, -INT32_MAX - 1, INT32_MAX)
