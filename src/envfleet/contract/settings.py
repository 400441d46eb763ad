"""What the frozen values that hold settings share: how they are given, and how they check their numbers."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any, ParamSpec, TypeVar

import numpy as np

from envfleet.contract.errors import UsageError

Settings = TypeVar("Settings")
Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


def settings_of(kind: type[Settings], given: Settings | Mapping[str, Any] | None, name: str) -> Settings:
    """The settings that argument `name` holds: a value of this kind, a dict of its fields, or None for all defaults.

    A value of a derived kind is refused: its further fields would be ignored.
    """
    if given is None:
        return kind()
    if type(given) is kind:
        return given
    if not isinstance(given, Mapping):
        raise UsageError(f"{name} must be envfleet.{kind.__name__}(...), or a dict of its fields; got {given!r}")
    fields = [field.name for field in dataclasses.fields(kind)]  # type: ignore[arg-type]
    require_known(given, fields, name)
    return kind(**given)


def require_known(
    names: Iterable[str], known: Iterable[str], where: str, moved: Mapping[str, str] | None = None
) -> None:
    """Refuse names that are not known; the error lists those that are, and says where a name has moved."""
    known = list(known)
    for name in names:
        if moved is not None and name in moved:
            raise UsageError(f"{name} moved: {moved[name]}")
        if name not in known:
            raise UsageError(f"{where} has no setting {name!r}; known: {', '.join(known)}")


def names_checked(
    where: str, moved: Mapping[str, str]
) -> Callable[[Callable[Arguments, Result]], Callable[Arguments, Result]]:
    """Have a method refuse names that it does not have; see require_known()."""

    def checked(method: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
        known = list(inspect.signature(method).parameters)[1:]

        @functools.wraps(method)
        def call(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
            require_known(kwargs, known, where, moved)
            return method(*args, **kwargs)

        return call

    return checked


def keep_plain_numbers(settings: Any) -> None:
    """Replace NumPy's numbers in a frozen dataclass by Python's, which every message can carry."""
    for field in dataclasses.fields(settings):
        value = getattr(settings, field.name)
        if isinstance(value, np.generic):
            object.__setattr__(settings, field.name, value.item())
