"""FirstReadyCollector: the policy acts on the envs that are ready first; each env's rows are its own time line.

An env collects T rows into a column, all with one policy version: that with which its first row was. In a rollout of
all envs each has one column, and waits when it is full. In a stream each has two: it goes on in one while the other
waits to be sent, so that no env waits for a slow one. Whatever an order does, envs may be left at work: the next order
goes on with them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from envfleet.cluster.info_choice import InfoChoice
from envfleet.cluster.sync import probe_places
from envfleet.cluster.wire.messages import RolloutInfos
from envfleet.cluster.wire.rollouts.row_checks import RowChecks
from envfleet.cluster.wire.spare_arrays import SpareArrays
from envfleet.cluster.worker.collecting.collector import (
    NO_INFOS,
    SavedCollector,
    final_values,
    received_from,
    require_actions,
)
from envfleet.cluster.worker.collecting.episode_changes import EpisodeChanges
from envfleet.cluster.worker.collecting.policy_copies import PolicyCopies
from envfleet.cluster.worker.collecting.policy_state import (
    PolicyError,
    PolicyState,
    asked,
    checked_values,
    initial_state_of,
    shown_by,
    values_of,
)
from envfleet.cluster.worker.collecting.recorder import Finals, Recorder, RunningEpisodes
from envfleet.cluster.worker.collecting.unsent_infos import UnsentInfos
from envfleet.contract.arrays import Array
from envfleet.contract.errors import StepOnEndedEpisode, UsageError
from envfleet.contract.infos.table import Infos
from envfleet.contract.spaces import SpaceTree
from envfleet.policies.action_masks import ActionMasks
from envfleet.pool.pool import EnvPool

NONE = -1  # no column


class FirstReadyCollector:
    """Keeps what must last from one order to the next: what each env shows, and its unfinished rows."""

    def __init__(
        self, pool: EnvPool, first_obs: Any, first_infos: Infos | None, changes: EpisodeChanges | None = None
    ) -> None:
        """`first_obs` is what the pool shows now; its envs reset themselves in the step that ends an episode."""
        self._pool = pool
        self._obs_tree = SpaceTree(pool.single_observation_space)
        self._action_tree = SpaceTree(pool.single_action_space)
        self._checks = RowChecks(self._obs_tree, self._action_tree)
        self._spares = SpareArrays()
        num_envs = pool.num_envs
        self._obs = [np.array(leaf) for leaf in self._obs_tree.flatten(first_obs)]  # [num_envs, ...], what each shows
        self._episodes = RunningEpisodes(num_envs)
        self._masks = ActionMasks(num_envs, first_infos)
        self._changes = EpisodeChanges(num_envs) if changes is None else changes
        self._is_at_work = np.zeros(num_envs, np.bool_)
        self._memory: PolicyState | None = None
        self._num_built = 0  # see PolicyCopies
        self._stream = 0
        self._columns: _Columns | None = None
        self._restored: dict[str, Array] | None = None  # what the policy remembered, until it is built
        self._anew: set[int] = set()  # envs in other episodes since then

    def saved(self) -> SavedCollector:
        """For a checkpoint, when no env is at work. Rows that were not sent are not saved: envs go on behind them."""
        memory = self._restored if self._memory is None else self._memory.saved
        return SavedCollector([leaf.copy() for leaf in self._obs], self._episodes.saved(), self._masks.saved(), memory)

    def restore(self, saved: SavedCollector) -> None:
        """Go on from a checkpoint."""
        self._obs = [np.array(leaf) for leaf in saved.obs]
        self._episodes.restore(saved.episodes)
        self._masks.restore(*saved.masks)
        self._restored = saved.memory

    def forget_memory(self) -> None:
        """The policy that will be built is not the one that was saved."""
        self._restored = None

    def versions_in_use(self, stream: int) -> set[int]:
        """The versions of rows that the next order of this stream goes on with."""
        return set() if self._columns is None or not stream or stream != self._stream else self._columns.versions_in_use

    def collect(
        self,
        copies: PolicyCopies,
        num_steps: int,
        failures: list[Exception],
        between_steps: Callable[[], None],
        num_probes: int = 0,
        choice: InfoChoice = NO_INFOS,
        stream: int = 0,
    ) -> tuple[dict[str, Array], str | None, RolloutInfos]:
        """The arrays of a rollout, the kind of the policy's distribution on the probed rows, and the infos' keys.

        Of all envs; or, for a stream, of the first `batch_size` of the pool that have `num_steps` rows.
        """
        columns, memory = self._begun(copies, num_steps, failures, choice, stream)
        self._changes.begin_rollout()
        num_wanted = self._pool.batch_size if stream else self._pool.num_envs
        try:
            while True:
                self._finish_columns(columns, memory, copies)
                if len(columns.waiting) >= num_wanted:
                    return self._sent(columns, copies, num_wanted, num_probes)
                between_steps()
                self._act(columns, memory, copies)
                self._receive(failures)
        except (PolicyError, UsageError):  # UsageError: of action masks
            self._masks.begin(None, 0)
            self._stream = 0  # or rows that cannot be used would be tried again
            raise

    def land(self, failures: list[Exception]) -> None:
        """Wait until no env is at work. Nothing is lost: the next order of the same stream goes on."""
        while self._is_at_work.any():
            try:
                self._receive(failures)
            except StepOnEndedEpisode:  # the batch is gone: the caller drops this collector
                raise
            except UsageError:  # of action masks, after all else was noted
                self._stream = 0

    def running(self, env_id: int) -> dict[str, Any]:
        """What belongs to the running episode of an env, besides the env's own state; in plain values."""
        return {**self._episodes.of(env_id), **self._masks.of(env_id)}

    def restored(self, obs: Any, running: Mapping[int, Mapping[str, Any]]) -> None:
        """Envs were put back into saved states; none is at work. Unfinished rows are dropped.

        Args:
            obs: What each env of the pool shows now.
            running: By env id: what running() gave when its state was saved; empty if that is not known.
        """
        self._obs = [np.array(leaf) for leaf in self._obs_tree.flatten(obs)]
        self._episodes.restored(running)
        self._masks.restored(running)
        self._stream, self._columns = 0, None
        if self._memory is not None:
            self._memory.forget(np.array(list(running), np.intp))
        else:
            self._anew.update(running)

    # -- inside --

    def _begun(
        self, copies: PolicyCopies, num_steps: int, failures: list[Exception], choice: InfoChoice, stream: int
    ) -> tuple[_Columns, PolicyState]:
        """What an order goes on with; or anew, without the rows of another stream or policy."""
        num_envs = self._pool.num_envs
        is_other_policy = copies.num_built != self._num_built
        if stream and stream == self._stream and not is_other_policy and self._columns is not None:
            assert self._memory is not None
            return self._columns, self._memory
        self.land(failures)
        self._stream, self._columns = 0, None  # until all is well
        if self._memory is None or is_other_policy:
            self._memory, self._num_built = PolicyState(copies.newest, num_envs), copies.num_built
            if self._restored is not None:
                self._memory.restore(self._restored)
                self._memory.forget(np.array(sorted(self._anew), np.intp))
                self._restored = None
                self._anew.clear()
        per_env = 2 if stream else 1
        num_columns = per_env * num_envs
        recorder = Recorder(self._obs_tree, self._action_tree, num_steps, num_columns, self._spares)
        self._masks.begin(choice.action_mask, num_steps, num_columns)
        unsent_infos = UnsentInfos(choice, num_steps, num_columns)
        self._columns, self._stream = _Columns(recorder, unsent_infos, num_steps, num_envs, per_env), stream
        return self._columns, self._memory

    def _act(self, columns: _Columns, memory: PolicyState, copies: PolicyCopies) -> None:
        """Have the policy act on all envs that are idle and may go on; each version on its own."""
        idle = np.flatnonzero(~self._is_at_work)
        begun = columns.begin(idle, copies.version)
        if len(begun):
            if copies.version not in columns.initial_states:
                initial = initial_state_of(copies.newest, self._pool.num_envs)
                columns.keep_initial_state(copies.version, initial)
            columns.recorder.write_obs(columns.place(begun), self._obs_of(begun))
        acting = idle[columns.may_act(idle)]
        versions = columns.version[columns.column[acting]]
        for version in np.unique(versions).tolist():
            rows = acting[versions == version]
            place = columns.place(rows)
            memory.begin_with(columns.initial_states[version])
            columns.keep_state(place, memory.rows(rows))
            self._masks.write(place[0], rows, place[1])
            columns.changes[place] = self._changes.of(rows)
            acted = asked(
                copies[version].act, self._obs_of(rows), **memory.argument(rows), **self._masks.argument(rows)
            )
            actions = columns.recorder.write_acted(place, acted, len(rows))
            memory.remember(acted.state, rows)
            self._pool.send(actions, rows)
            self._is_at_work[rows] = True

    def _receive(self, failures: list[Exception]) -> None:
        """Wait for the envs that are ready first, and write their rows."""
        columns, memory = self._columns, self._memory
        assert columns is not None and memory is not None  # an env is at work
        obs, rewards, terminated, truncated, info = received_from(
            self._pool.recv_ready, self._pool.recv_ready, failures
        )
        rows = info["env_id"].astype(np.int64)
        self._is_at_work[rows] = False
        for leaf, values in zip(self._obs, self._obs_tree.flatten(obs), strict=True):
            leaf[rows] = values
        steps, own = columns.place(rows)
        columns.recorder.write_results((steps, own), rewards, terminated, truncated)
        columns.recorder.write_obs((steps + 1, own), obs)
        columns.num_rows[rows] += 1
        self._episodes.add(rewards, rows)
        columns.infos.add(steps, own, terminated | truncated, info)
        ended = np.flatnonzero(terminated | truncated)
        if len(ended):
            ends, ended_steps = rows[ended], steps[ended].tolist()
            final_obs = [
                self._obs_tree.unflatten([np.array(leaf) for leaf in self._obs_tree.flatten(each)])  # not of the batch
                for each in columns.recorder.final_obs(info, len(rows), ended, ended_steps, own[ended])
            ]
            columns.finals.add(ended_steps, own[ended], final_obs, memory.rows(ends), self._episodes, ends)
            self._changes.see(info, env_ids=rows)
            for row, version in zip(ends, columns.version[own[ended]].tolist(), strict=True):
                memory.begin_with(columns.initial_states[version])
                memory.forget(np.array([row]))
        self._masks.see(info, rows)  # last: it raises if an env has no mask

    def _finish_columns(self, columns: _Columns, memory: PolicyState, copies: PolicyCopies) -> None:
        """Columns with T rows wait to be sent, with the values of what their envs came to."""
        full = columns.full()
        versions = columns.version[columns.column[full]]
        for version in np.unique(versions).tolist() if "values" in columns.recorder.extras else []:
            rows, policy = full[versions == version], copies[version]
            arguments = self._obs_of(rows), memory.argument(rows), len(rows)
            if columns.has_values is None:
                next_values = values_of(policy, *arguments)
                columns.has_values = next_values is not None
            else:
                next_values = checked_values(policy, *arguments) if columns.has_values else None
            if next_values is None:
                continue
            own = columns.column[rows]
            columns.next_values[own] = next_values
            its_columns = set(own.tolist())
            ends = Finals([end for end in columns.finals.ends if end.column in its_columns])
            final_obs = self._obs_tree.unflatten(ends.leaves(self._obs_tree))
            for end, value in zip(ends.ends, final_values(policy, final_obs, ends).tolist(), strict=True):
                end.value = value
        columns.finish(full)

    def _sent(
        self, columns: _Columns, copies: PolicyCopies, num_wanted: int, num_probes: int
    ) -> tuple[dict[str, Array], str | None, RolloutInfos]:
        """The arrays of the columns that were full first, in the order of envs."""
        env_ids, own = columns.take(num_wanted)
        versions = columns.version[own]
        recorder = columns.recorder.only(own) if self._stream else columns.recorder
        finals = columns.finals.take(own)
        require_actions(self._checks, recorder)
        arrays = recorder.arrays(finals, finals.leaves(self._obs_tree))
        if columns.has_values:
            arrays["next_values"] = columns.next_values[own]
            arrays["final_values"] = finals.values
        arrays |= {f"state.{name}": states[0, own] for name, states in columns.states.items()}
        if columns.changes[:, own].any():
            arrays["changes"] = columns.changes[:, own]
        names, info_arrays = columns.infos.take(own)
        arrays |= self._masks.arrays(own) | info_arrays
        if self._stream:
            arrays |= {"env_ids": env_ids, "versions": versions}
        steps, probed = probe_places(columns.num_steps, versions, num_probes)
        if not len(steps):
            return arrays, None, names
        state = {name: states[steps, own[probed]] for name, states in columns.states.items()}
        obs = self._obs_tree.unflatten([leaf[steps, probed] for leaf in recorder.obs])
        masks = arrays["action_mask"][steps, probed] if "action_mask" in arrays else None
        shown, kind = shown_by(copies[int(versions.max())], obs, state, masks)
        return arrays | shown, kind, names

    def _obs_of(self, rows: Array) -> Any:
        return self._obs_tree.unflatten([leaf[rows] for leaf in self._obs])


class _Columns:
    """Which env writes into which column, how far it is, and what else belongs to a column."""

    def __init__(self, recorder: Recorder, infos: UnsentInfos, num_steps: int, num_envs: int, per_env: int) -> None:
        num_columns = per_env * num_envs  # env i has column i and, in a stream, column num_envs + i
        self.recorder = recorder
        self.infos = infos
        self.changes = np.zeros((num_steps, num_columns), np.int64)  # with which the episode of each row was begun
        self.num_steps = num_steps
        self.finals = Finals()
        self.column = np.full(num_envs, NONE)  # into which an env writes; NONE: it has not begun
        self.num_rows = np.zeros(num_envs, np.int64)  # that it has written there
        self.waiting: dict[int, int] = {}  # env -> its column that waits to be sent; in the order of being full
        self.version = np.full(num_columns, NONE)
        self.has_values: bool | None = None  # None: not known yet
        self.next_values = np.zeros(num_columns, np.float32)
        self.states: dict[str, Array] = {}  # of a recurrent policy before each row, each [num_steps, num_columns, ...]
        self.initial_states: dict[int, dict[str, Array] | None] = {}  # by version
        self._num_envs, self._per_env = num_envs, per_env

    @property
    def versions_in_use(self) -> set[int]:
        """Of columns that are not sent yet."""
        return {int(self.version[column]) for column in (*self.column.tolist(), *self.waiting.values()) if column >= 0}

    def begin(self, idle: Array, version: int) -> Array:
        """Give those of the idle envs that have no column another one, if there is one. Returns these envs."""
        begun = [
            env_id
            for env_id in idle[self.column[idle] == NONE].tolist()
            if self._per_env > 1 or env_id not in self.waiting
        ]
        for env_id in begun:
            self.column[env_id] = env_id + self._num_envs if self.waiting.get(env_id) == env_id else env_id
        rows = np.array(begun, np.int64)
        self.num_rows[rows] = 0
        self.version[self.column[rows]] = version
        return rows

    def may_act(self, env_ids: Array) -> Array:
        """Which of these envs have a column that is not full."""
        mask: Array = (self.column[env_ids] != NONE) & (self.num_rows[env_ids] < self.num_steps)
        return mask

    def place(self, env_ids: Array) -> tuple[Array, Array]:
        """Where the next row of each of these envs belongs."""
        return self.num_rows[env_ids], self.column[env_ids]

    def full(self) -> Array:
        """Envs with a full column, none of whose columns waits to be sent."""
        env_ids = np.flatnonzero((self.column != NONE) & (self.num_rows == self.num_steps))
        return np.array([env_id for env_id in env_ids.tolist() if env_id not in self.waiting], np.int64)

    def finish(self, env_ids: Array) -> None:
        """The full columns of these envs wait to be sent."""
        self.waiting.update(zip(env_ids.tolist(), self.column[env_ids].tolist(), strict=True))
        self.column[env_ids] = NONE

    def take(self, num_columns: int) -> tuple[Array, Array]:
        """The envs whose columns were full first, in the order of env ids, and these columns: they wait no longer."""
        env_ids = sorted(list(self.waiting)[:num_columns])
        own = [self.waiting.pop(env_id) for env_id in env_ids]
        return np.array(env_ids, np.int64), np.array(own, np.int64)

    def keep_initial_state(self, version: int, initial: dict[str, Array] | None) -> None:
        """Keep what a policy remembers at first; that of versions that are not in use is dropped."""
        in_use = self.versions_in_use
        self.initial_states = {each: state for each, state in self.initial_states.items() if each in in_use}
        self.initial_states[version] = initial
        if initial is not None and not self.states:
            shape = (self.num_steps, self._per_env * self._num_envs)
            self.states = {name: np.zeros((*shape, *rows.shape[1:]), rows.dtype) for name, rows in initial.items()}

    def keep_state(self, place: tuple[Array, Array], state: dict[str, Array]) -> None:
        """Keep what a recurrent policy remembers before some rows."""
        for name, rows in state.items():
            self.states[name][place] = rows
