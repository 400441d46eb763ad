"""EvaluationPool: a worker's second pool, for evaluations. The envs of rollouts and steps stay as they are."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from envfleet.cluster.wire.evaluations import arrays_of
from envfleet.cluster.wire.messages import Evaluate, EvaluationProgress, EvaluationReady
from envfleet.cluster.worker.collecting.policy_state import PolicyError
from envfleet.cluster.worker.plain_answers import plain_parts
from envfleet.contract.arrays import Array, Arrays
from envfleet.contract.episode import Autoreset
from envfleet.contract.errors import EnvFailed, PoolTimeout, UsageError
from envfleet.contract.evaluation import Episodes
from envfleet.contract.live_changes import LiveChanges
from envfleet.contract.policy import Policy
from envfleet.contract.pool_config import PoolConfig
from envfleet.contract.spec import EnvSpec
from envfleet.policies.evaluate import Actor, EpisodePlayer
from envfleet.policies.seeding import seed_policy
from envfleet.pool.make import make_pool
from envfleet.pool.pool import EnvPool

PROGRESS_S = 0.5  # between two messages


class EvaluationPool:
    """Built by the first evaluation, kept for the next one; built again after a failure, or if more envs are needed."""

    def __init__(
        self,
        spec: EnvSpec,
        config: PoolConfig,
        attributes: Mapping[str, list[Any]],
        changes: LiveChanges,
        while_waiting: Callable[[], None] = lambda: None,
    ) -> None:
        """Build nothing yet. `attributes` has a value for each of the worker's envs; they and `changes` may change."""
        self._while_waiting = while_waiting
        self._spec = spec
        self._config = config
        self._attributes = attributes
        self._changes = changes
        self._num_changes = 0  # the number of the last one that the pool has
        self._given: dict[str, list[Any]] = {}  # attributes that the pool has
        self._pool: EnvPool | None = None

    def close(self, terminate: bool = False) -> None:
        """Close the envs; `terminate`: kill those that are at work."""
        pool, self._pool = self._pool, None
        if pool is not None:
            pool.close(terminate=terminate)

    def play(
        self, order: Evaluate, policy: Policy, between_steps: Callable[[], None], say: Callable[[Any], None]
    ) -> tuple[EvaluationReady, Arrays]:
        """Play the episodes of an order. The policy, and the global random generators, are seeded for it.

        Args:
            order: The order.
            policy: Its policy.
            between_steps: Called before each step; what it raises is passed on.
            say: Sends a message to the head.

        Raises:
            EnvFailed: An env raised; the pool is closed.
            EvaluationHung: An env does not answer; the pool is closed.
        """
        seed_policy(policy, int(np.random.SeedSequence((order.seeds[0], 1)).generate_state(1)[0]))
        progress = _Progress(order.order, between_steps, say)
        try:  # also while the pool is built: what is raised there must not be taken for the pool of rollouts
            pool = self._pool_for(len(order.seeds))
            actor = _GuardedActor(policy, pool, order.is_deterministic)
            episodes = EpisodePlayer(pool, actor, order.seeds, order.num_recorded, order.action_mask).play(
                progress.before_step
            )
        except EnvFailed:
            self.close()  # results of the other envs may be under way
            raise
        except PoolTimeout as error:
            self.close(terminate=True)
            raise EvaluationHung(f"an env of the evaluation hung: {error.report}") from None
        return _answer(order, episodes)

    def _pool_for(self, num_episodes: int) -> EnvPool:
        num_envs = min(self._config.num_envs, num_episodes)
        if self._pool is not None and self._pool.num_envs < num_envs:
            self.close()
        if self._pool is None:
            config = replace(
                self._config,
                num_envs=num_envs,
                batch_size=None,
                autoreset=Autoreset.NEXT_STEP,
                switches_autoreset=False,
                fails_late=True,
            )
            self._pool = make_pool(_first_envs(self._spec, num_envs, self._config.num_envs), config)
            self._pool.call_while_waiting(self._while_waiting)
            self._num_changes, self._given = 0, {}
        pool = self._pool
        for name, values in self._attributes.items():
            if self._given.get(name) is not values:  # set anew, it would undo a change
                pool.set_attr(name, values[: pool.num_envs])
                self._given[name] = values
        for change in self._changes.last:
            if change.number > self._num_changes:
                self._num_changes = pool.change(change)
        return pool


class EvaluationHung(Exception):
    """The evaluation's pool did not answer in time, and was closed."""


class _GuardedActor:
    """An Actor whose errors are the policy's."""

    def __init__(self, policy: Policy, pool: EnvPool, is_deterministic: bool) -> None:
        try:
            self._actor = Actor(policy, pool.single_action_space, pool.num_envs, is_deterministic)
        except UsageError:
            raise
        except Exception as error:
            raise PolicyError(f"the policy raised {type(error).__name__}: {error}") from error

    def begin(self, rows: Array) -> None:
        self._actor.begin(rows)

    def act(self, obs: Any, masks: dict[str, Any]) -> Any:
        try:
            return self._actor.act(obs, masks)
        except UsageError:
            raise
        except Exception as error:
            raise PolicyError(f"the policy raised {type(error).__name__}: {error}") from error


class _Progress:
    """Tells the head now and then how many episodes are played."""

    def __init__(self, order: int, between_steps: Callable[[], None], say: Callable[[Any], None]) -> None:
        self._order = order
        self._between_steps = between_steps
        self._say = say
        self._num_said = 0
        self._next_s = 0.0

    def before_step(self, num_done: int) -> None:
        self._between_steps()
        if num_done > self._num_said and time.monotonic() >= self._next_s:
            self._say(EvaluationProgress(order=self._order, num_done=num_done))
            self._num_said, self._next_s = num_done, time.monotonic() + PROGRESS_S


def _answer(order: Evaluate, episodes: Episodes) -> tuple[EvaluationReady, Arrays]:
    infos = ["list", *(plain_parts(info, "info") for info in episodes.infos)]
    return EvaluationReady(order=order.order, infos=infos), arrays_of(episodes)


def _first_envs(spec: EnvSpec, num_envs: int, num_all: int) -> EnvSpec:
    """The spec of the first `num_envs` of a worker's `num_all` envs."""
    factory = spec.factory[:num_envs] if spec.is_list else spec.factory
    kwargs = spec.kwargs
    if not isinstance(kwargs, Mapping):
        kwargs = [spec.kwargs_of(index, num_all) for index in range(num_envs)]
    return replace(spec, factory=factory, kwargs=kwargs)
