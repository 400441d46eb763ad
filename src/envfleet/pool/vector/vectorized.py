"""Environments that come vectorized, in one form: any gymnasium VectorEnv, ale-py's games (EnvPool: envpool.py).

They differ in how seeds are given, whether some envs can be reset alone, and how their infos look; here that ends.
"""

from __future__ import annotations

import contextlib
import inspect
import sys
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import gymnasium
import numpy as np
from gymnasium.vector import AsyncVectorEnv, SyncVectorEnv, VectorEnv

from envfleet.contract.arrays import Array
from envfleet.contract.episode import Autoreset
from envfleet.contract.errors import UsageError
from envfleet.contract.infos.table import InfoTable
from envfleet.contract.results import reset_result, vector_step_result
from envfleet.contract.spaces import SpaceTree
from envfleet.contract.spec import EnvTraits
from envfleet.pool.foreign_envs import hint

Rows = tuple[Any, InfoTable]  # observations and infos
StepRows = tuple[Any, Any, Any, Any, InfoTable]

TERMINATE_WAIT_S = 5.0  # for a process of a vector env that could not be closed

LARGEST_SEED = 2**31  # EnvPool and ale-py have seeds of 31 bits: larger ones are taken modulo this

_NOT_INFOS = ("env_id", "players")  # in which EnvPool and ale-py say which env a row belongs to

_SWALLOWS = (
    "AsyncVectorEnv(shared_memory=False) in next-step mode swallows the first step after a reset() that follows the "
    "end of an episode: use shared_memory=True, or build it with the autoreset_mode you want"
)


class Vectorized(Protocol):
    """N envs that are stepped together. What the caller does wrong is a UsageError, and changes nothing."""

    env: Any
    own_mode: Autoreset  # what it does by itself after the last step of an episode
    reuses_arrays: bool  # results may be overwritten later

    def reset(self, seeds: Sequence[int | None], options: dict[str, Any] | None) -> Rows:
        """Reset all envs, with a seed for each."""

    def reset_some(self, env_ids: Array, seeds: Sequence[int | None], options: dict[str, Any] | None) -> Rows:
        """Reset some envs, with a seed for each of them; returns their rows only."""

    def step(self, actions: Any) -> StepRows:
        """Step all envs with one action each."""

    def why_not_some(self) -> str | None:
        """Why some envs cannot be reset alone; None if they can. Nothing is tried out."""

    def render(self, env_ids: Sequence[int]) -> list[Any]:
        """The frames of some envs."""


def failed_env_ids(env: Any) -> list[int]:
    """The envs that failed in the last call, as far as the vector env tells; empty: it does not.

    Gymnasium's AsyncVectorEnv closes the pipes of those that raised.
    """
    inner = getattr(env, "unwrapped", None)
    pipes = inner.parent_pipes if isinstance(inner, AsyncVectorEnv) else []
    return [env_id for env_id, pipe in enumerate(pipes) if pipe is None]


class GymnasiumVector:
    """Any VectorEnv with Gymnasium's methods."""

    def __init__(self, env: Any, num_envs: int) -> None:
        """Check what a factory has made; what is refused is closed."""
        try:
            self.own_mode = _mode_of(env, num_envs)
        except UsageError:
            close_vector(env)
            raise
        self.env: Any = env
        self.reuses_arrays = True  # it may: a VectorEnv does not say
        inner = env.unwrapped
        is_next = self.own_mode is Autoreset.NEXT_STEP
        self._swallows = isinstance(inner, AsyncVectorEnv) and not inner.shared_memory and is_next
        self._any_ended = False  # in the last step
        # A reset of their own may treat masks and lists of seeds in its own way.
        self._is_gymnasiums = type(inner).reset in (SyncVectorEnv.reset, AsyncVectorEnv.reset)

    def reset(self, seeds: Sequence[int | None], options: dict[str, Any] | None) -> Rows:
        """Reset all envs. Raises UsageError if the vector env would lose the next step."""
        if self._swallows and self._any_ended:
            raise UsageError(_SWALLOWS)
        obs, infos = self._reset(_one_or_all(seeds), options)
        return obs, info_table(infos, self.env.num_envs)

    def reset_some(self, env_ids: Array, seeds: Sequence[int | None], options: dict[str, Any] | None) -> Rows:
        """Reset some envs by Gymnasium's `reset_mask`, and return their rows only."""
        mask = np.zeros(self.env.num_envs, np.bool_)
        mask[env_ids] = True
        masked = {**(options or {}), "reset_mask": mask}
        is_wrapped = self.env is not self.env.unwrapped
        obs, infos = self._reset(self._some_seeds(env_ids, seeds), _KeepsMask(masked) if is_wrapped else masked)
        tree = SpaceTree(self.env.single_observation_space)
        return tree.select(obs, env_ids), info_table(infos, self.env.num_envs).select(env_ids)

    def step(self, actions: Any) -> StepRows:
        """Step all envs, and check the form of what comes back."""
        obs, rewards, terminated, truncated, infos = vector_step_result(self.env.step(actions))
        if self._swallows:
            self._any_ended = bool(np.any(terminated) or np.any(truncated))
        return obs, rewards, terminated, truncated, info_table(infos, self.env.num_envs)

    def why_not_some(self) -> str | None:
        """See Vectorized.

        A mask that is not understood resets all envs. To see which it is, another vector env would have to be built,
        or this one reset: neither is what the caller asked for. So it is read in the code of its reset().
        """
        if self._swallows:
            return _SWALLOWS
        inner = self.env.unwrapped
        if self._is_gymnasiums or self.env.num_envs == 1 or inner.metadata.get("reset_mask") or _names_mask(inner):
            return None
        return (
            f"{type(inner).__name__} has no reset_mask, by which some of its envs could be reset: its reset() does not "
            "name it. If it passes the options on to one that does, say so: metadata['reset_mask'] = True"
        )

    def render(self, env_ids: Sequence[int]) -> list[Any]:
        """The frames of some envs, in one call where they cannot be drawn one by one."""
        require_drawing(self.env)
        if isinstance(self.env, SyncVectorEnv):
            return [self.env.envs[env_id].render() for env_id in env_ids]
        try:
            frames = self.env.render()
        except NotImplementedError:
            raise UsageError(f"{type(self.env.unwrapped).__name__} does not draw its envs") from None
        return [None if frames is None else frames[env_id] for env_id in env_ids]

    # -- inside --

    def _reset(self, seed: Any, options: dict[str, Any] | None) -> tuple[Any, dict[str, Any]]:
        try:
            made = self.env.reset(seed=seed, options=options)
        except (TypeError, ValueError, AssertionError, gymnasium.error.Error) as error:
            if not isinstance(seed, list) or self._is_gymnasiums:
                raise
            name = type(self.env.unwrapped).__name__
            text = f"{name} takes one seed only: pass an int, or nothing, and reset all envs; it said: {error}"
            raise UsageError(text) from error
        return reset_result(made)

    def _some_seeds(self, env_ids: Array, seeds: Sequence[int | None]) -> Any:
        """As reset() takes them together with a mask."""
        if all(seed is None for seed in seeds):
            return None
        all_seeds: list[int | None] = [None] * self.env.num_envs
        for env_id, seed in zip(env_ids.tolist(), seeds, strict=True):
            all_seeds[env_id] = seed
        return all_seeds


class _KeepsMask(dict[str, Any]):
    """Options of a reset. Gymnasium's vector envs take the mask out, but their wrappers look for it afterwards."""

    def pop(self, key: str, *default: Any) -> Any:
        return self[key] if key == "reset_mask" else super().pop(key, *default)


class AleVector(GymnasiumVector):
    """ale-py's own AtariVectorEnv: seeds are an array, one for each env that is reset."""

    def __init__(self, env: Any, num_envs: int) -> None:
        """As any VectorEnv, but its arrays are new ones each time."""
        super().__init__(env, num_envs)
        self.reuses_arrays = env is not env.unwrapped

    def reset(self, seeds: Sequence[int | None], options: dict[str, Any] | None) -> Rows:
        """Reset all envs, with seeds of 31 bits."""
        obs, infos = reset_result(self.env.reset(seed=_small_seeds(seeds)))
        return obs, info_table(infos, self.env.num_envs)

    def why_not_some(self) -> str | None:
        """None: ale-py resets any envs alone."""
        return None

    def render(self, env_ids: Sequence[int]) -> list[Any]:
        """Raises UsageError: ale-py's own vector env does not draw."""
        raise UsageError("ale-py's own vector env does not draw; backend='process' does")

    def _some_seeds(self, env_ids: Array, seeds: Sequence[int | None]) -> Any:
        return _small_seeds(seeds)


def vectorized(env: Any, num_envs: int) -> GymnasiumVector:
    """In the form that fits."""
    ale = sys.modules.get("ale_py.vector_env")
    is_ale = ale is not None and isinstance(env, VectorEnv) and isinstance(env.unwrapped, ale.AtariVectorEnv)
    return AleVector(env, num_envs) if is_ale else GymnasiumVector(env, num_envs)


def info_table(infos: Mapping[str, Any], num_rows: int) -> InfoTable:
    """The infos that a vector env returned."""
    return InfoTable.from_vector_env({key: infos[key] for key in infos if key not in _NOT_INFOS}, num_rows)


def traits_of_vector(env: VectorEnv[Any, Any, Any]) -> EnvTraits:
    """What is known of each of its envs."""
    return EnvTraits(
        observation_space=env.single_observation_space,
        action_space=env.single_action_space,
        metadata={key: value for key, value in env.metadata.items() if key != "autoreset_mode"},
        render_mode=env.render_mode,
        gymnasium_spec=env.spec if hasattr(env.spec, "entry_point") else None,
    )


def require_drawing(env: Any) -> None:
    """Refuse to draw what was not made for it."""
    if env.render_mode is None:
        name = type(env.unwrapped).__name__
        raise UsageError(f"{name} was built without a render_mode, so it does not draw: make() has render_mode")


def close_vector(env: Any) -> None:
    """Close it, whatever happens; child processes that do not end by themselves are ended."""
    inner = getattr(env, "unwrapped", None)
    try:
        if not getattr(env, "closed", False):
            env.close()
    except Exception:
        for process in getattr(inner, "processes", ()):
            with contextlib.suppress(Exception):
                _end(process)
        if inner is not None:
            inner.closed = True  # or it would be closed again when it is collected
    if isinstance(inner, AsyncVectorEnv):
        _let_go(inner)


def _end(process: Any) -> None:
    process.terminate()
    process.join(TERMINATE_WAIT_S)
    if process.is_alive():
        process.kill()
        process.join(TERMINATE_WAIT_S)


def _let_go(env: AsyncVectorEnv) -> None:
    """Close the files that a closed AsyncVectorEnv keeps until it is collected.

    These are two for each process and two of its queue; if close() raised, its pipes too. A traceback, which somebody
    keeps, would keep them open.
    """
    for pipe in env.parent_pipes:
        if pipe is not None:
            pipe.close()
    for process in env.processes:
        with contextlib.suppress(ValueError):  # it does not end
            process.close()
    env.error_queue = None  # type: ignore[assignment]  # nothing is put into it any more


def _mode_of(env: Any, num_envs: int) -> Autoreset:
    if not isinstance(env, VectorEnv):
        got = f"{type(env).__name__}{hint(env)}"
        raise UsageError(f"backend='vector' needs a factory of gymnasium.vector.VectorEnv; got {got}")
    if env.num_envs != num_envs:
        raise UsageError(f"the vector env has {env.num_envs} envs instead of num_envs={num_envs}")
    mode = env.metadata.get("autoreset_mode")
    if mode is None:
        raise UsageError(f"{type(env).__name__} does not say its metadata['autoreset_mode'], as Gymnasium wants it")
    return Autoreset(getattr(mode, "value", mode))


def _names_mask(env: Any) -> bool:
    """Does the code of its reset() name "reset_mask"?"""
    codes = [getattr(inspect.unwrap(type(env).reset), "__code__", None)]
    while codes:
        constants = getattr(codes.pop(), "co_consts", ())
        if "reset_mask" in constants:
            return True
        codes += [each for each in constants if inspect.iscode(each)]  # of functions inside it
    return False


def _one_or_all(seeds: Sequence[int | None]) -> int | list[int | None] | None:
    """One number where it says the same: not every vector env takes a list."""
    first = seeds[0]
    if first is not None and all(seed == first + i for i, seed in enumerate(seeds)):
        return first
    return list(seeds) if any(seed is not None for seed in seeds) else None


def _small_seeds(seeds: Sequence[int | None]) -> Array:
    return np.array([-1 if seed is None else seed % LARGEST_SEED for seed in seeds])
