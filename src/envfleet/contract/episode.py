"""Episode: one environment and the rule for what follows its last step. The only copy of that rule."""

from __future__ import annotations

import copy
import enum
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from envfleet.contract.errors import StepOnEndedEpisode
from envfleet.contract.live_changes import EnvChanges, LiveChanges
from envfleet.contract.results import reset_result, step_result


class Env(Protocol):
    """The part of a Gymnasium environment that an episode needs."""

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Start an episode and return its first observation."""

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        """Take one step and return what Gymnasium envs return."""

    def close(self) -> None:
        """Release the resources of the env."""


class Autoreset(enum.Enum):
    """What follows the last step of an episode. The values are Gymnasium's."""

    NEXT_STEP = "NextStep"  # the next step() resets: its action is ignored, its reward is 0
    SAME_STEP = "SameStep"  # the same step() resets: its observation is the new episode's first
    DISABLED = "Disabled"  # the caller resets


class Transition(NamedTuple):
    """What one env returns for one task."""

    obs: Any
    reward: float
    terminated: bool
    truncated: bool
    info: dict[str, Any]
    has_final: bool = False  # the episode ended here and `obs` belongs to the next one
    final_obs: Any = None
    final_info: dict[str, Any] | None = None


def _any_obs(obs: Any) -> None:
    """Accept every observation."""


@dataclass(slots=True)
class Episode:
    """One environment and the rule for what follows its last step.

    What the env returns is checked before anything changes: WrongResult is raised as if by the env itself.
    """

    env: Env
    autoreset: Autoreset
    last_obs: Any  # before the first reset: an observation of zeros
    ended: bool = True
    num_steps: int = 0  # since the last reset
    next_seed: int | None = None  # for the next reset without a seed of its own: the env is new and unseeded
    check_obs: Callable[[Any], None] = _any_obs  # raises for an observation that cannot be used
    changes: EnvChanges = field(default_factory=lambda: LiveChanges().of_new_env())

    def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> Transition:
        """Start an episode, whatever state the last one is in, with all changes that were made since.

        Args:
            seed: passed to the env; None: `next_seed`.
            options: passed to the env; None or empty: those that were set for all resets.

        Returns:
            The first observation, with reward 0.

        Raises:
            WrongResult: the env returned something else than (obs, info).
            ChangeFailed: the env could not apply a change.
        """
        self.changes.apply(self.env)
        if seed is None:
            seed = self.next_seed
        obs, info = reset_result(self.env.reset(seed=seed, options=self.changes.options(options)))
        self.check_obs(obs)
        self.last_obs = obs
        self.next_seed = None
        self.ended = False
        self.num_steps = 0
        return Transition(obs, 0.0, False, False, self.changes.told(info))

    def step(self, action: Any) -> Transition:
        """Take one step, or do what the autoreset mode says after an episode's last step.

        Args:
            action: passed to the env.

        Returns:
            The result. With same-step autoreset the last step also has the final observation and info.

        Raises:
            StepOnEndedEpisode: the episode has ended, and the mode does not reset in the next step.
            WrongResult: the env returned something that Gymnasium's API or its spaces do not allow.
        """
        if self.ended:
            if self.autoreset is Autoreset.NEXT_STEP:
                return self.reset()
            raise StepOnEndedEpisode(
                "its episode has ended: call recv() for the rows of the other envs, then reset this one before its "
                "next step()"
            )
        obs, reward, terminated, truncated, info = step_result(self.env.step(action))
        self.check_obs(obs)
        self.last_obs = obs
        self.num_steps += 1
        transition = Transition(obs, reward, terminated, truncated, info)
        return self._end(transition) if terminated or truncated else transition

    def cut_short(self, info: dict[str, Any]) -> Transition:
        """End the episode as truncated at its last observation, because its env failed or is lost.

        Args:
            info: of this row.

        Returns:
            The truncated row.
        """
        return self._end(Transition(self.last_obs, 0.0, False, True, info))

    def repeat(self) -> Transition:
        """Return the last observation again, for a batch in which only other envs are reset."""
        return Transition(self.last_obs, 0.0, False, False, {})

    def _end(self, last: Transition) -> Transition:
        self.ended = True
        if self.autoreset is not Autoreset.SAME_STEP:
            return last
        final_obs = copy.deepcopy(last.obs)  # many envs write their next observation into the same array
        first = self.reset()
        return last._replace(obs=first.obs, info=first.info, has_final=True, final_obs=final_obs, final_info=last.info)
