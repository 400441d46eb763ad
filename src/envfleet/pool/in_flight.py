"""InFlight: which envs of a pool have results to come, and which batch comes next."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from envfleet._native import core
from envfleet.contract.arrays import IntArray
from envfleet.contract.errors import EnvBusy, NothingToReceive, UsageError
from envfleet.contract.pool_config import Line, PoolConfig

# Bound once: looking up a member of an enum takes 0.1 us, and each batch needs several.
_FULL = Line.FULL
_NO_SUCH_ENV, _NAMED_TWICE, _BUSY = (
    core.SendProblem.NO_SUCH_ENV,
    core.SendProblem.NAMED_TWICE,
    core.SendProblem.BUSY,
)
_NO_ENVS: IntArray = np.zeros(0, np.int32)


class InFlight:
    """What was sent and not received.

    Attributes:
        line: The line of what is in flight. A reset() that timed out has rows for all envs to come, also in an
            asynchronous pool.
    """

    def __init__(self, config: PoolConfig, *, steps_some: bool) -> None:
        """Nothing is in flight; `steps_some`: the backend can step some envs while the others stand still."""
        self.line = config.line
        self._config = config
        self._is_synchronous = config.line is _FULL
        self._steps_some = steps_some
        self._flight = core.Flight(config.num_envs)
        self._chosen: list[IntArray] = []  # synchronous pools: what was sent since the last batch, if not all at once
        self._padding: IntArray = _NO_ENVS  # asynchronous pools: idle envs that only fill the next batch

    @property
    def num_envs(self) -> int:
        """How many envs have results to come."""
        num_in_flight: int = self._flight.num_in_flight
        return num_in_flight

    @property
    def env_ids(self) -> list[int]:
        """The envs that have results to come, in ascending order."""
        env_ids: list[int] = self._flight.env_ids
        return env_ids

    @property
    def flight(self) -> core.Flight:
        """Which envs they are, as C++ has it."""
        return self._flight

    @property
    def is_plain(self) -> bool:
        """Is there nothing more to know about the next batch than which envs are in flight?"""
        return self.line is self._config.line and not self._chosen and not len(self._padding)

    @property
    def is_of_some(self) -> bool:
        """Is the next batch one of a synchronous pool that only some envs were sent for?"""
        return bool(self._chosen)

    def sent(self, env_ids: IntArray | None) -> None:
        """Tasks were sent to these envs; None: to all."""
        self._flight.sent(env_ids)

    def chose(self, env_ids: IntArray) -> None:
        """The caller named these envs: in a synchronous pool, the next batch is for them and has their order."""
        if self._is_synchronous:
            self._chosen.append(env_ids.copy())

    def chosen_env_ids(self) -> IntArray:
        """The envs that the next batch is for, in the order in which they were sent."""
        return np.concatenate(self._chosen)

    def other_env_ids(self) -> IntArray:
        """The envs that have no result to come."""
        others = np.ones(self._config.num_envs, np.bool_)
        others[self._flight.env_ids] = False
        return np.flatnonzero(others).astype(np.int32)

    def pad(self) -> IntArray:
        """Idle envs that are to fill the next batch of an asynchronous pool: they are in flight from now on."""
        num_missing = self._config.rows - self._flight.num_in_flight
        if self.line is _FULL or num_missing <= 0:
            return _NO_ENVS
        self._padding = self.other_env_ids()[:num_missing]
        self._flight.sent(self._padding)
        return self._padding

    def take_padding(self) -> IntArray:
        """The envs that only filled the batch that was received."""
        padding, self._padding = self._padding, _NO_ENVS
        return padding

    def landed(self, env_ids: IntArray) -> bool:
        """The next batch was received, with these envs. Is it one with a row for each env?"""
        if self.line is _FULL:
            self.landed_all()
            return True
        self._flight.landed(env_ids)
        return False

    def landed_all(self) -> None:
        """Nothing is in flight any more."""
        self._flight.landed(None)
        self._chosen, self._padding = [], _NO_ENVS
        self.line = self._config.line

    def checked(self, env_id: ArrayLike, name: str = "env_id") -> IntArray:
        """The indices of some envs that tasks may be sent to.

        Raises:
            UsageError: It is not a vector of indices, each once.
            EnvBusy: One of these envs has a result to come.
        """
        num_envs = self._config.num_envs
        ids = np.asarray(env_id)
        if ids.ndim != 1 or ids.dtype.kind not in "iu" or not len(ids):
            raise UsageError(f"{name} must be a vector of env indices; got shape {ids.shape}, dtype {ids.dtype}")
        if ids.dtype != np.int32:
            ids = np.clip(ids, -1, num_envs)  # so that no number becomes another one
        env_ids: IntArray = np.ascontiguousarray(ids, dtype=np.int32)
        problem = self._flight.check(env_ids)
        if problem is _NO_SUCH_ENV:
            raise UsageError(f"{name} must be between 0 and {num_envs - 1}; got {np.asarray(env_id).tolist()}")
        if problem is _NAMED_TWICE:
            raise UsageError(f"{name} names an env twice: {env_ids.tolist()}")
        if problem is _BUSY:
            busy = sorted(set(env_ids.tolist()) & set(self.env_ids))
            raise EnvBusy(f"envs {busy} have results to come: receive them before sending again")
        return env_ids

    def require_batch(self, num_more: int = 0) -> None:
        """Raise NothingToReceive unless a batch will be full, once `num_more` envs are sent."""
        num_in_flight = self._flight.num_in_flight + num_more
        if self._is_synchronous and self._steps_some:
            if not num_in_flight:
                raise NothingToReceive("no env is in flight: send() actions first")
        elif num_in_flight < self._config.rows:
            text = f"a batch has {self._config.rows} rows, but only {num_in_flight} envs are in flight: send() more"
            together = "" if self._steps_some else "; a vector env steps all its envs together"
            raise NothingToReceive(text + together)

    def require_none(self, before: str) -> None:
        """Raise EnvBusy if results are to come; `before` says what is to be done when they were received."""
        if self._flight.num_in_flight:
            raise EnvBusy(f"envs {self.env_ids} have results to come: {before}")
