"""evaluate(): whole episodes of a policy, each with a seed of its own. A cluster's workers play theirs with it, too."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, VectorEnv

from envfleet.contract.arrays import Array
from envfleet.contract.checks import positive_or_none, true_or_false, whole_number
from envfleet.contract.errors import PoolTimeout, UsageError
from envfleet.contract.evaluation import Episodes, Evaluation, fresh_seed, seeds_of_episodes
from envfleet.contract.infos.table import Info, InfoTable, mask_key
from envfleet.contract.policy import Policy, Recurrent
from envfleet.contract.spaces import SpaceTree
from envfleet.policies.action_masks import ActionMasks, checked_key
from envfleet.policies.adapting import as_policy
from envfleet.policies.deterministic import deterministic_act
from envfleet.policies.seeding import random_numbers_kept
from envfleet.pool.pool import EnvPool


def evaluate(
    envs: VectorEnv[Any, Any, Any],
    agent: Any,
    num_episodes: int = 100,
    *,
    deterministic: bool = True,
    seed: int | None = None,
    num_recorded: int = 0,
    action_mask: str | None = None,
    timeout_s: float | None = 300.0,
) -> Evaluation:
    """Play exactly `num_episodes` whole episodes, and return what they came to.

    Episodes are assigned before they start: env i of N plays episodes i, i + N, i + 2N, ..., each with a seed of its
    own, so that short ones do not count more often. For a deterministic policy and equal envs the result depends on
    `seed` alone, not on the number of envs or their speed. All envs are reset: call `reset()` before you step them
    again.

    Args:
        envs: A pool, or another vector env of Gymnasium's whose envs can be reset one by one.
        agent: The policy; as for `ClusterEnv.rollout`.
        num_episodes: Number of episodes.
        deterministic: Act with the mode of the distribution, the mean, the best Q value; False: as in training.
        seed: From which the seeds of the episodes are made; None: a new one, which `Evaluation.seed` names.
        num_recorded: Number of episodes whose frames are kept, the first ones. The envs need
            `render_mode="rgb_array"`.
        action_mask: The key of the action masks in the envs' infos, which the policy gets; None: it gets none.
        timeout_s: Seconds without a finished episode before PoolTimeout; None: no limit.

    Returns:
        Returns, lengths, ends, infos of the last steps and frames of the episodes.

    Raises:
        UsageError: `agent` is no policy or cannot act deterministically, envs cannot be reset one by one, the pool is
            asynchronous, the infos have no masks under this key, or an argument is wrong.
        EnvFailed: An env raised, or its process died.
        PoolTimeout: No episode was finished for `timeout_s`, or an env hangs.
    """
    _require_steppable(envs)
    num_episodes, num_recorded = checked_counts(num_episodes, num_recorded, envs.render_mode)
    positive_or_none("timeout_s", timeout_s)
    seed = fresh_seed() if seed is None else whole_number("seed", seed, at_least=0, at_most=None)
    seeds = seeds_of_episodes(seed, num_episodes)
    true_or_false("deterministic", deterministic)
    checked_key(action_mask)
    actor = Actor(as_policy(agent), envs.single_action_space, envs.num_envs, deterministic)
    player = EpisodePlayer(envs, actor, seeds, num_recorded, action_mask)
    deadline = _Deadline(num_episodes, timeout_s)
    if not deterministic:
        return Evaluation.of(player.play(deadline.check), seeds, seed)
    with random_numbers_kept():  # a module may draw, and throw away what it has drawn
        return Evaluation.of(player.play(deadline.check), seeds, seed)


def checked_counts(num_episodes: int, num_recorded: int, render_mode: str | None) -> tuple[int, int]:
    """The numbers of episodes to play and to record; UsageError if there are no frames to record."""
    num_episodes = whole_number("num_episodes", num_episodes)
    num_recorded = min(whole_number("num_recorded", num_recorded, at_least=0), num_episodes)
    if num_recorded and render_mode != "rgb_array":
        raise UsageError(f"frames need envs with render_mode='rgb_array'; these have {render_mode!r}")
    return num_episodes, num_recorded


class Acting(Protocol):
    """What chooses the actions of all envs. See Actor."""

    def begin(self, rows: Array) -> None:
        """Begin an episode in each of these envs."""

    def act(self, obs: Any, masks: dict[str, Any]) -> Any:
        """Choose an action for each env; `masks` is the keyword argument with action masks, or empty."""


class Actor:
    """A policy, and what it remembers of each env."""

    def __init__(self, policy: Policy, action_space: spaces.Space[Any], num_envs: int, is_deterministic: bool) -> None:
        self._act: Callable[..., Any] = deterministic_act(policy, action_space) if is_deterministic else policy.act
        self._actions = SpaceTree(action_space)
        self._num_envs = num_envs
        self._initial: dict[str, Array] | None = None
        if isinstance(policy, Recurrent):
            self._initial = {name: np.array(rows) for name, rows in policy.initial_state(num_envs).items()}
        self._state = self._initial

    def begin(self, rows: Array) -> None:
        """Begin an episode in each of these envs: the policy remembers nothing of them."""
        if self._initial is None or self._state is None:
            return
        self._state = {name: np.array(array) for name, array in self._state.items()}
        for name, array in self._state.items():
            array[rows] = self._initial[name][rows]

    def act(self, obs: Any, masks: dict[str, Any]) -> Any:
        """Choose an action for each env, a batch in the form of the space. UsageError if they do not fit it."""
        if self._state is None:
            actions = self._act(obs, **masks).actions
        else:
            acted = self._act(obs, state={name: rows.copy() for name, rows in self._state.items()}, **masks)
            self._state = self._checked_state(acted.state)
            actions = acted.actions
        leaves = self._actions.require_batch(actions, self._num_envs, "actions")
        return self._actions.unflatten([tuple(leaf) if isinstance(leaf, list) else leaf for leaf in leaves])

    def _checked_state(self, state: Any) -> dict[str, Array]:
        assert self._initial is not None
        came = {name: np.asarray(rows) for name, rows in (state or {}).items()}
        expected = {name: rows.shape for name, rows in self._initial.items()}
        if {name: rows.shape for name, rows in came.items()} != expected:
            got = {name: rows.shape for name, rows in came.items()} or None
            raise UsageError(f"the state after acting must be that of initial_state(), {expected}; got {got}")
        return came


class EpisodePlayer:
    """Plays given episodes in the envs of one vector env: env i of N those at places i, i + N, i + 2N, ..."""

    def __init__(
        self,
        envs: VectorEnv[Any, Any, Any],
        actor: Acting,
        seeds: Sequence[int],
        num_recorded: int = 0,
        action_mask: str | None = None,
    ) -> None:
        """Play nothing yet.

        Args:
            envs: All of them are reset.
            actor: Chooses the actions.
            seeds: Of the episodes, one each.
            num_recorded: Number of episodes whose frames are kept, the first ones.
            action_mask: The key of the action masks in the infos; None: there are none.
        """
        self._envs = envs
        self._action_mask = action_mask
        self._actor = actor
        self._seeds = seeds
        self._num_recorded = num_recorded
        self._obs_tree = SpaceTree(envs.single_observation_space)
        self._action_tree = SpaceTree(envs.single_action_space)
        self._steps_some = isinstance(envs, EnvPool) and envs.steps_some
        self._autoreset = AutoresetMode(envs.metadata["autoreset_mode"])
        num_episodes = len(seeds)
        self._episodes = np.arange(envs.num_envs)  # which one each env plays; len(seeds) or more: none
        self._returns = np.zeros(num_episodes)
        self._lengths = np.zeros(num_episodes, np.int64)
        self._terminated = np.zeros(num_episodes, np.bool_)
        self._truncated = np.zeros(num_episodes, np.bool_)
        self._infos: dict[int, Info] = {}  # of finished episodes
        self._frames: list[list[Array]] = [[] for _ in range(num_recorded)]

    def play(self, before_step: Callable[[int], None] = lambda num_done: None) -> Episodes:
        """Play all episodes.

        Args:
            before_step: Called with the number of finished episodes before each step; what it raises is passed on.
        """
        num_envs = self._envs.num_envs
        seeds = [self._seeds[env % len(self._seeds)] for env in range(num_envs)]
        obs, infos = self._envs.reset(seed=seeds)  # type: ignore[arg-type]  # Gymnasium's vector envs take lists
        self._masks = ActionMasks(num_envs, infos)
        self._masks.begin(self._action_mask, num_steps=0)
        self._actor.begin(np.arange(num_envs))
        self._record(np.arange(num_envs))
        while len(self._infos) < len(self._seeds):
            before_step(len(self._infos))
            obs = self._step(obs)
        return Episodes(
            self._returns,
            self._lengths,
            self._terminated,
            self._truncated,
            [self._infos[episode] for episode in range(len(self._seeds))],
            [np.stack(frames) for frames in self._frames],
        )

    def _step(self, obs: Any) -> Any:
        """One step of the envs that have an episode. Returns what all envs show."""
        actions = self._actor.act(obs, self._masks.argument())
        envs = np.flatnonzero(self._episodes < len(self._seeds))
        if len(envs) == self._envs.num_envs or not self._steps_some:
            obs, rewards, terminated, truncated, infos = self._envs.step(actions)
            rows = envs  # of the arrays
        else:
            step = self._envs.step(self._action_tree.select(actions, envs), envs)  # type: ignore[call-arg]
            some_obs, rewards, terminated, truncated, infos = step
            obs = self._with_rows(obs, envs, some_obs)
            rows = np.arange(len(envs))
        has_ended = terminated | truncated
        episodes, ended = self._episodes[envs], has_ended[rows]
        self._returns[episodes] += rewards[rows]
        self._lengths[episodes] += 1
        # With same-step autoreset the last frame of an episode is gone.
        self._record(envs[~ended] if self._autoreset is AutoresetMode.SAME_STEP else envs)
        table = InfoTable(len(rewards), infos)
        self._see_masks(table, rows[~ended], envs[~ended])
        idle: Array = np.zeros(0, np.int64)  # envs without an episode that were stepped, and must be reset
        if not self._steps_some:
            all_envs = np.arange(self._envs.num_envs)
            others = np.setdiff1d(all_envs, envs[~ended])
            self._see_masks(table, others, others, must_have=False)
            if self._autoreset is AutoresetMode.DISABLED:
                idle = np.setdiff1d(all_envs[has_ended], envs)
        if ended.any():
            self._finish(envs[ended], rows[ended], terminated, truncated, table)
        return self._begin(obs, envs[ended], idle)

    def _finish(self, envs: Array, rows: Array, terminated: Array, truncated: Array, infos: InfoTable) -> None:
        """Note how the episodes of `envs` ended; `rows` are theirs in the arrays."""
        episodes = self._episodes[envs]
        self._terminated[episodes] = terminated[rows]
        self._truncated[episodes] = truncated[rows]
        last = infos.final_infos if self._autoreset is AutoresetMode.SAME_STEP else infos
        its_infos = last.select(rows)  # a copy: the batch's memory is not kept
        for index, episode in enumerate(episodes.tolist()):
            self._infos[episode] = its_infos.row(index)
        self._episodes[envs] += self._envs.num_envs

    def _begin(self, obs: Any, envs: Array, idle: Array) -> Any:
        """Begin the next episodes of `envs`, as far as there are any; reset `idle`. Returns what all envs show."""
        has_next = self._episodes[envs] < len(self._seeds)
        must_reset = not self._steps_some and self._autoreset is AutoresetMode.DISABLED  # all envs are stepped on
        chosen = np.concatenate([envs if must_reset else envs[has_next], idle])
        if not len(chosen):
            return obs
        mask = np.zeros(self._envs.num_envs, np.bool_)
        mask[chosen] = True
        seeds: list[int | None] = [None] * self._envs.num_envs
        for env in envs[has_next].tolist():
            seeds[env] = self._seeds[self._episodes[env]]
        obs, infos = self._envs.reset(seed=seeds, options={"reset_mask": mask})  # type: ignore[arg-type]
        self._see_masks(InfoTable(self._envs.num_envs, infos), chosen, chosen)
        self._actor.begin(chosen)
        self._record(envs[has_next])
        return obs

    def _see_masks(self, infos: InfoTable, rows: Array, envs: Array, must_have: bool = True) -> None:
        """Take the action masks of what `envs` show now, or of those that have one; `rows` are theirs in the infos."""
        if self._action_mask is None:
            return
        if not must_have:
            has: Any = infos.columns.get(mask_key(self._action_mask), np.zeros(infos.num_rows, np.bool_))
            rows, envs = rows[has[rows]], envs[has[rows]]
        if len(envs):
            self._masks.see(infos.select(rows).columns, envs)

    def _record(self, envs: Array) -> None:
        """Keep a frame of each of these envs whose episode is recorded."""
        envs = envs[self._episodes[envs] < self._num_recorded]
        if not len(envs):
            return
        if isinstance(self._envs, EnvPool):
            frames = self._envs.render(envs)
        else:
            all_frames = self._envs.render()
            frames = None if all_frames is None else tuple(all_frames[env] for env in envs.tolist())
        for env, frame in zip(envs.tolist(), frames or [None] * len(envs), strict=True):
            if not isinstance(frame, np.ndarray):
                raise UsageError(f"frames must be arrays; render() of env {env} gave {type(frame).__name__}")
            self._frames[self._episodes[env]].append(frame.copy())

    def _with_rows(self, obs: Any, envs: Array, some_obs: Any) -> Any:
        """What all envs show, after a step of `envs`."""
        leaves = []
        for old, new in zip(self._obs_tree.flatten(obs), self._obs_tree.flatten(some_obs), strict=True):
            column: Any = list(old) if isinstance(old, tuple) else np.array(old)
            for row, env in enumerate(envs.tolist()):
                column[env] = new[row]
            leaves.append(tuple(column) if isinstance(old, tuple) else column)
        return self._obs_tree.unflatten(leaves)


class _Deadline:
    """The longest time without a finished episode."""

    def __init__(self, num_episodes: int, timeout_s: float | None) -> None:
        self._num_episodes = num_episodes
        self._timeout_s = math.inf if timeout_s is None else timeout_s
        self._num_done = 0
        self._since_s = time.monotonic()

    def check(self, num_done: int) -> None:
        now_s = time.monotonic()
        if num_done > self._num_done:
            self._num_done, self._since_s = num_done, now_s
        elif now_s - self._since_s > self._timeout_s:
            raise PoolTimeout(
                f"no episode was finished within {self._timeout_s:g} s; {num_done} of {self._num_episodes} are",
                "The evaluation is given up: pass a longer timeout_s, or make the envs with max_episode_steps",
            )


def _require_steppable(envs: Any) -> None:
    if not isinstance(envs, VectorEnv):
        raise UsageError(f"envs must be a pool or another gymnasium VectorEnv; got {type(envs).__name__}")
    if hasattr(envs, "evaluate"):
        raise UsageError(f"a {type(envs).__name__} evaluates by itself: call its evaluate(agent, ...)")
    if isinstance(envs, EnvPool) and envs.batch_size < envs.num_envs:
        raise UsageError(
            f"episodes cannot be assigned in an asynchronous pool (batch_size={envs.batch_size} of {envs.num_envs} "
            f"envs): make() one without batch_size for evaluations"
        )
