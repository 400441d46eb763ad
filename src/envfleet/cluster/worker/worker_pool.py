"""WorkerPool: a worker's pool as the head sees it: reset, step and rollouts in any mode, also after a loss."""

from __future__ import annotations

import enum
import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields, replace
from typing import Any

import msgspec
import numpy as np

from envfleet.cluster.wire.messages import ChangeEnvs, EnvFailure, PoolPlan, Reset, RowsReady, SetState, Step, Welcome
from envfleet.cluster.wire.plain_values import from_plain
from envfleet.cluster.wire.rollouts.rollout_form import FIXED
from envfleet.cluster.wire.states import states_from_plain
from envfleet.cluster.worker.collecting.collector import Collector, SavedCollector
from envfleet.cluster.worker.collecting.episode_changes import EpisodeChanges
from envfleet.cluster.worker.collecting.first_ready import FirstReadyCollector
from envfleet.cluster.worker.plain_answers import env_failure, kept_infos, plain_parts
from envfleet.cluster.worker.pool_builder import PoolBuilder
from envfleet.contract.arrays import Array, Arrays
from envfleet.contract.episode import Autoreset
from envfleet.contract.errors import EnvFailed, NotReset, PoolTimeout, StepOnEndedEpisode, UsageError
from envfleet.contract.infos.table import Infos, InfoTable
from envfleet.contract.live_changes import LiveChanges
from envfleet.contract.pool_config import Line, PoolConfig
from envfleet.contract.spaces import SpaceTree
from envfleet.contract.spec import EnvSpec
from envfleet.contract.state import EnvState
from envfleet.pool.pool import EnvPool

logger = logging.getLogger("envfleet.worker")

LOST = "the worker that ran it was lost"
HUNG = "the pool of its worker hung"


class Episodes(enum.Enum):
    """How it is with the episodes of this worker's envs."""

    NONE = enum.auto()  # never reset since the pool was built
    CUT_SHORT = enum.auto()  # the head was told that they ended with an earlier process or pool; to be reset next
    FRESH = enum.auto()  # reset by the head, and not stepped since
    RESTORED = enum.auto()  # put back into saved states, and not stepped since: they go on in any autoreset mode
    RUNNING = enum.auto()


class WorkerPool:
    """Builds the pool once: orders say in which autoreset mode they want it.

    An env that hangs fails, and only that one (see LateEnvs). Where that is not possible, native envs for example, the
    pool is built again.
    """

    def __init__(self, welcome: Welcome, arrays: Arrays, while_waiting: Callable[[], None] = lambda: None) -> None:
        """An env that cannot be built raises here. `while_waiting` is called now and then while envs are at work."""
        self._builder = PoolBuilder(welcome, arrays, while_waiting)
        self._plan = welcome.plan
        self._epoch = welcome.epoch
        self._num_beginnings = 0
        self._autoreset = welcome.plan.pool.autoreset
        self._reset_arguments: dict[str, Any] = {}
        self._last_obs: Any = None
        self._reset_infos: Infos = {}  # of the last reset of all envs
        self._seed: int | None = None  # for the first reset that brings none
        self._hung: EnvFailed | None = None  # the last pool was given up, and the head was sent no rows since
        self._num_hung = 0  # pools that were given up since an episode was finished
        self._collector: Collector | FirstReadyCollector | None = None
        self._untold: list[EnvFailed] = []  # of envs that a stream had left at work; the next rollout tells of them
        self._has_ended: Array = np.zeros(0, np.bool_)  # [num_envs]: envs whose next step is a reset
        self._episodes = Episodes.NONE
        self._build()

    def close(self) -> None:
        """Close the pool and all of its envs."""
        self.envs.close()

    def saved(self) -> tuple[dict[str, Any], str | None]:
        """For a checkpoint, between two orders: plain values; and why envs must begin anew, None: they need not."""
        envs, why = self._saved_envs()
        saved: dict[str, Any] = {
            "autoreset": self._autoreset.value,
            "episodes": self._episodes.name,
            "epoch": self._epoch,
            "num_beginnings": self._num_beginnings,
            "seed": self._seed,
            "reset_arguments": self._reset_arguments,
            "reset_infos": kept_infos(self._reset_infos),
            "last_obs": None if self._last_obs is None else self._obs.flatten(self._last_obs),
            "has_ended": self._has_ended.tolist(),
            "changes": self._episode_changes.saved,
            "envs": envs,
            "collector": None,
        }
        if self._collector is not None:
            obs, episodes, (infos, key, current), memory = self._collector.saved()
            masks = None if infos is None else kept_infos(infos), key, current
            saved["collector"] = list(obs), dict(episodes), masks, memory
        return saved, why

    def _saved_envs(self) -> tuple[list[dict[str, Any]] | None, str | None]:
        try:
            states = self.envs.get_state()
        except (UsageError, EnvFailed, PoolTimeout) as error:  # PoolTimeout: the pool goes on, its states are missing
            is_nothing_lost = self._episodes in (Episodes.NONE, Episodes.CUT_SHORT)
            return None, None if is_nothing_lost else str(error)
        return [{each.name: getattr(state, each.name) for each in fields(state)} for state in states], None

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Go on where the worker was whose pool was saved. Raises UsageError if a state does not fit; nothing is lost.

        A pool whose envs could not be saved begins anew, with seeds of its own.
        """
        episodes, autoreset = Episodes[saved["episodes"]], Autoreset(saved["autoreset"])
        if saved["envs"] is None and episodes not in (Episodes.NONE, Episodes.CUT_SHORT):
            return
        if autoreset is not self._autoreset:
            self._switch_to(autoreset)
        if saved["envs"] is not None:
            self.envs.set_state([EnvState(**each) for each in saved["envs"]])
        self._episodes, self._epoch, self._num_beginnings = episodes, saved["epoch"], saved["num_beginnings"]
        self._seed, self._reset_arguments = saved["seed"], saved["reset_arguments"]
        self._reset_infos = saved["reset_infos"]
        self._last_obs = None if saved["last_obs"] is None else self._obs.unflatten(saved["last_obs"])
        self._has_ended = np.array(saved["has_ended"], np.bool_)
        self._episode_changes.restore(saved["changes"])
        if saved["collector"] is not None:
            collector = SavedCollector(*saved["collector"])
            self._collector = self._new_collector(self._obs.unflatten(list(collector.obs)), {})
            self._collector.restore(collector)

    def forget_memory(self) -> None:
        """The policy that will be built is not the one that was saved."""
        if self._collector is not None:
            self._collector.forget_memory()

    def reset(self, order: Reset) -> tuple[RowsReady, Arrays]:
        """Reset all envs, or those in the mask; the result has a row for each env."""
        self.require_idle(Autoreset(order.autoreset))
        self._untold.clear()
        options = from_plain(order.options)
        is_begun = self._episodes in (Episodes.FRESH, Episodes.RESTORED, Episodes.RUNNING)
        is_partial = order.mask is not None and is_begun
        # The head resets all envs first: some of them only, in a new pool, means that another process has been lost.
        is_after_loss = order.mask is not None and not all(order.mask) and self._episodes is Episodes.NONE
        hung, self._hung = self._hung, None
        if is_partial and not any(order.mask or ()):
            return self._rows(order.order, self._last_obs, _zeros(self.envs.num_envs), {}, [])
        if is_partial:
            options = {**(options or {}), "reset_mask": np.array(order.mask)}
        failures: list[Exception] = []
        seeds = order.seeds
        if self._episodes is Episodes.NONE and not any(seed is not None for seed in seeds):
            # So that a rollout, which may need another pool, can begin with the very same episodes.
            # Consecutive numbers, since some vector envs take one number only.
            first, self._seed = self._seed, None
            if first is None:
                first = int(np.random.SeedSequence().generate_state(1)[0]) >> 1
            seeds = [first + i for i in range(len(seeds))]
        arguments = {"seed": seeds, "options": options}
        result = _received(lambda: self.envs.reset(**arguments), self.envs, failures)
        obs, info = result[0], result[-1]
        fixed = _zeros(self.envs.num_envs) if len(result) == 2 else dict(zip(FIXED, result[1:4], strict=True))
        # An env whose reset has failed has no episode with which a rollout could begin.
        self._episodes = Episodes.RUNNING if is_partial or failures else Episodes.FRESH
        self._reset_arguments, self._collector = arguments, None
        self._reset_infos = dict(info)
        self._has_ended &= False if order.mask is None else ~np.array(order.mask)
        if is_after_loss:
            lost = ~np.array(order.mask)
            reason = LOST if hung is None else HUNG
            InfoTable(len(lost), info).add_errors(np.flatnonzero(lost), reason)
            failures += self._told_of(hung)
        ready, arrays = self._rows(order.order, obs, fixed, info, failures)
        return msgspec.structs.replace(ready, is_after_loss=is_after_loss and hung is None), arrays

    def step(self, order: Step, arrays: Arrays) -> tuple[RowsReady, Arrays]:
        """A row for each env. Those of a pool that hangs are truncated, and another one takes its place."""
        self.require_idle(Autoreset(order.autoreset))
        self._untold.clear()
        if self._episodes is Episodes.NONE:
            return self._rows_after_loss(order.order)
        failures: list[Exception] = []
        if self._episodes is Episodes.CUT_SHORT:
            return self._rows_after_cut(order.order, failures)
        self._episodes, self._collector = Episodes.RUNNING, None
        actions = self._actions.unflatten([arrays[f"action.{index}"] for index in range(len(self._actions.leaves))])
        try:
            result = _received(lambda: self.envs.step_all(actions), self.envs, failures)
        except PoolTimeout as error:
            logger.warning("%s", self.give_up(error))
            self.require_open()
            return self._rows_after_loss(order.order, failures)
        obs, rewards, terminated, truncated, info = result
        ended = terminated | truncated
        if ended.any():
            self._num_hung = 0
        if self._autoreset is Autoreset.DISABLED:
            self._has_ended |= ended
        else:
            self._has_ended = ended & (self._autoreset is Autoreset.NEXT_STEP)
        fixed = {"rewards": rewards, "terminated": terminated, "truncated": truncated}
        return self._rows(order.order, obs, fixed, info, failures)

    def collector(self, failures: list[Exception]) -> Collector | FirstReadyCollector:
        """Ready for a rollout. Envs that were reset and not stepped since begin where they are.

        An env whose reset fails is told of in `failures`, and one that failed while a checkpoint waited for it.
        """
        failures += self._untold
        self._untold.clear()
        if self._episodes is Episodes.RESTORED and not self.envs.closed:
            return self._restored_collector(failures)
        was_fresh = self._episodes is Episodes.FRESH
        if self.envs.closed or self._autoreset is not Autoreset.SAME_STEP:
            has_same_envs = self._switch_to(Autoreset.SAME_STEP)
            if was_fresh and has_same_envs:
                obs, infos = self._last_obs, self._reset_infos
            elif was_fresh:
                obs, infos = self._begun(lambda: self.envs.reset(**self._reset_arguments), failures)
            else:
                obs, infos = self._begun(self._first_reset, failures)
            self._collector = self._new_collector(obs, infos)
        elif self._collector is None:
            obs, infos = self._last_obs, self._reset_infos
            if not was_fresh:
                obs, infos = self._begun(self._first_reset, failures)
            self._collector = self._new_collector(obs, infos)
        self._episodes, self._hung = Episodes.RUNNING, None
        return self._collector

    def _restored_collector(self, failures: list[Exception]) -> Collector | FirstReadyCollector:
        """Goes on with the episodes that run; where one had ended, another is begun first."""
        assert self._collector is not None
        if self._autoreset is not Autoreset.SAME_STEP:
            self._switch_to(Autoreset.SAME_STEP)
        ended = np.flatnonzero(self._has_ended)
        if len(ended):
            mask = self._has_ended.copy()
            obs, _ = self._begun(lambda: self.envs.reset(options={"reset_mask": mask}), failures)
            self._collector.restored(obs, {env_id: {} for env_id in ended.tolist()})
            self._has_ended[:] = False
        self._episodes, self._hung = Episodes.RUNNING, None
        return self._collector

    def get_state(self, env_ids: list[int]) -> list[EnvState | None]:
        """A state for each env of the pool, None for those that are not in `env_ids`."""
        self.require_idle()
        if self._episodes not in (Episodes.FRESH, Episodes.RESTORED, Episodes.RUNNING):
            raise NotReset("reset the envs before you save their states; those of a lost worker have begun anew")
        states: list[EnvState | None] = [None] * self.envs.num_envs
        changes = self._episode_changes.of(np.arange(self.envs.num_envs)).tolist()
        for env_id, state in zip(env_ids, self.envs.get_state(env_ids), strict=True):
            running = {} if self._collector is None else self._collector.running(env_id)
            states[env_id] = replace(state, running={**running, "change": changes[env_id]})
        return states

    def set_state(self, order: SetState) -> None:
        """Put envs back into saved states. Without states: see whether such ones would fit."""
        self.require_idle()
        self.envs.require_fitting(order.env_names, order.env_ids)
        if order.states is None:
            return
        states = dict(zip(order.env_ids, states_from_plain(order.states), strict=True))
        try:
            self.envs.set_state(list(states.values()), order.env_ids)
            obs = self.envs.observations()
        except EnvFailed:
            self._episodes, self._collector = Episodes.CUT_SHORT, None
            raise
        num_changes = self._builder.num_changes
        for env_id, state in states.items():
            self._has_ended[env_id] = state.has_ended
            self._episode_changes.restored(env_id, min(int(state.running.get("change", 0)), num_changes))
        self._last_obs = obs
        self._collector = self._collector or self._new_collector(obs, None)
        self._collector.restored(obs, {env_id: state.running for env_id, state in states.items()})
        self._episodes = Episodes.RESTORED

    def _new_collector(self, obs: Any, infos: Infos | None) -> Collector | FirstReadyCollector:
        kind = FirstReadyCollector if self._plan.pool.line is Line.FIRST_READY else Collector
        return kind(self.envs, obs, infos, self._episode_changes)

    def versions_in_use(self, stream: int) -> set[int]:
        """The versions of rows that the next order of this stream goes on with."""
        return self._collector.versions_in_use(stream) if isinstance(self._collector, FirstReadyCollector) else set()

    def drop_collector(self) -> None:
        """The next rollout resets all envs. What envs are still at work on is dropped."""
        self._collector = None
        if not self.envs.closed:
            self.envs.drop_results()

    def require_open(self, autoreset: Autoreset | None = None) -> None:
        """Build another pool if the last one was given up; use the autoreset mode of the order."""
        if self.envs.closed or autoreset not in (None, self._autoreset):
            self._switch_to(autoreset or self._autoreset)

    def require_idle(self, autoreset: Autoreset | None = None) -> None:
        """As require_open(), and wait for envs that a stream has left at work. The stream may go on afterwards."""
        if isinstance(self._collector, FirstReadyCollector) and not self.envs.closed:
            failures: list[Exception] = []
            try:
                self._collector.land(failures)
            except StepOnEndedEpisode as error:
                self.drop_collector()
                failures.append(error)
            for each in failures:
                logger.warning("of an env that a stream has left at work: %s", each)
            self._untold += [each for each in failures if isinstance(each, EnvFailed)]
        self.require_open(autoreset)

    def give_up(self, error: PoolTimeout) -> str:
        """Close a pool that hangs; the next order has another one built. Returns what happened."""
        text = f"{HUNG}, and another one is built (envs are counted within the worker here): {error.report}"
        env_id = error.env_ids[0] if error.env_ids else 0
        self._hung = EnvFailed(text, env_id=env_id)
        self._num_hung += 1
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
        return env_failure(error, self._plan.first_env_id)

    @property
    def env_settings(self) -> tuple[EnvSpec, PoolConfig, Mapping[str, list[Any]], LiveChanges]:
        """What another pool of such envs needs: spec, settings, attributes and changes, which may become more."""
        return self._builder.spec, self._plan.pool, self._builder.attributes, self._builder.changes

    # -- inside --

    def _build(self) -> None:
        self.envs: EnvPool = self._builder.build(self._autoreset)
        self._obs = SpaceTree(self.envs.single_observation_space)
        self._actions = SpaceTree(self.envs.single_action_space)
        self._episode_changes = EpisodeChanges(self.envs.num_envs)
        self._has_ended = np.zeros(self.envs.num_envs, np.bool_)
        self._begin_anew()

    def _begin_anew(self) -> None:
        """No env has been reset yet, or each is to be reset next."""
        self._episodes, self._collector = Episodes.NONE, None
        self._seed = _first_seed(self._plan, self._epoch, self._num_beginnings)
        self._num_beginnings += 1

    def _begun(self, reset: Callable[[], Any], failures: list[Exception]) -> tuple[Any, Infos]:
        """The observations and infos with which a rollout begins."""
        result = _received(reset, self.envs, failures)  # after a failure, recv() has the results of a step
        self._episode_changes.see(result[-1])
        return result[0], result[-1]

    def _first_reset(self) -> tuple[Any, dict[str, Any]]:
        """Reset all envs, with the seed that is meant for the first reset without seeds of its own."""
        seed, self._seed = self._seed, None
        self._has_ended[:] = False
        return self.envs.reset(seed=seed)

    def _switch_to(self, autoreset: Autoreset) -> bool:
        """Use another autoreset mode, from the next reset on. False if the envs are new ones."""
        if self.envs.closed:
            self._autoreset = autoreset
            self._build()
            return False
        if self._episodes is Episodes.RUNNING:
            logger.info("the pool goes on in autoreset mode %s: running episodes end here", autoreset.name)
        has_same_envs = self.envs.switch_autoreset(autoreset)
        self._autoreset = autoreset
        if self._episodes is not Episodes.RESTORED or not has_same_envs:
            self._begin_anew()
        return has_same_envs

    def _told_of(self, hung: EnvFailed | None) -> list[Exception]:
        """What the head hears of a pool that hung; with restarts on, only if there were too many."""
        restarts = self._plan.pool.env_restarts
        is_told = restarts is None or self._num_hung > restarts
        return [hung] if hung is not None and is_told else []

    def _rows_after_cut(self, order: int, failures: list[Exception]) -> tuple[RowsReady, Arrays]:
        """The head was told that the episodes have ended."""
        nothing = _zeros(self.envs.num_envs)
        if self._autoreset is Autoreset.DISABLED:
            failures.append(
                StepOnEndedEpisode(
                    f"the episodes of this worker's {self.envs.num_envs} envs were cut short: call recv() for the rows "
                    "of the others, then reset these envs before their next step()"
                )
            )
            return self._rows(order, self._last_obs, nothing, {}, failures)
        result = _received(self._first_reset, self.envs, failures)
        self._episodes = Episodes.RUNNING
        return self._rows(order, result[0], nothing, result[-1], failures)

    def _rows_after_loss(self, order: int, failures: Iterable[Exception] = ()) -> tuple[RowsReady, Arrays]:
        """The order was for a process or pool that is lost, and its episodes with it: they are cut short here."""
        num_envs = self.envs.num_envs
        hung, self._hung = self._hung, None
        failures = [*failures, *self._told_of(hung)]
        leaves = [np.zeros((num_envs, *leaf.shape), leaf.dtype) for leaf in self._obs.leaves]
        if hung and self._last_obs is not None:
            leaves = self._obs.flatten(self._last_obs)
        obs, infos, final_obs = self._obs.unflatten(leaves), InfoTable(num_envs), None
        if self._autoreset is Autoreset.SAME_STEP:
            final_obs = self._obs.each_row(obs, range(num_envs))
            result = _received(self._first_reset, self.envs, failures)
            obs, infos = result[0], InfoTable(num_envs, result[-1])
        self._episodes = Episodes.CUT_SHORT if final_obs is None else Episodes.RUNNING
        infos.add_errors(np.arange(num_envs), HUNG if hung else LOST, final_obs)
        fixed = _zeros(num_envs) | {"truncated": np.ones(num_envs, np.bool_)}
        ready, arrays = self._rows(order, obs, fixed, infos.columns, failures)
        return msgspec.structs.replace(ready, is_after_loss=hung is None), arrays

    def _rows(
        self, order: int, obs: Any, fixed: Arrays, info: Infos, failures: list[Exception]
    ) -> tuple[RowsReady, Arrays]:
        self._last_obs = obs
        self._episode_changes.see(info)
        arrays = {f"obs.{index}": leaf for index, leaf in enumerate(self._obs.flatten(obs))}
        told = [self.failure(each) for each in failures]
        return RowsReady(order=order, info=plain_parts(info, "info"), failures=told), {**arrays, **fixed}


def _received(call: Callable[[], Any], envs: EnvPool, failures: list[Exception]) -> Any:
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


def _zeros(num_envs: int) -> dict[str, Array]:
    return {name: np.zeros(num_envs, dtype) for name, dtype in FIXED.items()}


def _first_seed(plan: PoolPlan, epoch: int, num_beginnings: int) -> int | None:
    """Later beginnings have seeds of their own, the same ones in each run: those of the first episodes are used up."""
    if plan.seed is None:
        return None
    seed = plan.seed + plan.first_env_id
    if epoch == 1 and num_beginnings == 0:
        return seed
    return int(np.random.SeedSequence((seed, epoch, num_beginnings)).generate_state(1)[0])
