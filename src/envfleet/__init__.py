"""EnvFleet: reinforcement-learning environments, fast on one machine and unchanged on a cluster."""

from typing import TYPE_CHECKING, Any

from envfleet.contract.distributions import Bernoulli, Categorical, Gaussian, MultiCategorical
from envfleet.contract.episode import Autoreset
from envfleet.contract.errors import (
    CheckpointError,
    ChildDied,
    ClusterError,
    ClusterTimeout,
    EnvBusy,
    EnvFailed,
    EnvFleetError,
    InvalidAction,
    JoinTimeout,
    MissingExtra,
    NothingToReceive,
    NotReset,
    PolicyFailed,
    PoolClosed,
    PoolTimeout,
    SpacesDiffer,
    StepOnEndedEpisode,
    UsageError,
    WorkerFailed,
    WorkerLost,
)
from envfleet.contract.evaluation import Evaluation
from envfleet.contract.pixels import Pixels
from envfleet.contract.policy import Acted, ActsDeterministically, MovesToDevice, Policy
from envfleet.contract.pool_config import PoolSettings
from envfleet.contract.returns import gae, gae_of, vtrace
from envfleet.contract.rollout import Rollout
from envfleet.contract.spec import EnvSpec
from envfleet.contract.state import EnvState
from envfleet.pool.gymnasium_ids import register_ids as _register_ids
from envfleet.pool.make import make
from envfleet.pool.native.plugins import compile_native, load_native
from envfleet.pool.native.registry import registry
from envfleet.pool.pool import EnvPool
from envfleet.version import __version__

if TYPE_CHECKING:
    from envfleet.cluster.checkpoint.checkpoint import Checkpoint, load_checkpoint
    from envfleet.cluster.cluster_env import ClusterEnv
    from envfleet.cluster.network import Network
    from envfleet.cluster.run.stop_signal import StopSignal
    from envfleet.cluster.sync import APS, Every, EveryUpdate, Never
    from envfleet.cluster.timing import Timing
    from envfleet.launchers.by_name import launcher_of
    from envfleet.launchers.kubernetes.settings import Kubernetes
    from envfleet.launchers.local import Local
    from envfleet.launchers.manual import Manual
    from envfleet.launchers.ray.settings import Ray
    from envfleet.launchers.slurm.settings import Slurm
    from envfleet.launchers.ssh import SSH
    from envfleet.policies.by_path import PolicySpec
    from envfleet.policies.evaluate import evaluate
    from envfleet.policies.functions import FunctionPolicy
    from envfleet.policies.mapping import PolicyMapping
    from envfleet.policies.noisy_actor import GaussianNoise
    from envfleet.policies.normalizing import NormalizedPolicy, RewardScaler
    from envfleet.policies.off_policy import EpsilonGreedy, SquashedGaussian
    from envfleet.policies.torch.policy import TorchPolicy
    from envfleet.policies.torch.recurrent import RecurrentTorchPolicy

# What a pool does not need, above all ZeroMQ, is imported when it is first asked for.
_LATER = {
    "APS": "envfleet.cluster.sync",
    "Checkpoint": "envfleet.cluster.checkpoint.checkpoint",
    "ClusterEnv": "envfleet.cluster.cluster_env",
    "EpsilonGreedy": "envfleet.policies.off_policy",
    "Every": "envfleet.cluster.sync",
    "EveryUpdate": "envfleet.cluster.sync",
    "FunctionPolicy": "envfleet.policies.functions",
    "GaussianNoise": "envfleet.policies.noisy_actor",
    "Kubernetes": "envfleet.launchers.kubernetes.settings",
    "Local": "envfleet.launchers.local",
    "Manual": "envfleet.launchers.manual",
    "Network": "envfleet.cluster.network",
    "Never": "envfleet.cluster.sync",
    "NormalizedPolicy": "envfleet.policies.normalizing",
    "PolicyMapping": "envfleet.policies.mapping",
    "PolicySpec": "envfleet.policies.by_path",
    "Ray": "envfleet.launchers.ray.settings",
    "RecurrentTorchPolicy": "envfleet.policies.torch.recurrent",
    "RewardScaler": "envfleet.policies.normalizing",
    "SSH": "envfleet.launchers.ssh",
    "Slurm": "envfleet.launchers.slurm.settings",
    "SquashedGaussian": "envfleet.policies.off_policy",
    "StopSignal": "envfleet.cluster.run.stop_signal",
    "Timing": "envfleet.cluster.timing",
    "TorchPolicy": "envfleet.policies.torch.policy",
    "evaluate": "envfleet.policies.evaluate",
    "launcher_of": "envfleet.launchers.by_name",
    "load_checkpoint": "envfleet.cluster.checkpoint.checkpoint",
}


def __getattr__(name: str) -> Any:
    """Import what is not needed by everybody."""
    import importlib

    if name == "losses":
        return importlib.import_module("envfleet.losses")
    if name not in _LATER:
        raise AttributeError(f"module 'envfleet' has no attribute {name!r}")
    return getattr(importlib.import_module(_LATER[name]), name)


_register_ids()

__all__ = [
    "APS",
    "SSH",
    "Acted",
    "ActsDeterministically",
    "Autoreset",
    "Bernoulli",
    "Categorical",
    "Checkpoint",
    "CheckpointError",
    "ChildDied",
    "ClusterEnv",
    "ClusterError",
    "ClusterTimeout",
    "EnvBusy",
    "EnvFailed",
    "EnvFleetError",
    "EnvPool",
    "EnvSpec",
    "EnvState",
    "EpsilonGreedy",
    "Evaluation",
    "Every",
    "EveryUpdate",
    "FunctionPolicy",
    "Gaussian",
    "GaussianNoise",
    "InvalidAction",
    "JoinTimeout",
    "Kubernetes",
    "Local",
    "Manual",
    "MissingExtra",
    "MovesToDevice",
    "MultiCategorical",
    "Network",
    "Never",
    "NormalizedPolicy",
    "NotReset",
    "NothingToReceive",
    "Pixels",
    "Policy",
    "PolicyFailed",
    "PolicyMapping",
    "PolicySpec",
    "PoolClosed",
    "PoolSettings",
    "PoolTimeout",
    "Ray",
    "RecurrentTorchPolicy",
    "RewardScaler",
    "Rollout",
    "Slurm",
    "SpacesDiffer",
    "SquashedGaussian",
    "StepOnEndedEpisode",
    "StopSignal",
    "Timing",
    "TorchPolicy",
    "UsageError",
    "WorkerFailed",
    "WorkerLost",
    "__version__",
    "compile_native",
    "evaluate",
    "gae",
    "gae_of",
    "launcher_of",
    "load_checkpoint",
    "load_native",
    "make",
    "registry",
    "vtrace",
]
