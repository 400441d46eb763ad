"""Collector: T steps of a worker's pool with the policy beside it -> the arrays of a rollout."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from envfleet.cluster.info_choice import InfoChoice
from envfleet.cluster.sync import probe_rows
from envfleet.cluster.wire.codec import BadMessage
from envfleet.cluster.wire.messages import RolloutInfos
from envfleet.cluster.wire.rollouts.row_checks import RowChecks
from envfleet.cluster.wire.spare_arrays import SpareArrays
from envfleet.cluster.worker.collecting.episode_changes import EpisodeChanges
from envfleet.cluster.worker.collecting.info_recorder import InfoRecorder
from envfleet.cluster.worker.collecting.policy_state import (
    PolicyError,
    PolicyState,
    Probing,
    asked,
    checked_values,
    values_of,
)
from envfleet.cluster.worker.collecting.recorder import Finals, Recorder, RunningEpisodes
from envfleet.contract.arrays import Array
from envfleet.contract.errors import EnvFailed, StepOnEndedEpisode
from envfleet.contract.infos.table import Infos
from envfleet.contract.policy import Policy
from envfleet.contract.spaces import SpaceTree
from envfleet.policies.action_masks import ActionMasks
from envfleet.pool.pool import EnvPool

NO_INFOS = InfoChoice(keys=())


class SavedCollector(NamedTuple):
    """What lasts from one rollout to the next, of either kind of collector."""

    obs: Sequence[Any]  # leaves of [num_envs, ...]
    episodes: Mapping[str, Array]  # see RunningEpisodes
    masks: tuple[Infos | None, str | None, Array | None]  # see ActionMasks
    memory: dict[str, Array] | None  # of a recurrent policy


class Collector:
    """Keeps what must last from one rollout to the next: the observation to act on, and the running episodes."""

    def __init__(
        self, pool: EnvPool, first_obs: Any, first_infos: Infos | None, changes: EpisodeChanges | None = None
    ) -> None:
        """`first_obs` is what the pool shows now; its envs reset themselves in the step that ends an episode."""
        self._pool = pool
        self._changes = EpisodeChanges(pool.num_envs) if changes is None else changes
        self._obs_tree = SpaceTree(pool.single_observation_space)
        self._action_tree = SpaceTree(pool.single_action_space)
        self._checks = RowChecks(self._obs_tree, self._action_tree)
        self._obs = first_obs
        self._spares = SpareArrays()
        self._episodes = RunningEpisodes(pool.num_envs)
        self._masks = ActionMasks(pool.num_envs, first_infos)
        self._memory: PolicyState | None = None
        self._restored: dict[str, Array] | None = None  # what the policy remembered, until it is built
        self._anew: set[int] = set()  # envs in other episodes since then

    def saved(self) -> SavedCollector:
        """For a checkpoint, between two rollouts."""
        memory = self._restored if self._memory is None else self._memory.saved
        obs = [np.array(leaf) for leaf in self._obs_tree.flatten(self._obs)]
        return SavedCollector(obs, self._episodes.saved(), self._masks.saved(), memory)

    def restore(self, saved: SavedCollector) -> None:
        """Go on from a checkpoint."""
        self._obs = self._obs_tree.unflatten(list(saved.obs))
        self._episodes.restore(saved.episodes)
        self._masks.restore(*saved.masks)
        self._restored = saved.memory

    def forget_memory(self) -> None:
        """The policy that will be built is not the one that was saved."""
        self._restored = None

    def collect(
        self,
        policy: Policy,
        num_steps: int,
        failures: list[Exception],
        between_steps: Callable[[], None],
        num_probes: int = 0,
        choice: InfoChoice = NO_INFOS,
    ) -> tuple[dict[str, Array], str | None, RolloutInfos]:
        """The arrays of a rollout, the kind of the policy's distribution on the probed rows, and the infos' keys.

        Envs that fail have truncated rows, and are told of in `failures`.
        """
        pool, num_envs = self._pool, self._pool.num_envs
        memory = self._memory_of(policy)
        recorder = Recorder(self._obs_tree, self._action_tree, num_steps, num_envs, self._spares)
        first_state = memory.rows(np.arange(num_envs))
        probing = Probing(probe_rows(num_steps, num_envs, num_probes), num_envs)
        finals = Finals()
        obs_bytes = sum(leaf[0].nbytes for leaf in recorder.obs)
        infos, masks = InfoRecorder(choice, num_steps, num_envs, obs_bytes), self._masks
        masks.begin(choice.action_mask, num_steps)
        self._changes.begin_rollout()
        for t in range(num_steps):
            between_steps()
            recorder.write_obs(t, self._obs)
            probing.see(t, memory)
            masks.write(t)
            acted = asked(policy.act, self._obs, **memory.argument(), **masks.argument())
            actions = recorder.write_acted(t, acted, num_envs)
            memory.remember(acted.state)
            result = received_from(partial(pool.step, actions), pool.recv, failures)
            self._obs, rewards, terminated, truncated, info = result
            recorder.write_results(t, rewards, terminated, truncated)
            info.pop("env_id", None)  # recv() after an error adds it
            infos.write(t, None, info)
            self._episodes.add(rewards)
            ended = terminated | truncated
            if ended.any():
                rows = ended.nonzero()[0]
                steps = [t] * len(rows)
                final_obs = recorder.final_obs(info, num_envs, rows, steps, rows)
                infos.write_finals(rows, info)
                finals.add(steps, rows, final_obs, memory.rows(rows), self._episodes, rows)
                memory.forget(rows)
                self._changes.see(info, t)
            masks.see(info)  # last: it raises if an env has no mask
        recorder.write_obs(num_steps, self._obs)
        require_actions(self._checks, recorder)
        arrays = self._arrays(policy, memory, recorder, finals)
        if (changes := self._changes.rows(num_steps)) is not None:
            arrays["changes"] = changes
        arrays |= {f"state.{name}": rows for name, rows in first_state.items()}
        arrays |= masks.arrays()
        shown, kind = probing.shown(policy, self._obs_tree, recorder.obs, arrays.get("action_mask"))
        names, info_arrays = infos.packed()
        return arrays | shown | info_arrays, kind, names

    def running(self, env_id: int) -> dict[str, Any]:
        """What belongs to the running episode of an env, besides the env's own state; in plain values."""
        return {**self._episodes.of(env_id), **self._masks.of(env_id)}

    def restored(self, obs: Any, running: Mapping[int, Mapping[str, Any]]) -> None:
        """Envs were put back into saved states.

        Args:
            obs: What each env of the pool shows now.
            running: By env id: what running() gave when its state was saved; empty if that is not known.
        """
        self._obs = obs
        self._episodes.restored(running)
        self._masks.restored(running)
        if self._memory is not None:
            self._memory.forget(np.array(list(running), np.intp))
        else:
            self._anew.update(running)

    def _memory_of(self, policy: Policy) -> PolicyState:
        if self._memory is None or self._memory.policy is not policy:
            self._memory = PolicyState(policy, self._pool.num_envs)
            if self._restored is not None:
                self._memory.restore(self._restored)
                self._memory.forget(np.array(sorted(self._anew), np.intp))
                self._restored = None
                self._anew.clear()
        else:
            self._memory.begin_rollout()
        return self._memory

    def _arrays(self, policy: Policy, memory: PolicyState, recorder: Recorder, finals: Finals) -> dict[str, Array]:
        final_leaves = finals.leaves(self._obs_tree)
        arrays = recorder.arrays(finals, final_leaves)
        if "extra.values" in arrays:
            next_values = values_of(policy, self._obs, memory.argument(), self._pool.num_envs)
            if next_values is not None:
                arrays["next_values"] = next_values
                arrays["final_values"] = final_values(policy, self._obs_tree.unflatten(final_leaves), finals)
        return arrays


def final_values(policy: Policy, final_obs: Any, finals: Finals) -> Any:
    """[F] float32: what the policy thinks of the last observations of episodes."""
    num_finals = len(finals.ends)
    if not num_finals:
        return np.zeros(0, np.float32)
    return checked_values(policy, final_obs, finals.state(), num_finals)


def require_actions(checks: RowChecks, recorder: Recorder) -> None:
    """Once for all steps: an env may take choices that its space does not have, the head refuses them."""
    try:
        checks.require_actions(recorder.actions)
    except BadMessage as error:
        raise PolicyError(f"what the policy's act() returned cannot be used: {error}") from None


def received_from(receive: Callable[[], Any], again: Callable[[], Any], failures: list[Exception]) -> Any:
    """A batch, asked for `again` after an error. An env that failed has a row; the caller of the rollout hears of it.

    Raises StepOnEndedEpisode for an env whose reset has failed: it has no episode. The batch was received then.
    """
    ended: StepOnEndedEpisode | None = None
    while True:
        try:
            result = receive()
        except EnvFailed as error:
            failures.append(error)
        except StepOnEndedEpisode as error:
            ended = error
        else:
            if ended is not None:
                raise ended
            return result
        receive = again
