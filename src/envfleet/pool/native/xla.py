"""The functions of a native pool inside compiled programs of JAX: recv, send and step, as XLA calls them."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from envfleet._native import core
from envfleet.contract.errors import MissingExtra, UsageError
from envfleet.contract.spaces import SpaceTree, require_form

HANDLE_BYTES = 8
NO_VMAP = (
    "functions of pool.xla() cannot be vmapped: a pool is a batch of envs already, and has one state. Make it with "
    "more envs, or call xla() of several pools"
)


class XlaFunctions(NamedTuple):
    """A handle for the first call, and functions for `jax.jit` and `lax.scan`."""

    handle: Any  # [8] uint8
    recv: Callable[[Any], Any]  # handle -> handle, (obs, rewards, terminations, truncations, infos)
    send: Callable[..., Any]  # handle, actions, env_id=None -> handle
    step: Callable[..., Any]  # handle, actions, env_id=None -> as recv


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolForm:
    """What the functions take and return."""

    pool: Any  # kept alive
    num_envs: int
    obs: SpaceTree
    actions: SpaceTree
    store: core.BatchStore  # of the batches that recv() returns
    info_names: Sequence[str]
    has_elapsed_step: bool = False  # infos say how many steps each episode has


@functools.cache
def require_jax() -> Any:
    """Return the package jax, which knows our functions from now on. Raises MissingExtra."""
    try:
        import jax
        import jax.ffi
    except ImportError as error:
        raise MissingExtra('xla() needs JAX 0.5 or later: pip install "envfleet[jax]"') from error
    for name, capsule in core.xla_handlers().items():
        jax.ffi.register_ffi_target(f"envfleet_{name}", capsule, platform="cpu")
    return jax


def xla_functions(port_id: int, form: PoolForm) -> XlaFunctions:
    """Return the functions of the pool that has this port."""
    handle = np.frombuffer(port_id.to_bytes(HANDLE_BYTES, sys.byteorder), np.uint8)
    calls = _Calls(form)
    return XlaFunctions(handle, calls.recv, calls.send, calls.step)


class _Calls:
    def __init__(self, form: PoolForm) -> None:
        self._form = form
        columns = form.store.columns
        # XLA is told which rows have final observations, instead of the flags.
        row_flags = form.store.by_name(range(len(columns))).row_flags
        self._columns = [
            (np.dtype(np.bool_) if i == row_flags else dtype, shape) for i, (dtype, shape) in enumerate(columns)
        ]
        if form.has_elapsed_step:
            num_rows = columns[row_flags][1][0]
            self._columns.append((np.dtype(np.int32), (num_rows,)))

    def recv(self, handle: Any) -> Any:
        """Receive the next batch.

        Args:
            handle: Of the call before.

        Returns:
            The next handle, and a tuple of observations, rewards, terminations, truncations and infos.
        """
        return self._result(_call("recv", handle, [], self._columns))

    def send(self, handle: Any, actions: Any, env_id: Any = None) -> Any:
        """Start one step of all envs, or of those in `env_id`.

        Args:
            handle: Of the call before.
            actions: A row for each env, or for each of `env_id`.
            env_id: Indices of some envs of an asynchronous pool; None: all.

        Returns:
            The next handle.
        """
        return _call("send", handle, self._arguments(actions, env_id), [])[0]

    def step(self, handle: Any, actions: Any, env_id: Any = None) -> Any:
        """Send, and receive.

        Args:
            handle: Of the call before.
            actions: As for send().
            env_id: As for send().

        Returns:
            As recv().
        """
        return self._result(_call("step", handle, self._arguments(actions, env_id), self._columns))

    def _arguments(self, actions: Any, env_id: Any) -> list[Any]:
        """The leaves of the actions, in a dtype that JAX has and C++ converts; then the envs, if not all."""
        jnp = require_jax().numpy
        env_ids = [] if env_id is None else [_env_ids(env_id, self._form.num_envs)]
        num_rows = env_ids[0].shape[0] if env_ids else self._form.num_envs
        leaves = []
        for leaf, value in zip(
            self._form.actions.leaves, self._form.actions.require_parts(actions, "actions"), strict=True
        ):
            array = jnp.asarray(value)
            require_form(array.shape, array.dtype, leaf, num_rows, leaf.name_in("actions"))
            leaves.append(array.astype(_in_jax(leaf.dtype)))
        return [*leaves, *env_ids]

    def _result(self, results: Sequence[Any]) -> Any:
        handle, *columns = results
        elapsed_step = {"elapsed_step": columns.pop()} if self._form.has_elapsed_step else {}
        batch = self._form.store.by_name(columns)
        infos = {"env_id": batch.env_ids, **_nested(self._form.info_names, batch.infos), **elapsed_step}
        if batch.final_obs:
            infos |= {"final_obs": self._form.obs.unflatten(batch.final_obs), "_final_obs": batch.row_flags}
            infos |= {"final_info": _nested(self._form.info_names, batch.final_infos), "_final_info": batch.row_flags}
        return handle, (
            self._form.obs.unflatten(batch.obs),
            batch.rewards,
            batch.terminated,
            batch.truncated,
            infos,
        )


def _call(name: str, handle: Any, arguments: list[Any], columns: Sequence[tuple[Any, tuple[int, ...]]]) -> Any:
    jax = require_jax()
    handle = jax.numpy.asarray(handle)
    if handle.shape != (HANDLE_BYTES,) or handle.dtype != np.uint8:
        raise UsageError(
            f"{name}() of xla() takes the handle of the call before first, an array ({HANDLE_BYTES},) of uint8; got "
            f"{handle.shape}, {handle.dtype}"
        )
    results = [jax.ShapeDtypeStruct((HANDLE_BYTES,), np.uint8)]
    results += [jax.ShapeDtypeStruct(shape, _in_jax(dtype)) for dtype, shape in columns]
    ffi_call = jax.ffi.ffi_call(f"envfleet_{name}", results, has_side_effect=True)

    @jax.custom_batching.custom_vmap  # type: ignore[untyped-decorator]
    def call(*arguments: Any) -> tuple[Any, ...]:
        return tuple(ffi_call(*arguments))

    @call.def_vmap  # type: ignore[untyped-decorator]
    def refuse(*_: Any) -> Any:
        raise UsageError(NO_VMAP)

    return call(handle, *arguments)


def _in_jax(dtype: Any) -> Any:
    """JAX has no 64 bits unless it is told to."""
    return require_jax().dtypes.canonicalize_dtype(dtype)


def _env_ids(env_id: Any, num_envs: int) -> Any:
    jnp = require_jax().numpy
    ids = jnp.asarray(env_id)
    if ids.ndim != 1 or ids.dtype.kind not in "iu" or not ids.shape[0]:
        raise UsageError(f"env_id must be a vector of env indices; got shape {ids.shape}, dtype {ids.dtype}")
    return ids if ids.dtype == np.int32 else jnp.clip(ids, -1, num_envs).astype(np.int32)  # no id becomes another one


def _nested(names: Sequence[str], columns: Sequence[tuple[Any, Any]]) -> dict[str, Any]:
    """`key` and its mask `_key`, as contract/infos/table.py has them; but each key, whether any row has it or not."""
    infos: dict[str, Any] = {}
    for name, (values, mask) in zip(names, columns, strict=True):
        place = infos
        *parents, key = name.split("/")
        for parent in parents:
            place[f"_{parent}"] = mask
            place = place.setdefault(parent, {})
        place[key], place[f"_{key}"] = values, mask
    return infos
