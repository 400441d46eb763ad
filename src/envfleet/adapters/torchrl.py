"""TorchRLEnv: a pool or a cluster as a batched env of TorchRL. to_tensordict(): a cluster's rollout as a TensorDict."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from envfleet.adapters.explicit_resets import ExplicitResets
from envfleet.adapters.torchrl_forms import TensorForm, entries_of, tensor_of
from envfleet.adapters.torchrl_infos import InfoForm, rollout_infos
from envfleet.adapters.vector_source import VectorSource
from envfleet.contract.errors import MissingExtra
from envfleet.contract.infos.table import Info
from envfleet.contract.rollout import Rollout
from envfleet.pool.arguments import seeds_of

try:
    import torch
    from tensordict import TensorDict, TensorDictBase
    from torchrl.data import Categorical, Composite, Unbounded
    from torchrl.envs import EnvBase
except ImportError as error:
    raise MissingExtra('TorchRLEnv needs TorchRL: pip install "envfleet[torchrl]"') from error

DONE_KEYS = ("done", "terminated", "truncated")


class TorchRLEnv(EnvBase):
    """The N envs of a pool, or of a cluster, as one env of TorchRL with batch size [N].

    Entries are those of TorchRL's GymEnv: "observation" (or the keys of a Dict space), "action", "reward", "done",
    "terminated" and "truncated". The "next" entry of an episode's last step has its last observation. Partial resets
    ("_reset") and partial steps ("_step") work. Infos that are asked for are in ("info", key), their masks in
    ("info_mask", key).
    """

    def __init__(
        self,
        envs: Any,
        *,
        categorical_action_encoding: bool = False,
        infos: Mapping[str, Any] | None = None,
        device: Any = None,
    ) -> None:
        """Take a pool or a cluster; close() closes it.

        Args:
            envs: An EnvPool or a ClusterEnv, made with `autoreset_mode="same_step"`.
            categorical_action_encoding: Whether values of Discrete and MultiDiscrete spaces are numbers; otherwise they
                are one-hot vectors. As in TorchRL's GymEnv.
            infos: Keys of the envs' infos that are passed on, each with its dtype: `{"speed": np.float32}`, or
                `np.dtype((np.float32, (3,)))` for arrays; None: none.
            device: Where the tensors are; None: the CPU.

        Raises:
            UsageError: It is neither, it does not reset in the same step, it is asynchronous, TorchRL has no spec for
                one of its spaces, or infos are not numbers.
        """
        source = VectorSource(envs, "TorchRLEnv")
        super().__init__(device=device, batch_size=[source.num_envs])
        self._source = source
        self._resets = ExplicitResets(source)
        encoding = {"one_hot": not categorical_action_encoding, "device": self.device}
        self._obs_form = TensorForm(source.single_observation_space, "observation", is_nested=False, **encoding)
        self._action_form = TensorForm(source.single_action_space, "action", is_nested=True, **encoding)
        self._info_form = InfoForm(infos, self.device)
        num_envs, shape = source.num_envs, (source.num_envs, 1)
        observation_spec = self._obs_form.spec(num_envs)
        self._info_form.add_spec(observation_spec, num_envs)
        self.full_observation_spec = observation_spec
        self.full_action_spec = self._action_form.spec(num_envs)
        reward = Unbounded(shape, dtype=torch.float32, device=self.device)
        self.full_reward_spec = Composite(reward=reward, shape=(num_envs,), device=self.device)
        flags = {key: Categorical(2, shape=shape, dtype=torch.bool, device=self.device) for key in DONE_KEYS}
        self.full_done_spec = Composite(**flags, shape=(num_envs,), device=self.device)
        self._shown: Any = None  # a TensorDict: the last observation of each env
        self.is_closed = False

    def close(self, *, raise_if_closed: bool = True) -> None:
        """Close the envs.

        Args:
            raise_if_closed: Not used: to close twice does no harm.
        """
        self._source.close()
        super().close(raise_if_closed=raise_if_closed)

    # -- what TorchRL calls --

    def _reset(self, tensordict: TensorDictBase | None = None, **kwargs: Any) -> TensorDictBase:
        rows = _rows_of(tensordict, "_reset")
        seed, options = kwargs.get("seed"), kwargs.get("options")
        num_envs = self._source.num_envs
        if rows is None:
            seeds = None if seed is None else seeds_of(seed, num_envs)
            self._shown = self._began(*self._resets.reset(None, seeds, options))
        elif len(rows):
            began = self._began(*self._resets.reset(rows.tolist(), options=options))
            self._shown = self._with_rows(self._shown, rows, began)
        reset = self._shown.clone()  # the caller may write to it
        for key in DONE_KEYS:
            reset[key] = torch.zeros((num_envs, 1), dtype=torch.bool, device=self.device)
        return reset

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        rows = _rows_of(tensordict, "_step")
        stepped = tensordict if rows is None else tensordict[rows]
        step = self._resets.step(self._action_form.batch(stepped), None if rows is None else rows.tolist())
        result = self._obs_form.tensors(step.obs)
        self._info_form.put_step(result, step.step)
        flags = {"done": step.terminated | step.truncated, "terminated": step.terminated, "truncated": step.truncated}
        for key, values in flags.items():
            result[key] = tensor_of(values, self.device).unsqueeze(-1)
        result["reward"] = torch.as_tensor(step.rewards, dtype=torch.float32, device=self.device).unsqueeze(-1)
        if rows is not None:
            result = self._with_rows(self._standing_still(tensordict), rows, result)
        self._shown = result.exclude("reward", *DONE_KEYS).clone()
        return result

    def _set_seed(self, seed: int | None) -> None:
        """Seed the envs, env i with `seed + i`, by a reset, as TorchRL's GymEnv does."""
        if seed is not None:
            self._shown = self._began(*self._resets.reset(seeds=seeds_of(seed, self._source.num_envs)))

    def _began(self, obs: Any, infos: Sequence[Info]) -> TensorDictBase:
        """What a reset shows."""
        rows = self._obs_form.tensors(obs)
        self._info_form.put_reset(rows, infos)
        return rows

    def _standing_still(self, tensordict: TensorDictBase) -> TensorDictBase:
        """What a step of no env returns: all observations and flags are what they were."""
        result = self._shown.clone()
        for key in DONE_KEYS:
            result[key] = tensordict.get(key).clone()
        result["reward"] = torch.zeros((self._source.num_envs, 1), device=self.device)
        return result

    def _with_rows(self, rows_of_all: TensorDictBase, rows: Any, new: TensorDictBase) -> TensorDictBase:
        result = rows_of_all.clone()
        result[rows] = new
        return result


def to_tensordict(rollout: Rollout[Any], device: Any = None, infos: Mapping[str, Any] | None = None) -> Any:
    """Give a cluster's rollout the form in which TorchRL's collectors return data.

    Entries are those of TorchRLEnv with categorical actions, and "action_log_prob", what else the policy returned for
    each step, by its names, "action_mask", "policy_version" and "env_id".

    Args:
        rollout: Of `cluster.rollout()` or `cluster.stream()`; of arrays, or of tensors.
        device: Where the tensors go; None: where they are.
        infos: Keys of infos that are passed on, with their dtypes, as for TorchRLEnv. The rollout does not have the
            infos that came before its first step: the masks of ("info_mask", key) are False there.

    Returns:
        A TensorDict with batch size [N, T]: a row for each env, time last.

    Raises:
        UsageError: Infos are not numbers.
    """
    tensors: Any = rollout if isinstance(rollout.rewards, torch.Tensor) else rollout.to_torch(device)
    num_steps, num_envs = tensors.rewards.shape
    data = TensorDict({}, batch_size=[num_envs, num_steps], device=device)

    def put(key: Any, value: Any) -> None:
        data[key] = value.transpose(0, 1)

    obs = entries_of(tensors.obs, "observation", is_nested=False)
    next_obs = entries_of(tensors.next_obs, "observation", is_nested=False)
    final_obs = entries_of(tensors.final_obs, "observation", is_nested=False)
    for key, values in obs.items():
        put(key, values)
        following = torch.cat([values[1:], next_obs[key].unsqueeze(0)])
        following[tensors.final_steps, tensors.final_envs] = final_obs[key]
        put(("next", *key), following)
    for key, values in entries_of(tensors.actions, "action", is_nested=True).items():
        put(key, values)
    flags = {"terminated": tensors.terminations, "truncated": tensors.truncations}
    for name, values in {"done": tensors.terminations | tensors.truncations, **flags}.items():
        put(name, torch.zeros_like(values).unsqueeze(-1))  # every row is a step of a running episode
        put(("next", name), values.unsqueeze(-1))
    put(("next", "reward"), tensors.rewards.unsqueeze(-1))
    if tensors.log_probs is not None:
        put("action_log_prob", tensors.log_probs)
    if tensors.action_masks is not None:
        put("action_mask", tensors.action_masks)
    for name, values in tensors.extras.items():
        put(name, values)
    for key, values in rollout_infos(tensors, InfoForm(infos, device).dtypes).items():
        put(key, values)
    data["policy_version"] = tensors.versions[tensors.parts].unsqueeze(-1).expand(-1, num_steps)
    data["env_id"] = tensors.env_ids.unsqueeze(-1).expand(-1, num_steps)
    return data


def _rows_of(tensordict: TensorDictBase | None, key: str) -> Any:
    """The envs that a mask of TorchRL chooses, as indices; None: all."""
    mask = None if tensordict is None else tensordict.get(key, None)
    if mask is None or mask.all():
        return None
    return mask.reshape(len(mask), -1).any(-1).nonzero().squeeze(-1)
