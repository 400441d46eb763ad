"""The names that scripts annotate pools with: `from envpool.python.protocol import EnvPool`."""

from typing import Any

from envfleet.compat.envpool.array_spec import ArraySpec
from envfleet.compat.envpool.batched_pool import BatchedPool as EnvPool
from envfleet.compat.envpool.gymnasium_form import GymnasiumEnvPool
from envfleet.compat.envpool.spec import EnvSpec

__all__ = ["ArraySpec", "EnvPool", "EnvSpec", "GymnasiumEnvPool"]


def __getattr__(name: str) -> Any:
    """Import what needs dm_env when it is asked for."""
    if name == "DMEnvPool":
        from envfleet.compat.envpool.dm_form import DMEnvPool

        return DMEnvPool
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
