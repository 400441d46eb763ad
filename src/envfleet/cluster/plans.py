"""Plans: what the user said about envs -> what each worker is told. Built-in ids travel as they are, code pickled."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import cloudpickle
import gymnasium
from gymnasium.envs.registration import EnvSpec as GymnasiumSpec

from envfleet.cluster.messages import PoolPlan
from envfleet.cluster.values_wire import NotPlain, to_plain
from envfleet.contract.errors import UsageError
from envfleet.contract.spec import EnvSpec
from envfleet.pool.backend import PoolConfig
from envfleet.pool.building import EnvKwargs, EnvLike, kwargs_of
from envfleet.pool.making import BACKENDS
from envfleet.pool.native_plugins import plugin_file, plugin_names

Env = EnvLike | Sequence[Callable[..., Any]]


def pool_plans(
    env: Env,
    num_workers: int,
    num_envs_per_worker: int,
    *,
    env_kwargs: EnvKwargs,
    max_episode_steps: int | None,
    render_mode: str | None,
    backend: str,
    num_workers_of_pool: int | None,
    max_env_restarts: int | None,
    timeout_s: float,
    start_timeout_s: float,
    autoreset: str,
    seed: int | None,
) -> tuple[PoolPlan, ...]:
    """One for each worker."""
    num_envs = num_workers * num_envs_per_worker
    if isinstance(env, Sequence) and not isinstance(env, str) and len(env) != num_envs:
        raise UsageError(f"a list of env factories must have {num_envs} entries, one for each env; got {len(env)}")
    if not (isinstance(env, str | EnvSpec | GymnasiumSpec | Sequence) or callable(env)):
        raise UsageError(
            f"env must be a Gymnasium id, an EnvSpec, a callable that makes an env, or a list of callables; "
            f"got {type(env).__name__}"
        )
    if backend not in BACKENDS:
        raise UsageError(f"no backend is called {backend!r}; known: {', '.join(BACKENDS)}")
    PoolConfig(  # checks itself
        num_envs=num_envs_per_worker,
        max_env_restarts=max_env_restarts,
        num_workers=num_workers_of_pool,
        timeout_s=timeout_s,
        start_timeout_s=start_timeout_s,
    )
    plain = _plain_env(env)
    kwargs = None if plain is None else _plain_kwargs(plain, env_kwargs, num_envs)
    travels_plain = plain is not None and kwargs is not None
    own = env if isinstance(env, EnvSpec) else None
    return tuple(
        PoolPlan(
            num_envs=num_envs_per_worker,
            first_env_id=worker * num_envs_per_worker,
            env_id=plain.id if travels_plain and plain is not None else None,
            env_factory=plain.factory if travels_plain and plain is not None else None,
            native_file=str(plugin_file(plain.id)) if plain is not None and plain.id in plugin_names() else None,
            env_kwargs=None if kwargs is None else kwargs[_rows(worker, num_envs_per_worker)],
            max_episode_steps=own.max_episode_steps if max_episode_steps is None and own else max_episode_steps,
            render_mode=own.render_mode if render_mode is None and own else render_mode,
            backend=backend,
            num_workers=num_workers_of_pool,
            max_env_restarts=max_env_restarts,
            timeout_s=timeout_s,
            start_timeout_s=start_timeout_s,
            autoreset=autoreset,
            seed=seed,
        )
        for worker in range(num_workers)
    )


def env_pickles(env: Env, plans: Sequence[PoolPlan], env_kwargs: EnvKwargs) -> tuple[bytes | None, ...]:
    """For each worker (env, arguments of its envs), pickled; None where the plan says it all."""
    num_envs = sum(plan.num_envs for plan in plans)
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
            pickles.append(cloudpickle.dumps((its_env, kwargs)))
        except Exception as error:
            raise UsageError(f"the env cannot be pickled for the workers: {type(error).__name__}: {error}") from error
    return tuple(pickles)


def spec_of(env: Env) -> GymnasiumSpec | None:
    """Gymnasium's spec, if there is one here."""
    try:
        found = _resolved(env)
    except gymnasium.error.Error:
        return None
    return found if isinstance(found, GymnasiumSpec) else None


def _resolved(env: Any) -> Any:
    """Ids registered in this process only mean something as Gymnasium's spec."""
    if isinstance(env, EnvSpec) and env.id is not None:
        env = env.id
    return gymnasium.spec(env) if isinstance(env, str) else env


def _plain_env(env: Env) -> EnvSpec | None:
    """The env in plain words, if every process with the same packages understands them."""
    if isinstance(env, EnvSpec) and env.factory is not None:
        return env
    env_id = env.id if isinstance(env, EnvSpec) else env
    if not isinstance(env_id, str):
        return None
    if env_id in plugin_names():
        return env if isinstance(env, EnvSpec) else EnvSpec(id=env_id)
    try:
        entry_point = gymnasium.spec(env_id).entry_point
    except gymnasium.error.Error:
        entry_point = "gymnasium.envs."  # unknown here; the workers may have it, or will say that they do not
    is_built_in = isinstance(entry_point, str) and entry_point.startswith("gymnasium.envs.")
    if not is_built_in:
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
