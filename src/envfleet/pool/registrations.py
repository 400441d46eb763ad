"""Registrations: the envs that this process has registered with Gymnasium, for other processes to register.

A thunk such as `lambda: gym.make("My-v0")` needs the registrations of the script (`gym.register(...)`,
`import minigrid`), and runs in a child or on a worker, which has only those of Gymnasium itself.
"""

from __future__ import annotations

import ast
import inspect
import pickle
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any, NoReturn

import cloudpickle
import gymnasium
from gymnasium.envs.registration import EnvSpec as GymnasiumSpec
from gymnasium.envs.registration import load_env_creator

from envfleet.contract.errors import UsageError

NAMESPACE = "envfleet"  # of the ids that every process registers when it imports this package: gymnasium_ids.py


@dataclass(frozen=True, slots=True)
class Registrations:
    """Pickled specs by id. Each is pickled alone, so that one that cannot travel does not keep the others back."""

    pickles: dict[str, bytes]
    refusals: dict[str, str]  # id -> why its spec cannot be pickled

    @classmethod
    def of_this_process(cls) -> Registrations:
        """All that neither Gymnasium nor this package registers by itself."""
        pickles: dict[str, bytes] = {}
        refusals: dict[str, str] = {}
        for env_id, spec in list(gymnasium.registry.items()):
            if spec.namespace != NAMESPACE and not is_gymnasiums_own(spec):
                try:
                    pickles[env_id] = cloudpickle.dumps(_with_entry_points(portable(spec), _by_path))
                except Exception as error:
                    refusals[env_id] = f"{type(error).__name__}: {error}"
        return cls(pickles, refusals)

    def specs(self) -> dict[str, GymnasiumSpec]:
        """The specs. One that cannot be used here says why when its env is made, and not before."""
        specs = {env_id: _refusing(env_id, why) for env_id, why in self.refusals.items()}
        for env_id, pickled in self.pickles.items():
            try:
                specs[env_id] = pickle.loads(pickled)
            except Exception as error:
                specs[env_id] = _refusing(env_id, f"{type(error).__name__}: {error}")
        return specs


def register_all(specs: dict[str, GymnasiumSpec]) -> None:
    """Register `specs` in this process. To be called before each env is built.

    The import of an env's module may register envs, too: Gymnasium need not warn that they are registered already, and
    what the script had registered in their place comes back with the next call. A registration that could not travel
    makes room for the one that such a module has made.
    """
    if specs:
        warnings.filterwarnings("ignore", message=r"(?s).*Overriding environment .* already in registry")
        for env_id, spec in specs.items():
            present = gymnasium.registry.get(env_id)
            if present is None or not _is_refusing(spec) or is_gymnasiums_own(present):
                gymnasium.registry[env_id] = spec


def is_gymnasiums_own(spec: GymnasiumSpec) -> bool:
    """Does every process that imports Gymnasium have this very registration?"""
    if callable(spec.entry_point):  # of retired envs: a function that says so
        return getattr(spec.entry_point, "__module__", None) == gymnasium.envs.__name__
    return _gymnasiums_own().get(spec.id) == spec


def portable(spec: GymnasiumSpec) -> GymnasiumSpec:
    """`spec` with the class in place of a path into `__main__`, since other processes have another `__main__`."""
    return _with_entry_points(spec, lambda each: load_env_creator(each) if str(each).startswith("__main__:") else each)


def _by_path(entry_point: Any) -> Any:
    """The path of a class that can be imported: a process that does not build this env need not import it."""
    module, name = str(getattr(entry_point, "__module__", "")), str(getattr(entry_point, "__qualname__", ""))
    by_value = {"__main__", *cloudpickle.list_registry_pickle_by_value()}
    if any(f"{module}.".startswith(f"{each}.") for each in by_value):
        return entry_point
    return f"{module}:{name}" if name and getattr(sys.modules.get(module), name, None) is entry_point else entry_point


def _with_entry_points(spec: GymnasiumSpec, change: Callable[[Any], Any]) -> GymnasiumSpec:
    changed = {name: change(getattr(spec, name)) for name in ("entry_point", "vector_entry_point")}
    return spec if all(getattr(spec, name) is each for name, each in changed.items()) else replace(spec, **changed)


@cache
def _gymnasiums_own() -> dict[str, GymnasiumSpec]:
    """As its source has them: the registry does not say who made an entry, or whether it was changed since."""
    specs: dict[str, GymnasiumSpec] = {}
    try:
        source = inspect.getsource(gymnasium.envs)
    except OSError:
        return specs  # installed without its source: all registrations travel
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "register":
            try:
                spec = GymnasiumSpec(**{str(each.arg): ast.literal_eval(each.value) for each in node.keywords})
            except ValueError:
                continue  # not a plain registration, so it travels
            specs[spec.id] = spec
    return specs


def _refusing(env_id: str, why: str) -> GymnasiumSpec:
    return GymnasiumSpec(env_id, entry_point=partial(_refuse, env_id, why), disable_env_checker=True)


def _is_refusing(spec: GymnasiumSpec) -> bool:
    return isinstance(spec.entry_point, partial) and spec.entry_point.func is _refuse


def _refuse(env_id: str, why: str, **_: Any) -> NoReturn:
    raise UsageError(
        f"{env_id} is registered where the envs were asked for, but its registration cannot be passed to the process "
        f"that runs this env: {why}. Register it as 'module:Class', or in the function that makes the env"
    )
