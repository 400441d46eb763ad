"""The process backend: the parent of child processes that run any Python env."""

from __future__ import annotations

import logging
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from envfleet._native import core
from envfleet.contract.arrays import Array, IntArray
from envfleet.contract.batch import StepBatch
from envfleet.contract.episode import Autoreset
from envfleet.contract.errors import EnvFailed, StepOnEndedEpisode
from envfleet.contract.live_changes import Change
from envfleet.contract.pool_config import Line, PoolConfig
from envfleet.contract.spaces import SpaceTree
from envfleet.contract.spec import EnvTraits
from envfleet.contract.state import EnvState
from envfleet.pool.backend import StepAtOnce
from envfleet.pool.batch_layout import HAS_FINAL, HAS_OBJECTS
from envfleet.pool.building import EnvBuilder
from envfleet.pool.process import child as process_child
from envfleet.pool.process.change_channel import ChangeSender
from envfleet.pool.process.children import Children
from envfleet.pool.process.cpus import usable_cpus
from envfleet.pool.process.info_columns import InfoColumns
from envfleet.pool.process.late_envs import LateEnvs
from envfleet.pool.process.object_channel import FileClosed, ObjectChannel, Windows
from envfleet.pool.process.resources import ProcessResources
from envfleet.pool.process.rows import Extras, assemble_batch
from envfleet.pool.process.shared_arrays import MemoryFiles, PoolShape, SharedArrays
from envfleet.pool.process.step_timing import StepTimes, advice
from envfleet.pool.waits import WAIT_SLICE_S, deadline_in, slice_s

logger = logging.getLogger("envfleet.pool")

_READY, _NEWS = core.Waiting.READY, core.Waiting.NEWS


class ProcessBackend:
    """Child processes, each with several envs, and the memory they share with this process."""

    name = "process"
    steps_some = True
    why_no_changes: str | None = None

    def __init__(self, builders: Sequence[EnvBuilder], config: PoolConfig) -> None:
        """Start the children and have them build the envs: env 0 first, which tells the spaces."""
        self._config = config
        self._gives_up_late = config.gives_up_late
        self.step_at_once: StepAtOnce | None = None
        self.is_step_pending = False
        self._warnings: set[str] = set()  # that were logged
        self._files = MemoryFiles.create()
        self._channel = ObjectChannel(self._files.objects)
        self._windows = Windows(config.num_envs)
        self._resources = ProcessResources(self._files)
        self._finalizer = weakref.finalize(self, ProcessResources.shut, self._resources)
        self._shape = self._choose_shape()
        self._all_env_ids = np.arange(config.num_envs, dtype=np.int32)
        # A caller who has chosen the number needs no advice on it.
        self._awaits_step_times = config.num_workers is None and self._shape.num_children < config.num_envs
        deadline_s = deadline_in(config.start_timeout_s)
        try:
            self._children = Children(builders, config, self._shape, self._resources, self._channel, self._windows)
            self.traits: EnvTraits = self._children.start_first(deadline_s, times_steps=self._awaits_step_times)
            self._obs_tree = SpaceTree(self.traits.observation_space)
            self._action_tree = SpaceTree(self.traits.action_space)
            self._info_columns = InfoColumns(self.traits.info_columns)
            SharedArrays.allocate(self._files, self._shape, self._action_tree)
            self._arrays = SharedArrays(self._files, self._shape, self._obs_tree, self._action_tree, self._info_columns)
            self._arrays.autoreset = config.autoreset
            self._changes = ChangeSender(self._files.changes, self._arrays)
            self._task_queues = self._arrays.task_queues
            self._task_queues.let_parent_spin(self._shape.num_children < usable_cpus())
            self._children.start_others(self._task_queues, self._changes, deadline_s)
            self._late = LateEnvs(self._task_queues, self._arrays.task_clocks, self._resources, self._children)
        except BaseException:
            self.close()
            raise

    def reset(self, env_ids: IntArray, seeds: Sequence[int | None], options: dict[str, Any] | None, line: Line) -> None:
        """Write seeds and options for the children, and queue the resets of these envs."""
        self._children.begin_tasks(env_ids)
        is_of_some = len(env_ids) < self._config.num_envs
        if not is_of_some or line is Line.FULL:  # otherwise other envs may be reading them
            self._channel.put_code(Windows.options, options, "options")
        for env_id, seed in zip(env_ids.tolist(), seeds, strict=True):
            self._task_queues.set_seed(env_id, seed)
            self._children.note_seed(env_id, seed)
        if line is Line.FULL and is_of_some:
            self._task_queues.send_reset_of_some(env_ids)
        else:
            self._task_queues.send(env_ids, core.Op.RESET, line)

    def send(self, env_ids: IntArray | None, action_leaves: list[Any], line: Line) -> None:
        """Write the actions into shared memory, and queue a step of these envs."""
        for column, leaf in zip(self._arrays.action_columns, action_leaves, strict=True):
            if column is not None:
                column[... if env_ids is None else env_ids] = leaf
        if env_ids is None:
            env_ids = self._all_env_ids
        self._children.begin_tasks(env_ids)
        if self._action_tree.object_leaves:
            for row, env_id in enumerate(env_ids.tolist()):
                objects = [action_leaves[leaf][row] for leaf in self._action_tree.object_leaves]
                self._channel.put_code(self._windows.action(env_id), objects, "actions")
        self._task_queues.send(env_ids, core.Op.STEP, line)

    def repeat(self, env_ids: IntArray, line: Line) -> None:
        """Queue rows that show the last observation of these envs."""
        self._task_queues.send(env_ids, core.Op.REPEAT, line)

    def recv(self, line: Line, timeout_s: float | None = None) -> StepBatch:
        """Wait for a batch; children that die meanwhile are replaced."""
        begun_s = time.monotonic()
        if self._gives_up_late or self._late.has_given_up:
            self._late.glance(self._config, begun_s)
        wait_s = WAIT_SLICE_S if timeout_s is None else min(WAIT_SLICE_S, timeout_s)
        while (waited := self._task_queues.wait_full(line, wait_s)) is not _READY:
            self._children.after_wait(waited)
            self._late.look(begun_s, self._config, has_own_deadline=timeout_s is not None)
            if timeout_s is not None:
                if time.monotonic() >= begun_s + timeout_s:
                    text = f"no full batch after {timeout_s:g} s, the timeout_s of this recv()"
                    raise self._children.reports.timeout(text)
                wait_s = slice_s(begun_s + timeout_s)
        if self._awaits_step_times:
            self._hear_of_step_times()
        flags, arrays = self._task_queues.take(line)
        if flags == 0 and self._obs_tree.is_one_array:  # the common case, for which the caller waits
            infos = self._info_columns.read(arrays.infos, len(arrays.env_ids)).columns
            return StepBatch(arrays.env_ids, arrays.obs[0], arrays.rewards, arrays.terminated, arrays.truncated, infos)
        extras = self._extras(arrays.env_ids, arrays.row_flags) if flags else {}
        return assemble_batch(self._obs_tree, arrays, extras, self._info_columns)

    def drain(self) -> None:
        """See Backend. Failures of envs that nobody waits for any more are only logged."""
        begun_s = time.monotonic()
        pause_s = 0.0001
        while self._task_queues.busy_env_ids():
            try:
                self._children.after_wait(_NEWS)
            except (EnvFailed, StepOnEndedEpisode) as error:
                logger.warning("before the reset: %s", str(error))
            self._late.look(begun_s, self._config)
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, 0.01)
        self._task_queues.abandon()

    def call(self, env_ids: Sequence[int], name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
        """Ask the children of these envs, and wait for their answers."""
        request = process_child.Call(tuple(env_ids), name, args, kwargs)
        requests = [request] * self._shape.num_children
        return self._children.ask(requests, f"call {name!r}", self._config.timeout_s)

    def set_attr(self, env_ids: Sequence[int], name: str, values: Sequence[Any]) -> None:
        """Ask the children of these envs to set the attribute, and wait until they have."""
        by_child: list[dict[int, Any]] = [{} for _ in range(self._shape.num_children)]
        for env_id, value in zip(env_ids, values, strict=True):
            by_child[self._task_queues.child_of(env_id)][env_id] = value
        requests = [process_child.SetAttr(name, each) for each in by_child]
        self._children.ask(requests, f"set {name!r}", self._config.timeout_s)

    def change(self, change: Change) -> None:
        """See Backend. Children look for changes before each task."""
        self._changes.send(change)

    @property
    def why_no_states(self) -> str | None:
        """See Backend. Env 0 speaks for all."""
        return self.traits.why_no_states

    def state_names(self, env_ids: Sequence[int]) -> list[str]:
        """Name the kinds of states that fit these envs."""
        return self._on_episodes("state_name", {env_id: () for env_id in env_ids}, "look at their envs")

    def get_state(self, env_ids: Sequence[int]) -> list[EnvState]:
        """Save the states of these envs, in their order."""
        return self._on_episodes("save", {env_id: () for env_id in env_ids}, "save the states of their envs")

    def set_state(self, env_ids: Sequence[int], states: Sequence[EnvState]) -> None:
        """Put these envs back into saved states."""
        arguments = {env_id: (state,) for env_id, state in zip(env_ids, states, strict=True)}
        self._on_episodes("restore", arguments, "restore the states of their envs")

    why_no_giving_up: str | None = None

    def give_up(self, env_ids: Sequence[int]) -> None:
        """End the steps of envs that hang, and build those envs anew."""
        self._late.give_up(env_ids, self._config)

    def switch_autoreset(self, mode: Autoreset) -> bool:
        """See Backend. Children, also those that take the place of others, look at the mode before each task."""
        self._arrays.autoreset = mode
        return True

    def call_while_waiting(self, look: Callable[[], None]) -> None:
        """Call `look` now and then while envs are at work."""
        self._children.while_waiting = look

    def close(self, terminate: bool = False) -> None:
        """End all processes and close the memory files."""
        self._resources.kills_busy = terminate
        self._finalizer()

    def abandon(self) -> None:
        """See Backend. ProcessResources sees to it."""

    # -- starting --

    def _choose_shape(self) -> PoolShape:
        num_envs, num_workers = self._config.num_envs, self._config.num_workers
        if num_workers is None:
            num_workers, reason = usable_cpus(), "one for each CPU"
        else:
            reason = "as the caller chose"
        num_workers = min(num_workers, num_envs)
        logger.info("%d worker processes for %d envs: %s", num_workers, num_envs, reason)
        return PoolShape(num_envs, num_workers, self._config.rows, self._config.has_finals)

    # -- states --

    def _on_episodes(self, name: str, arguments: Mapping[int, tuple[Any, ...]], what: str) -> list[Any]:
        by_child: list[dict[int, tuple[Any, ...]]] = [{} for _ in range(self._shape.num_children)]
        for env_id, given in arguments.items():
            by_child[self._task_queues.child_of(env_id)][env_id] = (*given, self._config.env_states)
        requests = [process_child.OnEpisodes(name, each) for each in by_child]
        answers = self._children.ask(requests, what, self._config.timeout_s)
        by_env = dict(zip(sorted(arguments), answers, strict=True))
        return [by_env[env_id] for env_id in arguments]

    # -- receiving --

    def _hear_of_step_times(self) -> None:
        """Once the first child knows how its envs spend their time: advise more processes if they mostly wait."""
        if self._channel.is_empty(Windows.step_times):
            return
        self._awaits_step_times = False
        times: StepTimes = self._channel.get(Windows.step_times)
        if text := advice(times, self._shape.num_children, self._shape.num_envs, usable_cpus()):
            logger.warning(text)
        else:
            logger.info("%d worker processes fit: %s", self._shape.num_children, times)

    def _extras(self, env_ids: Array, row_flags: Array) -> dict[int, Extras]:
        extras: dict[int, Extras] = {}
        for row in np.flatnonzero(row_flags & HAS_OBJECTS).tolist():
            has_final = bool(row_flags[row] & HAS_FINAL)
            extras[row] = self._extras_of(int(env_ids[row]), has_final)
        return extras

    def _extras_of(self, env_id: int, has_final: bool) -> Extras:
        try:
            extras = Extras(*self._channel.get(self._windows.result(env_id)))
        except FileClosed:
            raise
        except Exception as error:  # the row must not be lost for it
            self._warn(f"the info of env {env_id} is left out, since it cannot be unpickled here: {error!r}")
            return Extras({}, {} if has_final else None, None, None, None)
        for name in extras.left_out:
            self._warn(f"{name} is left out, since it cannot be pickled")
        return extras

    def _warn(self, text: str) -> None:
        """Log each text at most once."""
        if text not in self._warnings:
            self._warnings.add(text)
            logger.warning("%s", text)
