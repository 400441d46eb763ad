"""PolicySpec: a policy as an import path and weights, which travels without pickling."""

from __future__ import annotations

import importlib
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from envfleet.contract.errors import UsageError


@dataclass(frozen=True, slots=True, eq=False)
class PolicySpec:
    """How to build a policy anywhere, and whose weights it acts with. It travels without pickling.

    Args:
        factory: "package.module:name" of a class or function that the workers can import. It returns a Policy, or
            anything else that a cluster accepts as an agent.
        kwargs: arguments of the factory; plain values.
        weights: the learner's module, Policy or mapping of arrays; None: those that the factory makes, on each worker.

    Raises:
        UsageError: `factory` is no such path or names __main__, or `kwargs` has values that are not plain.
    """

    factory: str  # "package.module:name", a class or a function
    kwargs: Mapping[str, Any] = field(default_factory=dict)  # of the factory; plain values
    weights: Any = (
        None  # the learner's module, Policy or mapping of arrays; None: the factory's own, the same everywhere
    )

    def __post_init__(self) -> None:
        """Check the path and the arguments."""
        module, colon, name = self.factory.partition(":") if isinstance(self.factory, str) else ("", "", "")
        if not (module and colon and name) or ":" in name:
            raise UsageError(f"factory must read 'package.module:name'; got {self.factory!r}")
        if module == "__main__":
            raise UsageError(
                f"workers cannot import {self.factory!r}, because their __main__ is another module: move it "
                f"to a file of its own, or pass the agent itself"
            )
        if not isinstance(self.kwargs, Mapping):
            raise UsageError(f"kwargs must be a mapping of names to plain values; got {type(self.kwargs).__name__}")
        _require_plain(dict(self.kwargs), "kwargs")


def imported(path: str) -> Callable[..., Any]:
    """Import what a path names.

    Args:
        path: "package.module:name".

    Returns:
        The class or function.

    Raises:
        ImportError: there is no such module.
        AttributeError: the module has no such name.
    """
    module, _, name = path.partition(":")
    factory: Callable[..., Any] = operator.attrgetter(name)(importlib.import_module(module))
    return factory


def _require_plain(value: Any, where: str) -> None:
    # Exact types: a subclass (np.float64 is a float, an enum may be a str) would arrive as something else.
    if type(value) is dict:
        for key, part in value.items():
            if type(key) is not str:
                raise UsageError(f"keys of {where} must be str; got {key!r}")
            _require_plain(part, f"{where}[{key!r}]")
    elif type(value) in (list, tuple):
        for index, part in enumerate(value):
            _require_plain(part, f"{where}[{index}]")
    elif type(value) is int:
        if not -(2**63) <= value < 2**64:
            raise UsageError(f"{where} must fit into 64 bits; got {value}")
    elif value is not None and type(value) not in (bool, float, str, bytes):
        kind = type(value)
        raise UsageError(
            f"{where} must be a plain value (None, bool, int, float, str, bytes, list, tuple, dict): it travels "
            f"without pickling; got {kind.__module__}.{kind.__qualname__}"
        )
