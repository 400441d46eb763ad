"""Gymnasium's own door: `gymnasium.make_vec("envfleet/CartPole-v1", num_envs=8)` gives a pool.

To import envfleet registers these ids, the one thing that it changes outside itself: one for each id that Gymnasium has
by itself. A spec names this file's function and the id, so that nothing is looked for before it is asked for.
"""

from __future__ import annotations

import difflib
import inspect
from typing import Any

import gymnasium
from gymnasium.envs.registration import EnvSpec as GymnasiumSpec
from gymnasium.envs.registration import load_env_creator

from envfleet.contract.errors import UsageError
from envfleet.pool.make import make
from envfleet.pool.pool import EnvPool
from envfleet.pool.registrations import NAMESPACE

_POOL_OPTIONS = tuple(inspect.signature(make).parameters.keys() - {"env", "num_envs"})


def register_ids() -> None:
    """Register `envfleet/ID` for each ID of Gymnasium's own envs, those that it has retired left out."""
    for spec in list(gymnasium.registry.values()):
        env_id = f"{NAMESPACE}/{spec.id}"
        if spec.namespace is None and str(spec.entry_point).startswith("gymnasium.envs."):
            gymnasium.registry[env_id] = GymnasiumSpec(
                id=env_id,
                vector_entry_point=f"{__name__}:make_registered",
                kwargs={"env_id": spec.id},
            )


def make_registered(*, env_id: str, num_envs: int = 1, env_kwargs: Any = None, **options: Any) -> EnvPool:
    """Make a pool for `gymnasium.make_vec`.

    Args:
        env_id: Gymnasium's id of the env, without our namespace; each spec has its own.
        num_envs: Number of envs.
        env_kwargs: Arguments for the env, as for `envfleet.make`.
        options: Those that `envfleet.make` has are the pool's, all others arguments of the env.

    Returns:
        The pool.

    Raises:
        UsageError: An argument is known neither to the pool nor to the env, or wrong.
    """
    of_pool = {name: value for name, value in options.items() if name in _POOL_OPTIONS}
    of_env = {name: value for name, value in options.items() if name not in _POOL_OPTIONS}
    _require_known(env_id, of_env)
    if of_env and env_kwargs is not None and not isinstance(env_kwargs, dict):
        raise UsageError(f"{', '.join(of_env)}: with env_kwargs for each env, arguments of the env must be in there")
    if of_env:
        env_kwargs = {**(env_kwargs or {}), **of_env}
    return make(env_id, num_envs, env_kwargs=env_kwargs, **of_pool)


def _require_known(env_id: str, kwargs: dict[str, Any]) -> None:
    """Refuse arguments that the env does not take, as far as its signature tells."""
    entry_point = gymnasium.spec(env_id).entry_point if kwargs else None
    if entry_point is None:
        return
    parameters = inspect.signature(load_env_creator(entry_point) if isinstance(entry_point, str) else entry_point)
    if any(each.kind is each.VAR_KEYWORD for each in parameters.parameters.values()):
        return
    known = [name for name in parameters.parameters if name != "render_mode"]
    for name in kwargs:
        if name not in known:
            near = difflib.get_close_matches(name, [*_POOL_OPTIONS, *known], 1)
            raise UsageError(
                f"{NAMESPACE}/{env_id} has no argument {name!r}"
                + (f"; did you mean {near[0]!r}?" if near else "")
                + f" Of the pool: {', '.join(sorted(_POOL_OPTIONS))}. Of the env: {', '.join(known) or 'none'}"
            )
