"""Rollout: T steps of N envs, each worker's collected with exactly one policy version."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from envfleet.contract.errors import MissingExtra


@dataclass(frozen=True, slots=True)
class Rollout:
    """T steps of N envs, time first; rows in the order of env ids. W workers contributed.

    Envs reset themselves in the step that ends an episode, so every row is a real transition: `obs[t]` was acted on
    with `actions[t]`, which gave `rewards[t]`. What the episode came to then is in `final_obs`, not in `obs[t + 1]`.
    Observations of a single worker's rollout are the received message itself, and cannot be written.
    A tree is one array, or a dict or tuple of trees, in the form of the space. F episodes ended in this rollout.
    """

    obs: Any  # tree of [T, N, ...]
    actions: Any  # tree of [T, N, ...]
    log_probs: Any  # [T, N] float32, by the policy that acted; None if it has no probabilities
    extras: Mapping[str, Any]  # what else the policy gave for each step, each [T, N, ...]; often "values"
    rewards: Any  # [T, N] float64
    terminations: Any  # [T, N] bool
    truncations: Any  # [T, N] bool
    next_obs: Any  # tree of [N, ...]: what the envs show after the last step
    next_values: Any  # [N] float32, of next_obs; None if the policy has no values
    final_values: Any  # [T, N] float32, of the final observations; 0 where no episode ended; None without values
    final_steps: Any  # [F] int64: the step t in which an episode ended
    final_envs: Any  # [F] int64: its row n
    final_obs: Any  # tree of [F, ...]
    episode_returns: Any  # [F] float64
    episode_lengths: Any  # [F] int64
    states: Any  # by name, each [N, ...]: what a recurrent policy remembered before the first step; None for others
    env_ids: Any  # [N] int64: which envs of the whole run the rows are
    workers: Any  # [W] int64
    versions: Any  # [W] int64: the policy version each worker acted with
    lags: Any  # [W] int64: by how many versions that was behind when the rollout was accepted

    @property
    def num_steps(self) -> int:
        """T."""
        return len(self.rewards)

    @property
    def num_envs(self) -> int:
        """N."""
        return int(self.rewards.shape[1])

    @property
    def version(self) -> int:
        """The oldest policy version in it."""
        return int(min(self.versions))

    @property
    def lag(self) -> int:
        """The largest lag in it."""
        return int(max(self.lags))

    def to_torch(self, device: Any = "cpu") -> Rollout:
        """The same with tensors. float64 becomes float32, which is what networks compute in."""
        try:
            import torch
        except ImportError as error:
            raise MissingExtra("to_torch() needs PyTorch: pip install 'envfleet[torch]'") from error

        def tensor(value: Any) -> Any:
            if value is None:
                return None
            if isinstance(value, Mapping):
                return {key: tensor(part) for key, part in value.items()}
            if isinstance(value, tuple):
                return tuple(tensor(part) for part in value)
            array = value.astype(np.float32) if value.dtype == np.float64 else value
            if not array.flags.writeable:
                array = array.copy()
            return torch.from_numpy(np.ascontiguousarray(array)).to(device)

        fields = {each.name: tensor(getattr(self, each.name)) for each in dataclasses.fields(self)}
        return Rollout(**fields)
