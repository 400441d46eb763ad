"""EnvPool's module, with envs of ours: `import envfleet.compat.envpool as envpool`."""

from typing import Any

from envfleet.compat.envpool.batched_pool import BatchedPool as EnvPool
from envfleet.compat.envpool.gymnasium_form import GymnasiumEnvPool
from envfleet.compat.envpool.registration import (
    list_all_envs,
    make,
    make_dm,
    make_gym,
    make_gymnasium,
    make_spec,
    register,
    registry,
)
from envfleet.compat.envpool.spec import EnvSpec

__version__ = "1.2.5"  # the EnvPool whose interface this is

__all__ = [
    "DMEnvPool",
    "EnvPool",
    "EnvSpec",
    "GymnasiumEnvPool",
    "list_all_envs",
    "make",
    "make_dm",
    "make_gym",
    "make_gymnasium",
    "make_spec",
    "register",
    "registry",
]


def __getattr__(name: str) -> Any:
    """Import what needs dm_env when it is asked for."""
    if name == "DMEnvPool":
        from envfleet.compat.envpool.dm_form import DMEnvPool

        return DMEnvPool
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
