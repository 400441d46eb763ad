"""EnvSpec: all that a caller says about envs. EnvTraits: what is known of an env once it was built."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from gymnasium import spaces

from envfleet.contract.checks import whole_number
from envfleet.contract.errors import UsageError
from envfleet.contract.pixels import Pixels

NO_STEP_LIMIT = -1  # as gymnasium.make() has it

if TYPE_CHECKING:
    EnvKwargs = Mapping[str, Any] | Sequence[Mapping[str, Any]] | Callable[[int], Mapping[str, Any]]
else:
    EnvKwargs = Any  # msgspec, which decodes specs, knows no callables


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvSpec:
    """How to build envs: a Gymnasium id or a factory, and the settings that go with it.

    With an id or an import path, and with plain values as arguments, a spec travels to another machine without pickled
    code.
    """

    id: str | None = None  # Gymnasium's: "LunarLander-v3"
    factory: Any = None  # "package.module:function", a callable, Gymnasium's spec, or a list with one for each env
    kwargs: EnvKwargs = field(default_factory=dict)  # a dict, a list with one for each env, or a function of its index
    max_episode_steps: int | None = None  # NO_STEP_LIMIT (-1): no limit; None: what is registered for the id
    render_mode: str | None = None
    pixels: Pixels | None = None  # observations are images of the envs

    def __post_init__(self) -> None:
        """Raise UsageError if a setting is wrong."""
        if (self.id is None) == (self.factory is None):
            raise UsageError(f"EnvSpec takes either id= or factory=; got id={self.id!r}, factory={self.factory!r}")
        if isinstance(self.factory, str) and self.factory.count(":") != 1:
            raise UsageError(f"factory must read 'package.module:function'; got {self.factory!r}")
        if self.max_episode_steps not in (None, NO_STEP_LIMIT):
            object.__setattr__(self, "max_episode_steps", whole_number("max_episode_steps", self.max_episode_steps))
        if self.pixels is not None and not isinstance(self.pixels, Pixels):
            raise UsageError(f"pixels must be envfleet.Pixels(...); got {self.pixels!r}")
        if self.pixels is not None and self.render_mode not in (None, "rgb_array"):
            raise UsageError(f"pixel observations need render_mode='rgb_array' (or None); got {self.render_mode!r}")

    @classmethod
    def of(
        cls,
        env: Any,
        *,
        kwargs: EnvKwargs | None = None,
        max_episode_steps: int | None = None,
        render_mode: str | None = None,
        pixels: Pixels | None = None,
    ) -> EnvSpec:
        """The spec of an env, however the caller names the env.

        Args:
            env: A Gymnasium id, an EnvSpec, or what makes the env.
            kwargs: Arguments of the env; they are merged with those of an EnvSpec.
            max_episode_steps: The limit of an episode. This and the settings below overrule those of an EnvSpec.
            render_mode: How the env draws.
            pixels: Images as observations.

        Returns:
            The spec.

        Raises:
            UsageError: `env` is None, or a setting is wrong.
        """
        if env is None:
            raise UsageError("env must be a Gymnasium id, an EnvSpec, or a callable that makes an env; got None")
        spec = env if isinstance(env, EnvSpec) else cls(id=env) if isinstance(env, str) else cls(factory=env)
        return replace(
            spec,
            kwargs=_merged(spec.kwargs, kwargs),
            max_episode_steps=spec.max_episode_steps if max_episode_steps is None else max_episode_steps,
            render_mode=spec.render_mode if render_mode is None else render_mode,
            pixels=spec.pixels if pixels is None else pixels,
        )

    @property
    def is_list(self) -> bool:
        """Has each env a factory of its own?"""
        return isinstance(self.factory, Sequence) and not isinstance(self.factory, str)

    def one(self, index: int, num_envs: int) -> EnvSpec:
        """The spec of one env: one factory, and a dict of arguments.

        Args:
            index: The env.
            num_envs: The number of envs.

        Returns:
            The spec of this env alone.

        Raises:
            UsageError: A list of arguments does not have `num_envs` entries.
        """
        kwargs = self.kwargs_of(index, num_envs)
        if not self.is_list:
            return replace(self, kwargs=kwargs)
        return EnvSpec.of(
            self.factory[index],
            kwargs=kwargs,
            max_episode_steps=self.max_episode_steps,
            render_mode=self.render_mode,
            pixels=self.pixels,
        )

    def kwargs_of(self, index: int, num_envs: int) -> dict[str, Any]:
        """The arguments of one env.

        Args:
            index: The env.
            num_envs: The number of envs.

        Returns:
            The arguments by name.

        Raises:
            UsageError: A list of arguments does not have `num_envs` entries.
        """
        kwargs = self.kwargs
        if not isinstance(kwargs, Mapping) and not callable(kwargs) and len(kwargs) != num_envs:
            raise UsageError(f"a list of env_kwargs must have num_envs={num_envs} entries; got {len(kwargs)}")
        return _kwargs_at(kwargs, index)

    def common_kwargs(self, num_envs: int) -> dict[str, Any] | None:
        """The arguments that all envs share.

        Args:
            num_envs: The number of envs.

        Returns:
            The arguments by name; None if the envs differ in them.

        Raises:
            UsageError: A list of arguments does not have `num_envs` entries.
        """
        if isinstance(self.kwargs, Mapping):
            return dict(self.kwargs)
        each = [self.kwargs_of(index, num_envs) for index in range(num_envs)]
        with np.printoptions(threshold=sys.maxsize):  # arrays whole
            is_same = all(repr(kwargs) == repr(each[0]) for kwargs in each)  # values need not be comparable
        return each[0] if is_same else None


def _merged(defaults: EnvKwargs, given: EnvKwargs | None) -> EnvKwargs:
    if given is None:
        return defaults
    if isinstance(defaults, Mapping) and isinstance(given, Mapping):
        return {**defaults, **given}

    def merged_at(index: int) -> dict[str, Any]:
        return {**_kwargs_at(defaults, index), **_kwargs_at(given, index)}

    lengths = [len(each) for each in (defaults, given) if not isinstance(each, Mapping) and not callable(each)]
    if not lengths:
        return merged_at
    if lengths[0] != lengths[-1]:
        raise UsageError(
            f"lists of arguments must have one entry for each env; EnvSpec(kwargs=...) has {lengths[0]}, "
            f"env_kwargs has {lengths[-1]}"
        )
    return [merged_at(index) for index in range(lengths[0])]  # still a list, so that its length is checked


def _kwargs_at(kwargs: EnvKwargs, index: int) -> dict[str, Any]:
    if isinstance(kwargs, Mapping):
        return dict(kwargs)
    return dict(kwargs(index) if callable(kwargs) else kwargs[index])


@dataclass(frozen=True, slots=True)
class EnvTraits:
    """What is known of an env once it is built."""

    observation_space: spaces.Space[Any]
    action_space: spaces.Space[Any]
    metadata: dict[str, Any]
    render_mode: str | None
    gymnasium_spec: Any = None  # gymnasium.envs.registration.EnvSpec, if the env has one
    info_columns: Mapping[str, np.dtype[Any]] = field(default_factory=dict)  # numbers that every info of it has
    why_no_states: str | None = None  # why its state cannot be saved; None: as far as it can be seen, it can
