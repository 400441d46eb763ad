"""Backend: what every way of running envs offers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from envfleet.contract.arrays import IntArray
from envfleet.contract.batch import StepBatch
from envfleet.contract.episode import Autoreset
from envfleet.contract.live_changes import Change
from envfleet.contract.pool_config import Line
from envfleet.contract.spec import EnvTraits
from envfleet.contract.state import EnvState

# All of step() in one call: its five results; or None, and then Backend.is_step_pending says what to do.
StepAtOnce = Callable[[Any], tuple[Any, ...] | None]


class Backend(Protocol):
    """Runs envs. The caller has checked all arguments, and sends only to envs that are not in flight."""

    name: str  # as make(backend=...) has it
    traits: EnvTraits
    steps_some: bool  # can it step some envs while the others stand still?

    @property
    def step_at_once(self) -> StepAtOnce | None:
        """A quicker way to step all envs, if there is one at present."""

    def switch_autoreset(self, mode: Autoreset) -> bool:
        """Use `mode` from the next call on; nothing is in flight. False if envs had to be built anew for it.

        Raises UsageError, and nothing has changed, where envs of another library do not have this mode; EnvFailed, and
        all envs must be reset, where they could not be built anew.
        """

    @property
    def is_step_pending(self) -> bool:
        """After step_at_once() gave None: were the actions sent (receive the batch), or must send() look at them?"""

    def reset(self, env_ids: IntArray, seeds: Sequence[int | None], options: dict[str, Any] | None, line: Line) -> None:
        """Start resetting `env_ids`. On the full line the other envs repeat their last observation."""

    def send(self, env_ids: IntArray | None, action_leaves: list[Any], line: Line) -> None:
        """Start stepping `env_ids`; None: all."""

    def repeat(self, env_ids: IntArray, line: Line) -> None:
        """`env_ids` repeat their last observation, so that a batch for the others is complete."""

    def recv(self, line: Line, timeout_s: float | None = None) -> StepBatch:
        """Wait for a batch. Raises PoolTimeout, or EnvFailed once for each failed env, and loses nothing.

        `timeout_s` is the longest wait; None: as the settings say, which may allow each env its time.
        """

    def drain(self) -> None:
        """Wait until no env is at work, and forget all results that were not received."""

    @property
    def why_no_giving_up(self) -> str | None:
        """Why give_up() is not available; None: it is."""

    def give_up(self, env_ids: Sequence[int]) -> None:
        """End the tasks that these envs are at work on, as failures, while the next batch is waited for."""

    def call_while_waiting(self, look: Callable[[], None]) -> None:
        """Call `look` several times a second in each wait, where the backend can. What it raises is passed on."""

    def call(self, env_ids: Sequence[int], name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
        """Call a method of `env_ids`, which are in ascending order, or get an attribute."""

    def set_attr(self, env_ids: Sequence[int], name: str, values: Sequence[Any]) -> None:
        """Set an attribute of `env_ids`, with a value for each."""

    @property
    def why_no_changes(self) -> str | None:
        """Why change() is not available, and what is instead; None: it is."""

    def change(self, change: Change) -> None:
        """Have each env apply a change in its next reset, also while it is in flight."""

    @property
    def why_no_states(self) -> str | None:
        """Why states of its envs cannot be saved, and what to do; None: they can. Then the next three are called."""

    def state_names(self, env_ids: Sequence[int]) -> list[str]:
        """`EnvState.env_name` of the states that fit each of some envs. UsageError: one cannot be saved."""

    def get_state(self, env_ids: Sequence[int]) -> list[EnvState]:
        """The states of some envs, in their order. UsageError: one cannot be saved."""

    def set_state(self, env_ids: Sequence[int], states: Sequence[EnvState]) -> None:
        """Put some envs back into saved states, whose names fit.

        Raises EnvFailed for an env that could not take its state; it must be reset, the others are restored. Where all
        states can be looked at first (native envs), UsageError, and none was restored.
        """

    def close(self, terminate: bool = False) -> None:
        """Close the envs and leave nothing behind. May be called twice.

        Processes whose envs are at work have some seconds to close them; with `terminate` they are killed at once.
        """

    def abandon(self) -> None:
        """In a fork of the owner, right after it: let go of what belongs to the owner. Nothing else is called there."""
