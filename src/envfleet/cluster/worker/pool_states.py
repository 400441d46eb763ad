"""PoolStates: states of a worker's envs: single ones that the caller asks for, and all of them in a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any

import numpy as np

from envfleet.cluster.wire.messages import SetState
from envfleet.cluster.wire.states import states_from_plain
from envfleet.cluster.worker.collecting.collector import SavedCollector
from envfleet.cluster.worker.plain_answers import kept_infos
from envfleet.cluster.worker.pool_place import BEGUN, Episodes
from envfleet.cluster.worker.worker_pool import WorkerPool
from envfleet.contract.episode import Autoreset
from envfleet.contract.errors import EnvFailed, NotReset, PoolTimeout, UsageError
from envfleet.contract.state import EnvState


class PoolStates:
    """Saves and restores the envs, and what belongs to their episodes besides them."""

    def __init__(self, pool: WorkerPool) -> None:
        self._pool = pool
        self._place = pool.place

    def saved(self) -> tuple[dict[str, Any], str | None]:
        """For a checkpoint, between two orders: plain values; and why envs must begin anew, None: they need not."""
        pool, place = self._pool, self._place
        envs, why = self._saved_envs()
        saved: dict[str, Any] = {
            "autoreset": place.autoreset.value,
            "episodes": place.episodes.name,
            "epoch": place.epoch,
            "num_beginnings": place.num_beginnings,
            "seed": place.seed,
            "reset_arguments": place.reset_arguments,
            "reset_infos": kept_infos(place.reset_infos),
            "last_obs": None if place.last_obs is None else pool.obs.flatten(place.last_obs),
            "has_ended": place.has_ended.tolist(),
            "changes": place.changes.saved,
            "envs": envs,
            "collector": None,
        }
        if place.collector is not None:
            obs, episodes, (infos, key, current), memory = place.collector.saved()
            masks = None if infos is None else kept_infos(infos), key, current
            saved["collector"] = list(obs), dict(episodes), masks, memory
        return saved, why

    def _saved_envs(self) -> tuple[list[dict[str, Any]] | None, str | None]:
        pool, place = self._pool, self._place
        try:
            states = pool.envs.get_state()
        except (UsageError, EnvFailed, PoolTimeout) as error:  # PoolTimeout: the pool goes on, its states are missing
            is_nothing_lost = place.episodes in (Episodes.NONE, Episodes.CUT_SHORT)
            return None, None if is_nothing_lost else str(error)
        return [{each.name: getattr(state, each.name) for each in fields(state)} for state in states], None

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Go on where the worker was whose pool was saved. Raises UsageError if a state does not fit; nothing is lost.

        A pool whose envs could not be saved begins anew, with seeds of its own.
        """
        pool, place = self._pool, self._place
        episodes, autoreset = Episodes[saved["episodes"]], Autoreset(saved["autoreset"])
        if saved["envs"] is None and episodes not in (Episodes.NONE, Episodes.CUT_SHORT):
            return
        if autoreset is not place.autoreset:
            pool.switch_to(autoreset)
        if saved["envs"] is not None:
            pool.envs.set_state([EnvState(**each) for each in saved["envs"]])
        place.episodes, place.epoch, place.num_beginnings = episodes, saved["epoch"], saved["num_beginnings"]
        place.seed, place.reset_arguments = saved["seed"], saved["reset_arguments"]
        place.reset_infos = saved["reset_infos"]
        place.last_obs = None if saved["last_obs"] is None else pool.obs.unflatten(saved["last_obs"])
        place.has_ended = np.array(saved["has_ended"], np.bool_)
        place.changes.restore(saved["changes"])
        if saved["collector"] is not None:
            collector = SavedCollector(*saved["collector"])
            place.collector = pool.new_collector(pool.obs.unflatten(list(collector.obs)), {})
            place.collector.restore(collector)

    def get_state(self, env_ids: list[int]) -> list[EnvState | None]:
        """A state for each env of the pool, None for those that are not in `env_ids`."""
        pool, place = self._pool, self._place
        pool.require_idle()
        if place.episodes not in BEGUN:
            raise NotReset("reset the envs before you save their states; those of a lost worker have begun anew")
        states: list[EnvState | None] = [None] * pool.envs.num_envs
        changes = place.changes.of(np.arange(pool.envs.num_envs)).tolist()
        for env_id, state in zip(env_ids, pool.envs.get_state(env_ids), strict=True):
            running = {} if place.collector is None else place.collector.running(env_id)
            states[env_id] = replace(state, running={**running, "change": changes[env_id]})
        return states

    def set_state(self, order: SetState) -> None:
        """Put envs back into saved states. Without states: see whether such ones would fit."""
        pool, place = self._pool, self._place
        pool.require_idle()
        pool.envs.require_fitting(order.env_names, order.env_ids)
        if order.states is None:
            return
        states = dict(zip(order.env_ids, states_from_plain(order.states), strict=True))
        try:
            pool.envs.set_state(list(states.values()), order.env_ids)
            obs = pool.envs.observations()
        except EnvFailed:
            place.episodes, place.collector = Episodes.CUT_SHORT, None
            raise
        num_changes = pool.num_changes
        for env_id, state in states.items():
            place.has_ended[env_id] = state.has_ended
            place.changes.restored(env_id, min(int(state.running.get("change", 0)), num_changes))
        place.last_obs = obs
        place.collector = place.collector or pool.new_collector(obs, None)
        place.collector.restored(obs, {env_id: state.running for env_id, state in states.items()})
        place.episodes = Episodes.RESTORED
