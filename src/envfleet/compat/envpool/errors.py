"""Errors of the stand-in. Each is ours, and also what EnvPool raises in its place, so that scripts catch it."""

from __future__ import annotations

from envfleet.contract.errors import InvalidAction, UsageError


class WrongSetting(UsageError, AssertionError):
    """An argument of make() has a value that it cannot have, or there is no such task."""


class UnknownSetting(UsageError, TypeError):
    """make() was given an argument that this task does not have."""


class WrongAction(InvalidAction, RuntimeError):
    """Actions in a form that neither EnvPool nor EnvFleet takes."""


class NotDrawn(UsageError, RuntimeError):
    """render() was called where nothing can be drawn."""
