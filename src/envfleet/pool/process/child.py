"""The loop of one child process: takes tasks for its envs, writes their results into shared memory."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import gymnasium
import numpy as np
from gymnasium.envs.registration import EnvSpec as GymnasiumSpec

from envfleet._native import core
from envfleet.contract.episode import Transition
from envfleet.contract.pool_config import PoolConfig
from envfleet.contract.results import ObservationCheck
from envfleet.contract.spaces import SpaceTree
from envfleet.contract.spec import EnvTraits
from envfleet.pool.batch_layout import FAILED, HAS_FINAL, HAS_OBJECTS
from envfleet.pool.building import EnvBuilder, take_or_build
from envfleet.pool.guard import Failure, GuardedEpisode
from envfleet.pool.pickling import picklable_part, pickled
from envfleet.pool.process.change_channel import NO_CHANGES, ChangeReceiver, ChangesSoFar
from envfleet.pool.process.cpus import keep_to_share
from envfleet.pool.process.info_columns import InfoColumns
from envfleet.pool.process.interruption import Interruption, ignore_interruptions
from envfleet.pool.process.object_channel import FileClosed, ObjectChannel, Windows
from envfleet.pool.process.rows import Extras, RowWriter, action_reader
from envfleet.pool.process.shared_arrays import MemoryFiles, PoolShape, SharedArrays
from envfleet.pool.process.step_timing import StepTimes
from envfleet.pool.process.tolerant_output import tolerate_full_disk
from envfleet.pool.registrations import Registrations, register_all
from envfleet.pool.traits import require_same_spaces, set_attribute, traits_of, value_of

STACK_SIGNAL = signal.SIGRTMIN + 7  # not used by Python, and hardly by any env
BUILD_FAILED = 71  # exit status; the reply says why
BROKE_DOWN = 72  # likewise: an exception that no env raised, such as that of a closed file descriptor
IDLE_WAIT_S = 60.0


class Call(NamedTuple):
    """Parent -> child: call a method of those of your envs that are named, or get an attribute."""

    env_ids: tuple[int, ...]
    name: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def is_for(self, env_id: int) -> bool:
        """Whether this task is for the env."""
        return env_id in self.env_ids

    def answer(self, env_id: int, episode: GuardedEpisode) -> Any:
        """What the method returns."""
        return value_of(episode.env, self.name, self.args, self.kwargs)


class SetAttr(NamedTuple):
    """Parent -> child: set an attribute of those of your envs that have a value here."""

    name: str
    values: dict[int, Any]  # by env id

    def is_for(self, env_id: int) -> bool:
        """Whether this task is for the env."""
        return env_id in self.values

    def answer(self, env_id: int, episode: GuardedEpisode) -> None:
        """Set the attribute; the answer is None."""
        set_attribute(episode.env, self.name, self.values[env_id])


class OnEpisodes(NamedTuple):
    """Parent -> child: call a method of GuardedEpisode for those of your envs that have arguments here.

    For all of them, also after one has failed.
    """

    name: str
    arguments: dict[int, tuple[Any, ...]]  # by env id

    def is_for(self, env_id: int) -> bool:
        """Whether this task is for the env."""
        return env_id in self.arguments

    def answer(self, env_id: int, episode: GuardedEpisode) -> Any:
        """What the method returns."""
        return getattr(episode, self.name)(*self.arguments[env_id])


Request = Call | SetAttr | OnEpisodes


class FirstReply(NamedTuple):
    """What the first child says of env 0."""

    traits: EnvTraits
    why_no_spec: str | None  # set: the spec of the env cannot be pickled, and is left out

    @classmethod
    def of(cls, traits: EnvTraits) -> FirstReply:
        """The traits, without a spec that cannot be pickled: an object in its kwargs, for example."""
        try:
            pickled(traits.gymnasium_spec)
        except Exception as error:
            return cls(replace(traits, gymnasium_spec=None), f"{type(error).__name__}: {error}")
        return cls(traits, None)


class Start(NamedTuple):
    """A child's first request. It lies in the object channel, so that the spawner never runs the user's code."""

    builders: list[EnvBuilder]
    registrations: Registrations
    first_env: int
    seeds: list[int | None]  # of each env's last seeded reset, in a process that this one takes the place of
    traits: EnvTraits | None  # of env 0; None: this child builds it first, and says them
    config: PoolConfig
    times_steps: bool
    lost_because: str | None  # set: this child takes the place of one that died
    num_losses: dict[int, int]  # by env id, of tasks that are not tried again: children that were lost at them
    builds_later: bool  # envs are built in their first tasks: children before this one were lost while they built them
    delay_s: float  # before it builds anything: the back-off of a child that dies again and again
    changes: ChangesSoFar = NO_CHANGES


def run(child: int, files: MemoryFiles, shape: PoolShape) -> None:
    """A child's process: build its envs, then do tasks until told to stop."""
    tolerate_full_disk()
    faulthandler.register(STACK_SIGNAL, file=files.stacks, all_threads=True, chain=False)
    ignore_interruptions()
    channel = ObjectChannel(files.objects)
    windows = Windows(shape.num_envs)
    env_id = child * shape.num_envs // shape.num_children  # its first env, as SharedTaskQueues has it
    try:
        start: Start = channel.get(windows.request(child))
        process = ChildProcess.begin(child, files, shape, start, channel, windows)
    except BaseException as error:  # no Ctrl-C reaches this process: the env has raised it
        failure = error.failure if isinstance(error, _BuildFailed) else Failure.of(env_id, error)
        channel.put(windows.reply(child), failure)
        sys.exit(BUILD_FAILED)
    if process is None:
        return
    process.task_queues.reply()
    try:
        process.loop()
    except BaseException as error:
        with contextlib.suppress(OSError):
            channel.reopen(os.getppid())
            channel.put(windows.reply(child), Failure.of(-1, error))
            sys.exit(BROKE_DOWN)
        raise


class ChildProcess:
    """The envs of one child and the shared memory they write to."""

    @classmethod
    def begin(
        cls, child: int, files: MemoryFiles, shape: PoolShape, start: Start, channel: ObjectChannel, windows: Windows
    ) -> ChildProcess | None:
        """Build the envs. None: the parent said that it needs none, once it knew their spaces."""
        time.sleep(start.delay_s)
        if start.config.pins_processes:
            keep_to_share(child, shape.num_children)
        specs = start.registrations.specs()
        builds: list[Callable[[], Any]] = [partial(_build, build, specs) for build in start.builders]
        traits = start.traits
        if traits is None:
            task_queues = SharedArrays.task_queues_alone(files, shape)
            task_queues.start_child(child)
            env = builds[0]()
            traits = traits_of(env, start.config.env_states)
            reply = FirstReply.of(traits)
            traits = reply.traits
            channel.put(Windows.traits, tuple(reply))
            if not _may_go_on(task_queues):
                with contextlib.suppress(BaseException):
                    env.close()
                return None
            builds[0] = partial(take_or_build, [env], builds[0])
        return cls(child, files, shape, start, traits, builds, channel, windows)

    def __init__(
        self,
        child: int,
        files: MemoryFiles,
        shape: PoolShape,
        start: Start,
        traits: EnvTraits,
        builds: Sequence[Callable[[], Any]],
        channel: ObjectChannel,
        windows: Windows,
    ) -> None:
        """Build those envs that are not built yet, all with the spaces of `traits`."""
        obs_tree = SpaceTree(traits.observation_space)
        self._child = child
        self._channel = channel
        self._windows = windows
        self._action_tree = SpaceTree(traits.action_space)
        info_columns = InfoColumns(traits.info_columns)
        self._arrays = SharedArrays(files, shape, obs_tree, self._action_tree, info_columns)
        self._writer = RowWriter(obs_tree, info_columns)
        self._known_arrays: dict[tuple[core.Line, int], core.BatchArrays] = {}  # by line and buffer
        self._line: core.Line | None = None  # of the row written last
        self._buffer = -1  # likewise
        self._batch_arrays: Any = None  # of that buffer
        self._step_times = StepTimes() if start.times_steps else None
        self.task_queues = self._arrays.task_queues
        self.task_queues.start_child(child)
        self._autoreset_code = self._arrays.autoreset_code[0]
        self._changes = ChangeReceiver(files.changes, self._arrays, child, start.changes)
        clock = Interruption(child, self.task_queues, self._arrays.task_clocks, start.config)
        self._episodes: dict[int, GuardedEpisode] = {}
        check_obs = ObservationCheck(obs_tree).check
        for env_id, build in enumerate(builds, start.first_env):
            try:
                episode = GuardedEpisode(
                    env_id,
                    build,
                    self._arrays.autoreset,
                    obs_tree.empty(np.zeros),
                    self.task_queues,
                    max_restarts=start.config.env_restarts,
                    check_obs=check_obs,
                    env_errors=(BaseException,),  # no Ctrl-C reaches this process: the env has raised it
                    lost_because=start.lost_because,
                    num_losses=start.num_losses.get(env_id),
                    builds_later=start.builds_later,
                    seed=start.seeds[env_id - start.first_env],
                    changes=self._changes.changes,
                    clock=clock,
                )
                self._episodes[env_id] = episode
                if not start.builds_later:
                    require_same_spaces(traits, episode.env, env_id, start.config.observation_mode)
            except BaseException as error:
                self._close_envs()
                raise _BuildFailed(Failure.of(env_id, error)) from error

    def loop(self) -> None:
        """Do tasks until told to stop."""
        next_task, finish = self.task_queues.next_task, self._finish
        autoreset_code, num_changes, changes = self._arrays.autoreset_code, self._arrays.num_changes, self._changes
        read_action = self._action_reader()
        step_op, reset_op, repeat_op, request_op = core.Op.STEP, core.Op.RESET, core.Op.REPEAT, core.Op.REQUEST
        while True:
            task = next_task(IDLE_WAIT_S)
            if task is None:
                continue
            op, env_id, line = task
            episodes = self._episodes if autoreset_code[0] == self._autoreset_code else self._switch_autoreset()
            if num_changes[0] != changes.num_taken:
                changes.take()
            if op is step_op:
                episode = episodes[env_id]
                step = episode.step if self._step_times is None else partial(self._time_step, episode.step)
                try:
                    action = read_action(env_id)
                except _Unreadable as error:
                    finish(env_id, line, episode, episode.cannot_begin(error.reason))
                else:
                    finish(env_id, line, episode, step(action))
            elif op is reset_op:
                finish(env_id, line, episodes[env_id], self._reset(env_id))
            elif op is repeat_op:
                finish(env_id, line, episodes[env_id], episodes[env_id].repeat())
            elif op is request_op:
                self._take_request()
            else:
                break
        self._close_envs()

    def _switch_autoreset(self) -> dict[int, GuardedEpisode]:
        """The parent has chosen another mode since the last task."""
        self._autoreset_code = self._arrays.autoreset_code[0]
        for episode in self._episodes.values():
            episode.switch_autoreset(self._arrays.autoreset)
        return self._episodes

    def _reset(self, env_id: int) -> Transition:
        try:
            options = self._read(Windows.options)
        except _Unreadable as error:
            return self._episodes[env_id].cannot_begin(error.reason)
        return self._episodes[env_id].reset(self.task_queues.seed(env_id), options)

    def _read(self, window: int) -> Any:
        """What the caller sent. To unpickle it runs code of the caller's, which may raise anything."""
        try:
            return self._channel.get(window)
        except FileClosed:
            raise
        except BaseException as error:
            raise _Unreadable(error) from error

    def _close_envs(self) -> None:
        for episode in self._episodes.values():
            with contextlib.suppress(BaseException):
                episode.env.close()

    def _time_step(self, step: Callable[[Any], Transition], action: Any) -> Transition:
        """Step, and say how the first steps spent their time once there were enough of them."""
        assert self._step_times is not None
        transition = self._step_times.timed(partial(step, action))
        if self._step_times.are_enough:
            self._channel.put(Windows.step_times, self._step_times)
            self._step_times = None
        return transition

    def _action_reader(self) -> Callable[[int], Any]:
        if self._action_tree.object_leaves:
            return self._read_action
        return action_reader(self._action_tree, self._arrays.action_columns)

    def _read_action(self, env_id: int) -> Any:
        """An action with parts that are no arrays: those lie in the object channel."""
        objects = iter(self._read(self._windows.action(env_id)))
        columns = [{env_id: next(objects)} if column is None else column for column in self._arrays.action_columns]
        return action_reader(self._action_tree, columns)(env_id)

    def _finish(self, env_id: int, line: core.Line, episode: GuardedEpisode, transition: Transition) -> None:
        # Before a row is taken: what is slow to pickle must not hold a batch up that others could fill.
        flags, transition = self._put_extras(env_id, episode, transition)
        buffer, row = self.task_queues.claim(env_id, line)
        if buffer != self._buffer or line is not self._line:
            self._buffer, self._line = buffer, line
            self._batch_arrays = self._arrays_of(line, buffer)
        written = self._writer.write(episode, transition, self._batch_arrays, row)
        if written is not transition:
            flags, transition = self._put_extras(env_id, episode, written)
        self.task_queues.complete(env_id, transition.reward, transition.terminated, transition.truncated, flags)

    def _put_extras(self, env_id: int, episode: GuardedEpisode, transition: Transition) -> tuple[int, Transition]:
        """Put what is no array into the object channel; returns the row's flags, and the transition to write.

        That is another one where an observation has parts that cannot be pickled: its env has failed.
        """
        extras = self._writer.extras(episode, transition)
        if extras is None:  # nearly always
            return 0, transition
        remedies = iter((episode.refuse, episode.give_up))
        while extras is not None:
            try:
                self._put(self._windows.result(env_id), extras)
            except FileClosed:
                raise
            except Exception as error:
                transition = next(remedies)(error)
                extras = self._writer.extras(episode, transition)
            else:
                has_final = HAS_FINAL if transition.has_final else 0
                failed = 0 if extras.failure is None else FAILED
                return HAS_OBJECTS | has_final | failed, transition
        return 0, transition

    def _put(self, window: int, extras: Extras) -> None:
        try:
            self._channel.put(window, tuple(extras))  # not the named tuple: its class would be looked up for each row
        except FileClosed:
            raise
        except Exception:
            info, left_out = picklable_part(extras.info, "info")
            final_info, more = picklable_part(extras.final_info or {}, "final_info")
            self._channel.put(
                window,
                tuple(
                    extras._replace(
                        info=info,
                        final_info=None if extras.final_info is None else final_info,
                        left_out=(*left_out, *more),
                    )
                ),
            )

    def _arrays_of(self, line: core.Line, buffer: int) -> core.BatchArrays:
        arrays = self._known_arrays.get((line, buffer))
        if arrays is None:
            self._channel.require_file()  # the batches' files have gone the same way as the channel's
            arrays = self._known_arrays[line, buffer] = self._arrays.stores[line].arrays(buffer)
        return arrays

    def _take_request(self) -> None:
        try:
            request: Request = self._read(self._windows.request(self._child))
        except _Unreadable as error:
            self._reply(Failure.of(next(iter(self._episodes)), error.reason))
        else:
            self._answer(request)

    def _answer(self, request: Request) -> None:
        answers: dict[int, Any] = {}  # by env id
        failures: list[Failure] = []
        for env_id, episode in self._episodes.items():
            try:
                if request.is_for(env_id):
                    answers[env_id] = request.answer(env_id, episode)
            except BaseException as error:
                failures.append(Failure.of(env_id, error))
                if not isinstance(request, OnEpisodes):
                    break
        if failures:
            return self._reply(failures[0])
        try:
            self._reply(list(answers.values()))
        except FileClosed:
            raise
        except Exception as error:  # an answer that cannot be pickled
            env_id = next((each for each, answer in answers.items() if not _can_be_pickled(answer)), -1)
            self._reply(Failure.of(env_id if env_id >= 0 else next(iter(self._episodes)), error))

    def _reply(self, reply: list[Any] | Failure) -> None:
        self._channel.put(self._windows.reply(self._child), reply)
        self.task_queues.reply()


def _build(build: EnvBuilder, specs: dict[str, GymnasiumSpec]) -> gymnasium.Env[Any, Any]:
    register_all(specs)
    return build()


def _may_go_on(task_queues: core.SharedTaskQueues) -> bool:
    """Say that env 0 is built, and wait until the parent has laid out the arrays, or tells this child to stop."""
    task_queues.reply()
    while (task := task_queues.next_task(IDLE_WAIT_S)) is None:
        pass
    if task.op is core.Op.REQUEST:
        task = task_queues.next_task(0.0) or task  # the parent may have given up since
    return task.op is core.Op.REQUEST


def _can_be_pickled(value: Any) -> bool:
    try:
        pickled(value)
    except Exception:
        return False
    return True


class _Unreadable(Exception):
    """What the caller sent cannot be unpickled in this process."""

    def __init__(self, reason: BaseException) -> None:
        super().__init__(reason)
        self.reason = reason


class _BuildFailed(Exception):
    """An env could not be built, or has other spaces than the first."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.error)
        self.failure = failure
