"""TianshouVectorEnv: a pool or a cluster as the vector env that Tianshou's collectors take."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import numpy as np
from gymnasium import spaces

from envfleet.adapters.explicit_resets import ExplicitResets
from envfleet.adapters.vector_source import VectorSource
from envfleet.contract.arrays import Array, BoolArray, FloatArray
from envfleet.contract.errors import MissingExtra, UsageError
from envfleet.contract.infos.table import Info
from envfleet.contract.spaces import SpaceTree
from envfleet.pool.arguments import seeds_of

try:
    from tianshou.env import BaseVectorEnv
except ImportError as error:
    raise MissingExtra('TianshouVectorEnv needs Tianshou 2: pip install "envfleet[tianshou]"') from error

EnvIds = int | Sequence[int] | Array | None


class TianshouVectorEnv(BaseVectorEnv):
    """The envs of a pool, or of a cluster, as one of Tianshou's vector envs.

    Tianshou's own have a worker for each env; here the pool steps all envs of a call at once. Results are the same as
    those of its DummyVectorEnv, bit for bit. While a collector steps some envs, the others of a pool stand still, and
    so do those of other workers of a cluster. Where several envs step together (the envs of one worker of a cluster;
    envs that come vectorized), the others run on, and must be reset before they are stepped again; collectors do so.
    """

    def __init__(self, envs: Any) -> None:  # without BaseVectorEnv's own, which would build a worker for each env
        """Take a pool or a cluster; close() closes it.

        Args:
            envs: An EnvPool or a ClusterEnv, made with `autoreset_mode="same_step"`.

        Raises:
            UsageError: It is neither, it does not reset in the same step, it is asynchronous, or its observations are
                tuples.
        """
        self._source = VectorSource(envs, "TianshouVectorEnv")
        self._resets = ExplicitResets(self._source)
        self._obs = SpaceTree(self._source.single_observation_space)
        if isinstance(self._source.single_observation_space, spaces.Tuple):
            raise UsageError(
                "Tianshou takes no tuples as observations, and these envs have "
                f"{self._source.single_observation_space}: wrap them to give a dict or an array"
            )
        self._action_spaces = [copy.deepcopy(self._source.single_action_space) for _ in range(self._source.num_envs)]
        self.env_num = self.wait_num = self._source.num_envs
        self.timeout = None
        self.is_async = False
        self.waiting_id: list[int] = []
        self.ready_id = list(range(self.env_num))
        self.is_closed = False

    def reset(self, env_id: EnvIds = None, **kwargs: Any) -> tuple[Array, Array]:
        """Reset all envs, or some.

        Args:
            env_id: Index of an env, or indices of some, in any order; None: all.
            kwargs: `seed`, the same for each of these envs, as Tianshou has it (`seed()` gives each its own), and
                `options`.

        Returns:
            Observations and infos, a row for each of these envs. Observations that are dicts are an array of dicts.

        Raises:
            UsageError: `env_id` is wrong, or the envs are to be reset with something else.
        """
        unknown = set(kwargs) - {"seed", "options"}
        if unknown:
            raise UsageError(f"reset() takes seed and options; got {', '.join(sorted(unknown))}, too")
        env_ids = self._env_ids(env_id)
        seed = kwargs.get("seed")
        obs, infos = self._resets.reset(env_ids, None if seed is None else [seed] * len(env_ids), kwargs.get("options"))
        return self._rows(obs, len(env_ids)), _objects(infos)

    def step(self, action: Any, id: EnvIds = None) -> tuple[Array, FloatArray, BoolArray, BoolArray, Array]:
        """Step all envs, or some. An env whose episode has ended must be reset before its next step.

        Args:
            action: A row for each of these envs: an array, or a tensor.
            id: Index of an env, or indices of some, in any order; None: all.

        Returns:
            Observations, rewards, terminations, truncations and infos, a row for each of these envs. Each info has
            "env_id".

        Raises:
            UsageError: `id` is wrong, there is no action, or an env must be reset first.
            InvalidAction: The actions do not fit the action space; nothing was stepped.
            EnvFailed: An env raised, or its process died.
        """
        if action is None:
            raise UsageError("step() needs actions: these envs are not asynchronous")
        env_ids = self._env_ids(id)
        actions = action.detach().cpu().numpy() if hasattr(action, "detach") else action
        step = self._resets.step(self._source.batch_of(actions), env_ids)
        infos = step.infos()
        for env_id, info in zip(env_ids, infos, strict=True):
            info["env_id"] = env_id
        return self._rows(step.obs, len(env_ids)), step.rewards, step.terminated, step.truncated, _objects(infos)

    def seed(self, seed: int | list[int] | None = None) -> list[list[int] | None]:
        """Seed the envs and their action spaces. The envs are reset, as Tianshou's own are.

        Args:
            seed: Env i is seeded with `seed + i`, or with `seed[i]`; None: anew.

        Returns:
            A list with the seed of each env.

        Raises:
            UsageError: The seeds are wrong.
        """
        seeds = seeds_of(seed, self.env_num)
        for space, each in zip(self._action_spaces, seeds, strict=True):
            space.seed(each)
        self._resets.reset(seeds=seeds)
        return [[each] for each in seeds]  # type: ignore[list-item]

    def get_env_attr(self, key: str, id: EnvIds = None) -> list[Any]:
        """Get an attribute of all envs, or of some; of spaces, `metadata` and `spec`, what the pool knows.

        Args:
            key: Name of the attribute.
            id: Index of an env, or indices of some; None: all.

        Returns:
            A value for each of these envs.

        Raises:
            AttributeError: An env does not have it.
        """
        env_ids = self._env_ids(id)
        if key == "action_space":
            return [self._action_spaces[env_id] for env_id in env_ids]
        if key == "observation_space":
            return [self._source.single_observation_space for _ in env_ids]
        if key in ("metadata", "spec"):
            return [getattr(self._source.envs, key) for _ in env_ids]
        return self._source.get_attr(env_ids, key)

    def set_env_attr(self, key: str, value: Any, id: EnvIds = None) -> None:
        """Set an attribute of all envs, or of some.

        Args:
            key: Name of the attribute.
            value: The same for all of these envs.
            id: Index of an env, or indices of some; None: all. Of a cluster: all envs of some workers.

        Raises:
            UsageError: The envs are native.
        """
        self._source.set_attr(self._env_ids(id), key, value)

    def render(self, **kwargs: Any) -> list[Any]:
        """Render all envs.

        Args:
            kwargs: Passed to each env.

        Returns:
            A frame for each env.
        """
        return self._source.call(range(self.env_num), "render", **kwargs)

    def close(self) -> None:
        """Close the envs; more than once does no harm."""
        self._source.close()
        self.is_closed = True

    def _env_ids(self, id: EnvIds) -> list[int]:
        if id is None:
            return list(range(self.env_num))
        ids = [id] if np.isscalar(id) else id
        return [int(each) for each in ids]  # type: ignore[union-attr, arg-type]

    def _rows(self, obs: Any, num_rows: int) -> Array:
        if isinstance(obs, np.ndarray):
            return obs
        return _objects(self._obs.each_row(obs, range(num_rows)))


def _objects(values: Sequence[Info]) -> Array:
    """An array of objects; np.array() would look into them."""
    array = np.empty(len(values), object)
    for row, value in enumerate(values):
        array[row] = value
    return array
