"""WorkerPool: a worker's pool: built, switched to the mode of an order, given up if it hangs, ready for a rollout."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from envfleet.cluster.wire.messages import ChangeEnvs, EnvFailure, Welcome
from envfleet.cluster.worker.collecting.collector import Collector
from envfleet.cluster.worker.collecting.episode_changes import EpisodeChanges
from envfleet.cluster.worker.collecting.first_ready import FirstReadyCollector
from envfleet.cluster.worker.plain_answers import env_failure
from envfleet.cluster.worker.pool_builder import PoolBuilder
from envfleet.cluster.worker.pool_place import Episodes, PoolPlace
from envfleet.contract.arrays import Arrays
from envfleet.contract.episode import Autoreset
from envfleet.contract.errors import EnvFailed, PoolTimeout, StepOnEndedEpisode
from envfleet.contract.infos.table import Infos
from envfleet.contract.live_changes import LiveChanges
from envfleet.contract.pool_config import Line, PoolConfig
from envfleet.contract.spaces import SpaceTree
from envfleet.contract.spec import EnvSpec
from envfleet.pool.pool import EnvPool

logger = logging.getLogger("envfleet.worker")

HUNG = "the pool of its worker hung"


class WorkerPool:
    """Builds the pool once: orders say in which autoreset mode they want it.

    An env that hangs fails, and only that one (see LateEnvs). Where that is not possible, native envs for example, the
    pool is built again. PoolStepping and PoolStates use it, too, and note in `place` where they have left the envs.

    Attributes:
        plan: What the head has said of the envs and the pool.
        place: Where the envs are.
        envs: The pool; closed: it was given up.
        obs: The observation space of an env.
        actions: Its action space.
    """

    def __init__(self, welcome: Welcome, arrays: Arrays, while_waiting: Callable[[], None] = lambda: None) -> None:
        """An env that cannot be built raises here. `while_waiting` is called now and then while envs are at work."""
        self._builder = PoolBuilder(welcome, arrays, while_waiting)
        self.plan = welcome.plan
        self.place = PoolPlace(autoreset=welcome.plan.pool.autoreset, epoch=welcome.epoch)
        self._build()

    def close(self) -> None:
        """Close the pool and all of its envs."""
        self.envs.close()

    def forget_memory(self) -> None:
        """The policy that will be built is not the one that was saved."""
        if self.place.collector is not None:
            self.place.collector.forget_memory()

    def collector(self, failures: list[Exception]) -> Collector | FirstReadyCollector:
        """Ready for a rollout. Envs that were reset and not stepped since begin where they are.

        An env whose reset fails is told of in `failures`, and one that failed while a checkpoint waited for it.
        """
        failures += self.place.untold
        self.place.untold.clear()
        if self.place.episodes is Episodes.RESTORED and not self.envs.closed:
            return self._restored_collector(failures)
        was_fresh = self.place.episodes is Episodes.FRESH
        if self.envs.closed or self.place.autoreset is not Autoreset.SAME_STEP:
            has_same_envs = self.switch_to(Autoreset.SAME_STEP)
            if was_fresh and has_same_envs:
                obs, infos = self.place.last_obs, self.place.reset_infos
            elif was_fresh:
                obs, infos = self._begun(lambda: self.envs.reset(**self.place.reset_arguments), failures)
            else:
                obs, infos = self._begun(self.first_reset, failures)
            self.place.collector = self.new_collector(obs, infos)
        elif self.place.collector is None:
            obs, infos = self.place.last_obs, self.place.reset_infos
            if not was_fresh:
                obs, infos = self._begun(self.first_reset, failures)
            self.place.collector = self.new_collector(obs, infos)
        self.place.episodes, self.place.hung = Episodes.RUNNING, None
        return self.place.collector

    def _restored_collector(self, failures: list[Exception]) -> Collector | FirstReadyCollector:
        """Goes on with the episodes that run; where one had ended, another is begun first."""
        assert self.place.collector is not None
        if self.place.autoreset is not Autoreset.SAME_STEP:
            self.switch_to(Autoreset.SAME_STEP)
        ended = np.flatnonzero(self.place.has_ended)
        if len(ended):
            mask = self.place.has_ended.copy()
            obs, _ = self._begun(lambda: self.envs.reset(options={"reset_mask": mask}), failures)
            self.place.collector.restored(obs, {env_id: {} for env_id in ended.tolist()})
            self.place.has_ended[:] = False
        self.place.episodes, self.place.hung = Episodes.RUNNING, None
        return self.place.collector

    def versions_in_use(self, stream: int) -> set[int]:
        """The versions of rows that the next order of this stream goes on with."""
        collector = self.place.collector
        return collector.versions_in_use(stream) if isinstance(collector, FirstReadyCollector) else set()

    def drop_collector(self) -> None:
        """The next rollout resets all envs. What envs are still at work on is dropped."""
        self.place.collector = None
        if not self.envs.closed:
            self.envs.drop_results()

    def require_open(self, autoreset: Autoreset | None = None) -> None:
        """Build another pool if the last one was given up; use the autoreset mode of the order."""
        if self.envs.closed or autoreset not in (None, self.place.autoreset):
            self.switch_to(autoreset or self.place.autoreset)

    def require_idle(self, autoreset: Autoreset | None = None) -> None:
        """As require_open(), and wait for envs that a stream has left at work. The stream may go on afterwards."""
        if isinstance(self.place.collector, FirstReadyCollector) and not self.envs.closed:
            failures: list[Exception] = []
            try:
                self.place.collector.land(failures)
            except StepOnEndedEpisode as error:
                self.drop_collector()
                failures.append(error)
            for each in failures:
                logger.warning("of an env that a stream has left at work: %s", each)
            self.place.untold += [each for each in failures if isinstance(each, EnvFailed)]
        self.require_open(autoreset)

    def give_up(self, error: PoolTimeout) -> str:
        """Close a pool that hangs; the next order has another one built. Returns what happened."""
        text = f"{HUNG}, and another one is built (envs are counted within the worker here): {error.report}"
        env_id = error.env_ids[0] if error.env_ids else 0
        self.place.hung = EnvFailed(text, env_id=env_id)
        self.place.num_hung += 1
        self.envs.close(terminate=True)
        return text

    def set_attr(self, name: str, values: list[Any]) -> None:
        """Of each env, also if the pool is built anew."""
        self.require_idle()
        self.envs.set_attr(name, values)
        self._builder.attributes[name] = values

    def change(self, order: ChangeEnvs) -> None:
        """Have each env apply a change in its next reset, also if the pool is built anew."""
        change = self._builder.add_change(order)
        if change is not None and not self.envs.closed:
            self.envs.change(change)

    def failure(self, error: Exception) -> EnvFailure:
        """What the head is told of an env that failed."""
        return env_failure(error, self.plan.first_env_id)

    @property
    def num_changes(self) -> int:
        """The number of the last live change that envs were told of."""
        return self._builder.num_changes

    @property
    def env_settings(self) -> tuple[EnvSpec, PoolConfig, Mapping[str, list[Any]], LiveChanges]:
        """What another pool of such envs needs: spec, settings, attributes and changes, which may become more."""
        return self._builder.spec, self.plan.pool, self._builder.attributes, self._builder.changes

    def switch_to(self, autoreset: Autoreset) -> bool:
        """Use another autoreset mode, from the next reset on. False if the envs are new ones."""
        if self.envs.closed:
            self.place.autoreset = autoreset
            self._build()
            return False
        if self.place.episodes is Episodes.RUNNING:
            logger.info("the pool goes on in autoreset mode %s: running episodes end here", autoreset.name)
        has_same_envs = self.envs.switch_autoreset(autoreset)
        self.place.autoreset = autoreset
        if self.place.episodes is not Episodes.RESTORED or not has_same_envs:
            self.place.begin_anew(self.plan)
        return has_same_envs

    def first_reset(self) -> tuple[Any, dict[str, Any]]:
        """Reset all envs, with the seed that is meant for the first reset without seeds of its own."""
        seed, self.place.seed = self.place.seed, None
        self.place.has_ended[:] = False
        return self.envs.reset(seed=seed)

    def new_collector(self, obs: Any, infos: Infos | None) -> Collector | FirstReadyCollector:
        """For envs that show `obs`; `infos` are those of the same results, None: they are not known."""
        kind = FirstReadyCollector if self.plan.pool.line is Line.FIRST_READY else Collector
        return kind(self.envs, obs, infos, self.place.changes)

    # -- inside --

    def _build(self) -> None:
        self.envs: EnvPool = self._builder.build(self.place.autoreset)
        self.obs = SpaceTree(self.envs.single_observation_space)
        self.actions = SpaceTree(self.envs.single_action_space)
        self.place.changes = EpisodeChanges(self.envs.num_envs)
        self.place.has_ended = np.zeros(self.envs.num_envs, np.bool_)
        self.place.begin_anew(self.plan)

    def _begun(self, reset: Callable[[], Any], failures: list[Exception]) -> tuple[Any, Infos]:
        """The observations and infos with which a rollout begins."""
        result = received(reset, self.envs, failures)  # after a failure, recv() has the results of a step
        self.place.changes.see(result[-1])
        return result[0], result[-1]


def received(call: Callable[[], Any], envs: EnvPool, failures: list[Exception]) -> Any:
    """The result of a reset or step. Envs that failed have rows all the same; who asked hears of them."""
    try:
        return call()
    except (EnvFailed, StepOnEndedEpisode) as error:
        failures.append(error)
    while True:
        try:
            return envs.recv()
        except (EnvFailed, StepOnEndedEpisode) as error:
            failures.append(error)
