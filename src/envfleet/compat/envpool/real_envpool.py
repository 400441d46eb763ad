"""The real EnvPool, if it is installed: it runs the tasks that are no envs of ours.

While a script runs with ours under the name `envpool`, the real one is imported beside it, under the same name.
"""

from __future__ import annotations

import importlib
import importlib.machinery
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

_NAME = "envpool"
_of_real: dict[str, ModuleType] = {}  # its modules, while ours have their names


def is_installed() -> bool:
    """Whether there is a real EnvPool; what stands in sys.modules under its name does not count."""
    return importlib.machinery.PathFinder.find_spec(_NAME) is not None


@contextmanager
def real_envpool() -> Iterator[Any]:
    """EnvPool's own package, under its own name, as its lazy imports want it."""
    present = sys.modules.get(_NAME)
    if present is None or not is_stand_in(present):
        yield importlib.import_module(_NAME)
        return
    ours = _take_modules()
    sys.modules.update(_of_real)
    try:
        yield importlib.import_module(_NAME)
    finally:
        _of_real.update(_take_modules())
        sys.modules.update(ours)


def is_stand_in(module: ModuleType) -> bool:
    """Is this module ours, under EnvPool's name?"""
    return module.__name__.startswith("envfleet.")


def _take_modules() -> dict[str, ModuleType]:
    names = [name for name in sys.modules if name == _NAME or name.startswith(f"{_NAME}.")]
    return {name: sys.modules.pop(name) for name in names}
