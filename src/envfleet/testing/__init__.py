"""Hold any pool to EnvFleet's contract: `check_pool(make)` runs the conformance suite on it.

Policies: `check_policy`; launchers: `check_launcher`.

`make` is called like `envfleet.make` and returns a pool; the suite brings its own environments.
"""

from typing import TYPE_CHECKING, Any

from envfleet.testing.conformance import CHECKS, PYTHON_ENV_CHECKS, check_pool
from envfleet.testing.envs import Act, BoxActionEnv, ScriptedEnv, TreeEnv
from envfleet.testing.leases import check_leases
from envfleet.testing.policy_conformance import POLICY_CHECKS, PolicyCase, check_policy
from envfleet.testing.programs import Program, run_program

if TYPE_CHECKING:
    from envfleet.testing.launcher_conformance import LAUNCHER_CHECKS, check_launcher
    from envfleet.testing.launcher_fleet import LauncherCase


def __getattr__(name: str) -> Any:
    """Import the launchers' suite when it is asked for: it loads ZeroMQ, which no child process of a pool needs."""
    if name not in ("LAUNCHER_CHECKS", "LauncherCase", "check_launcher"):
        raise AttributeError(f"module 'envfleet.testing' has no attribute {name!r}")
    from envfleet.testing import launcher_conformance

    return getattr(launcher_conformance, name)


__all__ = [
    "CHECKS",
    "LAUNCHER_CHECKS",
    "POLICY_CHECKS",
    "PYTHON_ENV_CHECKS",
    "Act",
    "BoxActionEnv",
    "LauncherCase",
    "PolicyCase",
    "Program",
    "ScriptedEnv",
    "TreeEnv",
    "check_launcher",
    "check_leases",
    "check_policy",
    "check_pool",
    "run_program",
]
