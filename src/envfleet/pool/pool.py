"""EnvPool: the gymnasium VectorEnv in front of a backend. Arguments are checked here, once."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import numpy as np
from gymnasium.spaces import Space
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_differing_spaces, batch_space
from numpy.typing import ArrayLike

from envfleet.contract.arrays import IntArray
from envfleet.contract.batch import StepBatch
from envfleet.contract.episode import Autoreset
from envfleet.contract.errors import (
    RECV_GOES_ON,
    EnvBusy,
    NotReset,
    PoolClosed,
    PoolTimeout,
    UsageError,
)
from envfleet.contract.infos.table import Infos
from envfleet.contract.live_changes import Change, attribute_change, call_change, options_change
from envfleet.contract.pool_config import Line, PoolConfig
from envfleet.contract.spaces import SpaceTree
from envfleet.contract.state import EnvState, require_fitting
from envfleet.pool.arguments import autoreset_of, seeds_of, some_env_ids, take_reset_mask, values_for
from envfleet.pool.backend import Backend, StepAtOnce
from envfleet.pool.batch_rows import StepResult, rows_of_result
from envfleet.pool.in_flight import InFlight

if TYPE_CHECKING:
    from envfleet.pool.native.xla import XlaFunctions

# What a PoolTimeout says at the end.
NOTHING_WAS_RESET = "Nothing is lost, and nothing was reset: recv() goes on waiting for the batch in flight"
CALL_GOES_ON = "The call goes on, but its result is dropped; what is asked of that env next waits for it"


class EnvPool(VectorEnv[Any, Any, Any]):
    """N envs on this machine, behind Gymnasium's vector API.

    `step(actions)` is `send(actions)` and `recv()`. With `batch_size < num_envs` the pool is asynchronous:
    `recv()` returns the first `batch_size` envs that finished, and `info["env_id"]` says which. Otherwise it is
    synchronous: `recv()` returns all envs that were sent, in the order in which they were sent.

    Returned arrays are leases: they are never overwritten while anybody refers to them, and their memory is
    reused when the last reference is gone. A pool is for one thread at a time, and for the process that made it: after
    close(), and in a fork, every call but close() raises PoolClosed.
    """

    def __init__(self, backend: Backend, config: PoolConfig, seed: int | None = None) -> None:
        """Not called by users: `envfleet.make` builds pools."""
        traits = backend.traits
        self._backend = backend
        self._config = config
        self._actions = SpaceTree(traits.action_space)
        self._obs = SpaceTree(traits.observation_space)
        self._owner_pid = os.getpid()
        self._first_seed = seed
        self._was_reset = False
        self._had_options = False  # the last reset of all envs
        self._in_flight = InFlight(config, steps_some=backend.steps_some)
        self._step_at_once: StepAtOnce | None = None  # set while the pool was reset and nothing is in flight
        self._num_changes = 0
        self.num_envs = config.num_envs
        self.batch_size = config.rows
        self.autoreset_mode = AutoresetMode(config.autoreset.value)
        self.metadata = {**traits.metadata, "autoreset_mode": self.autoreset_mode}
        self.render_mode = traits.render_mode
        self.spec = traits.gymnasium_spec
        self.single_observation_space = traits.observation_space
        self.single_action_space = traits.action_space
        self.observation_space = self._batched_observation_space()
        self.action_space = batch_space(traits.action_space, config.num_envs)
        _pools.add(self)

    # -- Gymnasium's vector API --

    def reset(
        self, *, seed: int | Sequence[int | None] | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, Infos]:
        """Reset all envs, or those in `options["reset_mask"]`, and return a row for each env.

        Results that were not received are dropped.

        Args:
            seed: Env i is seeded with `seed + i`, or with `seed[i]`. None: with the pool's own seed at the first reset,
                later the generators go on.
            options: Passed to each env, without "reset_mask". That is an array of [num_envs] bool: the other envs
                repeat their last observation.

        Returns:
            Observations of all envs, and infos.

        Raises:
            NotReset: The first reset() has a mask that leaves envs out.
            EnvBusy: Some envs are to be reset, but results are to come.
            EnvFailed: An env raised, or its process died. `recv()` returns the batch.
            PoolTimeout: No full batch after `timeout_s`. `recv()` goes on waiting for it.
        """
        self._require_open()
        seeds = self._seeds(seed)
        options = None if options is None else dict(options)
        mask = None if options is None else take_reset_mask(options, self.num_envs)
        if mask is not None:
            self._in_flight.require_none("receive them before resetting some envs only")
        if mask is not None and not self._was_reset and not mask.all():
            raise NotReset("the first reset() must reset all envs: call it without reset_mask")
        self._clear_flight()
        env_ids = np.flatnonzero(np.ones(self.num_envs, np.bool_) if mask is None else mask).astype(np.int32)
        self._backend.reset(env_ids, [seeds[env_id] for env_id in env_ids], options, Line.FULL)
        self._had_options = bool(options)
        self._in_flight.line = Line.FULL
        self._mark_sent(None)
        self._was_reset = True
        batch = self._recv(None)
        return batch.obs, batch.infos

    def step(self, actions: Any, env_id: ArrayLike | None = None) -> StepResult:
        """Send one action to each env, or to those in `env_id`, and receive a batch.

        Args:
            actions: A row for each env, or for each of `env_id`.
            env_id: Indices of some envs, in any order. A synchronous pool steps only these, and returns a row for each
                of them, in that order; `info["env_id"]` has the indices. In an asynchronous pool nothing is sent if
                there would not be enough envs at work for a batch.

        Returns:
            Observations, rewards, terminations, truncations and infos, as Gymnasium's vector envs return them.

        Raises:
            InvalidAction: The actions do not fit the action space; nothing was sent.
            NotReset: The pool was never reset.
            EnvBusy: An env that is to step has a result to come.
            NothingToReceive: Fewer envs would be at work than a batch has rows.
            EnvFailed: An env raised, or its process died. `recv()` returns the batch.
            StepOnEndedEpisode: With autoreset disabled, an env must be reset first. `recv()` returns the batch.
            PoolTimeout: No full batch after `timeout_s`. `recv()` goes on waiting for it.
        """
        if self._step_at_once is not None and env_id is None:
            result: StepResult | None = self._step_at_once(actions)
            if result is not None:
                return result
            if self._backend.is_step_pending:
                self._mark_sent(None)
            else:
                self.send(actions)
        else:
            if env_id is not None and self._was_reset:
                self._in_flight.require_batch(num_more=int(np.size(env_id)))
            self.send(actions, env_id)
        has_env_ids = self._config.line is Line.FIRST_READY or self._in_flight.is_of_some
        return self._result(None, has_env_ids=has_env_ids)

    def step_all(self, actions: Any) -> StepResult:
        """Step all envs and return a row for each, in the order of envs, whatever the batch size of the pool.

        Args:
            actions: A row for each env.

        Returns:
            Observations, rewards, terminations, truncations and infos, as Gymnasium's vector envs return them.

        Raises:
            EnvBusy: Results are to come: receive them first.
            InvalidAction, NotReset, EnvFailed, StepOnEndedEpisode, PoolTimeout: As step() raises them. `recv()` returns
                the batch.
        """
        if self._config.line is Line.FULL:
            return self.step(actions)
        self._require_open()
        self._in_flight.require_none("receive them before you step all envs")
        self._in_flight.line = Line.FULL
        try:
            self.send(actions)
        except BaseException:
            self._in_flight.line = self._config.line
            raise
        return self._result(None, has_env_ids=False)

    def render(self, env_ids: ArrayLike | None = None) -> tuple[Any, ...] | None:
        """Render all envs, or some.

        Args:
            env_ids: Indices of some envs, in any order; None: all.

        Returns:
            A frame for each of these envs, in that order.

        Raises:
            EnvBusy: Results are to come: receive them first.
            EnvFailed: An env raised.
        """
        return self.call("render") if env_ids is None else self.call_some(env_ids, "render")

    def call(self, name: str, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        """Call a method of each env, or get an attribute.

        Args:
            name: Name of the method or attribute.
            args: Positional arguments of the method.
            kwargs: Named arguments of the method.

        Returns:
            A result for each env.

        Raises:
            EnvBusy: Results are to come: receive them first.
            EnvFailed: An env raised.
            PoolTimeout: No answer after `timeout_s`; the call goes on, but its result is dropped.
        """
        self._require_open()
        self._in_flight.require_none(f"receive them before you call {name!r}")
        return tuple(self._asked(self._backend.call, range(self.num_envs), name, args, kwargs))

    def call_some(self, env_ids: ArrayLike, name: str, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        """Call a method of some envs, or get an attribute.

        Args:
            env_ids: Indices of some envs, in any order.
            name: Name of the method or attribute.
            args: Positional arguments of the method.
            kwargs: Named arguments of the method.

        Returns:
            A result for each of these envs, in that order.

        Raises:
            EnvBusy: Results are to come: receive them first.
            EnvFailed: An env raised.
            PoolTimeout: No answer after `timeout_s`; the call goes on, but its result is dropped.
        """
        self._require_open()
        self._in_flight.require_none(f"receive them before you call {name!r}")
        ids = some_env_ids(env_ids, self.num_envs)
        values = dict(zip(sorted(ids), self._asked(self._backend.call, sorted(ids), name, args, kwargs), strict=True))
        return tuple(values[env_id] for env_id in ids)

    def get_attr(self, name: str) -> tuple[Any, ...]:
        """Get an attribute of each env; as `call(name)`.

        Args:
            name: Name of the attribute.

        Returns:
            A value for each env.
        """
        return self.call(name)

    def set_attr(self, name: str, values: Any, env_ids: ArrayLike | None = None) -> None:
        """Set an attribute of each env, or of those in `env_ids`.

        Args:
            name: Name of the attribute.
            values: A list or tuple has a value for each of these envs; anything else is for all of them.
            env_ids: Indices of some envs, in any order; None: all.

        Raises:
            UsageError: The number of values is another one, or the envs are native.
            EnvBusy: Results are to come: receive them first.
            EnvFailed: An env raised.
        """
        self._require_open()
        self._in_flight.require_none(f"receive them before you set {name!r}")
        ids = range(self.num_envs) if env_ids is None else some_env_ids(env_ids, self.num_envs)
        self._asked(self._backend.set_attr, ids, name, values_for(values, len(ids)))

    def switch_autoreset(self, mode: AutoresetMode | Autoreset | str) -> bool:
        """Use another autoreset mode from the next call on. Results that were not received are dropped.

        Episodes that have ended must be reset before the next step.

        Args:
            mode: What follows the last step of an episode: "next_step", "same_step", "disabled", or Gymnasium's
                AutoresetMode.

        Returns:
            True if the envs are the same; False if they had to be built anew, and must be reset: vector envs of other
            libraries only.

        Raises:
            UsageError: The pool was not made to switch, or its vector env does not have this mode. Nothing has changed.
            EnvFailed: The vector env of another library could not be built anew. The mode is the old one, and the pool
                must be reset.
            PoolTimeout: Envs are still at work.
        """
        self._require_open()
        mode = autoreset_of(mode)
        if mode is Autoreset.SAME_STEP and not self._config.has_finals:
            raise UsageError("this pool has no room for final observations: make() it with autoreset_mode='same_step'")
        self._clear_flight()
        has_same_envs = False
        try:
            has_same_envs = self._backend.switch_autoreset(mode)
        except UsageError:
            has_same_envs = True
            raise
        finally:
            if not has_same_envs:
                self._was_reset, self._step_at_once = False, None
        self.autoreset_mode = AutoresetMode(mode.value)
        self.metadata = {**self.metadata, "autoreset_mode": self.autoreset_mode}
        return has_same_envs

    @property
    def backend(self) -> str:
        """The backend that runs the envs: "native", "process", "vector" or "serial"."""
        return self._backend.name

    @property
    def steps_some(self) -> bool:
        """Whether some envs can be stepped while the others stand still; vector envs step all together."""
        return self._backend.steps_some

    @property
    def np_random_seed(self) -> tuple[int, ...]:  # type: ignore[override]  # as Gymnasium's SyncVectorEnv has it
        """The seed of each env's random generator; -1 where it is not known."""
        return self.get_attr("np_random_seed")

    @property  # type: ignore[misc]
    def np_random(self) -> tuple[np.random.Generator, ...]:  # type: ignore[override]  # likewise
        """The random generator of each env; of envs in other processes, a copy."""
        return self.get_attr("np_random")

    def close_extras(self, *, terminate: bool = False, **kwargs: Any) -> None:
        """Close the envs; called by close(). In a fork of the owner this does nothing: the envs are the owner's.

        Args:
            terminate: Kill child processes that are at work, such as those of an env that hangs, at once. Else they
                have 5 s to end.
            kwargs: Not used; Gymnasium's close() passes its own on.
        """
        self._step_at_once = None
        if os.getpid() == self._owner_pid:
            self._backend.close(terminate)

    # -- asynchronously --

    def async_reset(
        self,
        *,
        seed: int | Sequence[int | None] | None = None,
        options: dict[str, Any] | None = None,
        env_id: ArrayLike | None = None,
    ) -> None:
        """Start resetting all envs, or those in `env_id`; recv() returns the first `batch_size` that are ready.

        Args:
            seed: As for reset().
            options: Passed to each env; "reset_mask" is refused.
            env_id: Indices of some envs of an asynchronous pool, as for send(); None: all, and results that were not
                received are dropped.

        Raises:
            UsageError: The options have a mask, or the seeds are wrong; or some envs cannot be reset alone.
            NotReset: Some envs are to be reset, but never were all.
            EnvBusy: One of these envs has a result to come; nothing was reset.
            PoolTimeout: Envs are still at work on what was sent before; nothing was reset.
        """
        self._require_open()
        seeds = self._seeds(seed)
        if options is not None and "reset_mask" in options:
            raise UsageError("async_reset() has no reset_mask; for some envs pass env_id, or call reset()")
        if env_id is not None:
            self._async_reset_some(self._in_flight.checked(env_id), seeds, options)
            return
        self._clear_flight()
        env_ids = np.arange(self.num_envs, dtype=np.int32)
        self._backend.reset(env_ids, seeds, options, self._config.line)
        self._had_options = bool(options)
        self._mark_sent(None)
        self._was_reset = True

    def send(self, actions: Any, env_id: ArrayLike | None = None) -> None:
        """Start one step of all envs, or of those in `env_id`.

        Args:
            actions: A row for each env, or for each of `env_id`.
            env_id: Indices of some envs, in any order; None: all.

        Raises:
            InvalidAction: The actions do not fit the action space; nothing was sent.
            NotReset: The pool was never reset.
            EnvBusy: One of these envs has a result to come; nothing was sent.
            UsageError: `env_id` is not a vector of indices, each once; nothing was sent.
        """
        if self.closed or not self._was_reset:
            self._require_open()
            raise NotReset("call reset() or async_reset() before the first step() or send()")
        in_flight = self._in_flight
        env_ids = None if env_id is None else in_flight.checked(env_id)
        if env_ids is None and in_flight.num_envs:
            raise EnvBusy(f"envs {in_flight.env_ids} have results to come: call recv() first")
        num_rows = self.num_envs if env_ids is None else len(env_ids)
        self._backend.send(env_ids, self._actions.require_batch(actions, num_rows, "actions"), in_flight.line)
        self._mark_sent(env_ids)
        if env_ids is not None:
            in_flight.chose(env_ids)

    def recv(self, timeout_s: float | None = None) -> StepResult:
        """Wait for the next batch.

        A synchronous pool returns the envs that were sent, in the order in which they were sent.
        After PoolTimeout, EnvFailed or StepOnEndedEpisode, raised by this, step() or reset(), nothing is lost: call it
        (again) for the same batch. The row of an env that failed is truncated there, with `info["env_error"]`.

        Args:
            timeout_s: Seconds to wait for the batch; None: as long as no env takes longer than the pool's `timeout_s`.

        Returns:
            Observations, rewards, terminations, truncations and infos; `info["env_id"]` says which env each row
            belongs to.

        Raises:
            NothingToReceive: Fewer envs are in flight than a batch has rows.
            EnvFailed: An env raised, or its process died.
            StepOnEndedEpisode: With autoreset disabled, an env must be reset first.
            PoolTimeout: No full batch after `timeout_s`.
        """
        self._require_open()
        self._in_flight.require_batch()
        return self._result(timeout_s, has_env_ids=True)

    def recv_ready(self, timeout_s: float | None = None) -> StepResult:
        """Wait for the envs that are ready first: as many as a batch has rows, or all that are in flight, if fewer are.

        As recv() otherwise; after an error, call this again for the same batch.

        Args:
            timeout_s: As for recv().

        Returns:
            Observations, rewards, terminations, truncations and infos; `info["env_id"]` says which env each row
            belongs to.

        Raises:
            NothingToReceive: No env is in flight.
            EnvFailed, StepOnEndedEpisode, PoolTimeout: As recv() raises them.
        """
        self._require_open()
        in_flight = self._in_flight
        if in_flight.num_envs and len(padding := in_flight.pad()):
            self._backend.repeat(padding, Line.FIRST_READY)
        result = self.recv(timeout_s)
        if not len(padding := in_flight.take_padding()):
            return result
        return rows_of_result(self._obs, result, np.flatnonzero(~np.isin(result[4]["env_id"], padding)))

    def drop_results(self) -> None:
        """Wait for the envs that are in flight, and drop what they return.

        Raises:
            PoolTimeout: Envs are still at work after `timeout_s`.
        """
        self._require_open()
        self._clear_flight()

    def give_up(self, env_ids: ArrayLike) -> None:
        """End the steps or resets that these envs are at work on, for example those that a PoolTimeout names.

        `recv()` then raises EnvFailed and returns the batch, in which their rows are truncated; the envs are built
        anew. An env that does not react to an interrupt within 2 s loses its process, and with it the episodes of all
        envs of that process. Envs that are done, or have not begun, are left alone.

        Args:
            env_ids: Indices of some envs, in any order.

        Raises:
            UsageError: The envs do not run in processes of their own, or `env_ids` is wrong.
        """
        self._require_open()
        if self._backend.why_no_giving_up is not None:
            raise UsageError(self._backend.why_no_giving_up)
        self._backend.give_up(some_env_ids(env_ids, self.num_envs))

    def call_while_waiting(self, look: Callable[[], None]) -> None:
        """Call `look` several times a second while a call waits for envs in other processes or threads.

        Args:
            look: What it raises ends the wait, and is passed on; what was waited for goes on.
        """
        self._backend.call_while_waiting(look)

    # -- in compiled programs --

    def xla(self) -> XlaFunctions:
        """Return a handle, and functions that receive, send and step inside `jax.jit` and `lax.scan`, on the CPU.

        `handle, recv, send, step = pool.xla()`. Each function takes a handle first and returns the next one, which
        orders the calls: `handle, (obs, rewards, terminations, truncations, infos) = step(handle, actions)`,
        `handle = send(handle, actions, env_id)`, `handle, results = recv(handle)`. Reset the pool in Python. Without
        JAX's 64 bits, float64 and int64 arrays are float32 and int32. What step(), send() and recv() of the pool raise
        is the text of JAX's error. See docs/jax.md.

        Returns:
            `XlaFunctions(handle, recv, send, step)`. They keep the pool alive.

        Raises:
            UsageError: The envs are not native.
            MissingExtra: JAX is not installed.
        """
        from envfleet.pool.xla_pool import share_with_xla  # which builds on this module

        self._require_open()
        return share_with_xla(self)

    # -- live changes --

    def broadcast(self, name: str, value: Any) -> int:
        """Set an attribute of each env just before its next reset, also while envs are in flight.

        Envs that are built anew later have it from their first reset on. `info["live_change"]` of each reset has the
        number of the last change that the episode was begun with.

        Args:
            name: Name of the attribute, which the envs must have; wrappers are looked through.
            value: The same for all envs.

        Returns:
            The number of the change: 1, 2, 3, ...

        Raises:
            UsageError: The value cannot be pickled, the name is none, or the envs are native or come vectorized.
        """
        return self.change(attribute_change(self._num_changes + 1, name, value))

    def call_at_reset(self, name: str, *args: Any, **kwargs: Any) -> int:
        """Call a method of each env once, just before its next reset; see `broadcast`.

        An env that is built anew later gets the last call of each method only.

        Args:
            name: Name of the method; wrappers are looked through.
            args: Positional arguments of the method.
            kwargs: Named arguments of the method.

        Returns:
            The number of the change: 1, 2, 3, ...

        Raises:
            UsageError: An argument cannot be pickled, the name is none, or the envs are native or come vectorized.
        """
        return self.change(call_change(self._num_changes + 1, name, args, kwargs))

    def set_reset_options(self, options: Mapping[str, Any] | None) -> int:
        """Pass these options to every later reset of each env, also when it resets itself; see `broadcast`.

        A reset() with options of its own has those instead.

        Args:
            options: The options; None: none, as at first.

        Returns:
            The number of the change: 1, 2, 3, ...

        Raises:
            UsageError: An option cannot be pickled, or the envs are native or come vectorized.
        """
        return self.change(options_change(self._num_changes + 1, options))

    def change(self, change: Change) -> int:
        """Have each env apply a change in its next reset; `broadcast` and the others above make it.

        Args:
            change: With a number greater than that of the last one.

        Returns:
            Its number.

        Raises:
            UsageError: The envs of this backend cannot be changed while they run.
        """
        self._require_open()
        if self._backend.why_no_changes is not None:
            raise UsageError(self._backend.why_no_changes)
        self._backend.change(change)
        self._num_changes = change.number
        return change.number

    @property
    def why_no_changes(self) -> str | None:
        """Why envs of this pool cannot be changed while they run; None: they can."""
        return self._backend.why_no_changes

    # -- saving and restoring --

    @property
    def why_no_states(self) -> str | None:
        """Why states of this pool's envs cannot be saved, and what to do; None: they can, as far as env 0 shows."""
        return self._backend.why_no_states

    def get_state(self, env_ids: ArrayLike | None = None) -> list[EnvState]:
        """Save the states of all envs, or of some.

        Native envs and Atari games can be saved as they are. A Python env needs `get_state()` and `set_state(state)`,
        or a pool with `env_states="pickle"`.

        Args:
            env_ids: Indices of some envs, in any order; None: all.

        Returns:
            A state for each of these envs. An env that is put back into it repeats its trajectory, bit for bit.

        Raises:
            UsageError: The envs cannot be saved (`why_no_states` says why), or `env_ids` is wrong.
            NotReset: The envs were never reset, or one has failed since.
            EnvBusy: Results are to come: receive them first.
            EnvFailed: The `get_state()` of an env raised.
            PoolTimeout: No answer after `timeout_s`.
        """
        ids = self._env_ids_with_states(env_ids, "save their states")
        if not self._was_reset:
            raise NotReset("reset the envs before you save their states")
        states: list[EnvState] = self._asked(self._backend.get_state, ids)
        return states

    def set_state(self, states: Sequence[EnvState], env_ids: ArrayLike | None = None) -> None:
        """Put all envs, or some, back into saved states; `step()` goes on from there at once.

        The states of Python envs are pickles: take only those that you trust.

        Args:
            states: What get_state() gave, of this pool or of another one: a state for each of these envs.
            env_ids: Indices of some envs, in any order; None: all.

        Raises:
            UsageError: The envs cannot be saved, a state is of another kind of env, or the number of states is wrong;
                no state was restored.
            NotReset: The envs were never reset, and some of them are to be restored.
            EnvBusy: Results are to come: receive them first.
            EnvFailed: The `set_state()` of an env raised. This env must be reset; the others are restored.
            PoolTimeout: No answer after `timeout_s`.
        """
        states = list(states)
        self.require_fitting([each.env_name for each in states], env_ids)
        ids = self._env_ids_with_states(env_ids, "restore their states")
        if not self._was_reset and len(ids) < self.num_envs:
            raise NotReset("the first set_state() must restore all envs; or call reset() first")
        try:
            self._asked(self._backend.set_state, ids, states)
        except UsageError:
            raise
        except BaseException:
            self._was_reset = True
            raise
        self._was_reset = True
        self._step_at_once = self._backend.step_at_once

    def require_fitting(self, env_names: Sequence[str], env_ids: ArrayLike | None = None) -> None:
        """Look whether states are of the kind of these envs; set_state() does so first.

        Args:
            env_names: `EnvState.env_name` of each state.
            env_ids: Indices of some envs, in any order; None: all.

        Raises:
            UsageError: One is not.
        """
        ids = self._env_ids_with_states(env_ids, "restore their states")
        if len(env_names) == len(ids):
            require_fitting(env_names, self._asked(self._backend.state_names, ids), ids)
        else:
            require_fitting(env_names, (), ids)

    def observations(self) -> Any:
        """Return what each env showed last: after its reset, its step, or the state that it was put back into.

        Returns:
            A row for each env.

        Raises:
            NotReset: The envs were never reset.
            EnvBusy: Results are to come: receive them first.
        """
        self._require_open()
        self._in_flight.require_none("receive them before you ask for observations")
        if not self._was_reset:
            raise NotReset("reset the envs before you ask for observations")
        self._backend.repeat(np.arange(self.num_envs, dtype=np.int32), Line.FULL)
        self._in_flight.line = Line.FULL
        self._mark_sent(None)
        return self._recv(self._config.timeout_s).obs

    def __enter__(self) -> Self:
        """Return the pool, which `with` closes."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the pool, whatever happened."""
        self.close()

    # -- inside --

    def _batched_observation_space(self) -> Space[Any]:
        num_envs, first = self._config.num_envs, self.single_observation_space
        if self._config.observation_mode == "same":
            return batch_space(first, num_envs)
        spaces = self._backend.call(range(num_envs), "observation_space", (), {})
        return batch_differing_spaces(spaces)

    def _result(self, timeout_s: float | None, *, has_env_ids: bool) -> StepResult:
        chosen = self._chosen_env_ids() if self._in_flight.is_of_some else None
        batch = self._recv(timeout_s)
        if has_env_ids:
            batch.infos["env_id"] = batch.env_ids
        result = batch.obs, batch.rewards, batch.terminated, batch.truncated, batch.infos
        return result if chosen is None else rows_of_result(self._obs, result, chosen)

    def _chosen_env_ids(self) -> IntArray:
        """The envs that a batch is for, in the order sent. All others are given rows, too, which the caller never sees.

        From then on every env is in flight: after PoolTimeout or EnvFailed the same batch is received again.
        """
        others = self._in_flight.other_env_ids()
        if len(others):
            self._backend.repeat(others, Line.FULL)
            self._in_flight.sent(others)
        return self._in_flight.chosen_env_ids()

    def _recv(self, timeout_s: float | None) -> StepBatch:
        try:
            batch = self._backend.recv(self._in_flight.line, timeout_s)
        except PoolTimeout as error:
            raise PoolTimeout(error.report, RECV_GOES_ON, error.env_ids) from None
        self._first_seed = None  # only now: a first reset() that timed out may be made again
        if self._in_flight.landed(batch.env_ids):
            self._step_at_once = self._backend.step_at_once
        return batch

    def _async_reset_some(self, env_ids: IntArray, seeds: list[int | None], options: dict[str, Any] | None) -> None:
        if self._in_flight.line is Line.FULL or not self._backend.steps_some:
            raise UsageError(
                "async_reset(env_id=...) is for asynchronous pools, with batch_size < num_envs: call reset() with "
                "reset_mask"
            )
        if not self._was_reset:
            raise NotReset("the first async_reset() must reset all envs: call it without env_id")
        if options or self._had_options:  # all envs read the same options, and others may be in a reset
            raise UsageError("async_reset(env_id=...) knows no options, nor do resets of all envs before it")
        self._backend.reset(env_ids, [seeds[env_id] for env_id in env_ids], None, self._config.line)
        self._mark_sent(env_ids)

    def _mark_sent(self, env_ids: IntArray | None) -> None:
        self._step_at_once = None
        self._in_flight.sent(env_ids)

    def _clear_flight(self) -> None:
        if self._in_flight.num_envs:
            try:
                self._backend.drain()
            except PoolTimeout as error:
                raise PoolTimeout(error.report, NOTHING_WAS_RESET, error.env_ids) from None
            self._in_flight.landed_all()
            self._step_at_once = self._backend.step_at_once

    def _asked(self, ask: Callable[..., Any], *args: Any) -> Any:
        try:
            return ask(*args)
        except PoolTimeout as error:
            raise PoolTimeout(error.report, CALL_GOES_ON, error.env_ids) from None

    def _seeds(self, seed: int | Sequence[int | None] | None) -> list[int | None]:
        if seed is None:
            seed = self._first_seed
        return seeds_of(seed, self.num_envs)

    def _env_ids_with_states(self, env_ids: ArrayLike | None, what: str) -> list[int]:
        self._require_open()
        self._in_flight.require_none(f"receive them before you {what}")
        if self._backend.why_no_states is not None:
            raise UsageError(self._backend.why_no_states)
        return list(range(self.num_envs) if env_ids is None else self._in_flight.checked(env_ids, "env_ids").tolist())

    def _require_open(self) -> None:
        if self.closed:
            raise PoolClosed("this pool was closed; make() another one")
        if os.getpid() != self._owner_pid:
            raise PoolClosed(f"this pool belongs to process {self._owner_pid}; a fork of it must make its own")

    def _abandon(self) -> None:
        """In a fork of the owner: have all calls look whose pool it is, also those that are quick otherwise."""
        self._step_at_once = None
        self._was_reset = False
        self._backend.abandon()


_pools: weakref.WeakSet[EnvPool] = weakref.WeakSet()


def _abandon_in_fork() -> None:
    for pool in _pools:
        pool._abandon()


os.register_at_fork(after_in_child=_abandon_in_fork)
