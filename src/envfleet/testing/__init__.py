"""Hold any pool to EnvFleet's contract: `check_pool(make)` runs the conformance suite on it.

`make` is called like `envfleet.make` and returns a pool; the suite brings its own environments.
"""

from envfleet.testing.conformance import CHECKS, PYTHON_ENV_CHECKS, check_pool
from envfleet.testing.envs import Act, BoxActionEnv, ScriptedEnv, TreeEnv
from envfleet.testing.leases import check_leases
from envfleet.testing.programs import Program, run_program

__all__ = [
    "CHECKS",
    "PYTHON_ENV_CHECKS",
    "Act",
    "BoxActionEnv",
    "Program",
    "ScriptedEnv",
    "TreeEnv",
    "check_leases",
    "check_pool",
    "run_program",
]
