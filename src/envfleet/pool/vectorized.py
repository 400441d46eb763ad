"""Environments that come vectorized, in one form: any gymnasium VectorEnv, ale-py's games, EnvPool's tasks.

They differ in how seeds are given, whether some envs can be reset alone, and how their infos look; here that ends.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
from gymnasium.vector import AsyncVectorEnv, SyncVectorEnv, VectorEnv

from envfleet.contract.episode import Autoreset
from envfleet.contract.errors import UsageError
from envfleet.contract.spaces import SpaceTree
from envfleet.contract.spec import EnvTraits
from envfleet.pool.infos import object_column

Array = np.ndarray[Any, Any]
Rows = tuple[Any, dict[str, Any]]  # observations and joined infos
StepRows = tuple[Any, Any, Any, Any, dict[str, Any]]

_NOT_INFOS = ("env_id", "players")  # EnvPool and ale-py say there which env a row belongs to
_LARGEST_SEED = 2**31  # EnvPool and ale-py have seeds of 31 bits: larger ones are taken modulo this


class Vectorized(Protocol):
    """N envs that are stepped together."""

    env: Any
    own_mode: Autoreset  # what it does by itself after the last step of an episode
    reuses_arrays: bool  # an observation may be overwritten later

    def reset(self, seeds: Sequence[int | None], options: dict[str, Any] | None) -> Rows:
        """Reset all envs."""

    def reset_some(self, env_ids: Array, seeds: Sequence[int | None], options: dict[str, Any] | None) -> Rows:
        """Reset some envs, with a seed for each of them; returns their rows only."""

    def step(self, actions: Any) -> StepRows:
        """Step all envs."""

    def can_reset_some(self) -> bool:
        """Can it?"""


class GymnasiumVector:
    """Any VectorEnv. Whether some envs can be reset alone is tried out before it is first used."""

    reuses_arrays = True  # who knows

    def __init__(self, env: Any, num_envs: int) -> None:
        """Check what a factory has made."""
        if not isinstance(env, VectorEnv):
            raise UsageError(
                f"backend='vector' needs a factory of gymnasium.vector.VectorEnv; got {type(env).__name__}"
            )
        if env.num_envs != num_envs:
            raise UsageError(f"the vector env has {env.num_envs} envs instead of num_envs={num_envs}")
        mode = env.metadata.get("autoreset_mode")
        if mode is None:
            raise UsageError(f"{type(env).__name__} does not say its metadata['autoreset_mode'], as Gymnasium wants it")
        self.env: Any = env
        self.own_mode = Autoreset(getattr(mode, "value", mode))

    def reset(self, seeds: Sequence[int | None], options: dict[str, Any] | None) -> Rows:
        """See Vectorized."""
        obs, infos = self.env.reset(seed=_one_or_all(seeds), options=options)
        return obs, with_masks(infos, self.env.num_envs)

    def reset_some(self, env_ids: Array, seeds: Sequence[int | None], options: dict[str, Any] | None) -> Rows:
        """See Vectorized."""
        mask = np.zeros(self.env.num_envs, np.bool_)
        mask[env_ids] = True
        all_seeds: list[int | None] = [None] * self.env.num_envs
        for env_id, seed in zip(env_ids.tolist(), seeds, strict=True):
            all_seeds[env_id] = seed
        seed_argument = all_seeds if any(seed is not None for seed in seeds) else None
        obs, infos = self.env.reset(seed=seed_argument, options={**(options or {}), "reset_mask": mask})
        tree = SpaceTree(self.env.single_observation_space)
        rows = tree.unflatten([_taken(leaf, env_ids) for leaf in tree.flatten(obs)])
        return rows, rows_of(with_masks(infos, self.env.num_envs), env_ids)

    def step(self, actions: Any) -> StepRows:
        """See Vectorized."""
        obs, rewards, terminated, truncated, infos = self.env.step(actions)
        return obs, rewards, terminated, truncated, with_masks(infos, self.env.num_envs)

    def can_reset_some(self) -> bool:
        """Does `reset_mask` leave the other envs alone? Tried out, before the first episode, if nobody knows.

        A mask that is not understood resets all: the others' observations change, as without a mask. Where those are
        the same in every episode nothing can be seen, and the answer is no. (No action is tried: it might do harm.)
        """
        if isinstance(self.env, SyncVectorEnv | AsyncVectorEnv) or self.env.num_envs == 1:
            return True
        try:
            first = self._others(self.env.reset(seed=0)[0])
            masked = self._others(self.env.reset(options={"reset_mask": np.arange(self.env.num_envs) == 0})[0])
            unmasked = self._others(self.env.reset()[0])
        except Exception:
            return False
        return _equal(first, masked) and not _equal(masked, unmasked)

    def _others(self, obs: Any) -> list[Array]:
        """The observations of all envs but the first, copied."""
        return [np.array(leaf[1:]) for leaf in SpaceTree(self.env.single_observation_space).flatten(obs)]


class AleVector(GymnasiumVector):
    """ale-py's own AtariVectorEnv: seeds are an array, one for each env that is reset."""

    reuses_arrays = False

    def reset(self, seeds: Sequence[int | None], options: dict[str, Any] | None) -> Rows:
        """See Vectorized."""
        obs, infos = self.env.reset(seed=_small_seeds(seeds))
        return obs, with_masks(infos, self.env.num_envs)

    def reset_some(self, env_ids: Array, seeds: Sequence[int | None], options: dict[str, Any] | None) -> Rows:
        """See Vectorized."""
        mask = np.zeros(self.env.num_envs, np.bool_)
        mask[env_ids] = True
        obs, infos = self.env.reset(seed=_small_seeds(seeds), options={"reset_mask": mask})
        return obs[env_ids], rows_of(with_masks(infos, self.env.num_envs), env_ids)

    def can_reset_some(self) -> bool:
        """It can."""
        return True


class EnvPoolVector:
    """A task of EnvPool. It takes seeds only when it is built, so a reset with seeds builds it anew."""

    own_mode = Autoreset.NEXT_STEP
    reuses_arrays = False

    def __init__(self, build: Callable[[list[int]], Any], num_envs: int) -> None:
        """`build` makes it from a seed for each env."""
        self._build = build
        self._num_envs = num_envs
        self.env = build(_with_chance([None] * num_envs))

    def reset(self, seeds: Sequence[int | None], options: dict[str, Any] | None) -> Rows:
        """See Vectorized."""
        if any(seed is not None for seed in seeds):
            self.env.close()
            self.env = self._build(_with_chance(seeds))
        obs, infos = self.env.reset()
        return obs, with_masks(infos, self._num_envs)

    def reset_some(self, env_ids: Array, seeds: Sequence[int | None], options: dict[str, Any] | None) -> Rows:
        """See Vectorized."""
        if any(seed is not None for seed in seeds):
            raise UsageError("EnvPool takes seeds only when it is built: reset all envs, or some of them without seeds")
        obs, infos = self.env.reset(np.asarray(env_ids, np.int32))
        return obs, with_masks(infos, len(env_ids))

    def step(self, actions: Any) -> StepRows:
        """See Vectorized."""
        if isinstance(actions, np.ndarray) and actions.dtype == np.int64:
            actions = actions.astype(np.int32)
        obs, rewards, terminated, truncated, infos = self.env.step(actions)
        return obs, rewards, terminated, truncated, with_masks(infos, self._num_envs)

    def can_reset_some(self) -> bool:
        """It can."""
        return True


def traits_of_vector(env: VectorEnv[Any, Any, Any]) -> EnvTraits:
    """What is known of each of its envs."""
    return EnvTraits(
        observation_space=env.single_observation_space,
        action_space=env.single_action_space,
        metadata={key: value for key, value in env.metadata.items() if key != "autoreset_mode"},
        render_mode=env.render_mode,
        gymnasium_spec=env.spec if hasattr(env.spec, "entry_point") else None,
    )


def with_masks(infos: Mapping[str, Any], num_rows: int) -> dict[str, Any]:
    """Infos as Gymnasium's own vector envs have them: each `key` with a mask `_key`."""
    joined: dict[str, Any] = {}
    for key, value in infos.items():
        if key in _NOT_INFOS:
            continue
        joined[key] = with_masks(value, num_rows) if isinstance(value, dict) else np.asarray(value)
        if not key.startswith("_") and f"_{key}" not in infos:
            joined[f"_{key}"] = np.ones(num_rows, np.bool_)
    return joined


def rows_of(infos: Mapping[str, Any], rows: Array) -> dict[str, Any]:
    """The chosen rows of joined infos."""
    return {key: rows_of(value, rows) if isinstance(value, dict) else value[rows] for key, value in infos.items()}


def put_rows(into: Mapping[str, Any], infos: Mapping[str, Any], rows: Array, num_rows: int) -> dict[str, Any]:
    """Joined infos in which `rows` come from `infos`, the others from `into`; nothing is written into either."""
    joined: dict[str, Any] = {}
    for key in [*into, *(key for key in infos if key not in into)]:
        old: Any = into.get(key)
        new: Any = infos.get(key)
        if isinstance(old, dict) or isinstance(new, dict):
            joined[key] = put_rows(old or {}, new or {}, rows, num_rows)
            continue
        like = old if old is not None else new
        column = (
            np.zeros((num_rows, *like.shape[1:]), like.dtype) if like.dtype != object else object_column({}, num_rows)
        )
        if old is not None:
            column[:] = old
        column[rows] = new if new is not None else (None if like.dtype == object else np.zeros((), like.dtype))
        joined[key] = column
    gone = [key for key in joined if f"_{key}" in joined and not joined[f"_{key}"].any()]
    return {key: value for key, value in joined.items() if key not in gone and key.removeprefix("_") not in gone}


def _one_or_all(seeds: Sequence[int | None]) -> int | list[int | None] | None:
    """One number where it says the same: not every vector env takes a list."""
    first = seeds[0]
    if first is not None and all(seed == first + i for i, seed in enumerate(seeds)):
        return first
    return list(seeds) if any(seed is not None for seed in seeds) else None


def _small_seeds(seeds: Sequence[int | None]) -> Array:
    return np.array([-1 if seed is None else seed % _LARGEST_SEED for seed in seeds])


def _with_chance(seeds: Sequence[int | None]) -> list[int]:
    """Where there is no seed, a random one."""
    chance = np.random.SeedSequence().generate_state(len(seeds)).tolist()
    return [(other if seed is None else seed) % _LARGEST_SEED for seed, other in zip(seeds, chance, strict=True)]


def _equal(leaves: list[Array], others: list[Array]) -> bool:
    return all(np.array_equal(leaf, other) for leaf, other in zip(leaves, others, strict=True))


def _taken(leaf: Any, rows: Array) -> Any:
    return tuple(leaf[row] for row in rows.tolist()) if isinstance(leaf, tuple) else leaf[rows]
