"""What happens to a native env that failed: the same rule as for every other env, pool/guard.py's."""

from __future__ import annotations

from collections import Counter
from typing import Any, NamedTuple

import numpy as np

from envfleet._native import core
from envfleet.contract.episode import Autoreset, Transition
from envfleet.contract.spaces import SpaceTree
from envfleet.pool.guard import Failure, GuardedEpisode


class Asked(NamedTuple):
    """What the caller asked of an env."""

    seed: int | None  # of its last seeded reset
    reset_seed: int | None  # of its last reset
    options: dict[str, Any] | None  # likewise


class Place(NamedTuple):
    """The row of an env in a batch that was received."""

    line: core.Line
    buffer: int
    row: int


class Settled(NamedTuple):
    """What came of a failure."""

    transition: Transition  # `obs` None: it is in the row already
    failure: Failure | None  # for the caller


class _FailedEnv:
    """A native env that has just failed, as GuardedEpisode sees it: the first call raises what C++ threw."""

    def __init__(self, pool: core.NativePool, env_id: int, place: Place, what: str) -> None:
        self._pool = pool
        self._env_id = env_id
        self._place = place
        self._what: str | None = what

    def step(self, action: Any) -> Any:
        self._raise_once()

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Reset in C++, straight into the row: no observation is returned."""
        self._raise_once()
        if seed is not None:
            self._pool.set_generator(self._env_id, np.random.PCG64(seed), True)
        self._pool.reset_into(self._env_id, options or {}, self._place.line, self._place.buffer, self._place.row)
        return None, {}

    def rebuild(self) -> _FailedEnv:
        self._pool.rebuild(self._env_id)
        return self

    def close(self) -> None:
        """C++ releases what the env has."""

    def _raise_once(self) -> None:
        what, self._what = self._what, None
        if what is not None:
            raise RuntimeError(what)


class NativeFailures:
    """Counts the failures of a pool's envs, and has guard.py decide what follows each."""

    def __init__(
        self,
        pool: core.NativePool,
        autoreset: Autoreset,
        obs: SpaceTree,
        actions: SpaceTree,
        max_restarts: int | None,
    ) -> None:
        """None for `max_restarts`: the caller hears of each failure."""
        self._pool = pool
        self.autoreset = autoreset
        self._obs = obs
        self._actions = actions
        self._max_restarts = max_restarts
        self._counts: Counter[int] = Counter()

    def settle(self, env_id: int, place: Place, last_obs: Any, asked: Asked) -> Settled:
        """What the row of a failed env shows, and what the caller is told."""
        during, what = self._pool.failure(env_id)
        env = _FailedEnv(self._pool, env_id, place, what)
        built = [env]
        guarded = GuardedEpisode(
            env_id,
            lambda: built.pop() if built else env.rebuild(),
            self.autoreset,
            self._obs.empty(np.zeros),
            self,
            max_restarts=self._max_restarts,
            seed=asked.seed,
        )
        # With same-step autoreset the reset is part of a step that began with the episode under way.
        was_ended = during is core.During.ENDED or (
            during is core.During.AUTORESET and self.autoreset is Autoreset.NEXT_STEP
        )
        guarded.take_over(last_obs, was_ended)
        if during is core.During.RESET:
            transition = guarded.reset(asked.reset_seed, asked.options)
        else:
            transition = guarded.step(self._action(env_id))
        self._pool.set_ended(env_id, guarded.ended)
        if guarded.next_seed is not None:
            self._pool.set_generator(env_id, np.random.PCG64(guarded.next_seed), True)
        return Settled(transition, guarded.failure)

    @property
    def any_counted(self) -> bool:
        """Has any env failed since it last finished an episode?"""
        return bool(self._counts)

    def num_failures(self, env_id: int, /) -> int:
        """How often this env has failed since it last finished an episode."""
        return self._counts[env_id]

    def add_failure(self, env_id: int, /) -> int:
        """Count one more failure of this env; returns the new count."""
        self._counts[env_id] += 1
        return self._counts[env_id]

    def forgive_failures(self, env_id: int, /) -> None:
        """Start again from zero for this env."""
        self._counts.pop(env_id, None)

    def _action(self, env_id: int) -> Any:
        leaves = [
            np.frombuffer(raw, leaf.dtype).reshape(leaf.shape)[()]
            for raw, leaf in zip(self._pool.action_bytes(env_id), self._actions.leaves, strict=True)
        ]
        return self._actions.unflatten(leaves)
