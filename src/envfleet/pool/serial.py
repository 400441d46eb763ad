"""The serial backend: all envs in this thread, one after the other. Slow, obviously right, the oracle of tests."""

from __future__ import annotations

import contextlib
import logging
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from envfleet.contract.arrays import Array, IntArray
from envfleet.contract.batch import StepBatch
from envfleet.contract.episode import Autoreset, Env, Transition
from envfleet.contract.live_changes import Change, LiveChanges
from envfleet.contract.pool_config import Line, PoolConfig
from envfleet.contract.results import ObservationCheck
from envfleet.contract.spaces import SpaceTree
from envfleet.contract.spec import EnvTraits
from envfleet.contract.state import EnvState
from envfleet.pool.backend import StepAtOnce
from envfleet.pool.batch_layout import columns_of
from envfleet.pool.building import EnvBuilder, take_or_build
from envfleet.pool.guard import ENV_ERRORS, Failure, GuardedEpisode
from envfleet.pool.process.rows import Extras, RowWriter, action_reader, assemble_batch
from envfleet.pool.traits import require_same_spaces, set_attribute, traits_of, value_of
from envfleet.pool.waits import SAME_THREAD, CallWatch

logger = logging.getLogger("envfleet.pool")


class SerialBackend:
    """A task waits until recv() needs its result; then it is done, in the order in which tasks were sent."""

    name = "serial"
    steps_some = True
    why_no_changes: str | None = None

    def __init__(self, builders: Sequence[EnvBuilder], config: PoolConfig) -> None:
        self._config = config
        self.step_at_once: StepAtOnce | None = None
        self.is_step_pending = False
        self._num_failures: Counter[int] = Counter()
        self._watch = CallWatch(self, logger) if config.timeout_s is None else None
        self._changes = LiveChanges()
        self._episodes: list[GuardedEpisode] = []
        built: list[Env] = []
        env_id = 0
        try:
            first = builders[0]()
            built.append(first)
            self.traits: EnvTraits = traits_of(first, config.env_states)
            self._obs_tree = SpaceTree(self.traits.observation_space)
            self._action_tree = SpaceTree(self.traits.action_space)
            self._writer = RowWriter(self._obs_tree)
            for env_id, build in enumerate(builders):
                self._add_env(env_id, partial(take_or_build, built, build))
        except BaseException as error:
            for env in built:  # env 0, if no episode has it yet
                with contextlib.suppress(*ENV_ERRORS):
                    env.close()
            self.close()
            if isinstance(error, ENV_ERRORS):
                raise Failure.of(env_id, error).to_exception("cannot be built:") from error
            raise
        self._tasks: deque[tuple[int, Callable[[], Transition]]] = deque()
        self._filling: _Filling | None = None
        self._failures: list[Failure] = []  # that the caller has not heard of

    def _add_env(self, env_id: int, build: Callable[[], Env]) -> None:
        episode = GuardedEpisode(
            env_id,
            build,
            self._config.autoreset,
            self._obs_tree.empty(np.zeros),
            self,
            max_restarts=self._config.env_restarts,
            check_obs=ObservationCheck(self._obs_tree).check,
            changes=self._changes,
        )
        self._episodes.append(episode)
        require_same_spaces(self.traits, episode.env, env_id, self._config.observation_mode)

    def reset(self, env_ids: IntArray, seeds: Sequence[int | None], options: dict[str, Any] | None, line: Line) -> None:
        """Queue the resets of these envs; recv() carries them out."""
        tasks: dict[int, Callable[[], Transition]] = {}
        if line is Line.FULL:
            tasks = {env_id: episode.repeat for env_id, episode in enumerate(self._episodes)}
        for env_id, seed in zip(env_ids.tolist(), seeds, strict=True):
            episode = self._episodes[env_id]
            own_options = None if options is None else dict(options)  # an env may take them apart
            tasks[env_id] = partial(episode.reset, seed, own_options)
        self._tasks.extend(tasks.items())

    def send(self, env_ids: IntArray | None, action_leaves: list[Any], line: Line) -> None:
        """Queue a step of these envs; recv() carries it out."""
        read_action = action_reader(self._action_tree, action_leaves)
        for row, env_id in enumerate(range(self._config.num_envs) if env_ids is None else env_ids.tolist()):
            self._tasks.append((env_id, partial(self._episodes[env_id].step, read_action(row))))

    def repeat(self, env_ids: IntArray, line: Line) -> None:
        """Queue rows that show the last observation of these envs."""
        self._tasks.extend((env_id, self._episodes[env_id].repeat) for env_id in env_ids.tolist())

    def recv(self, line: Line, timeout_s: float | None = None) -> StepBatch:
        """See Backend. A step in this thread cannot be cut off, so `timeout_s` has no effect; None has it watched."""
        num_rows = self._config.num_envs if line is Line.FULL else self._config.rows
        filling = self._filling = self._filling or _Filling(self._obs_tree, num_rows)
        while filling.num_done < num_rows:
            env_id, task = self._tasks[0]
            row = env_id if line is Line.FULL else filling.num_done
            if self._watch is None:
                transition = task()
            else:
                with self._watch.during(f"env {env_id} is at work in this thread (timeout_s=None)"):
                    transition = task()
            filling.write(row, env_id, self._episodes[env_id], transition, self._writer)
            self._tasks.popleft()  # not before: a Ctrl-C in the env's step leaves it to the next recv()
            failure = self._episodes[env_id].failure
            if failure is not None:
                self._failures.append(failure)
        if self._failures:
            raise self._failures.pop(0).to_exception()
        self._filling = None
        return assemble_batch(self._obs_tree, filling, filling.extras)

    def drain(self) -> None:
        """Carry out what is queued, and forget its results."""
        for _, task in self._tasks:
            task()
        self._tasks.clear()
        self._filling = None
        self._failures.clear()

    def call(self, env_ids: Sequence[int], name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
        """Call each env in turn; the first that raises ends the call with EnvFailed."""
        return [self._on_env(env_id, value_of, name, args, kwargs) for env_id in env_ids]

    def set_attr(self, env_ids: Sequence[int], name: str, values: Sequence[Any]) -> None:
        """Set the attribute of each env in turn."""
        for env_id, value in zip(env_ids, values, strict=True):
            self._on_env(env_id, set_attribute, name, value)

    def change(self, change: Change) -> None:
        """Keep the change: each episode looks for new ones in its next reset."""
        self._changes.add(change)

    @property
    def why_no_states(self) -> str | None:
        """See Backend. Env 0 speaks for all."""
        return self.traits.why_no_states

    def state_names(self, env_ids: Sequence[int]) -> list[str]:
        """Name the kinds of states that fit these envs."""
        return self._on_episodes(GuardedEpisode.state_name, {env_id: () for env_id in env_ids})

    def get_state(self, env_ids: Sequence[int]) -> list[EnvState]:
        """Save the states of these envs, in their order."""
        return self._on_episodes(GuardedEpisode.save, {env_id: () for env_id in env_ids})

    def set_state(self, env_ids: Sequence[int], states: Sequence[EnvState]) -> None:
        """Put these envs back into saved states."""
        self._on_episodes(GuardedEpisode.restore, {i: (state,) for i, state in zip(env_ids, states, strict=True)})

    def switch_autoreset(self, mode: Autoreset) -> bool:
        """Tell each episode the mode; the envs stay as they are."""
        for episode in self._episodes:
            episode.switch_autoreset(mode)
        return True

    why_no_giving_up = SAME_THREAD

    def give_up(self, env_ids: Sequence[int]) -> None:
        """See Backend. Never called."""
        raise NotImplementedError

    def call_while_waiting(self, look: Callable[[], None]) -> None:
        """See Backend. There is no wait: the envs work in the calling thread."""

    def close(self, terminate: bool = False) -> None:
        """Close each env. What they raise is suppressed."""
        if self._watch is not None:
            self._watch.close()
        episodes, self._episodes = self._episodes, []
        for episode in episodes:
            with contextlib.suppress(*ENV_ERRORS):
                episode.env.close()

    def abandon(self) -> None:
        """See Backend. The envs are copies, which do no harm."""

    def _on_env(self, env_id: int, function: Callable[..., Any], *args: Any) -> Any:
        try:
            return function(self._episodes[env_id].env, *args)
        except ENV_ERRORS as error:
            raise Failure.of(env_id, error).to_exception() from None

    def _on_episodes(self, method: Callable[..., Any], arguments: Mapping[int, tuple[Any, ...]]) -> list[Any]:
        """Call it for all of them, also after one has failed."""
        answers, failures = [], []
        for env_id, given in arguments.items():
            try:
                answers.append(method(self._episodes[env_id], *given, self._config.env_states))
            except ENV_ERRORS as error:
                failures.append(Failure.of(env_id, error))
        if failures:
            raise failures[0].to_exception()
        return answers

    def num_failures(self, env_id: int) -> int:
        """How often this env has failed since it last finished an episode."""
        return self._num_failures[env_id]

    def add_failure(self, env_id: int) -> int:
        """Count one more failure of this env; returns the new count."""
        self._num_failures[env_id] += 1
        return self._num_failures[env_id]

    def forgive_failures(self, env_id: int) -> None:
        """Start again from zero for this env."""
        self._num_failures[env_id] = 0


class _Filling:
    """A batch of which some rows are written; see BatchArrays."""

    def __init__(self, tree: SpaceTree, num_rows: int) -> None:
        self.env_ids: Array = np.zeros(num_rows, np.int32)
        self.rewards: Array = np.zeros(num_rows, np.float64)
        self.terminated: Array = np.zeros(num_rows, np.bool_)
        self.truncated: Array = np.zeros(num_rows, np.bool_)
        self.obs: list[Array] = [np.zeros((num_rows, *shape), dtype) for dtype, shape in columns_of(tree)]
        self.final_obs: list[Array] = [np.zeros_like(column) for column in self.obs]
        self.infos: list[tuple[Array, Array]] = []
        self.final_infos: list[tuple[Array, Array]] = []
        self.extras: dict[int, Extras] = {}
        self.num_done = 0

    def write(self, row: int, env_id: int, episode: GuardedEpisode, transition: Transition, writer: RowWriter) -> None:
        transition = writer.write(episode, transition, self, row)
        extras = writer.extras(episode, transition)
        self.env_ids[row] = env_id
        self.rewards[row] = transition.reward
        self.terminated[row] = transition.terminated
        self.truncated[row] = transition.truncated
        if extras is not None:
            self.extras[row] = extras
        self.num_done += 1
