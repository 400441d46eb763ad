"""What the checks of the conformance suite share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from envfleet.contract.arrays import Array
from envfleet.contract.episode import Autoreset
from envfleet.testing.envs import Act

Make = Callable[..., Any]
Check = Callable[[Make, Autoreset], None]

STEP, EPISODE, LAST_ACT = 1, 2, 3  # columns of ScriptedEnv's observation


def acts(*actions: Act) -> Array:
    """Return actions for ScriptedEnv."""
    return np.array(actions, dtype=np.int64)


def expect(kind: type[Exception], call: Callable[[], Any]) -> Exception:
    """Check that a call raises.

    Args:
        kind: of the exception.
        call: takes no arguments.

    Returns:
        The exception.

    Raises:
        AssertionError: it did not raise.
    """
    try:
        call()
    except kind as error:
        return error
    raise AssertionError(f"expected {kind.__name__}, but nothing was raised")
