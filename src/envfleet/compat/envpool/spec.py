"""EnvSpec: what a pool of one kind of env is like; `spec_class` makes EnvPool's class for each kind."""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Iterable, Mapping
from functools import cache
from typing import Any, ClassVar

import numpy as np
from gymnasium.spaces import Space

from envfleet.compat.envpool.array_spec import ArraySpec
from envfleet.compat.envpool.config import Settings, defaults_of, settings_of
from envfleet.compat.envpool.forms_of_spaces import action_form, observation_form
from envfleet.compat.envpool.kind import Kind
from envfleet.compat.envpool.opening import spaces_of

_FLOAT32 = np.finfo(np.float32)
Spaces = tuple[Space[Any], Space[Any]]  # of observations and actions


class EnvSpec:
    """Settings, spaces and arrays of a pool, under EnvPool's names."""

    kind: ClassVar[Kind]
    gen_config: ClassVar[Any]  # a namedtuple of all arguments, with their defaults
    _config_keys: ClassVar[list[str]]
    _default_config_values: ClassVar[tuple[Any, ...]]

    def __init__(self, config: Iterable[Any], our_spaces: Spaces | None = None) -> None:
        """`config` as gen_config() makes it; `our_spaces` if they are known already."""
        given = dict(zip(self._config_keys, config, strict=True))
        self.settings: Settings = settings_of(self.kind, given)
        self._our_spaces = our_spaces

    # -- EnvPool's names --

    @property
    def config(self) -> Any:
        """All arguments, as a namedtuple."""
        return self.gen_config(*self.settings.values())

    @property
    def _config_values(self) -> tuple[Any, ...]:
        return tuple(self.settings.values())

    @property
    def reward_threshold(self) -> float | None:
        """The return at which the task counts as solved; None if there is none."""
        return self.settings.get("reward_threshold")

    @property
    def observation_space(self) -> Space[Any]:
        """The observation space of one env."""
        return observation_form(self.our_spaces[0], self.frame_stack)[0]

    @property
    def action_space(self) -> Space[Any]:
        """The action space of one env."""
        return action_form(self.our_spaces[1], self.kind.action_dtype)

    @property
    def gymnasium_observation_space(self) -> Space[Any]:
        """The observation space of one env."""
        return self.observation_space

    @property
    def gymnasium_action_space(self) -> Space[Any]:
        """The action space of one env."""
        return self.action_space

    @property
    def state_array_spec(self) -> dict[str, ArraySpec]:
        """What EnvPool has for each env after a step, by name."""
        number = ArraySpec.of_env_ids([])
        flag = ArraySpec(np.bool_, [], False, True)
        infos = {f"info:{each.name}": self._info_spec(each.name, each.dtype, each.shape) for each in self.kind.infos}
        return {
            "info:env_id": number,
            "info:players.env_id": ArraySpec.of_env_ids([-1]),
            "elapsed_step": number,
            "done": flag,
            "reward": ArraySpec(np.float32, [-1], float(_FLOAT32.min), float(_FLOAT32.max)),
            "discount": ArraySpec(np.float32, [-1], 0.0, 1.0),
            "step_type": number,
            "trunc": flag,
            "obs": ArraySpec.of_space(self.observation_space, has_players=False),
            **infos,
        }

    @property
    def action_array_spec(self) -> dict[str, ArraySpec]:
        """What EnvPool takes for a step, by name."""
        return {
            "env_id": ArraySpec.of_env_ids([]),
            "players.env_id": ArraySpec.of_env_ids([-1]),
            "action": ArraySpec.of_space(self.action_space, has_players=True),
        }

    def observation_spec(self) -> Any:
        """Describe observations and infos of one env.

        Returns:
            A namedtuple of dm_env's specs.
        """
        from envfleet.compat.envpool.named_tuples import nested_tuple

        arrays = self.state_array_spec
        names = [name for name in arrays if name.startswith(("obs", "info:"))]
        return nested_tuple(
            "State", {_short(name): arrays[name].to_dm_env(_short(name).rpartition(".")[2]) for name in names}
        )

    def action_spec(self) -> Any:
        """Describe the actions of one env.

        Returns:
            A spec of dm_env's.
        """
        return self.action_array_spec["action"].to_dm_env("action")

    def __repr__(self) -> str:
        """Return the name of the kind with all arguments."""
        arguments = ", ".join(f"{name}={value!r}" for name, value in self.settings.items())
        return f"{type(self).__name__}({arguments})"

    # -- for pools --

    @property
    def our_spaces(self) -> Spaces:
        """The spaces that our envs have; the first time, one env is built to ask it."""
        if self._our_spaces is None:
            self._our_spaces = spaces_of(self.kind, self.settings)
        return self._our_spaces

    @our_spaces.setter
    def our_spaces(self, spaces: Spaces) -> None:
        self._our_spaces = spaces

    @property
    def frame_stack(self) -> int:
        """Number of observations one behind the other; Atari games stack their frames themselves."""
        return int(self.settings.get("frame_stack", 1))

    def _info_spec(self, name: str, dtype: Any, shape: tuple[int, ...]) -> ArraySpec:
        return ArraySpec(dtype, [-1], 0, 1) if name == "terminated" else ArraySpec.of_info(dtype, shape)


@cache
def spec_class(kind_name: str) -> type[EnvSpec]:
    """EnvPool's class for the specs of one kind: "CartPole" -> CartPoleEnvSpec."""
    from envfleet.compat.envpool.tasks import KINDS

    kind = KINDS[kind_name]
    defaults = defaults_of(kind)
    names = {
        "kind": kind,
        "gen_config": namedtuple("Config", list(defaults), defaults=tuple(defaults.values())),
        "_config_keys": list(defaults),
        "_default_config_values": tuple(defaults.values()),
    }
    return type(f"{kind.name}EnvSpec", (EnvSpec,), names)


def make_env_spec(kind: Kind, given: Mapping[str, Any]) -> EnvSpec:
    """The spec of a pool with these arguments instead of the defaults."""
    settings = settings_of(kind, given)
    return spec_class(kind.name)(settings.values())


def _short(name: str) -> str:
    return name.removeprefix("info:").removeprefix("obs:")
