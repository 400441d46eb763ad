"""What to tell a caller who gave what no pool can build: a PettingZoo env, or an env that is built already."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import gymnasium

_SEVERAL_AGENTS = (
    "several agents act in it, as in PettingZoo's envs: make a pool of "
    "lambda: envfleet.adapters.pettingzoo.SharedEnv(parallel_env); or wrap it as a gymnasium.Env for one agent, in "
    "which the others act by a policy of yours"
)


def hint(env: Any) -> str:
    """What to do about an object that is no Gymnasium env, to be put at the end of a message; "" if nobody knows."""
    if _has_several_agents(env):
        return f"; {_SEVERAL_AGENTS}"
    if isinstance(env, gymnasium.Env):
        return "; pass what makes the env (a class, a function or a lambda), not an env that is made already"
    if isinstance(env, gymnasium.vector.VectorEnv):
        return "; it is a vector env: pass what makes it, called with num_envs, and backend='vector'"
    return ""


def _has_several_agents(env: Any) -> bool:
    """Told by names alone, so that PettingZoo need not be installed."""
    if isinstance(env, ModuleType):  # pettingzoo.butterfly.pistonball_v6
        return _is_pettingzoo(env.__name__)
    has_agents = hasattr(env, "possible_agents") or (hasattr(env, "agents") and hasattr(env, "observation_spaces"))
    return has_agents or any(_is_pettingzoo(kind.__module__) for kind in type(env).__mro__)


def _is_pettingzoo(module: str) -> bool:
    return module.partition(".")[0] == "pettingzoo"
