"""XlaPool: an EnvPool that jitted functions of JAX step, too."""

from __future__ import annotations

import contextlib
import functools
import math
import weakref
from collections.abc import Callable, Iterator
from types import FunctionType
from typing import Any

import numpy as np

from envfleet._native import core
from envfleet.contract.arrays import IntArray
from envfleet.contract.errors import PoolClosed, PoolTimeout, UsageError
from envfleet.contract.pool_config import Line
from envfleet.pool.native.backend import NativeBackend
from envfleet.pool.native.xla import PoolForm, XlaFunctions, require_jax, xla_functions
from envfleet.pool.pool import EnvPool


class XlaPool(EnvPool):
    """What an EnvPool is from its first xla() on: each public method has the envs to itself, or waits for them.

    XLA calls from threads of its own, without Python's lock. C++ does what is usual (bind/xla_port.h), and asks this
    class for the rest.
    """

    _backend: NativeBackend
    _port: core.XlaPort
    _is_abandoned = False

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        if self._is_abandoned:  # in a fork: the thread that holds the lock is not there
            yield
            return
        limit_s = self._config.timeout_s
        if not self._port.acquire(math.inf if limit_s is None else limit_s):
            raise PoolTimeout(
                f"a jitted function has been stepping this pool for {limit_s:g} s, the pool's timeout_s: wait for its "
                "results (jax.block_until_ready) before you call the pool"
            )
        try:
            if self._port.take_has_received():
                self._first_seed = None  # as after recv()
            yield
        finally:
            is_plain = self._was_reset and not self.closed and self._in_flight.is_plain and self._backend.is_plain
            self._port.release(is_plain)

    def _send_for_xla(self, action_leaves: list[Any], env_ids: IntArray | None) -> None:
        if env_ids is not None and self._config.line is Line.FULL:
            raise UsageError(
                "step() and send() of xla() step all envs of a synchronous pool, in their order: leave env_id out, or "
                f"pass 0 to {self.num_envs - 1}; got {env_ids.tolist()}"
            )
        self.send(self._actions.unflatten(action_leaves), env_ids)

    def _recv_for_xla(self) -> IntArray:
        with self._alone():
            self._require_open()
            self._in_flight.require_batch()
            if self._in_flight.is_of_some:
                raise UsageError("the next batch is of some envs only, which were sent in Python: recv() it there")
            return self._recv(None).env_ids

    def episode_steps(self, env_ids: IntArray) -> IntArray:
        """Count the steps of the episodes of some envs, as the engine knows them, whoever stepped the envs.

        Args:
            env_ids: Their indices; none may be in flight.

        Returns:
            [N] int32; 0 after a reset.
        """
        with self._alone():
            return self._port.episode_steps(np.ascontiguousarray(env_ids, np.int32))

    def _abandon(self) -> None:
        self._is_abandoned = True
        super()._abandon()
        self._port.abandon()


def share_with_xla(pool: EnvPool, *, has_elapsed_step: bool = False) -> XlaFunctions:
    """Have the pool be an XlaPool, and return its functions; `has_elapsed_step`: infos count the steps of episodes."""
    backend = pool._backend
    if not isinstance(backend, NativeBackend):
        raise UsageError(
            "xla() needs native envs, which XLA can step without Python; the backend of this pool is "
            f"{backend.name!r}. Call pools of Python envs from jax.experimental.io_callback, or outside of jax.jit"
        )
    require_jax()
    if not isinstance(pool, XlaPool):
        pool._step_at_once = None  # it does not look who else is stepping
        port = backend.open_xla_port(pool._in_flight.flight, _asking(pool))
        pool.__class__ = XlaPool
        assert isinstance(pool, XlaPool)
        pool._port = port
        with pool._alone():
            pass  # tells the port whether the envs were reset
    form = PoolForm(
        pool=pool,
        num_envs=pool.num_envs,
        obs=pool._obs,
        actions=pool._actions,
        store=backend.batch_store,
        info_names=backend.info_names,
        has_elapsed_step=has_elapsed_step,
    )
    return xla_functions(pool._port.id, form)


def _asking(pool: EnvPool) -> Callable[[list[Any] | None, IntArray | None], Any]:
    """What the port calls. It must not keep the pool alive."""
    weak_pool = weakref.ref(pool)

    def ask(action_leaves: list[Any] | None, env_ids: IntArray | None) -> Any:
        asked = weak_pool()
        if asked is None:
            raise PoolClosed("this pool was closed; make() another one")
        assert isinstance(asked, XlaPool)
        return asked._recv_for_xla() if action_leaves is None else asked._send_for_xla(action_leaves, env_ids)

    return ask


def _made_alone(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def alone(self: XlaPool, *args: Any, **kwargs: Any) -> Any:
        with self._alone():
            return method(self, *args, **kwargs)

    return alone


for _name, _method in {**vars(EnvPool), "close": EnvPool.close}.items():
    if isinstance(_method, FunctionType) and not _name.startswith("_"):
        setattr(XlaPool, _name, _made_alone(_method))
