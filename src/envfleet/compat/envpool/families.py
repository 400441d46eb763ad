"""EnvPool's packages for families of envs, such as `envpool.classic_control`, with a class for each kind and form."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

from envfleet.compat.envpool.gym_form import gym_class, imported_gym, is_old
from envfleet.compat.envpool.gymnasium_form import gymnasium_class
from envfleet.compat.envpool.kind import Kind
from envfleet.compat.envpool.spec import spec_class
from envfleet.compat.envpool.tasks import KINDS

_HOME = "envfleet.compat.envpool"


def family_modules() -> dict[str, ModuleType]:
    """The modules by the rest of their name after "envpool.": "atari", "atari.registration", "mujoco.gym", ..."""
    modules: dict[str, ModuleType] = {}
    for kind in KINDS.values():
        parts = kind.family.split(".")
        for depth in range(1, len(parts) + 1):
            modules.setdefault(".".join(parts[:depth]), _module(".".join(parts[:depth])))
        registration = f"{kind.family}.registration"
        modules.setdefault(registration, _module(registration))
        for name, value in _classes(kind).items():
            setattr(modules[kind.family], name, value)
    for name, module in modules.items():
        outer, _, inner = name.rpartition(".")
        if outer:
            setattr(modules[outer], inner, module)
    return modules


def _module(name: str) -> ModuleType:
    module = ModuleType(f"{_HOME}.{name}", "Stands in for EnvPool's module of this name.")
    module.__path__ = []
    return module


def _classes(kind: Kind) -> dict[str, Any]:
    return {
        f"{kind.name}EnvSpec": spec_class(kind.name),
        f"{kind.name}GymnasiumEnvPool": gymnasium_class(kind.name),
        f"{kind.name}GymEnvPool": _later(lambda: _gym_class(kind.name)),
        f"{kind.name}DMEnvPool": _later(lambda: _dm_class(kind.name)),
    }


def _later(find_class: Callable[[], Any]) -> Callable[[Any], Any]:
    """Which gym there is, and whether there is a dm_env, is asked when a pool is made."""
    return lambda spec: find_class()(spec)


def _gym_class(kind_name: str) -> Any:
    gym = imported_gym()
    return gymnasium_class(kind_name) if gym is None else gym_class(kind_name, gym, not is_old(gym))


def _dm_class(kind_name: str) -> Any:
    from envfleet.compat.envpool.dm_form import dm_class

    return dm_class(kind_name)
