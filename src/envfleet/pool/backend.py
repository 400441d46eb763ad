"""Backend: what every way of running envs offers. PoolConfig: the settings all of them share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, get_args, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from envfleet._native import core
from envfleet.contract.batch import StepBatch
from envfleet.contract.episode import Autoreset
from envfleet.contract.errors import UsageError
from envfleet.contract.spec import EnvTraits
from envfleet.contract.state import EnvState

IntArray = NDArray[np.int32]
# All of step() in one call: its five results; or None, and then Backend.is_step_pending says what to do.
StepAtOnce = Callable[[Any], tuple[Any, ...] | None]


ObservationMode = Literal["same", "different"]


Line = core.Line  # which batches results go to: those with a row for each env, or those of the first that finish


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolConfig:
    """Settings of a pool; checked here, once."""

    num_envs: int
    batch_size: int | None = None  # None: wait for every env
    autoreset: Autoreset = Autoreset.NEXT_STEP
    observation_mode: ObservationMode = "same"
    max_env_restarts: int | None = None  # None: an env that fails is reported, not restarted
    num_workers: int | None = None  # None: one for each CPU that may be used
    pin_workers: bool = False  # bind each worker to its share of the CPUs, where there are enough of them
    timeout_s: float = 60.0  # for results of envs
    start_timeout_s: float = 300.0  # for building them

    def __post_init__(self) -> None:
        """Refuse what cannot work."""
        for name in ("num_envs", "batch_size", "num_workers", "max_env_restarts"):
            count = getattr(self, name)
            if count is not None and not isinstance(count, int | np.integer):
                raise UsageError(f"{name} must be a whole number; got {count!r}")
        if self.num_envs < 1:
            raise UsageError(f"num_envs must be at least 1; got {self.num_envs}")
        if self.batch_size is not None and not 1 <= self.batch_size <= self.num_envs:
            raise UsageError(f"batch_size must be between 1 and num_envs={self.num_envs}; got {self.batch_size}")
        if self.observation_mode not in get_args(ObservationMode):
            raise UsageError(f"observation_mode must be 'same' or 'different'; got {self.observation_mode!r}")
        if self.num_workers is not None and self.num_workers < 1:
            raise UsageError(f"num_workers must be at least 1; got {self.num_workers}")
        if self.max_env_restarts is not None and self.max_env_restarts < 1:
            raise UsageError(f"max_env_restarts must be at least 1; got {self.max_env_restarts}")
        for name in ("timeout_s", "start_timeout_s"):
            if not getattr(self, name) > 0:
                raise UsageError(f"{name} must be positive; got {getattr(self, name)}")

    @property
    def rows(self) -> int:
        """Rows of a batch that recv() returns."""
        return self.num_envs if self.batch_size is None else self.batch_size

    @property
    def line(self) -> Line:
        """The line that send() uses."""
        return Line.FULL if self.rows == self.num_envs else Line.FIRST_READY


class Backend(Protocol):
    """Runs envs. The caller has checked all arguments, and sends only to envs that are not in flight."""

    traits: EnvTraits
    steps_some: bool  # can it step some envs while the others stand still?

    @property
    def step_at_once(self) -> StepAtOnce | None:
        """A quicker way to step all envs, if there is one at present."""

    @property
    def is_step_pending(self) -> bool:
        """After step_at_once() gave None: were the actions sent (receive the batch), or must send() look at them?"""

    def reset(self, env_ids: IntArray, seeds: Sequence[int | None], options: dict[str, Any] | None, line: Line) -> None:
        """Start resetting `env_ids`. On the full line the other envs repeat their last observation."""

    def send(self, env_ids: IntArray | None, action_leaves: list[Any]) -> None:
        """Start stepping `env_ids`; None: all."""

    def repeat(self, env_ids: IntArray) -> None:
        """On the full line: `env_ids` repeat their last observation, so that a batch for the others is complete."""

    def recv(self, line: Line, timeout_s: float) -> StepBatch:
        """Wait for a batch. Raises PoolTimeout, or EnvFailed once for each failed env, and loses nothing."""

    def drain(self, timeout_s: float) -> None:
        """Wait until no env is at work, and forget all results that were not received."""

    def call(self, env_ids: Sequence[int], name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
        """Call a method of `env_ids`, which are in ascending order, or get an attribute."""

    def set_attr(self, env_ids: Sequence[int], name: str, values: Sequence[Any]) -> None:
        """Set an attribute of `env_ids`, with a value for each."""

    def close(self) -> None:
        """Close the envs and leave nothing behind. May be called twice."""

    def abandon(self) -> None:
        """In a fork of the owner, right after it: let go of what belongs to the owner. Nothing else is called there."""


@runtime_checkable
class SavesStates(Protocol):
    """A backend whose envs can be saved and restored."""

    def get_state(self, env_ids: Sequence[int]) -> list[EnvState]:
        """The states of some envs."""

    def set_state(self, env_ids: Sequence[int], states: Sequence[EnvState]) -> None:
        """Put some envs back into saved states."""


@runtime_checkable
class SwitchesAutoreset(Protocol):
    """A backend that can use another autoreset mode with the same envs."""

    def switch_autoreset(self, mode: Autoreset) -> bool:
        """Use `mode` from now on. False, and nothing has changed: it would have to be built anew."""
