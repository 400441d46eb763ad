"""Kind: one of EnvPool's classes of envs, which arguments it takes, and which of our envs it is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from envfleet.compat.envpool.errors import WrongSetting

INT32_MAX = 2**31 - 1

# The arguments of all tasks, in EnvPool's order, and their defaults.
COMMON: Mapping[str, Any] = {
    "num_envs": 1,
    "batch_size": 0,  # 0: num_envs
    "num_threads": 0,  # 0: one for each CPU
    "max_num_players": 1,
    "thread_affinity_offset": -1,  # -1: threads are not bound to CPUs
    "base_path": "envpool",
    "seed": 42,
    "env_seed": [],
    "gym_reset_return_info": True,
    "max_episode_steps": INT32_MAX,
}
# Arguments that do not concern our envs.
FREE = ("reward_threshold", "frame_stack")


@dataclass(frozen=True, slots=True)
class InfoColumn:
    """A column that EnvPool has in the infos of every call."""

    name: str
    dtype: Any = np.float64
    shape: tuple[int, ...] = ()
    ours: tuple[str, ...] = ()  # the names that it may have in our infos besides its own


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """One of EnvPool's classes of envs. Several tasks may be of one kind ("Ant-v4" and "Ant-v5")."""

    name: str  # "CartPole" for CartPoleEnvSpec, CartPoleDMEnvPool and CartPoleGymnasiumEnvPool
    family: str  # the package of EnvPool that has these classes: "classic_control"
    defaults: Mapping[str, Any]  # its own arguments, in EnvPool's order
    variants: Mapping[str, Mapping[str, Any]]  # id of our env -> the arguments that only this one has
    kwargs: Mapping[str, str] = field(default_factory=dict)  # EnvPool's argument -> ours, where it may be changed
    ranges: Mapping[str, tuple[str | float, str | float]] = field(default_factory=dict)  # our argument -> its two ends
    infos: tuple[InfoColumn, ...] = ()
    action_dtype: Any = None  # of continuous actions, where it is another one than ours
    requires: str | None = None  # the module that these envs need

    def env_id(self, settings: Mapping[str, Any]) -> str:
        """The id of our env with these settings, or WrongSetting."""
        for env_id, own in self.variants.items():
            if all(settings[name] == value for name, value in own.items()):
                return env_id
        names = dict.fromkeys(name for own in self.variants.values() for name in own)
        given = ", ".join(f"{name}={settings[name]!r}" for name in names)
        known = "; ".join(
            f"{env_id} ({', '.join(f'{name}={value!r}' for name, value in own.items())})"
            for env_id, own in self.variants.items()
        )
        raise WrongSetting(f"EnvFleet has no {self.name} with {given}; it has {known}")

    def env_kwargs(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        """The arguments of our env for the settings that differ from the defaults, or WrongSetting."""
        own = self.variants[self.env_id(settings)]
        changed = [
            name
            for name, default in self.defaults.items()
            if name not in own and name not in FREE and settings[name] != default
        ]
        ends = {end: argument for argument, range_ends in self.ranges.items() for end in range_ends}
        given: dict[str, Any] = {}
        for name in changed:
            if name in self.kwargs:
                given[self.kwargs[name]] = settings[name]
            elif name in ends:
                given[ends[name]] = tuple(
                    settings[end] if isinstance(end, str) else end for end in self.ranges[ends[name]]
                )
            else:
                raise WrongSetting(
                    f"{name} of {self.name} can only be {self.defaults[name]!r} with EnvFleet; got {settings[name]!r}"
                )
        return given


def same_names(*names: str) -> dict[str, str]:
    """Arguments that EnvPool and Gymnasium call the same."""
    return {name: name for name in names}
