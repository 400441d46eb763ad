"""Collector: T steps of a worker's pool with the policy beside it -> the arrays of a rollout."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import numpy as np

from envfleet.cluster.info_choice import InfoChoice
from envfleet.cluster.sync import probe_rows
from envfleet.cluster.wire import stacks
from envfleet.cluster.wire.codec import DTYPES, NAME_OF, BadMessage
from envfleet.cluster.wire.messages import RolloutInfos
from envfleet.cluster.wire.row_checks import RowChecks
from envfleet.cluster.wire.spare_arrays import SpareArrays
from envfleet.cluster.worker.action_masks import ActionMasks
from envfleet.cluster.worker.episode_changes import EpisodeChanges
from envfleet.cluster.worker.info_recorder import InfoRecorder
from envfleet.cluster.worker.policy_state import PolicyError, PolicyState, Probing
from envfleet.contract.arrays import Array
from envfleet.contract.errors import EnvFailed, StepOnEndedEpisode, UsageError
from envfleet.contract.infos import Infos, InfoTable
from envfleet.contract.policy import Acted, Policy
from envfleet.contract.spaces import SpaceTree
from envfleet.pool.pool import EnvPool

Arrays = dict[str, Array]
Result = TypeVar("Result")
NO_INFOS = InfoChoice(keys=())


class Collector:
    """Keeps what must last from one rollout to the next: the observation to act on, and the running episodes."""

    def __init__(
        self, pool: EnvPool, first_obs: Any, first_infos: Infos, changes: EpisodeChanges | None = None
    ) -> None:
        """`first_obs` is what the pool shows now; its envs reset themselves in the step that ends an episode."""
        self._pool = pool
        self._changes = EpisodeChanges(pool.num_envs) if changes is None else changes
        self._obs_tree = SpaceTree(pool.single_observation_space)
        self._action_tree = SpaceTree(pool.single_action_space)
        self._checks = RowChecks(self._obs_tree, self._action_tree)
        self._obs = first_obs
        self._spares = SpareArrays()
        self._returns = np.zeros(pool.num_envs)
        self._lengths = np.zeros(pool.num_envs, np.int64)
        self._began_s = np.full(pool.num_envs, time.perf_counter())
        self._masks = ActionMasks(pool.num_envs, first_infos)
        self._memory: PolicyState | None = None
        self._stacks = [stacks.is_stack(leaf.shape, leaf.dtype) for leaf in self._obs_tree.leaves if leaf.dtype]

    def collect(
        self,
        policy: Policy,
        num_steps: int,
        failures: list[Exception],
        between_steps: Callable[[], None],
        num_probes: int = 0,
        choice: InfoChoice = NO_INFOS,
    ) -> tuple[Arrays, str | None, RolloutInfos]:
        """The arrays of a rollout, the kind of the policy's distribution on the probed rows, and the infos' keys.

        Envs that fail have truncated rows, and are told of in `failures`.
        """
        pool, num_envs = self._pool, self._pool.num_envs
        memory = self._memory_of(policy)
        recorder = _Recorder(self._obs_tree, self._action_tree, num_steps, num_envs, self._spares)
        first_state = memory.rows(np.arange(num_envs))
        probing = Probing(probe_rows(num_steps, num_envs, num_probes), num_envs)
        finals = _Finals()
        infos, masks = InfoRecorder(choice, num_steps, num_envs), self._masks
        masks.begin(choice.action_mask, num_steps)
        self._changes.begin_rollout()
        for t in range(num_steps):
            between_steps()
            recorder.write_obs(t, self._obs)
            probing.see(t, memory)
            masks.write(t)
            acted = _asked(policy.act, self._obs, **memory.argument(), **masks.argument())
            actions = recorder.write_acted(t, acted)
            memory.remember(acted.state)
            self._obs, rewards, terminated, truncated, info = _step(pool, actions, failures)
            infos.write(t, None, info)
            masks.see(info)
            recorder.rewards[t] = rewards
            recorder.terminated[t] = terminated
            recorder.truncated[t] = truncated
            self._returns += rewards
            self._lengths += 1
            ended = terminated | truncated
            if ended.any():
                rows = np.flatnonzero(ended)
                final_obs = self._final_obs(info, rows, recorder, t)
                infos.write_finals(rows, info)
                now_s = time.perf_counter()
                finals.seconds += (now_s - self._began_s[rows]).tolist()
                self._began_s[rows] = now_s
                finals.add(t, rows, final_obs, memory.rows(rows), self._returns[rows], self._lengths[rows])
                memory.forget(rows)
                self._changes.see(info, t)
                self._returns[rows] = 0.0
                self._lengths[rows] = 0
        recorder.write_obs(num_steps, self._obs)
        self._require_actions(recorder)
        arrays = self._arrays(policy, memory, recorder, finals)
        if (changes := self._changes.rows(num_steps)) is not None:
            arrays["changes"] = changes
        arrays |= {f"state.{name}": rows for name, rows in first_state.items()}
        arrays |= masks.arrays()
        shown, kind = probing.shown(policy, self._obs_tree, recorder.obs, arrays.get("action_mask"))
        names, info_arrays = infos.packed()
        return arrays | shown | info_arrays, kind, names

    def _require_actions(self, recorder: _Recorder) -> None:
        """Once for all steps: an env may take choices that its space does not have, the head refuses them."""
        try:
            self._checks.require_actions(recorder.actions)
        except BadMessage as error:
            raise PolicyError(f"what the policy's act() returned cannot be used: {error}") from None

    def _memory_of(self, policy: Policy) -> PolicyState:
        if self._memory is None or self._memory.policy is not policy:
            self._memory = PolicyState(policy, self._pool.num_envs)
        else:
            self._memory.begin_rollout()
        return self._memory

    def _final_obs(self, info: Infos, rows: Array, recorder: _Recorder, t: int) -> list[Any]:
        """What episodes came to. An env that could not even be reset after it failed has shown nothing new."""
        column = InfoTable(self._pool.num_envs, info).final_obs
        return [
            self._obs_tree.unflatten([leaf[t, row] for leaf in recorder.obs])
            if column is None or column[row] is None
            else column[row]
            for row in rows
        ]

    def _arrays(self, policy: Policy, memory: PolicyState, recorder: _Recorder, finals: _Finals) -> Arrays:
        arrays = recorder.arrays
        steps, envs = finals.places()
        arrays |= {
            "final_steps": steps,
            "final_envs": envs,
            "episode_returns": np.array(finals.returns, np.float64),
            "episode_lengths": np.array(finals.lengths, np.int64),
            "episode_seconds": np.array(finals.seconds, np.float64),
        }
        final_leaves = finals.leaves(self._obs_tree)
        if "extra.values" in arrays:
            next_values = _values(policy, self._obs, memory.argument(), self._pool.num_envs)
            if next_values is not None:
                arrays["next_values"] = next_values
                arrays["final_values"] = (
                    _checked_values(policy, self._obs_tree.unflatten(final_leaves), finals.state(), len(steps))
                    if len(steps)
                    else np.zeros(0, np.float32)
                )
        for index, leaf in enumerate(recorder.obs):
            self._add_obs(arrays, index, leaf, final_leaves[index], steps, envs)
        return arrays

    def _add_obs(self, arrays: Arrays, index: int, obs: Array, final: Array, steps: Array, envs: Array) -> None:
        """Stacked frames are sent once, not once for each place in the stack."""
        packed = stacks.pack(f"obs.{index}", obs) if self._stacks[index] else None
        if packed is None:
            arrays |= {f"obs.{index}": obs, f"final_obs.{index}": final}
            return
        arrays |= packed
        arrays |= stacks.pack_finals(f"final_obs.{index}", final, obs[steps, envs]) or {f"final_obs.{index}": final}


class _Recorder:
    """The arrays of one rollout while they are written: time first."""

    def __init__(
        self, obs_tree: SpaceTree, action_tree: SpaceTree, num_steps: int, num_envs: int, spares: SpareArrays
    ) -> None:
        shape = (num_steps, num_envs)
        self._obs_tree = obs_tree
        self._action_tree = action_tree
        self._shape = shape
        self.obs = [spares.take((num_steps + 1, num_envs, *leaf.shape), leaf.dtype) for leaf in obs_tree.leaves]
        self.actions = [np.empty((*shape, *leaf.shape), leaf.dtype) for leaf in action_tree.leaves]
        self.rewards = np.empty(shape, np.float64)
        self.terminated = np.empty(shape, np.bool_)
        self.truncated = np.empty(shape, np.bool_)
        self.log_probs: Array | None = None
        self.extras: dict[str, Array] = {}

    def write_obs(self, t: int, obs: Any) -> None:
        if self._obs_tree.is_one_array:
            self.obs[0][t] = obs
            return
        for leaf, value in zip(self.obs, self._obs_tree.flatten(obs), strict=True):
            leaf[t] = value

    def write_acted(self, t: int, acted: Acted) -> Any:
        """Returns the actions as the pool takes them."""
        actions = acted.actions
        try:
            leaves = self._action_tree.require_batch(actions, self._shape[1], "actions")
            for column, leaf in zip(self.actions, leaves, strict=True):
                column[t] = leaf
            if t == 0:
                self._make_room(acted)
            if self.log_probs is not None:
                self.log_probs[t] = acted.log_probs
            for name, column in self.extras.items():
                column[t] = acted.extras[name]
        except (UsageError, KeyError, ValueError, TypeError) as error:
            raise PolicyError(f"what the policy's act() returned cannot be used: {error}") from error
        return actions

    def _make_room(self, acted: Acted) -> None:
        if acted.log_probs is not None:
            self.log_probs = np.empty(self._shape, np.float32)
        for name, values in acted.extras.items():
            array = np.asarray(values)
            if array.dtype not in NAME_OF:
                raise TypeError(f"extra {name!r} has dtype {array.dtype}; the wire knows {', '.join(DTYPES)}")
            self.extras[name] = np.empty((*self._shape, *array.shape[1:]), array.dtype)

    @property
    def arrays(self) -> Arrays:
        """All but the observations, under the names they have on the wire."""
        arrays: Arrays = {f"action.{index}": column for index, column in enumerate(self.actions)}
        if self.log_probs is not None:
            arrays["log_probs"] = self.log_probs
        arrays |= {f"extra.{name}": column for name, column in self.extras.items()}
        return arrays | {"rewards": self.rewards, "terminated": self.terminated, "truncated": self.truncated}


class _Finals:
    """Where episodes ended, and at what."""

    def __init__(self) -> None:
        self._steps: list[int] = []
        self._envs: list[int] = []
        self._obs: list[Any] = []
        self._states: list[Arrays] = []
        self.returns: list[float] = []
        self.lengths: list[int] = []
        self.seconds: list[float] = []

    def add(self, t: int, rows: Array, obs: list[Any], state: Arrays, returns: Array, lengths: Array) -> None:
        if state:
            self._states.append(state)
        self._steps += [t] * len(rows)
        self._envs += rows.tolist()
        self._obs += obs
        self.returns += returns.tolist()
        self.lengths += lengths.tolist()

    def places(self) -> tuple[Array, Array]:
        return np.array(self._steps, np.int64), np.array(self._envs, np.int64)

    def state(self) -> dict[str, Arrays]:
        """What a recurrent policy remembered of these episodes, as an argument."""
        if not self._states:
            return {}
        return {"state": {name: np.concatenate([each[name] for each in self._states]) for name in self._states[0]}}

    def leaves(self, tree: SpaceTree) -> list[Array]:
        columns = [np.empty((len(self._obs), *leaf.shape), leaf.dtype) for leaf in tree.leaves]
        for row, obs in enumerate(self._obs):
            for column, value in zip(columns, tree.flatten(obs), strict=True):
                column[row] = value
        return columns


def _asked(method: Callable[..., Result], *args: Any, **kwargs: Any) -> Result:
    """What the policy says."""
    try:
        return method(*args, **kwargs)
    except Exception as error:
        name = getattr(method, "__name__", "method")  # a partial or a callable object has none
        raise PolicyError(f"the policy's {name}() raised {type(error).__name__}: {error}") from error


def _values(policy: Policy, obs: Any, state: dict[str, Any], num_rows: int) -> Array | None:
    values = _asked(policy.values, obs, **state)
    if values is None:
        return None
    array = np.asarray(values, np.float32)
    if array.shape != (num_rows,):
        raise PolicyError(f"the policy's values() must have shape ({num_rows},); got {array.shape}")
    return array


def _checked_values(policy: Policy, obs: Any, state: dict[str, Any], num_rows: int) -> Array:
    values = _values(policy, obs, state, num_rows)
    if values is None:
        raise PolicyError("the policy's values() returned None this time, but not before")
    return values


def _step(pool: EnvPool, actions: Any, failures: list[Exception]) -> Any:
    """One step. An env that failed has a row all the same; who asked for the rollout hears of it.

    Raises StepOnEndedEpisode for an env whose reset has failed: it has no episode. The pool is not busy then.
    """
    ended: StepOnEndedEpisode | None = None
    receive: Callable[[], Any] = partial(pool.step, actions)
    while True:
        try:
            result = receive()
        except EnvFailed as error:
            failures.append(error)
        except StepOnEndedEpisode as error:
            ended = error
        else:
            if ended is not None:
                raise ended
            return result
        receive = pool.recv
