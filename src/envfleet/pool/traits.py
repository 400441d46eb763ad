"""Look into a built env: its spaces and metadata, its attributes."""

from __future__ import annotations

from typing import Any

import gymnasium

from envfleet.contract.errors import SpacesDiffer
from envfleet.contract.spec import EnvTraits


def traits_of(env: gymnasium.Env[Any, Any]) -> EnvTraits:
    """What is known of an env once it was built."""
    return EnvTraits(
        observation_space=env.observation_space,
        action_space=env.action_space,
        metadata=dict(env.metadata),
        render_mode=env.render_mode,
        gymnasium_spec=env.spec,
        info_columns=dict(getattr(env.unwrapped, "info_columns", {})),
    )


def require_same_spaces(expected: EnvTraits, env: gymnasium.Env[Any, Any], env_id: int) -> None:
    """All envs of a pool share one batch, so their spaces must be equal."""
    for name in ("observation_space", "action_space"):
        if getattr(env, name) != getattr(expected, name):
            raise SpacesDiffer(
                f"env {env_id} has another {name} than env 0: {getattr(env, name)} instead of "
                f"{getattr(expected, name)}; the envs of one pool must have equal spaces"
            )


def value_of(env: gymnasium.Env[Any, Any], name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call the env's method of that name, or get its attribute; wrappers are looked through."""
    attribute = env.get_wrapper_attr(name)
    return attribute(*args, **kwargs) if callable(attribute) else attribute


def set_attribute(env: gymnasium.Env[Any, Any], name: str, value: Any) -> None:
    """Set the env's attribute; wrappers are looked through."""
    env.set_wrapper_attr(name, value)
