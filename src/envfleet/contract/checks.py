"""Checks of arguments and settings. Each returns the value as a plain Python one, or raises UsageError."""

from __future__ import annotations

import operator
import re
from typing import Any

from envfleet.contract.errors import UsageError


def whole_number(name: str, value: Any, at_least: int = 1, at_most: int | None = None) -> int:
    """Check a count. Integers of NumPy are accepted; bool, float and text are not.

    Args:
        name: what the error calls the value.
        value: what the user gave.
        at_least: the smallest allowed value.
        at_most: the largest allowed value; None: no limit.

    Returns:
        The value as an int.

    Raises:
        UsageError: `value` is not a whole number, or is outside the limits.
    """
    number = _index(value)
    if number is None or number < at_least or (at_most is not None and number > at_most):
        limits = f"of at least {at_least}" if at_most is None else f"from {at_least} to {at_most}"
        raise UsageError(f"{name} must be a whole number {limits}; got {value!r}")
    return number


def positive(name: str, value: Any, hint: str = "") -> float:
    """Check a number that must be greater than 0. NaN is refused, infinity is not.

    Args:
        name: what the error calls the value.
        value: what the user gave.
        hint: ends the error text.

    Returns:
        The value, unchanged.

    Raises:
        UsageError: `value` is not a positive number.
    """
    if not _is_positive(value):
        raise UsageError(f"{name} must be positive; got {value!r}{hint}")
    return value  # type: ignore[no-any-return]


def positive_or_none(name: str, value: Any) -> float | None:
    """Check a limit that None switches off; otherwise like positive()."""
    if value is not None and not _is_positive(value):
        raise UsageError(f"{name} must be positive, or None for no limit; got {value!r}")
    return value  # type: ignore[no-any-return]


def true_or_false(name: str, value: Any, hint: str = "") -> bool:
    """Check a switch: 0, 1 and None are refused with UsageError. `hint` is what else the setting may be."""
    if not isinstance(value, bool):
        raise UsageError(f"{name} must be True or False{hint}; got {value!r}")
    return value


def device_or_none(name: str, value: Any) -> str | None:
    """Check the name of a device, such as "cuda" or "cuda:1"; whether there is one is for its host to say.

    Args:
        name: what the error calls the value.
        value: what the user gave; None: no device is named.

    Returns:
        The value, unchanged.

    Raises:
        UsageError: `value` is not such a text.
    """
    if value is None:
        return None
    if not isinstance(value, str) or re.fullmatch(r"[a-z][a-z0-9_]*(:\d{1,4})?", value, re.ASCII) is None:
        raise UsageError(f"{name} must be a text such as 'cpu', 'cuda', 'cuda:1' or 'mps', or None; got {value!r}")
    return value


def _index(value: Any) -> int | None:
    if isinstance(value, bool):
        return None
    try:
        return operator.index(value)
    except TypeError:
        return None


def _is_positive(value: Any) -> bool:
    try:
        return not isinstance(value, bool) and bool(value > 0)
    except (TypeError, ValueError):
        return False
