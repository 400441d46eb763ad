"""VectorSource: what adapters need of a pool and of a cluster alike.

All envs at once, in the order of envs; episodes that end are reset in the same step, so that every row is a real
transition, and the last observation of each episode comes beside the first one of the next.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, Self

import numpy as np
from gymnasium import spaces
from gymnasium.spaces import Space
from gymnasium.vector import AutoresetMode
from numpy.typing import ArrayLike

from envfleet.contract.arrays import BoolArray, FloatArray, IntArray
from envfleet.contract.errors import EnvFailed, NothingToReceive, UsageError
from envfleet.contract.infos.table import Info, InfoTable, mask_key
from envfleet.contract.spaces import SpaceTree
from envfleet.pool.traits import CLIPS_REWARDS, WRAPPERS


class Envs(Protocol):
    """What EnvPool and ClusterEnv both have."""

    num_envs: int
    batch_size: int
    closed: bool
    render_mode: str | None
    metadata: dict[str, Any]
    single_observation_space: Space[Any]
    single_action_space: Space[Any]

    def reset(self, *, seed: Any = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Reset all envs, or those of a mask."""

    def step(self, actions: Any) -> tuple[Any, FloatArray, BoolArray, BoolArray, dict[str, Any]]:
        """Step all envs."""

    def send(self, actions: Any) -> None:
        """Start a step of all envs."""

    def recv(self) -> tuple[Any, FloatArray, BoolArray, BoolArray, dict[str, Any]]:
        """Wait for what was sent."""

    def call(self, name: str, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        """Call a method of each env, or get an attribute."""

    def call_some(self, env_ids: ArrayLike, name: str, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        """Call a method of some envs, or get an attribute."""

    def set_attr(self, name: str, values: Any, env_ids: ArrayLike | None = None) -> None:
        """Set an attribute of each env, or of some."""

    def close(self) -> None:
        """Close the envs."""


@dataclass(frozen=True, slots=True)
class SourceStep:
    """One step of all N envs. Arrays are leases of the pool: nobody overwrites them, and nobody may write to them."""

    obs: Any  # rows of [N, ...]: the first of the next episode where one has ended
    rewards: FloatArray  # [N] float64
    terminated: BoolArray  # [N]
    truncated: BoolArray  # [N]
    table: InfoTable

    @property
    def ended(self) -> BoolArray:
        """[N]: whether the episode of each env has ended with this step."""
        return self.terminated | self.truncated

    def was_reset(self, row: int) -> bool:
        """Whether an env whose episode has ended began the next one: not if its reset failed, too."""
        mask = self.table.columns.get(mask_key("final_obs"))
        return mask is not None and bool(mask[row])

    @property
    def unbegun_rows(self) -> IntArray:
        """The envs whose episode has ended, and whose reset failed, too."""
        return np.array([row for row in np.flatnonzero(self.ended).tolist() if not self.was_reset(row)], np.int32)

    def final_obs(self, row: int) -> Any:
        """The last observation of an episode that has ended."""
        return self.table.final_obs[row] if self.was_reset(row) else _row_of(self.obs, row)

    def final_info(self, row: int) -> Info:
        """The info of the last step of an episode that has ended."""
        return self.table.final_infos.row(row) if self.was_reset(row) else without_finals(self.table.row(row))

    def reset_info(self, row: int) -> Info:
        """The info of the reset that followed the last step of an episode."""
        return without_finals(self.table.row(row))

    def infos(self, ended_rows: Sequence[int]) -> list[Info]:
        """The info of each env's step; of those whose episode has ended the last one's."""
        infos = self.table.rows()
        for row in ended_rows:
            infos[row] = self.final_info(row)
        return infos


class VectorSource:
    """A pool, or a cluster that is stepped with actions, as adapters use it."""

    def __init__(self, envs: Any, adapter: str) -> None:
        """Look whether the envs can be used.

        Args:
            envs: An EnvPool or a ClusterEnv, which the adapter owns from now on: its close() closes them.
            adapter: Name of the class that is built, for messages.

        Raises:
            UsageError: It is neither, it does not reset in the same step, or it is asynchronous.
        """
        self.envs: Envs = _require_envs(envs, adapter)
        self.num_envs = self.envs.num_envs
        # Copies: some scripts write to their spaces, and the envs' own must stay as they are.
        self.single_observation_space: Space[Any] = copy.deepcopy(self.envs.single_observation_space)
        self.single_action_space: Space[Any] = copy.deepcopy(self.envs.single_action_space)
        self._obs = SpaceTree(self.single_observation_space)
        self._actions = SpaceTree(self.single_action_space)
        self._interrupted: SourceStep | None = None  # a step after which an env could not be reset

    @property
    def render_mode(self) -> str | None:
        """Gymnasium's, of all envs."""
        return self.envs.render_mode

    @property
    def has_own_rewards(self) -> bool:
        """Whether the envs clip their rewards, and say in `info["reward"]` what they were."""
        return bool(self.envs.metadata.get(CLIPS_REWARDS))

    def reset(
        self, seed: Any = None, options: dict[str, Any] | None = None, rows: Sequence[int] | None = None
    ) -> tuple[Any, InfoTable]:
        """Reset all envs, or those of `rows`; observations of all, and the table of infos."""
        if rows is not None:
            mask = np.zeros(self.num_envs, np.bool_)
            mask[rows] = True
            options = {**(options or {}), "reset_mask": mask}
        obs, infos = self.envs.reset(seed=seed, options=options)
        if "reset_mask" not in (options or {}):
            self._interrupted = None
        return obs, InfoTable(self.num_envs, infos)

    def send(self, actions: Any) -> None:
        """Start a step of all envs. EnvFailed: as step()."""
        self._begin_interrupted()
        self.envs.send(actions)

    def recv(self) -> SourceStep:
        """Wait for the step that was started. After EnvFailed the next call returns the step, if envs can be reset."""
        interrupted = self._begin_interrupted()
        return self._begun(self._result(self.envs.recv())) if interrupted is None else interrupted

    def step(self, actions: Any) -> SourceStep:
        """Step all envs.

        Raises:
            EnvFailed: An env raised; or the reset that followed did, too, and no restart was left for another one. The
                next step begins with a reset of that env.
        """
        self._begin_interrupted()
        return self._begun(self._result(self.envs.step(actions)))

    def _begin_interrupted(self) -> SourceStep | None:
        """Try again to begin the episodes that could not begin; return the step after which they should have begun."""
        return None if self._interrupted is None else self._begun(self._interrupted)

    def _begun(self, step: SourceStep) -> SourceStep:
        """The step, after which every env is in an episode.

        With `on_env_error="restart"` the reset that follows a failure may fail, too. A pool says so in the env's row
        and leaves it to the caller to reset the env; the libraries served here never do. So it is done here: a reset
        of the pool builds the env anew as long as restarts are left (`max_env_restarts`), and then raises.
        """
        rows = step.unbegun_rows
        if not len(rows):
            return step
        self._interrupted = step
        try:
            obs, table = self.reset(rows=rows.tolist())
        except EnvFailed:
            take_what_is_left(self.envs)
            raise
        self._interrupted = None
        first, last = table.select(rows), step.table.select(rows)
        first.columns |= {key: last.columns[key] for key in ("env_error", "_env_error") if key in last.columns}
        first.add_finals(np.arange(len(rows)), [_row_of(step.obs, row) for row in rows.tolist()], last)
        return replace(step, obs=obs, table=step.table.put_rows(rows, first))

    def _result(self, result: tuple[Any, FloatArray, BoolArray, BoolArray, dict[str, Any]]) -> SourceStep:
        obs, rewards, terminated, truncated, infos = result
        return SourceStep(obs, rewards, terminated, truncated, InfoTable(self.num_envs, infos))

    def batch_of(self, actions: Any) -> Any:
        """A batch of actions, also if they come as a list, an array or a tuple with those of each env.

        With a Tuple space a tuple may mean two things. It is a batch if its parts are arrays or lists, with a row for
        each env; if tuples are where these should be, it has an action for each env.
        """
        if self._actions.is_one_array or not isinstance(actions, np.ndarray | Sequence):
            return actions
        if isinstance(actions, tuple) and isinstance(self.single_action_space, spaces.Tuple):
            paths = [leaf.path for leaf in self._actions.leaves if leaf.dtype is not None]
            if len(actions) == len(self.single_action_space.spaces) and not any(_is_tuple(actions, p) for p in paths):
                return actions
        leaves = zip(*(self._actions.flatten(each) for each in actions), strict=True)
        return self._actions.unflatten([np.stack([np.asarray(value) for value in leaf]) for leaf in leaves])

    def next_obs(self, step: SourceStep) -> Any:
        """What each env showed after its step: last observations of episodes that have ended, not first ones."""
        rows = np.flatnonzero(step.ended)
        if not len(rows):
            return step.obs
        leaves = [leaf.copy() if isinstance(leaf, np.ndarray) else list(leaf) for leaf in self._obs.flatten(step.obs)]
        for row in rows.tolist():
            for leaf, value in zip(leaves, self._obs.flatten(step.final_obs(row)), strict=True):
                leaf[row] = value
        return self._obs.unflatten([leaf if isinstance(leaf, np.ndarray) else tuple(leaf) for leaf in leaves])

    # -- the single envs --

    def call(self, env_ids: Sequence[int], name: str, *args: Any, **kwargs: Any) -> list[Any]:
        """Call a method of these envs, or get an attribute; in their order, also if an env is named twice."""
        if list(env_ids) == list(range(self.num_envs)):
            return list(self.envs.call(name, *args, **kwargs))
        once = sorted(set(env_ids))
        values = dict(zip(once, self.envs.call_some(once, name, *args, **kwargs), strict=True))
        return [values[env_id] for env_id in env_ids]

    def get_attr(self, env_ids: Sequence[int], name: str) -> list[Any]:
        """Get an attribute of these envs, also one that could be called. AttributeError: an env does not have it."""
        if name in ("np_random", "np_random_seed"):  # a pool has them, where envs have not
            return self.call(env_ids, name)
        try:
            return self.call(env_ids, "get_wrapper_attr", name)
        except EnvFailed as error:
            if self.has_attr(env_ids, name):
                raise
            raise AttributeError(f"env {error.env_id} has no attribute {name!r}, and no wrapper of it has") from None

    def set_attr(self, env_ids: Sequence[int], name: str, value: Any) -> None:
        """Set an attribute of these envs, to the same value. Of a cluster: all envs of some workers."""
        once = sorted(set(env_ids))
        self.envs.set_attr(name, [value] * len(once), None if len(once) == self.num_envs else once)

    def has_attr(self, env_ids: Sequence[int], name: str) -> bool:
        """Whether all of these envs, or wrappers of them, have an attribute."""
        return all(self.call(env_ids, "has_wrapper_attr", name))

    def is_wrapped(self, env_ids: Sequence[int], wrapper: type) -> list[bool]:
        """Whether each of these envs is in such a wrapper. Classes are compared by name, for envs run elsewhere."""
        try:
            wrappers = self.call(env_ids, WRAPPERS)
        except (UsageError, EnvFailed):  # an env in C++ alone, or one that comes vectorized, is in none
            return [False] * len(env_ids)
        return [f"{wrapper.__module__}.{wrapper.__qualname__}" in names for names in wrappers]

    # -- the end --

    def close(self) -> None:
        """Close the envs; more than once does no harm."""
        if not self.envs.closed:
            self.envs.close()

    def __enter__(self) -> Self:
        """Return the source, which `with` closes."""
        return self

    def __exit__(self, *error: object) -> None:
        """Close the envs, whatever happened."""
        self.close()


def _is_tuple(tree: Any, path: Sequence[str | int]) -> bool:
    """Whether a tuple is at the place of a leaf, or before it, where the tree has another form."""
    for key in path:
        try:
            tree = tree[key]
        except (TypeError, IndexError, KeyError):
            return isinstance(tree, tuple)
    return isinstance(tree, tuple)


def take_what_is_left(envs: Any) -> None:
    """Receive the step or reset in which an env has failed: nobody else can, and envs cannot be reset before."""
    for _ in range(envs.num_envs + 1):  # each env may fail in it
        try:
            envs.recv()
        except NothingToReceive:
            return
        except EnvFailed:
            continue


def _row_of(obs: Any, row: int) -> Any:
    if isinstance(obs, dict):
        return {key: _row_of(part, row) for key, part in obs.items()}
    return tuple(_row_of(part, row) for part in obs) if isinstance(obs, tuple) else obs[row]


def without_finals(info: Info) -> Info:
    """The info of a reset, without what the row has of the episode before."""
    return {key: value for key, value in info.items() if key not in ("final_obs", "final_info")}


def env_ids_of(indices: int | Iterable[int] | None, num_envs: int) -> list[int]:
    """The envs that are meant: all, one or several; negative indices count from the end.

    Raises:
        UsageError: There is no such env.
    """
    if indices is None:
        return list(range(num_envs))
    given = [indices] if isinstance(indices, int | np.integer) else list(indices)
    for each in given:
        if not isinstance(each, int | np.integer) or not -num_envs <= each < num_envs:
            raise UsageError(f"indices must be between {-num_envs} and {num_envs - 1}; got {each!r}")
    return [int(each) % num_envs for each in given]


def _require_envs(envs: Any, adapter: str) -> Any:
    mode = getattr(envs, "autoreset_mode", None)
    if mode is None or not hasattr(envs, "call_some"):
        raise UsageError(
            f"{adapter} takes a pool of envfleet.make() or an envfleet.ClusterEnv; got {type(envs).__name__}"
        )
    if mode is not AutoresetMode.SAME_STEP:
        raise UsageError(
            f"{adapter} needs envs that reset in the step that ends their episode, and these have "
            f"autoreset_mode={mode.name.lower()!r}: make them with autoreset_mode='same_step'"
        )
    if envs.batch_size != envs.num_envs:
        raise UsageError(
            f"{adapter} steps all envs at once, and these come in batches of {envs.batch_size} of {envs.num_envs}: "
            "make them without batch_size"
        )
    return envs
