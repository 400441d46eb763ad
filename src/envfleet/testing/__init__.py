"""Hold any pool to EnvFleet's contract: `check_pool(make)` runs the conformance suite on it; policies: `check_policy`.

`make` is called like `envfleet.make` and returns a pool; the suite brings its own environments.
"""

from envfleet.testing.conformance import CHECKS, PYTHON_ENV_CHECKS, check_pool
from envfleet.testing.envs import Act, BoxActionEnv, ScriptedEnv, TreeEnv
from envfleet.testing.leases import check_leases
from envfleet.testing.policy_conformance import POLICY_CHECKS, PolicyCase, check_policy
from envfleet.testing.programs import Program, run_program

__all__ = [
    "CHECKS",
    "POLICY_CHECKS",
    "PYTHON_ENV_CHECKS",
    "Act",
    "BoxActionEnv",
    "PolicyCase",
    "Program",
    "ScriptedEnv",
    "TreeEnv",
    "check_leases",
    "check_policy",
    "check_pool",
    "run_program",
]
