"""The vector backend: environments that come vectorized, behind the same facade as all others."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NoReturn

import numpy as np
from gymnasium.vector import SyncVectorEnv, VectorEnv

from envfleet.contract.arrays import Array, IntArray
from envfleet.contract.batch import StepBatch
from envfleet.contract.episode import Autoreset
from envfleet.contract.errors import EnvFailed, StepOnEndedEpisode, UsageError
from envfleet.contract.infos.table import InfoTable
from envfleet.contract.live_changes import Change
from envfleet.contract.pool_config import Line, PoolConfig
from envfleet.contract.results import ObservationCheck, number_rows
from envfleet.contract.spaces import SpaceTree
from envfleet.contract.spec import EnvTraits
from envfleet.contract.state import EnvState
from envfleet.pool.backend import StepAtOnce
from envfleet.pool.guard import ENV_ERRORS, Failure
from envfleet.pool.traits import set_attribute, value_of
from envfleet.pool.vector.choice import VectorBuilder
from envfleet.pool.vector.vectorized import (
    Rows,
    StepRows,
    Vectorized,
    close_vector,
    failed_env_ids,
    traits_of_vector,
)
from envfleet.pool.waits import SAME_THREAD, CallWatch

logger = logging.getLogger("envfleet.pool")


class VectorBackend:
    """A reset is done at once, so that a wrong call changes nothing; a step waits until recv() needs its results.

    What a vector env does by itself after an episode's last step cannot be changed. Where it can reset some envs alone,
    the other modes are had that way; where it cannot, they are refused. After StepOnEndedEpisode no env was stepped:
    recv() has all last observations again (other backends step those envs whose episodes go on).
    """

    name = "vector"
    steps_some = False

    def __init__(self, builder: VectorBuilder, config: PoolConfig) -> None:
        """Build the vector env; its builder may pass the autoreset mode on to the library that has it."""
        _require_config(config)
        self._config = config
        self._build, self._takes_mode = builder
        self.step_at_once: StepAtOnce | None = None
        self.is_step_pending = False
        self._autoreset = config.autoreset
        self._watch = CallWatch(self, logger) if config.timeout_s is None else None
        self._vector: Vectorized = self._build(self._autoreset)
        try:
            self._resets_some = _resets_some(self._vector, self._autoreset)
            self.traits: EnvTraits = traits_of_vector(self._vector.env)
        except BaseException:
            close_vector(self._vector.env)
            raise
        self._obs_tree = SpaceTree(self.traits.observation_space)
        self._observations = ObservationCheck(self._obs_tree)
        self._action_tree = SpaceTree(self.traits.action_space)
        self._env_ids = np.arange(config.num_envs, dtype=np.int32)
        self._actions: list[Any] = [None] * len(self._action_tree.leaves)
        self._task: Callable[[], StepBatch] | None = None  # what the next recv() does
        self._failure: Failure | None = None  # what it raises instead
        self._attributes: dict[str, dict[int, Any]] = {}  # what set_attr() has set, by env: a new one gets it, too
        self._last_obs: Any = None  # our own copy
        self._ended = np.zeros(config.num_envs, np.bool_)  # with autoreset disabled: to be reset by the caller
        self._is_broken = False  # the vector env raised: all its episodes are lost

    def switch_autoreset(self, mode: Autoreset) -> bool:
        """See Backend. The only one that builds envs anew: where the vector env as it is does not have the mode."""
        try:
            self._resets_some, is_same = _resets_some(self._vector, mode), True
        except UsageError:
            if not self._takes_mode:  # another one would have the same modes
                raise
            self._build_for(mode)
            is_same = False
        self._autoreset = mode
        self._ended[:] = False
        return is_same

    def _build_for(self, mode: Autoreset) -> None:
        """Put a vector env with another mode in the place of this one, which is closed before: never two at once."""
        close_vector(self._vector.env)
        self._is_broken, self._task, self._failure = True, None, None
        try:
            self._vector = self._build(mode)
            self._resets_some = _resets_some(self._vector, mode)
            self._set_attributes()
        except ENV_ERRORS as error:  # the next reset builds one with the old mode
            close_vector(self._vector.env)
            failure = Failure.of(0, error)
            name = mode.name.lower()
            raise EnvFailed(
                f"the vector env could not be built anew for autoreset_mode={name!r}: {failure.error}; the mode is "
                "still the old one, but all episodes are lost: call reset()",
                env_id=0,
                child_traceback=failure.traceback,
            ) from error
        self._is_broken = False

    def reset(self, env_ids: IntArray, seeds: Sequence[int | None], options: dict[str, Any] | None, line: Line) -> None:
        """Reset these envs at once; recv() returns their rows, or raises what they raised."""
        if len(env_ids) < self._config.num_envs:
            self._require_some("some envs cannot be reset alone")
        try:
            with self._watched("is reset"):
                batch = self._reset(env_ids, seeds, options)
        except UsageError:
            raise
        except ENV_ERRORS as error:
            self._failure, self._is_broken = Failure.of(0, error), True
        else:
            self._task = lambda: batch

    def send(self, env_ids: IntArray | None, action_leaves: list[Any], line: Line) -> None:
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

    def repeat(self, env_ids: IntArray, line: Line) -> None:
        """See Backend. Never called: a vector env steps all its envs together."""
        raise NotImplementedError

    def recv(self, line: Line, timeout_s: float | None = None) -> StepBatch:
        """See Backend. A step of another library cannot be cut off: `timeout_s` has no effect; None has it watched."""
        if self._failure is not None:
            self._fail(self._failure)
        assert self._task is not None  # the facade receives what it has sent
        try:
            with self._watched("steps"):
                batch = self._task()
        except StepOnEndedEpisode:
            self._task = lambda: self._batch(self._copied(self._last_obs), self._no_infos())
            raise
        except ENV_ERRORS as error:
            self._fail(Failure.of(0, error))
        self._task = None
        return batch

    def drain(self) -> None:
        """Forget what was sent: nothing runs before recv()."""
        self._task = self._failure = None

    def call(self, env_ids: Sequence[int], name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
        """See Backend. Where the envs cannot be reached one by one, all are called or none."""
        env = self._vector.env.unwrapped
        if name != "render" and not isinstance(env, SyncVectorEnv):
            if not hasattr(env, "call"):
                raise UsageError(f"{type(env).__name__} does not let its envs be called, so {name!r} is not available")
            if len(env_ids) < self._config.num_envs:
                raise UsageError(f"{type(env).__name__} calls all its envs or none: use call({name!r}, ...)")
        env_id = 0
        try:
            if name == "render":
                return self._vector.render(env_ids)
            if not isinstance(env, SyncVectorEnv):
                return list(env.call(name, *args, **kwargs))
            values = []
            for env_id in env_ids:
                values.append(value_of(env.envs[env_id], name, args, kwargs))
            return values
        except UsageError:
            raise
        except ENV_ERRORS as error:
            failure = Failure.of(env_id, error)
            is_known = isinstance(env, SyncVectorEnv) and name != "render"
            raise (failure.to_exception() if is_known else self._to_exception(failure)) from None

    def set_attr(self, env_ids: Sequence[int], name: str, values: Sequence[Any]) -> None:
        """See Backend. Where the envs cannot be reached one by one, an attribute of all is set or of none."""
        env = self._vector.env.unwrapped
        if not hasattr(env, "set_attr"):
            raise UsageError(f"{type(env).__name__} does not let attributes of its envs be set")
        by_env = dict(zip(env_ids, values, strict=True))
        if len(by_env) < self._config.num_envs and not isinstance(env, SyncVectorEnv):
            raise UsageError(f"{type(env).__name__} sets {name!r} of all its envs or of none: leave env_ids out")
        try:
            self._set_attr(name, by_env)
        except ENV_ERRORS as error:
            raise self._to_exception(Failure.of(0, error)) from None
        self._attributes[name] = {**self._attributes.get(name, {}), **by_env}

    @property
    def why_no_changes(self) -> str | None:
        """Vector envs reset themselves, so no change can come before it."""
        return (
            f"{type(self._vector.env.unwrapped).__name__} resets its envs by itself, so that they cannot be changed "
            "just before: call set_attr() between two steps, or make a pool of single envs with backend='process'"
        )

    def change(self, change: Change) -> None:
        """See Backend. Never called."""
        raise NotImplementedError

    @property
    def why_no_states(self) -> str | None:
        """Say why states of these envs cannot be saved."""
        return (
            f"{type(self._vector.env.unwrapped).__name__} does not save the states of its envs: make a pool of single "
            "envs with backend='process', or of native ones"
        )

    def state_names(self, env_ids: Sequence[int]) -> list[str]:
        """See Backend. Never called, and so the next two."""
        raise NotImplementedError

    def get_state(self, env_ids: Sequence[int]) -> list[EnvState]:
        """Save the states of these envs, in their order."""
        raise NotImplementedError

    def set_state(self, env_ids: Sequence[int], states: Sequence[EnvState]) -> None:
        """Put these envs back into saved states."""
        raise NotImplementedError

    why_no_giving_up = SAME_THREAD

    def give_up(self, env_ids: Sequence[int]) -> None:
        """See Backend. Never called."""
        raise NotImplementedError

    def call_while_waiting(self, look: Callable[[], None]) -> None:
        """See Backend. There is no wait: the vector env works in the calling thread."""

    def close(self, terminate: bool = False) -> None:
        """Close the vector env of the other library."""
        if self._watch is not None:
            self._watch.close()
        close_vector(self._vector.env)

    def abandon(self) -> None:
        """See Backend. Or Gymnasium would close the owner's child processes when this copy is collected."""
        for env in (self._vector.env, getattr(self._vector.env, "unwrapped", None)):
            if isinstance(env, VectorEnv):
                env.closed = True

    # -- inside --

    def _require_some(self, refusal: str) -> None:
        _require_some(self._vector, refusal)

    def _reset(self, env_ids: IntArray, seeds: Sequence[int | None], options: dict[str, Any] | None) -> StepBatch:
        if self._is_broken:  # all episodes are lost, so all begin anew
            self._rebuild()
            given = dict(zip(env_ids.tolist(), seeds, strict=True))
            env_ids, seeds = self._env_ids, [given.get(env_id) for env_id in self._env_ids.tolist()]
        if len(env_ids) == self._config.num_envs:
            obs, infos = self._kept(*self._vector.reset(seeds, options))
        else:
            rows = self._checked(self._vector.reset_some(env_ids, seeds, options), len(env_ids))
            obs, infos = self._with_rows(self._last_obs, self._no_infos(), rows, env_ids)
        self._is_broken = False
        self._ended[env_ids] = False
        self._last_obs = self._copied(obs)
        return self._batch(obs, infos)

    def _step(self) -> StepBatch:
        if self._ended.any():
            ended = np.flatnonzero(self._ended).tolist()
            raise StepOnEndedEpisode(
                f"the episodes of envs {ended} have ended, so no env was stepped: call recv(), which repeats the last "
                "observations, then reset these envs before the next step()"
            )
        if self._is_broken:  # the caller has seen that all episodes ended
            return self._reset(self._env_ids, [None] * self._config.num_envs, None)
        actions = self._action_tree.unflatten(
            [tuple(leaf) if isinstance(leaf, list) else leaf for leaf in self._actions]
        )
        result: StepRows = self._vector.step(actions)
        obs, infos = self._kept(result[0], result[4])
        num_envs = self._config.num_envs
        rewards = number_rows(result[1], num_envs, "rewards").astype(np.float64)
        terminated = number_rows(result[2], num_envs, "terminations").astype(np.bool_)
        truncated = number_rows(result[3], num_envs, "truncations").astype(np.bool_)
        ended_rows = np.flatnonzero(terminated | truncated)
        if self._autoreset is Autoreset.DISABLED:
            self._ended = terminated | truncated
        elif self._resets_some and len(ended_rows):
            rows = self._checked(self._vector.reset_some(ended_rows, [None] * len(ended_rows), None), len(ended_rows))
            final_obs, final_infos = self._obs_tree.each_row(obs, ended_rows.tolist()), infos.only(ended_rows)
            obs, infos = self._with_rows(obs, infos, rows, ended_rows)
            infos.add_finals(ended_rows, final_obs, final_infos)
        elif self._autoreset is Autoreset.SAME_STEP and infos.final_obs is not None:
            self._split_finals(infos, ended_rows)
            for row in ended_rows.tolist():
                self._observations.check(infos.final_obs[row])
        self._last_obs = self._copied(obs)
        return self._batch(obs, infos)._replace(rewards=rewards, terminated=terminated, truncated=truncated)

    def _fail(self, failure: Failure) -> NoReturn:
        self._failure, self._is_broken = None, True
        self._task = lambda: self._cut_short(failure.error)
        raise self._to_exception(failure, "; all its episodes are lost") from None

    def _to_exception(self, failure: Failure, ending: str = "") -> EnvFailed:
        """Names the envs that failed, where the vector env tells."""
        culprits = failed_env_ids(self._vector.env)
        if len(culprits) == 1:
            text = f"env {culprits[0]} of the vector env raised {failure.error}"
        elif culprits:
            text = f"envs {culprits} of the vector env raised, one of them {failure.error}"
        else:
            text = f"the vector env raised {failure.error}; it does not say in which env"
        env_id = culprits[0] if culprits else 0
        return EnvFailed(text + ending, env_id=env_id, child_traceback=failure.traceback)

    def _cut_short(self, reason: str) -> StepBatch:
        """All episodes end here, at their last observations."""
        num_envs = self._config.num_envs
        if self._last_obs is None:  # it was never reset
            leaves = self._obs_tree.leaves
            nothing = (None,) * num_envs
            self._last_obs = self._obs_tree.unflatten(
                [nothing if leaf.dtype is None else np.zeros((num_envs, *leaf.shape), leaf.dtype) for leaf in leaves]
            )
        obs, infos, final_obs = self._copied(self._last_obs), self._no_infos(), None
        if self._autoreset is Autoreset.SAME_STEP:
            try:
                first = self._reset(self._env_ids, [None] * num_envs, None)
            except ENV_ERRORS as error:  # the next step tries again
                self._is_broken = True
                reason = f"{reason}; then, in reset: {Failure.of(0, error).error}"
            else:
                final_obs = self._obs_tree.each_row(obs, range(num_envs))
                obs, infos = first.obs, InfoTable(num_envs, first.infos)
        elif self._autoreset is Autoreset.DISABLED:
            self._ended[:] = True
        infos.add_errors(self._env_ids, reason, final_obs)
        return self._batch(obs, infos)._replace(truncated=np.ones(num_envs, np.bool_))

    def _watched(self, doing: str) -> AbstractContextManager[None]:
        what = f"{type(self._vector.env).__name__} {doing} in this thread (timeout_s=None)"
        return nullcontext() if self._watch is None else self._watch.during(what)

    def _no_infos(self) -> InfoTable:
        return InfoTable(self._config.num_envs)

    def _rebuild(self) -> None:
        close_vector(self._vector.env)
        self._vector = self._build(self._autoreset)
        self._set_attributes()

    def _set_attributes(self) -> None:
        for name, by_env in self._attributes.items():
            self._set_attr(name, by_env)

    def _set_attr(self, name: str, by_env: Mapping[int, Any]) -> None:
        env = self._vector.env.unwrapped
        if len(by_env) == self._config.num_envs:
            env.set_attr(name, [by_env[env_id] for env_id in range(len(by_env))])
            return
        for env_id, value in by_env.items():
            set_attribute(env.envs[env_id], name, value)

    def _batch(self, obs: Any, infos: InfoTable) -> StepBatch:
        num_envs = self._config.num_envs
        no, zeros = np.zeros(num_envs, np.bool_), np.zeros(num_envs)
        return StepBatch(self._env_ids.copy(), obs, zeros, no, no.copy(), dict(infos.columns))

    def _checked(self, rows: Rows, num_rows: int) -> Rows:
        return self._observations.batch(rows[0], num_rows), rows[1]

    def _kept(self, obs: Any, infos: InfoTable) -> Rows:
        """What nobody will overwrite."""
        obs = self._observations.batch(obs, self._config.num_envs)
        return (self._copied(obs), infos.copy()) if self._vector.reuses_arrays else (obs, infos)

    def _copied(self, obs: Any) -> Any:
        leaves = zip(self._obs_tree.leaves, self._obs_tree.flatten(obs), strict=True)
        return self._obs_tree.unflatten([value if leaf.dtype is None else np.array(value) for leaf, value in leaves])

    def _with_rows(self, obs: Any, infos: InfoTable, rows: Rows, env_ids: Array) -> Rows:
        """Observations and infos in which some rows are replaced; the old ones stay as they are."""
        joined = []
        for old, new in zip(self._obs_tree.flatten(obs), self._obs_tree.flatten(rows[0]), strict=True):
            column: Any = list(old) if isinstance(old, tuple) else old.copy()
            for row, env_id in enumerate(env_ids.tolist()):
                column[env_id] = new[row]
            joined.append(tuple(column) if isinstance(old, tuple) else column)
        return self._obs_tree.unflatten(joined), infos.put_rows(env_ids, rows[1])

    def _split_finals(self, infos: InfoTable, rows: Array) -> None:
        """ale-py has final observations as one array with a row for each env, and no final infos."""
        given = infos.final_obs
        if not isinstance(given, np.ndarray) or given.dtype != object:
            infos.add_finals(rows, self._obs_tree.each_row(given, rows.tolist()), infos.final_infos)


def _resets_some(vector: Vectorized, mode: Autoreset) -> bool:
    """Do we reset envs whose episodes have ended? If not, the vector env does, or the caller."""
    own = vector.own_mode
    if mode is own:
        return False
    name = type(vector.env).__name__
    modes = f"{own.name.lower()!r}; autoreset_mode={mode.name.lower()!r}"
    only = f"{name} resets its envs in mode {modes} is not available"
    if own is Autoreset.SAME_STEP or mode is Autoreset.NEXT_STEP:
        raise UsageError(f"{only} from it")
    _require_some(vector, only)
    return mode is Autoreset.SAME_STEP


def _require_some(vector: Vectorized, refusal: str) -> None:
    if (why := vector.why_not_some()) is not None:
        raise UsageError(f"{refusal}: {why}")


def _require_config(config: PoolConfig) -> None:
    if config.rows != config.num_envs:
        raise UsageError(
            f"a vector env steps all its envs together: batch_size must be num_envs; got {config.batch_size}"
        )
    if config.observation_mode != "same":
        raise UsageError("a vector env batches its own observations: say observation_mode to what makes it")
    if config.env_restarts is not None:
        raise UsageError("a vector env cannot restart one of its envs: on_env_error='restart' is for other backends")
