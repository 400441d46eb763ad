"""Plans: what the user said about envs and pools -> what each worker is told. Code travels pickled, all else plain."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import cloudpickle
import gymnasium
from gymnasium.envs.registration import EnvSpec as GymnasiumSpec

from envfleet.cluster.wire.messages import PoolPlan
from envfleet.cluster.wire.plain_values import NotPlain, to_plain
from envfleet.contract.errors import MissingExtra, UsageError
from envfleet.contract.pool_config import PoolConfig
from envfleet.contract.spec import EnvSpec
from envfleet.pool.building import registered, require_env_kwargs, require_env_like
from envfleet.pool.make import chosen_backend
from envfleet.pool.native.plugins import plugin_file, plugin_names
from envfleet.pool.native.registry import newer_id
from envfleet.pool.pickling import unpicklable_part
from envfleet.pool.registrations import Registrations, is_gymnasiums_own, portable
from envfleet.pool.vector.choice import is_envpool_task


class _Given(NamedTuple):
    """What the user gave, by the names of the arguments."""

    env: Any
    env_kwargs: Any


def pool_plans(spec: EnvSpec, pool: PoolConfig, seed: int | None, num_workers: int) -> tuple[PoolPlan, ...]:
    """One for each worker. What a worker would refuse is refused here, before any is started."""
    num_envs = num_workers * pool.num_envs
    chosen_backend(spec, pool.backend)
    _require_env(spec, num_envs)
    if spec.kwargs != {} and pool.backend != "vector":  # vector envs have arguments of their own
        _require_kwargs(spec, num_envs)
    kwargs = _plain_kwargs(spec, num_envs) if _is_plain(spec) else None
    native_file = str(plugin_file(spec.id)) if kwargs is not None and spec.id in plugin_names() else None
    plans = []
    for worker in range(num_workers):
        rows = _rows(worker, pool.num_envs)
        env = None if kwargs is None else replace(spec, kwargs=kwargs[rows])
        plans.append(PoolPlan(env=env, pool=pool, first_env_id=rows.start, seed=seed, native_file=native_file))
    return tuple(plans)


def env_pickles(spec: EnvSpec, plans: Sequence[PoolPlan]) -> tuple[bytes | None, ...]:
    """For each worker (spec of its envs, registrations), pickled; None where the plan says it all."""
    num_envs = sum(plan.pool.num_envs for plan in plans)
    registrations = Registrations.of_this_process()
    pickles: list[bytes | None] = []
    for worker, plan in enumerate(plans):
        if plan.env is not None:
            pickles.append(None)
            continue
        its_spec = _portable_part(spec, _rows(worker, plan.pool.num_envs), num_envs)
        try:
            pickles.append(cloudpickle.dumps((its_spec, registrations)))
        except Exception as error:
            part = unpicklable_part(_Given(its_spec.factory, its_spec.kwargs), "env")
            raise UsageError(
                f"{part} cannot be pickled for the workers: {type(error).__name__}: {error}. Make what is bound to "
                "this process (a lock, an open file, a connection) inside the env"
            ) from error
    return tuple(pickles)


def gymnasium_spec_of(spec: EnvSpec) -> GymnasiumSpec | None:
    """Gymnasium's spec, if there is one here."""
    if spec.id is not None and not is_envpool_task(spec.id):
        spec = replace(spec, id=newer_id(spec.id))
    try:
        found = _resolved(spec)
    except (gymnasium.error.Error, MissingExtra):
        return None
    return found if isinstance(found, GymnasiumSpec) else None


def _require_env(spec: EnvSpec, num_envs: int) -> None:
    if spec.is_list and len(spec.factory) != num_envs:
        raise UsageError(
            f"a list of env factories must have {num_envs} entries, one for each env; got {len(spec.factory)}"
        )
    if spec.factory is not None and not spec.is_list:
        require_env_like(spec.factory)


def _require_kwargs(spec: EnvSpec, num_envs: int) -> None:
    sources: dict[Any, Any] = {}  # ids are looked up once
    for env_id in range(num_envs):
        one = spec.one(env_id, num_envs)
        key = one.id or id(one.factory)
        if key not in sources:
            try:
                sources[key] = _resolved(one)
            except (gymnasium.error.Error, MissingExtra):
                return  # unknown here; the workers may have it
        assert isinstance(one.kwargs, Mapping)  # of one env
        require_env_kwargs(sources[key], one.kwargs)


def _resolved(spec: EnvSpec) -> Any:
    """What builds the env: Gymnasium's spec of an id, if it is no task of EnvPool; else what was given."""
    if spec.id is None:
        return portable(spec.factory) if isinstance(spec.factory, GymnasiumSpec) else spec.factory
    return spec.id if is_envpool_task(spec.id) else registered(spec.id)


def _portable_part(spec: EnvSpec, rows: slice, num_envs: int) -> EnvSpec:
    """What the worker of these envs is given; ids that are registered in this process only become Gymnasium's spec."""
    if spec.kwargs != {}:
        spec = replace(spec, kwargs=[spec.kwargs_of(env_id, num_envs) for env_id in range(num_envs)[rows]])
    if spec.is_list:
        return replace(spec, factory=list(spec.factory[rows]))
    source = _resolved(spec)
    return spec if isinstance(source, str) else replace(spec, id=None, factory=source)


def _is_plain(spec: EnvSpec) -> bool:
    """Does every process with the same packages understand which env is meant?"""
    if spec.id is None:
        return isinstance(spec.factory, str)
    if spec.id in plugin_names() or is_envpool_task(spec.id):
        return True
    try:
        found = registered(spec.id)
    except (gymnasium.error.Error, MissingExtra):
        return True  # the workers may have it, or will say that they do not
    return is_gymnasiums_own(found) or str(found.entry_point).startswith("envfleet.pool.")


def _plain_kwargs(spec: EnvSpec, num_envs: int) -> list[Any] | None:
    """The arguments of each env; None if they are no plain values."""
    with contextlib.suppress(NotPlain):
        return [to_plain(spec.kwargs_of(env_id, num_envs), "env_kwargs") for env_id in range(num_envs)]
    return None


def _rows(worker: int, num_envs: int) -> slice:
    return slice(worker * num_envs, (worker + 1) * num_envs)
