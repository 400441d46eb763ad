"""EnvBuilder: turns what the user calls an environment into something any process can build."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import gymnasium
from gymnasium.envs.registration import EnvSpec as GymnasiumSpec

from envfleet.contract.errors import UsageError
from envfleet.contract.spec import NO_STEP_LIMIT, EnvSpec
from envfleet.pool.foreign_envs import hint
from envfleet.pool.pixel_observation import PixelObservation
from envfleet.pool.registrations import NAMESPACE, portable
from envfleet.pool.simulators.atari_ids import atari_spec
from envfleet.pool.simulators.mujoco_gl import advice

EnvLike = str | EnvSpec | GymnasiumSpec | Callable[..., Any]


@dataclass(frozen=True, slots=True)
class EnvBuilder:
    """Builds one env. Registered envs travel as Gymnasium's spec, so a child need not know the registration."""

    spec: EnvSpec  # of this env alone, with what builds it as `factory`
    is_checked: bool  # Gymnasium's own checks of a new env; one env of a pool is enough

    def __call__(self) -> gymnasium.Env[Any, Any]:
        """Build the env, with pixels as observations if the spec says so."""
        render_mode, pixels = self.spec.render_mode, self.spec.pixels
        if pixels is None:
            return self._build(render_mode)
        is_registered = isinstance(self.source, GymnasiumSpec)
        try:
            env = self._build("rgb_array" if is_registered and render_mode is None else render_mode)
            return PixelObservation(env, pixels)
        except Exception as error:
            if (text := advice(error)) is not None:
                raise UsageError(text) from error
            raise

    def _build(self, render_mode: str | None) -> gymnasium.Env[Any, Any]:
        kwargs, max_episode_steps = dict(self.kwargs), self.spec.max_episode_steps
        if render_mode is not None:
            kwargs["render_mode"] = render_mode
        if isinstance(self.source, GymnasiumSpec):
            made: gymnasium.Env[Any, Any] = gymnasium.make(
                self.source,
                max_episode_steps=max_episode_steps,
                disable_env_checker=None if self.is_checked else True,
                **kwargs,
            )
            return made
        make = imported(self.source) if isinstance(self.source, str) else self.source
        env: gymnasium.Env[Any, Any] = make(**kwargs)
        if not isinstance(env, gymnasium.Env):
            raise UsageError(f"the env factory must return a gymnasium.Env; got {type(env).__name__}{hint(env)}")
        if max_episode_steps not in (None, NO_STEP_LIMIT):
            env = gymnasium.wrappers.TimeLimit(env, max_episode_steps)
        return env

    @property
    def source(self) -> GymnasiumSpec | Callable[..., Any] | str:
        """What builds the env; a str is a factory's import path."""
        source: GymnasiumSpec | Callable[..., Any] | str = self.spec.factory
        return source

    @property
    def kwargs(self) -> Mapping[str, Any]:
        """The arguments of the env."""
        assert isinstance(self.spec.kwargs, Mapping)  # the spec is of one env
        return self.spec.kwargs


def take_or_build(built: list[Any], build: Callable[[], Any]) -> Any:
    """Env 0, which was built to learn the spaces; only a restart builds another one in its place."""
    return built.pop() if built else build()


def env_builders(spec: EnvSpec, num_envs: int) -> list[EnvBuilder]:
    """One builder for each of `num_envs` envs."""
    if spec.is_list and len(spec.factory) != num_envs:
        raise UsageError(f"a list of env factories must have num_envs={num_envs} entries; got {len(spec.factory)}")
    sources: dict[Any, GymnasiumSpec | Callable[..., Any] | str] = {}  # ids are looked up once
    builders = []
    for index in range(num_envs):
        one = spec.one(index, num_envs)
        key = one.id or id(one.factory)
        if key not in sources:
            sources[key] = _resolve(one)
        builder = EnvBuilder(replace(one, id=None, factory=sources[key]), is_checked=index == 0)
        require_env_kwargs(builder.source, builder.kwargs)
        builders.append(builder)
    return builders


def registered(env_id: str) -> GymnasiumSpec:
    """How the env of this id, or of "module:id", is built: ours for Atari games, else what is registered."""
    name = without_module(env_id)
    return atari_spec(name) or portable(gymnasium.spec(name))


def without_module(env_id: str) -> str:
    """Gymnasium's id alone, also of "envfleet/id"; the module of "module:id" is imported, so that it is registered."""
    module, _, name = env_id.rpartition(":")
    if module:
        try:
            importlib.import_module(module)
        except ModuleNotFoundError as error:
            raise UsageError(f"env {env_id!r} names a module that cannot be imported: {error}") from error
    return name.removeprefix(f"{NAMESPACE}/")


def _resolve(spec: EnvSpec) -> GymnasiumSpec | Callable[..., Any] | str:
    """What builds the env of a spec of one env."""
    if spec.id is not None:
        return registered(spec.id)
    if isinstance(spec.factory, str):
        return spec.factory
    require_env_like(spec.factory)
    if isinstance(spec.factory, GymnasiumSpec):
        return portable(spec.factory)
    factory: Callable[..., Any] = spec.factory
    return factory


def require_env_like(env: Any) -> None:
    """Refuse what nothing can be built from."""
    if not (isinstance(env, str | EnvSpec | GymnasiumSpec) or callable(env)):
        raise UsageError(
            f"env must be a Gymnasium id, an EnvSpec, a callable that makes an env, or a list of callables; "
            f"got {type(env).__name__}{hint(env)}"
        )


# Arguments of gymnasium.make() itself, and what to do instead of passing them to an env.
_NOT_OF_THE_ENV = {
    "max_episode_steps": "use max_episode_steps={0!r} beside env_kwargs, or EnvSpec(..., max_episode_steps={0!r})",
    "disable_env_checker": "leave it out, since Gymnasium's checks run on env 0 only",
}


def require_env_kwargs(source: Any, kwargs: Mapping[str, Any]) -> None:
    """Refuse arguments that belong to make(), and that the env could not take."""
    for name in _NOT_OF_THE_ENV.keys() & kwargs.keys():
        if isinstance(source, GymnasiumSpec) or not _takes(source, name):
            advice = _NOT_OF_THE_ENV[name].format(kwargs[name])
            raise UsageError(f"env_kwargs has {name!r}, which is no argument of the env: {advice}")


def _takes(factory: Any, name: str) -> bool:
    """Has the factory an argument of that name? Also True if nobody can tell."""
    try:
        parameters = inspect.signature(factory).parameters
    except (TypeError, ValueError):
        return True
    return name in parameters or any(each.kind is each.VAR_KEYWORD for each in parameters.values())


def imported(path: str) -> Callable[..., Any]:
    """The factory at an import path."""
    module, _, name = path.partition(":")
    factory: Callable[..., Any] = getattr(importlib.import_module(module), name)
    return factory
