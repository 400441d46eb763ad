"""EnvFleet: reinforcement-learning environments, fast on one machine and unchanged on a cluster."""

from envfleet.api import make
from envfleet.contract.episode import Autoreset
from envfleet.contract.errors import (
    ChildDied,
    ClusterError,
    EnvBusy,
    EnvFailed,
    EnvFleetError,
    InvalidAction,
    MissingExtra,
    NothingToReceive,
    NotReset,
    PoolClosed,
    PoolTimeout,
    SpacesDiffer,
    StepOnEndedEpisode,
    UsageError,
)
from envfleet.contract.spec import EnvSpec
from envfleet.contract.state import EnvState
from envfleet.pool.native_plugins import compile_native, load_native
from envfleet.pool.native_registry import registry
from envfleet.pool.pool import EnvPool
from envfleet.version import __version__

__all__ = [
    "Autoreset",
    "ChildDied",
    "ClusterError",
    "EnvBusy",
    "EnvFailed",
    "EnvFleetError",
    "EnvPool",
    "EnvSpec",
    "EnvState",
    "InvalidAction",
    "MissingExtra",
    "NotReset",
    "NothingToReceive",
    "PoolClosed",
    "PoolTimeout",
    "SpacesDiffer",
    "StepOnEndedEpisode",
    "UsageError",
    "__version__",
    "compile_native",
    "load_native",
    "make",
    "registry",
]
