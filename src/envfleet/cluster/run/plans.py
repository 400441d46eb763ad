"""Plans: what the user said about envs -> what each worker is told. Built-in ids travel as they are, code pickled."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import cloudpickle
import gymnasium
import msgspec
from gymnasium.envs.registration import EnvSpec as GymnasiumSpec

from envfleet.cluster.wire.messages import PoolPlan
from envfleet.cluster.wire.plain_values import NotPlain, to_plain
from envfleet.contract.checks import whole_number
from envfleet.contract.errors import MissingExtra, UsageError
from envfleet.contract.spec import EnvSpec
from envfleet.pool.backend import PoolConfig
from envfleet.pool.building import EnvKwargs, EnvLike, kwargs_of, registered, require_env_kwargs, require_env_like
from envfleet.pool.make import BACKENDS, drawing_backend
from envfleet.pool.native.plugins import plugin_file, plugin_names
from envfleet.pool.native.registry import newer_id
from envfleet.pool.pickling import unpicklable_part
from envfleet.pool.registrations import Registrations, is_gymnasiums_own, portable
from envfleet.pool.vector.choice import is_envpool_task

Env = EnvLike | Sequence[Callable[..., Any]]


class _Given(NamedTuple):
    """What the user gave, by the names of the arguments."""

    env: Any
    env_kwargs: Any


def pool_plans(template: PoolPlan, env: Env, env_kwargs: EnvKwargs, num_workers: int) -> tuple[PoolPlan, ...]:
    """One for each worker. The template says all that is the same for all of them."""
    num_envs = num_workers * template.num_envs
    _require_plan(template)
    _require_env(env, num_envs)
    if env_kwargs is not None and template.backend != "vector":  # vector envs have arguments of their own
        _require_kwargs(env, env_kwargs, num_envs)
    plain = _plain_env(env)
    kwargs = None if plain is None else _plain_kwargs(plain, env_kwargs, num_envs)
    if plain is not None and kwargs is not None:
        template = msgspec.structs.replace(
            template,
            env_id=plain.id,
            env_factory=plain.factory,
            native_file=str(plugin_file(plain.id)) if plain.id in plugin_names() else None,
        )
    if isinstance(env, EnvSpec):
        if template.max_episode_steps is None:
            template = msgspec.structs.replace(template, max_episode_steps=env.max_episode_steps)
        if template.render_mode is None:
            template = msgspec.structs.replace(template, render_mode=env.render_mode)
    return tuple(
        msgspec.structs.replace(
            template,
            first_env_id=worker * template.num_envs,
            env_kwargs=None if kwargs is None else kwargs[_rows(worker, template.num_envs)],
        )
        for worker in range(num_workers)
    )


def env_pickles(env: Env, plans: Sequence[PoolPlan], env_kwargs: EnvKwargs) -> tuple[bytes | None, ...]:
    """For each worker (env, arguments of its envs, registrations), pickled; None where the plan says it all."""
    num_envs = sum(plan.num_envs for plan in plans)
    registrations = Registrations.of_this_process()
    pickles: list[bytes | None] = []
    for worker, plan in enumerate(plans):
        if plan.env_id is not None or plan.env_factory is not None:
            pickles.append(None)
            continue
        rows = _rows(worker, plan.num_envs)
        kwargs = None
        own_kwargs = env.kwargs if isinstance(env, EnvSpec) else {}
        if env_kwargs is not None or own_kwargs:
            kwargs = [{**own_kwargs, **kwargs_of(env_kwargs, env_id, num_envs)} for env_id in range(num_envs)[rows]]
        its_env = list(env[rows]) if isinstance(env, Sequence) and not isinstance(env, str) else _resolved(env)
        try:
            pickles.append(cloudpickle.dumps((its_env, kwargs, registrations)))
        except Exception as error:
            part = unpicklable_part(_Given(its_env, kwargs), "env")
            raise UsageError(
                f"{part} cannot be pickled for the workers: {type(error).__name__}: {error}. Make what is bound to "
                "this process (a lock, an open file, a connection) inside the env"
            ) from error
    return tuple(pickles)


def spec_of(env: Env) -> GymnasiumSpec | None:
    """Gymnasium's spec, if there is one here."""
    env_id = env.id if isinstance(env, EnvSpec) else env
    if isinstance(env_id, str) and not is_envpool_task(env_id):
        env = newer_id(env_id)
    try:
        found = _resolved(env)
    except (gymnasium.error.Error, MissingExtra):
        return None
    return found if isinstance(found, GymnasiumSpec) else None


def _require_plan(plan: PoolPlan) -> None:
    """What a worker would refuse is refused here, before any is started."""
    if plan.backend not in BACKENDS:
        raise UsageError(f"no backend is called {plan.backend!r}; known: {', '.join(BACKENDS)}")
    if plan.pixels is not None:
        drawing_backend(plan.pixels, plan.backend, plan.render_mode)
    if plan.max_episode_steps is not None:
        whole_number("max_episode_steps", plan.max_episode_steps)
    PoolConfig(  # checks itself
        num_envs=plan.num_envs,
        max_env_restarts=plan.max_env_restarts,
        num_workers=plan.num_workers,
        timeout_s=plan.timeout_s,
        start_timeout_s=plan.start_timeout_s,
    )


def _require_env(env: Any, num_envs: int) -> None:
    is_list = isinstance(env, Sequence) and not isinstance(env, str)
    if is_list and len(env) != num_envs:
        raise UsageError(f"a list of env factories must have {num_envs} entries, one for each env; got {len(env)}")
    if not is_list:
        require_env_like(env)


def _require_kwargs(env: Any, env_kwargs: EnvKwargs, num_envs: int) -> None:
    envs = env if isinstance(env, Sequence) and not isinstance(env, str) else [env] * num_envs
    try:
        sources = {id(each): _resolved(each) for each in envs}
    except (gymnasium.error.Error, MissingExtra):
        return  # unknown here; the workers may have it
    for env_id, each in enumerate(envs):
        require_env_kwargs(sources[id(each)], kwargs_of(env_kwargs, env_id, num_envs))


def _resolved(env: Any) -> Any:
    """Ids registered in this process only mean something as Gymnasium's spec."""
    if isinstance(env, EnvSpec) and env.id is not None:
        env = env.id
    if isinstance(env, GymnasiumSpec):
        return portable(env)
    return registered(env) if isinstance(env, str) and not is_envpool_task(env) else env


def _plain_env(env: Env) -> EnvSpec | None:
    """The env in plain words, if every process with the same packages understands them."""
    if isinstance(env, EnvSpec) and env.factory is not None:
        return env
    env_id = env.id if isinstance(env, EnvSpec) else env
    if not isinstance(env_id, str):
        return None
    if env_id in plugin_names() or is_envpool_task(env_id):
        return env if isinstance(env, EnvSpec) else EnvSpec(id=env_id)
    with contextlib.suppress(
        gymnasium.error.Error, MissingExtra
    ):  # the workers may have it, or will say that they do not
        spec = registered(env_id)
        if not (is_gymnasiums_own(spec) or str(spec.entry_point).startswith("envfleet.pool.")):
            return None
    return env if isinstance(env, EnvSpec) else EnvSpec(id=env_id)


def _plain_kwargs(env: EnvSpec, env_kwargs: EnvKwargs, num_envs: int) -> list[Any] | None:
    """The arguments of each env; None if they are no plain values."""
    try:
        return [
            to_plain({**env.kwargs, **kwargs_of(env_kwargs, env_id, num_envs)}, "env_kwargs")
            for env_id in range(num_envs)
        ]
    except NotPlain:
        return None


def _rows(worker: int, num_envs: int) -> slice:
    return slice(worker * num_envs, (worker + 1) * num_envs)
