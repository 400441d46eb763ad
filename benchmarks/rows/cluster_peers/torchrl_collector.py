"""TorchRL's MultiSync collector, with an actor and a critic of 2x64 tanh units.

Tried, by CPU for each env step: Gymnasium's SyncVectorEnv in GymWrapper with autoreset disabled, which TorchRL prefers
(the best: less than half of the others); the same with same-step resets; SerialEnv; GymEnv(num_envs=8); device="cpu"
(none is faster); use_buffers=False; trust_policy=True; more steps a batch (no difference). `is_compiled`: the collector
compiles the policy, which needs a C++ compiler and saves about a fifth.
"""

from __future__ import annotations

import functools
import warnings
from typing import Any

from benchmarks.rows.cluster_peers.serve import Served, count_for, serve


def make_env(num_envs: int) -> Any:
    import gymnasium
    from torchrl.envs import GymWrapper

    envs = gymnasium.make_vec(
        "CartPole-v1",
        num_envs,
        vectorization_mode="sync",
        vector_kwargs={"autoreset_mode": gymnasium.vector.AutoresetMode.DISABLED},
    )
    return GymWrapper(envs, categorical_action_encoding=True)


def make_policy() -> Any:
    from tensordict.nn import TensorDictModule, TensorDictSequential
    from torch import nn
    from torch.distributions import Categorical
    from torchrl.modules import ProbabilisticActor, ValueOperator

    def mlp(num_outputs: int) -> nn.Module:
        return nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, num_outputs))

    actor = ProbabilisticActor(
        TensorDictModule(mlp(2), in_keys=["observation"], out_keys=["logits"]),
        in_keys=["logits"],
        distribution_class=Categorical,
        return_log_prob=True,
    )
    return TensorDictSequential(actor, ValueOperator(mlp(1), in_keys=["observation"]))


def build(settings: dict[str, Any]) -> Served:
    import gymnasium
    import torch
    import torchrl
    from torchrl.collectors import MultiSyncCollector

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    num_workers, num_envs = settings["num_workers"], settings["num_envs_per_worker"]
    num_steps = settings.get("num_steps", 64)
    collector = MultiSyncCollector(
        [functools.partial(make_env, num_envs)] * num_workers,
        make_policy(),
        frames_per_batch=num_steps * num_envs * num_workers,
        total_frames=-1,
        cat_results=0,
        num_threads=1,
        num_sub_threads=1,
        compile_policy=settings["is_compiled"] or None,
    )
    batches = iter(collector)
    about = {
        "versions": f"torchrl {torchrl.__version__}, torch {torch.__version__}, gymnasium {gymnasium.__version__}",
        "settings": f"{num_steps} steps a batch, SyncVectorEnv"
        + (", compile_policy" if settings["is_compiled"] else ""),
    }
    return Served(lambda window_s: count_for(window_s, lambda: next(batches).numel()), collector.shutdown, about)


if __name__ == "__main__":
    serve(build)
