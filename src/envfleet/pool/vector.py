"""The vector backend: environments that come vectorized, behind the same facade as all others."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from envfleet.contract.batch import StepBatch
from envfleet.contract.episode import Autoreset
from envfleet.contract.errors import EnvFailed, EnvFleetError, StepOnEndedEpisode, UsageError
from envfleet.contract.spaces import SpaceTree
from envfleet.contract.spec import EnvTraits
from envfleet.pool.backend import IntArray, Line, PoolConfig, StepAtOnce
from envfleet.pool.guard import Failure
from envfleet.pool.infos import object_column
from envfleet.pool.vectorized import Rows, StepRows, Vectorized, put_rows, rows_of, traits_of_vector

Array = np.ndarray[Any, Any]


class VectorBackend:
    """A step waits until recv() needs its results.

    What a vector env does by itself after an episode's last step cannot be changed. Where it can reset some envs alone,
    the other modes are had that way; where it cannot, they are refused.
    """

    def __init__(self, build: Callable[[], Vectorized], config: PoolConfig) -> None:
        """Build the vector env."""
        _require_config(config)
        self._config = config
        self._build = build
        self.step_at_once: StepAtOnce | None = None
        self._vector: Vectorized = build()
        try:
            self._resets_some = self._choose_rule(self._vector)
            self.traits: EnvTraits = traits_of_vector(self._vector.env)
        except BaseException:
            self.close()
            raise
        self._obs_tree = SpaceTree(self.traits.observation_space)
        self._action_tree = SpaceTree(self.traits.action_space)
        self._env_ids = np.arange(config.num_envs, dtype=np.int32)
        self._actions: list[Any] = [None] * len(self._action_tree.leaves)
        self._task: Callable[[], StepBatch] | None = None  # what the next recv() does
        self._last_obs: Any = None
        self._ended = np.zeros(config.num_envs, np.bool_)  # with autoreset disabled: to be reset by the caller
        self._is_broken = False  # the vector env raised: all its episodes are lost

    def reset(self, env_ids: IntArray, seeds: Sequence[int | None], options: dict[str, Any] | None, line: Line) -> None:
        """See Backend."""
        self._task = lambda: self._reset(env_ids, seeds, options)

    def send(self, env_ids: IntArray | None, action_leaves: list[Any]) -> None:
        """See Backend. Envs may be sent one after the other; they are stepped together."""
        for index, values in enumerate(action_leaves):
            if env_ids is None:
                self._actions[index] = values.copy()
                continue
            if self._actions[index] is None:
                is_object = not isinstance(values, np.ndarray)
                shape = (self._config.num_envs, *np.shape(values)[1:])
                self._actions[index] = [None] * shape[0] if is_object else np.zeros(shape, values.dtype)
            for row, env_id in enumerate(env_ids.tolist()):
                self._actions[index][env_id] = values[row]
        self._task = self._step

    def recv(self, line: Line, timeout_s: float) -> StepBatch:
        """See Backend. A step of another library cannot be cut off, so `timeout_s` has no effect."""
        assert self._task is not None  # the facade receives what it has sent
        try:
            batch = self._task()
        except EnvFleetError:
            self._task = self._repeat
            raise
        except Exception as error:
            failure = Failure.of(0, error)
            self._is_broken = True
            self._task = lambda: self._cut_short(failure.error)
            message = f"the vector env raised {failure.error}; all its episodes are lost"
            raise EnvFailed(message, env_id=0, child_traceback=failure.traceback) from None
        self._task = None
        return batch

    def drain(self, timeout_s: float) -> None:
        """See Backend."""
        self._task = None

    def call(self, env_ids: Sequence[int], name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
        """See Backend. A vector env calls all its envs, whoever is asked for."""
        env = self._vector.env
        try:
            if hasattr(env, "call") or name == "render":
                values = env.call(name, *args, **kwargs) if hasattr(env, "call") else env.render()
                return [values[env_id] for env_id in env_ids]
        except Exception as error:
            raise Failure.of(0, error).to_exception() from None
        raise UsageError(f"{type(env).__name__} does not let its envs be called, so {name!r} cannot be had")

    def set_attr(self, name: str, values: Sequence[Any]) -> None:
        """See Backend."""
        if not hasattr(self._vector.env, "set_attr"):
            raise UsageError(f"{type(self._vector.env).__name__} does not let attributes of its envs be set")
        self._vector.env.set_attr(name, list(values))

    def close(self) -> None:
        """See Backend."""
        if not self._vector.env.closed:
            with contextlib.suppress(Exception):
                self._vector.env.close()

    # -- inside --

    def _choose_rule(self, vector: Vectorized) -> bool:
        """Do we reset envs whose episodes have ended? If not, the vector env does, or the caller."""
        asked, own = self._config.autoreset, vector.own_mode
        if asked is own:
            return False
        name = type(vector.env).__name__
        only = f"{name} resets its envs in mode {own.name.lower()!r}; autoreset_mode={asked.name.lower()!r}"
        if own is Autoreset.SAME_STEP or asked is Autoreset.NEXT_STEP:
            raise UsageError(f"{only} cannot be had from it")
        if not vector.can_reset_some():
            raise UsageError(f"{only} needs reset_mask, which it does not have")
        return asked is Autoreset.SAME_STEP

    def _reset(self, env_ids: IntArray, seeds: Sequence[int | None], options: dict[str, Any] | None) -> StepBatch:
        if self._is_broken:
            self._rebuild()
        if len(env_ids) == self._config.num_envs:
            obs, infos = self._vector.reset(seeds, options)
            obs = self._kept(obs)
        else:
            rows = self._vector.reset_some(env_ids, seeds, options)
            obs, infos = self._with_rows(self._last_obs, {}, rows, env_ids)
        self._ended[env_ids] = False
        self._last_obs = obs
        return self._batch(obs, infos)

    def _step(self) -> StepBatch:
        if self._is_broken:  # in next-step mode: the caller has seen that all episodes ended
            return self._reset(self._env_ids, [None] * self._config.num_envs, None)
        if self._ended.any():
            ended = np.flatnonzero(self._ended).tolist()
            raise StepOnEndedEpisode(f"the episodes of envs {ended} have ended: reset them before the next step()")
        actions = self._action_tree.unflatten(
            [tuple(leaf) if isinstance(leaf, list) else leaf for leaf in self._actions]
        )
        result: StepRows = self._vector.step(actions)
        obs = self._kept(result[0])
        rewards = np.asarray(result[1], np.float64)
        terminated, truncated = np.asarray(result[2], np.bool_), np.asarray(result[3], np.bool_)
        ended_rows = np.flatnonzero(terminated | truncated)
        infos = result[4]
        if self._config.autoreset is Autoreset.DISABLED:
            self._ended = terminated | truncated
        elif self._resets_some and len(ended_rows):
            rows = self._vector.reset_some(ended_rows, [None] * len(ended_rows), None)
            final_obs, final_infos = obs, put_rows({}, rows_of(infos, ended_rows), ended_rows, len(rewards))
            obs, infos = self._with_rows(obs, infos, rows, ended_rows)
            infos |= self._finals(final_obs, final_infos, ended_rows)
        elif self._config.autoreset is Autoreset.SAME_STEP and "final_obs" in infos:
            infos = self._with_object_finals(infos, ended_rows)
        self._last_obs = obs
        return self._batch(obs, infos)._replace(rewards=rewards, terminated=terminated, truncated=truncated)

    def _cut_short(self, reason: str) -> StepBatch:
        """All episodes end here, at their last observations."""
        num_envs = self._config.num_envs
        everybody = np.ones(num_envs, np.bool_)
        errors: dict[str, Any] = {
            "env_error": object_column(dict.fromkeys(range(num_envs), reason), num_envs),
            "_env_error": everybody,
        }
        if self._last_obs is None:  # it was never reset
            leaves = self._obs_tree.leaves
            self._last_obs = self._obs_tree.unflatten(
                [np.zeros((num_envs, *leaf.shape), leaf.dtype) for leaf in leaves]
            )
        obs, infos = self._last_obs, errors
        if self._config.autoreset is Autoreset.SAME_STEP:
            first = self._reset(self._env_ids, [None] * num_envs, None)
            infos = {**(first.info_columns or {}), **errors, **self._finals(obs, errors, np.arange(num_envs))}
            obs = first.obs
        elif self._config.autoreset is Autoreset.DISABLED:
            self._ended[:] = True
        return self._batch(obs, infos)._replace(truncated=everybody.copy())

    def _repeat(self) -> StepBatch:
        return self._batch(self._last_obs, {})

    def _rebuild(self) -> None:
        self.close()
        self._vector = self._build()
        self._is_broken = False

    def _batch(self, obs: Any, infos: dict[str, Any]) -> StepBatch:
        num_envs = self._config.num_envs
        no, zeros = np.zeros(num_envs, np.bool_), np.zeros(num_envs)
        return StepBatch(self._env_ids.copy(), obs, zeros, no, no.copy(), {}, info_columns=dict(infos))

    def _kept(self, obs: Any) -> Any:
        """The observations as arrays that nobody will overwrite."""
        if not self._vector.reuses_arrays:
            return obs
        leaves = self._obs_tree.flatten(obs)
        return self._obs_tree.unflatten(
            [leaf if self._obs_tree.leaves[i].dtype is None else np.array(leaf) for i, leaf in enumerate(leaves)]
        )

    def _with_rows(self, obs: Any, infos: dict[str, Any], rows: Rows, env_ids: Array) -> Rows:
        """Observations and infos in which some rows are replaced; the old ones stay as they are."""
        joined = []
        for old, new in zip(self._obs_tree.flatten(obs), self._obs_tree.flatten(rows[0]), strict=True):
            column: Any = list(old) if isinstance(old, tuple) else old.copy()
            for row, env_id in enumerate(env_ids.tolist()):
                column[env_id] = new[row]
            joined.append(tuple(column) if isinstance(old, tuple) else column)
        return self._obs_tree.unflatten(joined), put_rows(infos, rows[1], env_ids, self._config.num_envs)

    def _finals(self, obs: Any, infos: dict[str, Any], rows: Array) -> dict[str, Any]:
        """What the infos of a same-step reset have for the rows whose episodes ended."""
        leaves = self._obs_tree.flatten(obs)
        last = {row: self._obs_tree.unflatten([leaf[row] for leaf in leaves]) for row in rows.tolist()}
        mask = np.zeros(self._config.num_envs, np.bool_)
        mask[rows] = True
        return {
            "final_obs": object_column(last, len(mask)),
            "final_info": infos,
            "_final_obs": mask,
            "_final_info": mask.copy(),
        }

    def _with_object_finals(self, infos: dict[str, Any], rows: Array) -> dict[str, Any]:
        """ale-py has final observations as one array with a row for each env, and no final infos."""
        if infos["final_obs"].dtype == object:
            return infos
        finals = self._finals(infos["final_obs"], infos.get("final_info", {}), rows)
        return {**infos, **finals}


def _require_config(config: PoolConfig) -> None:
    if config.rows != config.num_envs:
        raise UsageError(
            f"a vector env steps all its envs together: batch_size must be num_envs; got {config.batch_size}"
        )
    if config.max_env_restarts is not None:
        raise UsageError("a vector env cannot restart one of its envs: on_env_error='restart' is for other backends")
