"""Rollout: T steps of N envs. Each column, the T steps of one env, has exactly one policy version."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Generic

import numpy as np

from envfleet.contract.arrays import ArrayT, Tree
from envfleet.contract.errors import MissingExtra


@dataclass(frozen=True, slots=True)
class Rollout(Generic[ArrayT]):
    """T steps of N envs, time first; rows in the order of env ids. It has W parts; F episodes ended.

    A part is what one worker collected with one policy version, and `parts` has the part of each column: the version of
    column n is `versions[parts[n]]`. In the rollouts of `rollout()` each worker has one part. So it is in those of
    `stream()`, unless the cluster was made with `worker_batch_size`: then the columns of a rollout are the envs that
    were ready first, and may have begun with different versions.

    Every row is a real transition, because an env resets in the same step that ends its episode: the policy saw
    `obs[t]`, chose `actions[t]` and received `rewards[t]`. Where an episode ended in step t, its last observation is in
    `final_obs`; `obs[t + 1]` is the first observation of the next episode.

    Arrays may be read-only: those of a single worker's rollout are views of the received message.

    A tree is one array, or a dict or tuple of trees in the form of the space. Arrays are those of NumPy, or tensors
    after `to_torch()`.
    """

    obs: Tree[ArrayT]  # tree of [T, N, ...]
    actions: Tree[ArrayT]  # tree of [T, N, ...]
    log_probs: ArrayT | None  # [T, N] float32, by the policy that acted; None: the policy has no probabilities
    extras: Mapping[str, ArrayT]  # each [T, N, ...]: what else the policy returned for each step, often "values"
    rewards: ArrayT  # [T, N] float64
    terminations: ArrayT  # [T, N] bool
    truncations: ArrayT  # [T, N] bool
    next_obs: Tree[ArrayT]  # tree of [N, ...]: the observations after the last step
    next_values: ArrayT | None  # [N] float32, values of next_obs; None: the policy has no values
    final_values: ArrayT | None  # [T, N] float32, values of the final observations; 0 where no episode ended
    final_steps: ArrayT  # [F] int64: the step t in which the episode ended
    final_envs: ArrayT  # [F] int64: the row n of its env
    final_obs: Tree[ArrayT]  # tree of [F, ...]
    episode_returns: ArrayT  # [F] float64
    episode_lengths: ArrayT  # [F] int64
    states: Mapping[str, ArrayT] | None  # each [N, ...]: state of a recurrent policy before step 0; None: not recurrent
    env_ids: ArrayT  # [N] int64: the env of each column, counted over the whole cluster
    parts: ArrayT  # [N] int64: the part of each column, from 0 to W - 1
    workers: ArrayT  # [W] int64: the worker of each part
    versions: ArrayT  # [W] int64: the policy version that acted in each part
    lags: ArrayT  # [W] int64: how many versions that was behind the newest when the learner took the rollout
    episode_seconds: ArrayT | None = None  # [F] float64: from the reset of the episode's env to its last step
    # What the envs said in step t, with the observation that follows it; where an episode ended in step t, that is the
    # info of the reset, and `final_infos` has that of the last step. A key whose values are numbers is an array, and
    # "_key" its mask: [T, N] bool, True where the env has the key (elsewhere the array is 0). A dictionary of an env is
    # a dictionary of these. A key with other values, which must be asked for, is a list of (t, n, value).
    infos: Mapping[str, Any] = field(default_factory=dict)  # key: [T, N, ...]; "_key": [T, N] bool
    # The same, one row for each of the F episodes; other values are a list of (f, value).
    final_infos: Mapping[str, Any] = field(default_factory=dict)  # key: [F, ...]; "_key": [F] bool
    action_masks: ArrayT | None = None  # [T, N, ...] bool: the masks that the policy acted under; None: without
    # [T, N] int64: the number of the last live change that the episode of each row was begun with, 0: with none; None:
    # no env has had one yet
    changes: ArrayT | None = None

    @property
    def num_steps(self) -> int:
        """T, the number of steps of each env."""
        return self.rewards.shape[0]

    @property
    def num_envs(self) -> int:
        """N: envs, each of which has a column."""
        return self.rewards.shape[1]

    @property
    def version(self) -> int:
        """The oldest policy version of any part."""
        return int(min(self.versions.tolist()))

    @property
    def lag(self) -> int:
        """The largest lag of any part, in versions."""
        return int(max(self.lags.tolist()))

    def to_torch(self, device: Any = None, pin_memory: bool = False) -> Rollout[Any]:
        """Copy the rollout into torch tensors, each array in one transfer. float64 becomes float32, other dtypes stay.

        On the CPU a tensor shares memory with its array, where that is writable and contiguous.

        Args:
            device: where the tensors go, as `torch.Tensor.to()` takes it; None: the CPU.
            pin_memory: copy each array into page-locked memory first. From there it goes to `device` while the program
                goes on, in the order of the device's stream. On the CPU the tensors stay there, ready for
                `.to(device, non_blocking=True)`. Where torch finds no accelerator this changes nothing.

        Returns:
            A rollout with a tensor in place of each array. None stays None, and so do lists of infos.

        Raises:
            MissingExtra: PyTorch is not installed.
        """
        try:
            import torch
        except ImportError as error:
            raise MissingExtra("to_torch() needs PyTorch: pip install 'envfleet[torch]'") from error
        device = torch.device("cpu" if device is None else device)
        pins = pin_memory and _has_accelerator(torch)

        def tensor(value: Any) -> Any:
            if value is None or isinstance(value, list):  # of values that are no numbers
                return value
            if isinstance(value, Mapping):
                return {key: tensor(part) for key, part in value.items()}
            if isinstance(value, tuple):
                return tuple(tensor(part) for part in value)
            dtype = np.float32 if value.dtype == np.float64 else value.dtype
            if pins:
                pinned = torch.empty(value.shape, dtype=torch.from_numpy(np.empty(0, dtype)).dtype, pin_memory=True)
                np.copyto(pinned.numpy(), value)
                return pinned.to(device, non_blocking=True)
            array = value.astype(dtype, copy=False)
            if not array.flags.writeable:
                array = array.copy()
            return torch.from_numpy(np.ascontiguousarray(array)).to(device)

        fields = {each.name: tensor(getattr(self, each.name)) for each in dataclasses.fields(self)}
        return Rollout(**fields)


def _has_accelerator(torch: Any) -> bool:
    """Whether torch has a device for which page-locked memory is of use."""
    accelerator = getattr(torch, "accelerator", torch.cuda)  # since 2.6
    return bool(accelerator.is_available())
