"""Look into a built env: its spaces and metadata, its attributes."""

from __future__ import annotations

from typing import Any

import gymnasium
from gymnasium.spaces.utils import is_space_dtype_shape_equiv

from envfleet.contract.errors import SpacesDiffer
from envfleet.contract.pool_config import EnvStates, ObservationMode
from envfleet.contract.spec import EnvTraits
from envfleet.pool.env_saver import why_not_saved


def traits_of(env: gymnasium.Env[Any, Any], env_states: EnvStates) -> EnvTraits:
    """What is known of an env once it was built."""
    return EnvTraits(
        observation_space=env.observation_space,
        action_space=env.action_space,
        metadata=dict(env.metadata),
        render_mode=env.render_mode,
        gymnasium_spec=env.spec,
        info_columns=dict(getattr(env.unwrapped, "info_columns", {})),
        why_no_states=why_not_saved(env, env_states),
    )


def require_same_spaces(
    expected: EnvTraits, env: gymnasium.Env[Any, Any], env_id: int, observation_mode: ObservationMode
) -> None:
    """All envs of a pool share one batch, so their spaces must be equal.

    With `observation_mode="different"` the bounds of their observations may differ, but neither form nor dtype.
    """
    for name in ("observation_space", "action_space"):
        own, first = getattr(env, name), getattr(expected, name)
        if own == first:
            continue
        advice = "the envs of one pool must have equal spaces"
        if name == "observation_space" and is_space_dtype_shape_equiv(own, first):
            if observation_mode == "different":
                continue
            advice += "; if other bounds are intended, pass observation_mode='different'"
        raise SpacesDiffer(f"env {env_id} has another {name} than env 0: {own} instead of {first}; {advice}")


# A name that no attribute has: which wrappers an env is in, asked as a plain value, so that any process can answer.
WRAPPERS = "envfleet.wrappers"
CLIPS_REWARDS = "clips_rewards"  # in an env's metadata: info["reward"] has what the reward was


def value_of(env: gymnasium.Env[Any, Any], name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call the env's method of that name, or get its attribute; wrappers are looked through."""
    if name == WRAPPERS:
        return _wrapper_names(env)
    attribute = env.get_wrapper_attr(name)
    return attribute(*args, **kwargs) if callable(attribute) else attribute


def set_attribute(env: gymnasium.Env[Any, Any], name: str, value: Any) -> None:
    """Set the env's attribute; wrappers are looked through."""
    env.set_wrapper_attr(name, value)


def _wrapper_names(env: gymnasium.Env[Any, Any]) -> list[str]:
    """The classes of all wrappers of an env, and what they inherit from."""
    names: list[str] = []
    while isinstance(env, gymnasium.Wrapper):
        names += [f"{each.__module__}.{each.__qualname__}" for each in type(env).__mro__]
        env = env.env
    return names
