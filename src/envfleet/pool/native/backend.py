"""The native backend: C++ envs, stepped by the calling thread and by C++ threads beside it."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import gymnasium
import numpy as np

from envfleet._native import core
from envfleet.contract.arrays import IntArray
from envfleet.contract.batch import StepBatch
from envfleet.contract.episode import Autoreset, Transition
from envfleet.contract.errors import MissingExtra, NotReset, PoolTimeout, UsageError
from envfleet.contract.infos.table import Info, InfoTable
from envfleet.contract.live_changes import Change
from envfleet.contract.pool_config import Line, PoolConfig
from envfleet.contract.spaces import SpaceTree
from envfleet.contract.spec import EnvTraits
from envfleet.contract.state import EnvState
from envfleet.pool.backend import StepAtOnce
from envfleet.pool.batch_layout import FAILED, HAS_FINAL, Column, columns_of
from envfleet.pool.guard import Failure
from envfleet.pool.native.failures import Asked, NativeFailures, Place
from envfleet.pool.native.registry import NativeChoice
from envfleet.pool.native.spaces import gymnasium_space
from envfleet.pool.process.cpus import usable_cpus
from envfleet.pool.traits import value_of
from envfleet.pool.waits import HOW_TO_RAISE, WAIT_SLICE_S, WaitLog, deadline_in, limit_text, slice_s

logger = logging.getLogger("envfleet.pool")

HELP_WORTH_S = 60e-6  # wake helper threads for batches of at least this much work
CLOSE_WAIT_S = 5.0  # for helper threads to finish the step they are in

_BUSINESS_OF_THE_POOL = ("reset", "step", "close")


class NativeBackend:
    """A NativePool, and what Python has to add: spaces, seeds, failures, and Gymnasium's renderer."""

    name = "native"
    steps_some = True

    def __init__(self, choice: NativeChoice, config: PoolConfig) -> None:
        model = choice.model
        self._choice = choice
        self._config = config
        self._line = config.line
        self.traits = EnvTraits(
            observation_space=gymnasium_space(model.observation_space),
            action_space=gymnasium_space(model.action_space),
            metadata=choice.metadata,
            render_mode=choice.render_mode,
            gymnasium_spec=choice.gymnasium_spec,
        )
        self._obs_tree = SpaceTree(self.traits.observation_space)
        self._action_tree = SpaceTree(self.traits.action_space)
        stores = self._stores()
        self.batch_store = stores[self._line]
        num_threads = min(config.num_workers or usable_cpus(), config.num_envs, core.MOST_THREADS)
        self._pool = core.NativePool(
            model,
            stores,
            core.Autoreset[config.autoreset.name],
            choice.max_episode_steps,
            num_threads,
            _helper_cpus(num_threads) if config.pin_workers else [],
            HELP_WORTH_S,
            None if self._obs_tree.is_one_array else self._obs_tree.unflatten,
        )
        self._failures = NativeFailures(
            self._pool, config.autoreset, self._obs_tree, self._action_tree, config.env_restarts
        )
        self._seeds: list[int | None] = [None] * config.num_envs  # of each env's last seeded reset
        self._reset_seeds: list[int | None] = [None] * config.num_envs  # of its last reset
        self._options: dict[str, Any] | None = None  # of the last reset
        self._restored: set[int] = set()  # envs whose generators set_state() has set: their seeds are not known
        self._held: StepBatch | None = None  # received, but the caller hears of its failures first
        self._unheard: list[Failure] = []
        self._twin_env: gymnasium.Env[Any, Any] | None = None
        self._while_waiting: Callable[[], None] = lambda: None
        self._is_shared = False  # with XLA

    @property
    def step_at_once(self) -> StepAtOnce | None:
        """See Backend. Not where a step has fewer rows than actions, failures are being counted, or XLA steps, too."""
        is_usual = self._line is Line.FULL and not self._failures.any_counted and not self._is_shared
        return self._pool.try_step if is_usual else None

    @property
    def is_step_pending(self) -> bool:
        """Whether C++ took the actions, and the batch is still to come."""
        return self._pool.is_step_pending

    @property
    def is_plain(self) -> bool:
        """Does C++ know all that there is to know about the next batch?"""
        return self._held is None and not self._failures.any_counted

    @property
    def info_names(self) -> list[str]:
        """The infos of a batch, in the order of its arrays; `episode/l` is the key "l" of the dictionary "episode"."""
        return [name for name, _, _ in self._choice.model.infos]

    def open_xla_port(
        self, flight: core.Flight, ask: Callable[[list[Any] | None, IntArray | None], Any]
    ) -> core.XlaPort:
        """Let XLA step the envs, too. From now on only the holder of the port's lock may call this object.

        `ask(action_leaves, env_ids)` sends actions, `ask(None, None)` receives a batch and returns its env ids.
        """
        timeout_s = math.inf if self._config.timeout_s is None else self._config.timeout_s
        port = self._pool.open_xla_port(self._line, flight, timeout_s, ask)
        self._is_shared = True
        return port

    def switch_autoreset(self, mode: Autoreset) -> bool:
        """Tell C++ the mode; the envs stay as they are."""
        self._pool.set_autoreset(core.Autoreset[mode.name])
        self._failures.autoreset = mode
        return True

    def reset(self, env_ids: IntArray, seeds: Sequence[int | None], options: dict[str, Any] | None, line: Line) -> None:
        """Seed the generators of these envs, and queue their resets."""
        self._options = options
        for env_id, seed in zip(env_ids.tolist(), seeds, strict=True):
            self._reset_seeds[env_id] = seed
            if seed is not None:
                self._seeds[env_id] = seed
            if seed is not None or self._pool.generator(env_id) is None:
                self._pool.set_generator(env_id, np.random.PCG64(seed), seed is not None)
                self._restored.discard(env_id)
        is_all = len(env_ids) == self._config.num_envs
        self._pool.send_reset(None if is_all else env_ids, options or {}, line)

    def send(self, env_ids: IntArray | None, action_leaves: list[Any], line: Line) -> None:
        """Queue a step of these envs. Raises UsageError for an action outside its space."""
        leaves = [
            np.ascontiguousarray(values, leaf.dtype)
            for values, leaf in zip(action_leaves, self._action_tree.leaves, strict=True)
        ]
        wrong = self._pool.send(env_ids, leaves, line)
        if wrong is not None:
            self._action_tree.refuse_value(wrong.leaf, wrong.row, leaves[wrong.leaf][wrong.row], "actions")

    def repeat(self, env_ids: IntArray, line: Line) -> None:
        """Queue rows that show the last observation of these envs."""
        self._pool.send_repeat(env_ids, line)

    def recv(self, line: Line, timeout_s: float | None = None) -> StepBatch:
        """See Backend. A step that the calling thread itself has begun cannot be cut off."""
        if self._held is None:
            wait_s = WAIT_SLICE_S if timeout_s is None else min(WAIT_SLICE_S, timeout_s)
            received = self._pool.recv(line, wait_s)
            if received is None:
                received = self._wait(partial(self._pool.recv, line), "no full batch", timeout_s, waited_s=wait_s)
            batch = StepBatch(
                received.env_ids,
                received.obs,
                received.rewards,
                received.terminated,
                received.truncated,
                received.infos,
            )
            if not received.flags:
                if self._failures.any_counted:
                    self._forgive(batch.env_ids[batch.terminated | batch.truncated])
                return batch
            arrays = self._pool.arrays(line, received.buffer, batch.env_ids.base)
            if self._failures.any_counted:
                has_failed = (arrays.row_flags & FAILED) != 0
                self._forgive(batch.env_ids[(batch.terminated | batch.truncated) & ~has_failed])
            self._held = self._settle(batch, line, received.buffer, arrays)
        if self._unheard:
            raise self._unheard.pop(0).to_exception()
        held, self._held = self._held, None
        return held

    def drain(self) -> None:
        """Wait until no thread is at work, and forget the results."""
        self._wait(self._pool.drain, "envs still at work")
        self._held = None
        self._unheard.clear()

    def call(self, env_ids: Sequence[int], name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
        """See Backend. The Gymnasium env of the same kind answers, given the state of each native env in turn."""
        if name in ("np_random", "np_random_seed"):
            return [self._random(env_id, name) for env_id in env_ids]
        twin, spec = self._choice.twin, self._choice.gymnasium_spec
        if twin is None or spec is None:
            raise UsageError(f"{self._choice.name} is written in C++ alone: it has no Python side that knows {name!r}")
        if name in _BUSINESS_OF_THE_POOL:
            raise UsageError(f"a native env cannot be called to {name}: use the pool's own {name}()")
        if self._twin_env is None:
            with twin.while_building():
                self._twin_env = gymnasium.make(
                    spec, disable_env_checker=True, render_mode=self._choice.render_mode, **self._choice.kwargs
                ).unwrapped
        answers = []
        for env_id in env_ids:
            twin.give_state(self._twin_env, self._pool.get_state(env_id).state)
            try:
                with twin.while_drawing(self._twin_env) if name == "render" else nullcontext():
                    answers.append(value_of(self._twin_env, name, args, kwargs))
            except gymnasium.error.DependencyNotInstalled as error:
                raise MissingExtra(f"{error}; or: pip install 'envfleet[render]'") from None
            except Exception as error:
                if (advice := twin.advice(error)) is not None:
                    raise UsageError(advice) from error
                raise Failure.of(env_id, error).to_exception() from None
        return answers

    def set_attr(self, env_ids: Sequence[int], name: str, values: Sequence[Any]) -> None:
        """Raises UsageError: C++ envs have no attributes."""
        raise UsageError(
            f"{name!r} of a native env cannot be set: pass it as env_kwargs, or choose backend='process', "
            "which runs the Python env"
        )

    why_no_changes = (
        "native envs cannot be changed while they run: pass env_kwargs, or options to reset(); or choose "
        "backend='process', which runs the Python env"
    )

    def change(self, change: Change) -> None:
        """See Backend. Never called."""
        raise NotImplementedError

    why_no_states: str | None = None

    def state_names(self, env_ids: Sequence[int]) -> list[str]:
        """Name the kinds of states that fit these envs."""
        return [self._choice.name] * len(env_ids)

    def get_state(self, env_ids: Sequence[int]) -> list[EnvState]:
        """Save the states of these envs, in their order."""
        states = []
        for env_id in env_ids:
            generator = self._pool.generator(env_id)
            if generator is None:
                raise NotReset("reset the envs before you save their states")
            saved = self._pool.get_state(env_id)
            states.append(EnvState(self._choice.name, saved.state, saved.num_steps, saved.has_ended, generator.state))
        return states

    def set_state(self, env_ids: Sequence[int], states: Sequence[EnvState]) -> None:
        """Put these envs back into saved states."""
        size = len(self._pool.get_state(0).state)
        for state in states:
            if len(state.state) != size:
                raise UsageError(
                    f"no state was restored: a {state.env_name} with other arguments has {len(state.state)} bytes; the "
                    f"pool's envs have {size}"
                )
        before = [self._pool.get_state(env_id) for env_id in env_ids]
        try:
            for env_id, state in zip(env_ids, states, strict=True):
                self._pool.set_state(env_id, state.state, state.num_steps, state.has_ended)
        except ValueError as error:
            for env_id, own in zip(env_ids, before, strict=True):
                with contextlib.suppress(ValueError):  # it was too long in its episode: nothing has changed it
                    self._pool.set_state(env_id, own.state, own.num_steps, own.has_ended)
            raise UsageError(f"a state cannot be restored, so none was: {error}") from None
        for env_id, state in zip(env_ids, states, strict=True):
            generator = np.random.PCG64()
            generator.state = state.generator  # type: ignore[assignment]
            self._pool.set_generator(env_id, generator, False)
            self._restored.add(env_id)

    why_no_giving_up = (
        "native envs run in threads of this process, which cannot be interrupted: choose backend='process' for envs "
        "that may hang, or close the pool"
    )

    def give_up(self, env_ids: Sequence[int]) -> None:
        """See Backend. Never called."""
        raise NotImplementedError

    def call_while_waiting(self, look: Callable[[], None]) -> None:
        """Call `look` now and then while envs are at work."""
        self._while_waiting = look

    def close(self, terminate: bool = False) -> None:
        """End the helper threads, and close Gymnasium's env, if one was built to draw."""
        if not self._pool.close(CLOSE_WAIT_S):
            logger.warning("a helper thread did not stop after %g s%s", CLOSE_WAIT_S, self._under_way())
        if self._twin_env is not None and self._choice.twin is not None:
            self._choice.twin.before_closing(self._twin_env)
            self._twin_env.close()
            self._twin_env = None

    def abandon(self) -> None:
        """See Backend. C++ knows of forks."""

    # -- inside --

    def _random(self, env_id: int, name: str) -> Any:
        """An env's generator, or its seed, as gymnasium.Env has them."""
        generator = self._pool.generator(env_id)
        if generator is None:
            generator = np.random.PCG64()
            self._pool.set_generator(env_id, generator, False)
        if name == "np_random":
            return np.random.Generator(generator)
        return -1 if env_id in self._restored else generator.seed_seq.entropy

    def _stores(self) -> list[core.BatchStore]:
        obs = columns_of(self._obs_tree)
        infos: list[Column] = [(np.dtype(dtype), shape) for _, dtype, shape in self._choice.model.infos]
        has_final = self._config.has_finals
        sizes = [self._config.num_envs]
        if self._line is Line.FIRST_READY:
            sizes.append(self._config.rows)
        return [core.BatchStore(-1, num_rows, obs, infos, has_final) for num_rows in sizes]

    def _forgive(self, env_ids: IntArray) -> None:
        """Envs that have finished an episode may fail again as often as new ones."""
        for env_id in env_ids.tolist():
            self._failures.forgive_failures(env_id)

    def _settle(self, batch: StepBatch, line: Line, buffer: int, arrays: core.BatchArrays) -> StepBatch:
        """See to failed rows and to final observations."""
        row_flags, lease = arrays.row_flags, arrays.row_flags.base
        infos: dict[int, Info] = {}  # of failed rows: C++ does not know them
        final_infos: dict[int, Info] = {}
        failed_rows = (row_flags & FAILED).nonzero()[0].tolist()
        for row in failed_rows:
            env_id = int(batch.env_ids[row])
            last_obs = self._obs_tree.unflatten([column[row].copy() for column in arrays.obs])
            asked = Asked(self._seeds[env_id], self._reset_seeds[env_id], self._options)
            transition, failure = self._failures.settle(env_id, Place(line, buffer, row), last_obs, asked)
            if failure is not None:
                self._unheard.append(failure)
            batch.rewards[row] = transition.reward
            batch.terminated[row] = transition.terminated
            batch.truncated[row] = transition.truncated
            self._write_obs(transition, arrays, row)
            if transition.info:
                infos[row] = transition.info
            row_flags[row] = HAS_FINAL if transition.has_final else 0
            if transition.final_info:
                final_infos[row] = transition.final_info
        if failed_rows:  # some may have been reset since
            batch = batch._replace(infos=self._pool.infos(line, buffer, lease, False))
        table = InfoTable(len(row_flags), batch.infos)
        table.add_rows(infos)
        final_rows = (row_flags & HAS_FINAL).nonzero()[0]
        if len(final_rows):
            finals = InfoTable(len(row_flags), self._pool.infos(line, buffer, lease, True))
            finals.add_rows(final_infos)
            final_obs = self._obs_tree.unflatten(arrays.final_obs)
            table.add_finals(final_rows, self._obs_tree.each_row(final_obs, final_rows.tolist()), finals)
        return batch

    def _write_obs(self, transition: Transition, arrays: core.BatchArrays, row: int) -> None:
        if transition.obs is not None:
            for column, value in zip(arrays.obs, self._obs_tree.flatten(transition.obs), strict=True):
                column[row] = value
        if transition.has_final:
            for column, value in zip(arrays.final_obs, self._obs_tree.flatten(transition.final_obs), strict=True):
                column[row] = value

    def _wait(
        self, wait: Callable[[float], Any], headline: str, timeout_s: float | None = None, waited_s: float = 0.0
    ) -> Any:
        """What `wait` gives after a while, in slices: between them the log says what is waited for."""
        own_s = self._config.timeout_s
        limit_s = own_s if timeout_s is None else timeout_s
        deadline_s, log = deadline_in(limit_s) - waited_s, WaitLog(logger, time.monotonic() - waited_s)
        while not (result := wait(slice_s(deadline_s))):
            now_s = time.monotonic()
            self._while_waiting()
            log.look(now_s, lambda: f"native envs ({limit_text('timeout_s', own_s)}){self._under_way()}")
            if limit_s is not None and now_s >= deadline_s:
                if timeout_s is not None:
                    raise self._timeout(f"{headline} after {limit_s:g} s, the timeout_s of this recv()")
                text = f"{headline} after {limit_s:g} s, the pool's timeout_s"
                raise self._timeout(text, f"\n{HOW_TO_RAISE['timeout_s']}")
        return result

    def _timeout(self, headline: str, remedy: str = "") -> PoolTimeout:
        env_ids = [env_id for first, last in self._pool.runs_under_way() for env_id in range(first, last + 1)]
        return PoolTimeout(f"{headline}{self._under_way()}{remedy}", env_ids=env_ids)

    def _under_way(self) -> str:
        runs = [f"{first} to {last}" for first, last in self._pool.runs_under_way()]
        return f"; threads are at work on envs {', '.join(runs)}" if runs else ""


def _helper_cpus(num_threads: int) -> list[int]:
    """A CPU for each helper. The calling thread is the caller's, and stays where it is."""
    cpus = sorted(os.sched_getaffinity(0))
    return [cpus[(helper + 1) % len(cpus)] for helper in range(num_threads - 1)]
