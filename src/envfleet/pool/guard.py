"""GuardedEpisode: one env that may fail. What a failure means is decided here, for every backend."""

from __future__ import annotations

import contextlib
import logging
import pickle
import time
import traceback
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import numpy as np

from envfleet.contract.episode import Autoreset, Env, Episode, Transition
from envfleet.contract.errors import EnvFailed, NotReset, StepOnEndedEpisode, UsageError
from envfleet.contract.infos.table import error_info
from envfleet.contract.live_changes import Applied, ChangeFailed, LiveChanges
from envfleet.contract.pool_config import EnvStates
from envfleet.contract.results import WrongResult
from envfleet.contract.state import EnvState
from envfleet.pool.env_saver import EnvSaver
from envfleet.pool.pickling import pickled

logger = logging.getLogger("envfleet.pool")

FIRST_BACKOFF_S = 0.1
LONGEST_BACKOFF_S = 5.0

MOST_HANGS = 3  # of one step or reset, in a row: the next one would hang as well, and each takes timeout_s

# What counts as a failure of an env that runs in the caller's own process. A KeyboardInterrupt is the user's Ctrl-C
# there, and goes on to the caller; in a child process, which no Ctrl-C reaches, every exception is the env's.
ENV_ERRORS = (Exception, SystemExit, GeneratorExit)


def backoff_s(num_failures: int) -> float:
    """How long to wait before the next restart: not at all after the first failure, then ever longer."""
    return 0.0 if num_failures < 2 else min(FIRST_BACKOFF_S * 2.0 ** (num_failures - 2), LONGEST_BACKOFF_S)


class StateNotRestored(Exception):
    """An env could not be put back into a saved state."""


class LostTooOften(Exception):
    """Each new process that ran an env was lost at the same task."""


class Failure(NamedTuple):
    """What the caller is told about an env that raised."""

    env_id: int
    error: str  # one line
    traceback: str
    seed: int | None
    last_action: Any
    usage_error: type[UsageError] | None  # set: the caller is wrong, not the env

    @classmethod
    def of(cls, env_id: int, error: BaseException, seed: int | None = None, action: Any = None) -> Failure:
        """Describe an exception, in words that can cross a process border."""
        usage_error = type(error) if isinstance(error, UsageError) else None
        line = str(error) if usage_error else _one_line(error)
        return cls(env_id, line, "".join(traceback.format_exception(error)), seed, action, usage_error)

    def to_exception(self, doing: str = "raised") -> Exception:
        """The exception that the pool raises."""
        if self.usage_error is not None:
            names_its_env = self.error.startswith(f"env {self.env_id} ")
            error = self.usage_error(self.error if names_its_env else f"env {self.env_id}: {self.error}")
            error.env_id = self.env_id  # type: ignore[attr-defined]  # for those who count envs otherwise
            return error
        return EnvFailed(
            f"env {self.env_id} {doing} {self.error}",
            env_id=self.env_id,
            child_traceback=self.traceback,
            seed=self.seed,
            last_action=self.last_action,
        )


def _one_line(error: BaseException) -> str:
    if isinstance(error, WrongResult | ChangeFailed | StateNotRestored | LostTooOften | EnvTimedOut):
        return f"{type(error).__name__}: {error}"  # without our module's name
    return traceback.format_exception_only(error)[-1].strip()


class FailureCount(Protocol):
    """How often each env failed since it last finished an episode. Outlives the process that runs the env."""

    def num_failures(self, env_id: int, /) -> int:
        """How often the env has failed since then."""

    def add_failure(self, env_id: int, /) -> int:
        """Count one more; returns the new count."""

    def forgive_failures(self, env_id: int, /) -> None:
        """Start again from zero."""


class EnvTimedOut(BaseException):
    """Raised inside an env whose task takes too long. No Exception: an env that tries again must not swallow it."""


class TaskClock(Protocol):
    """Measures how long an env has been at work on its task."""

    def renew(self, *, is_building: bool = False) -> None:
        """Count from now on: the env has failed, or is being built anew."""


class _NoClock:
    """The clock of a backend in which no task is timed."""

    def renew(self, *, is_building: bool = False) -> None:
        """Does nothing: no task is timed."""


_NO_CLOCK = _NoClock()


class _NotBuilt:
    """Stands for an env that is built before its next step or reset."""

    def __getattr__(self, name: str) -> Any:
        raise LostTooOften("the env is not built: several processes in a row could not; its next reset tries again")


class GuardedEpisode:
    """An episode whose env may fail.

    A failed step gives a row like any other: truncated, with reward 0, the last observation, and the
    reason in `info["env_error"]`. `failure` is set if the caller is to hear of it as an exception: with
    restarts off always, otherwise when the env failed more than `max_restarts` times in a row without
    finishing an episode. With restarts on, the env is built anew before its next reset; so is one that was interrupted,
    whose state nobody knows.
    """

    def __init__(
        self,
        env_id: int,
        build: Callable[[], Env],
        autoreset: Autoreset,
        empty_obs: Any,
        counts: FailureCount,
        *,
        max_restarts: int | None,  # None: restarts are off
        check_obs: Callable[[Any], None] | None = None,  # raises for an observation that cannot be used
        env_errors: tuple[type[BaseException], ...] = ENV_ERRORS,  # what counts as a failure of the env
        lost_because: str | None = None,  # set: an earlier instance is gone, and the caller does not know yet
        num_losses: int | None = None,  # set: processes lost at its task, which is not tried again
        builds_later: bool = False,  # the env is built before its first step or reset, not here
        seed: int | None = None,  # of the earlier instance
        changes: LiveChanges | None = None,  # that are made while envs run
        clock: TaskClock = _NO_CLOCK,
    ) -> None:
        self.failure: Failure | None = None
        self._env_id = env_id
        self._build = build
        self._empty_obs = empty_obs
        self._counts = counts
        self._max_restarts = max_restarts
        self._lost_because = lost_because
        self._num_losses = num_losses
        self._seed = seed
        self._must_rebuild = builds_later
        self._clock = clock
        self._env_errors = env_errors
        self._action: Any = None  # of the last step; None: the last call was no step
        self._obs_before = empty_obs  # what the last call found
        env: Any = _NotBuilt() if builds_later else build()
        self._episode = Episode(env, autoreset, last_obs=empty_obs, next_seed=self._seed_of_rebuilt())
        if check_obs is not None:
            self._episode.check_obs = check_obs
        if changes is not None:
            self._episode.changes = changes.of_new_env()

    def take_over(self, last_obs: Any, ended: bool) -> None:
        """The episode has been under way elsewhere, and this is how it stands."""
        self._episode.last_obs = last_obs
        self._episode.ended = ended
        self._episode.next_seed = None

    @property
    def env(self) -> Any:
        """The env as it is now: it may have been built anew."""
        return self._episode.env

    def switch_autoreset(self, mode: Autoreset) -> None:
        """Use another autoreset mode from now on."""
        self._episode.autoreset = mode

    @property
    def ended(self) -> bool:
        """Is a reset to come next?"""
        return self._episode.ended

    @property
    def next_seed(self) -> int | None:
        """For the next reset, if the env is new and unseeded."""
        return self._episode.next_seed

    def step(self, action: Any) -> Transition:
        """One step; never raises what the env raises."""
        self.failure = None
        self._action = action
        self._obs_before = self._episode.last_obs
        try:
            if self._lost_because is not None:
                reason, self._lost_because = self._lost_because, None
                if self._num_losses is not None:
                    return self._lost_too_often(reason)
                self._rebuild_if_needed()
                return self._cut_short(reason)
            self._rebuild_if_needed()
            transition = self._episode.step(action)
        except StepOnEndedEpisode as error:
            self.failure = Failure.of(self._env_id, error, self._seed, action)
            return self._episode.repeat()
        except self._env_errors as error:
            return self._failed(error, action)
        if (transition.terminated or transition.truncated) and self._counts.num_failures(self._env_id):
            self._counts.forgive_failures(self._env_id)
        return transition

    def reset(self, seed: int | None, options: dict[str, Any] | None) -> Transition:
        """Reset, with another try for each restart that is left: there is no row that could be truncated.

        One that hangs is tried MOST_HANGS times.
        """
        self.failure = None
        self._action = None
        self._obs_before = self._episode.last_obs
        reason, self._lost_because = self._lost_because, None
        if seed is not None:
            self._seed = seed
        if self._num_losses is not None:
            return self._lost_too_often(str(reason))
        num_hangs = 0
        while True:
            try:
                self._rebuild_if_needed()
                return self._episode.reset(seed, options)
            except self._env_errors as error:
                num_hangs += isinstance(error, EnvTimedOut)
                failure = self._note_failure(error, action=None, num_hangs=num_hangs)
                if num_hangs >= MOST_HANGS:
                    return self._ended_by(failure.error)
                if self.failure is not None:
                    return self._row_after(failure)

    def state_name(self, how: EnvStates) -> str:
        """`EnvState.env_name` of the states that fit. Raises UsageError if the env cannot be saved."""
        return EnvSaver(self.env, how).name

    def save(self, how: EnvStates) -> EnvState:
        """The state of the env, and its place in the episode.

        Raises:
            UsageError: The env cannot be saved.
            NotReset: It has failed, or was lost with its process, and has no episode.
        """
        episode = self._episode
        if self._must_rebuild or self._lost_because is not None:
            raise NotReset("it has failed, and has no state: reset it before you save it")
        saver = EnvSaver(self.env, how)
        kept = saver.save(), episode.last_obs, episode.next_seed, self._seed, episode.changes.applied
        return EnvState(saver.name, pickled(kept), episode.num_steps, episode.ended, {})

    def restore(self, state: EnvState, how: EnvStates) -> None:
        """Put the env back into a state of the same name: its trajectory repeats from there.

        Raises:
            StateNotRestored: The env raised, or the state is damaged. The env must be reset, and is built anew for it
                if restarts are on.
        """
        episode = self._episode
        self.failure = None
        try:
            self._rebuild_if_needed()
            saved, last_obs, next_seed, seed, *rest = pickle.loads(state.state)
            applied: Applied = rest[0] if rest else ()  # states of EnvFleet 0.9 have none
            saver = EnvSaver(self.env, how)
            if saver.keeps_env:
                episode.changes.catch_up(applied, self.env)
            env = saver.restore(saved)
        except self._env_errors as error:
            episode.ended, self._must_rebuild = True, self._max_restarts is not None or not self._is_built
            text = f"in set_state(): {_one_line(error)}; it must be reset"
            raise StateNotRestored(text) from error
        if env is not episode.env:  # it may be older than live changes
            episode.changes.begin_anew(applied)
        episode.env, episode.last_obs, episode.next_seed = env, last_obs, next_seed
        episode.num_steps, episode.ended = state.num_steps, state.has_ended
        self._seed, self._lost_because, self._action, self._obs_before = seed, None, None, last_obs

    def cannot_begin(self, error: BaseException) -> Transition:
        """What was sent for a step or a reset cannot be read: the row of a failed env, which is not built anew."""
        self._lost_because = None
        self.failure = Failure.of(self._env_id, error, self._seed)
        return self._ended_by(self.failure.error)

    def repeat(self) -> Transition:
        """The last observation again."""
        self.failure = None
        return self._episode.repeat()

    def refuse(self, error: Exception) -> Transition:
        """The row of the last transition cannot be written: it becomes that of a failed env."""
        self._episode.last_obs = self._obs_before
        return self._failed(error, self._action)

    def give_up(self, error: Exception) -> Transition:
        """Nor can the row that `refuse` gave: one of zeros, which can always be written."""
        self._episode.last_obs = self._empty_obs
        return self._ended_by(Failure.of(self._env_id, error).error)

    def _note_failure(self, error: BaseException, action: Any, num_hangs: int = 0) -> Failure:
        """Count it, and set `failure` if the caller is to hear of it; returns what it was in any case."""
        self._clock.renew()
        num_failures = self._counts.add_failure(self._env_id)
        restarts = self._max_restarts is not None
        self._must_rebuild = restarts or not self._is_built or isinstance(error, EnvTimedOut)
        failure = Failure.of(self._env_id, error, self._seed, action)
        if not restarts:
            self.failure = failure
        elif num_failures > (self._max_restarts or 0):
            count = f" ({num_failures} failures without a finished episode: no restart is left)"
            self.failure = failure._replace(error=failure.error + count)
        elif num_hangs >= MOST_HANGS:
            self.failure = failure._replace(error=f"{failure.error} ({num_hangs} times in a row: it is given up)")
        else:
            logger.warning("env %d raised %s; it is built anew", self._env_id, failure.error)
        return failure

    def _failed(self, error: BaseException, action: Any) -> Transition:
        return self._row_after(self._note_failure(error, action))

    def _row_after(self, failure: Failure) -> Transition:
        must_rebuild = self._must_rebuild
        try:
            self._rebuild_if_needed()
            return self._cut_short(failure.error)
        except self._env_errors as second:  # a same-step reset, or the new env, failed as well
            self._must_rebuild = must_rebuild or isinstance(second, EnvTimedOut)
            return self._ended_by(f"{failure.error}; then, in reset: {Failure.of(self._env_id, second).error}")

    def _lost_too_often(self, reason: str) -> Transition:
        """End the row instead of trying once more. The next task may succeed."""
        num_losses, self._num_losses = self._num_losses, None
        error = LostTooOften(f"{num_losses} processes in a row were lost at this task, which is given up; {reason}")
        self.failure = Failure.of(self._env_id, error, self._seed, self._action)
        return self._ended_by(self.failure.error)

    def _ended_by(self, reason: str) -> Transition:
        self._episode.ended = True
        return self._episode.repeat()._replace(truncated=True, info=error_info(reason))

    def _cut_short(self, reason: str) -> Transition:
        transition = self._episode.cut_short(error_info(reason))
        if transition.has_final:  # the reason is in the final info; `info` is the new episode's
            transition = transition._replace(info={**transition.info, **error_info(reason)})
        return transition

    def _rebuild_if_needed(self) -> None:
        if not self._must_rebuild:
            return
        self._clock.renew()
        with contextlib.suppress(*self._env_errors):
            self._episode.env.close()
        self._clock.renew(is_building=True)
        try:
            time.sleep(backoff_s(self._counts.num_failures(self._env_id)))
            self._episode.env = self._build()
        finally:
            self._clock.renew()
        self._episode.changes.begin_anew()
        self._episode.next_seed = self._seed_of_rebuilt()
        self._must_rebuild = False

    @property
    def _is_built(self) -> bool:
        return not isinstance(self._episode.env, _NotBuilt)

    def _seed_of_rebuilt(self) -> int | None:
        """A seed that differs from failure to failure (the same one might fail again), but not from run to run."""
        if self._seed is None:
            return None
        entropy = (self._seed, self._counts.num_failures(self._env_id))
        return int(np.random.SeedSequence(entropy).generate_state(1)[0])
