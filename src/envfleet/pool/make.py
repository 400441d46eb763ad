"""make(): the pool that answers the user's call."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

from gymnasium.vector import AutoresetMode

from envfleet.contract.episode import Autoreset
from envfleet.contract.errors import UsageError
from envfleet.contract.pixels import Pixels
from envfleet.contract.pool_config import DEFAULTS, BackendName, EnvStates, ObservationMode, OnEnvError, PoolConfig
from envfleet.contract.spec import EnvKwargs, EnvSpec
from envfleet.pool.arguments import autoreset_of, seeds_of
from envfleet.pool.backend import Backend
from envfleet.pool.building import EnvLike, env_builders
from envfleet.pool.native.registry import NativeChoice, choose_native
from envfleet.pool.native.twins import NotNative
from envfleet.pool.pool import EnvPool
from envfleet.pool.vector.choice import is_envpool_task, vector_builder

logger = logging.getLogger("envfleet.pool")


def make(
    env: EnvLike | Sequence[Callable[..., Any]],
    num_envs: int | None = None,
    *,
    batch_size: int | None = DEFAULTS.batch_size,
    backend: BackendName = DEFAULTS.backend,
    autoreset_mode: AutoresetMode | Autoreset | str = DEFAULTS.autoreset,
    observation_mode: ObservationMode = DEFAULTS.observation_mode,
    seed: int | None = None,
    env_kwargs: EnvKwargs | None = None,
    max_episode_steps: int | None = None,
    num_workers: int | None = DEFAULTS.num_workers,
    pin_workers: bool | None = DEFAULTS.pin_workers,
    on_env_error: OnEnvError = DEFAULTS.on_env_error,
    max_env_restarts: int = DEFAULTS.max_env_restarts,
    render_mode: str | None = None,
    pixels: Pixels | None = None,
    timeout_s: float | None = DEFAULTS.timeout_s,
    start_timeout_s: float | None = DEFAULTS.start_timeout_s,
    env_states: EnvStates = DEFAULTS.env_states,
) -> EnvPool:
    """Run `num_envs` environments on this machine, as one `gymnasium.vector.VectorEnv`.

    Args:
        env: A Gymnasium id, an EnvSpec (ours or Gymnasium's), a callable that makes an env, or a list of
            callables, one for each env.
        num_envs: Number of envs; may be left out for a list of callables. One if nothing says otherwise.
        batch_size: Rows of a batch. Less than `num_envs` makes the pool asynchronous: `recv()` returns the
            first that finished.
        backend: "native" runs envs that are written in C++ (`envfleet.registry()` lists them); "process" any env, in
            child processes; "serial" any env, in this thread; "vector" what comes vectorized: EnvPool's tasks
            ("envpool:Ant-v5"), ale-py's games, ids with a vector entry point, and factories of a
            `gymnasium.vector.VectorEnv`, which are called with `num_envs`. "auto": vector for EnvPool's tasks, native
            where there is such an env, otherwise process.
        autoreset_mode: What follows the last step of an episode: "next_step", "same_step", "disabled", or
            Gymnasium's AutoresetMode.
        observation_mode: "same": all envs have the same observation space. "different": its bounds may differ from env
            to env, but neither its form nor its dtype; as Gymnasium's vector envs have it.
        seed: For the first reset() if that has no seed of its own. Env i is seeded with `seed + i`.
        env_kwargs: Arguments for the env: a dict, a list with a dict for each env, or a callable from the
            env's index to a dict.
        max_episode_steps: Truncate episodes after this number of steps; -1: never; None: as registered.
        num_workers: Number of child processes, or of threads (the calling one included) for native envs. None:
            one for each CPU this process may use. Envs that mostly wait (for a network, a simulator elsewhere) want
            more processes, up to one for each env; if your first steps show that, a warning in the log says how many.
        pin_workers: Bind each worker to its share of the CPUs, if there are at least as many CPUs. None: child
            processes of a synchronous pool yes; all others no, since the calling thread works beside them.
        on_env_error: "raise": an env that fails, or whose process dies, raises EnvFailed. "restart": its row
            is truncated, `info["env_error"]` says why, and the env is built anew.
        max_env_restarts: With "restart": raise once an env has failed more often than this without a finished episode.
        render_mode: Gymnasium's; passed to the env.
        pixels: Observations are images of the envs, which are drawn at each step: `envfleet.Pixels(height=84, width=84,
            stack_num=3)`. Python envs draw them, in processes or serially.
        timeout_s: The longest time that a step or reset of one env may take before PoolTimeout; with
            `on_env_error="restart"` the env fails instead. None: no limit, and a line in the log once a minute.
        start_timeout_s: The longest wait for the envs to be built. None: no limit.
        env_states: How `get_state()` saves Python envs: "own": by their own `get_state()` and `set_state(state)`;
            "pickle": those without are pickled whole.

    Returns:
        The pool; its envs are built, and not reset.

    Raises:
        UsageError: An argument is wrong.
        SpacesDiffer: The envs have different spaces.
        EnvFailed: An env cannot be built.
        PoolTimeout: The envs were not built after `start_timeout_s`.
        MissingExtra: The env needs a package that is not installed.
    """
    spec = EnvSpec.of(
        env, kwargs=env_kwargs, max_episode_steps=max_episode_steps, render_mode=render_mode, pixels=pixels
    )
    config = PoolConfig(
        num_envs=(len(spec.factory) if spec.is_list else 1) if num_envs is None else num_envs,
        batch_size=batch_size,
        backend=backend,
        autoreset=autoreset_of(autoreset_mode),
        observation_mode=observation_mode,
        num_workers=num_workers,
        pin_workers=pin_workers,
        on_env_error=on_env_error,
        max_env_restarts=max_env_restarts,
        timeout_s=timeout_s,
        start_timeout_s=start_timeout_s,
        env_states=env_states,
    )
    return make_pool(spec, config, seed)


def make_pool(spec: EnvSpec, config: PoolConfig, seed: int | None = None) -> EnvPool:
    """The pool for these values; `make` without its many names."""
    seeds_of(seed, config.num_envs)  # refused here, not at the first reset
    return EnvPool(_make_backend(spec, config), config, seed)


def _make_backend(spec: EnvSpec, config: PoolConfig) -> Backend:
    backend = chosen_backend(spec, config.backend)
    choice = _native_choice(spec, config, backend)
    if choice is not None:
        from envfleet.pool.native.backend import NativeBackend

        return NativeBackend(choice, config)
    if backend == "vector":
        from envfleet.pool.vector.backend import VectorBackend

        return VectorBackend(vector_builder(spec, config), config)
    builders = env_builders(spec, config.num_envs)
    if backend == "serial":
        from envfleet.pool.serial import SerialBackend

        return SerialBackend(builders, config)
    from envfleet.pool.process.backend import ProcessBackend

    return ProcessBackend(builders, config)


def chosen_backend(spec: EnvSpec, backend: str) -> str:
    """The backend that the env needs; else the one that is asked for, which may be "auto"."""
    if is_envpool_task(spec.id):
        if backend not in ("auto", "vector"):
            raise UsageError(f"EnvPool runs its tasks itself: backend must be 'auto' or 'vector'; got {backend!r}")
        backend = "vector"
    if spec.pixels is None:
        return backend
    if backend not in ("auto", "process", "serial"):
        raise UsageError(
            f"Python envs draw pixel observations: backend must be 'auto', 'process' or 'serial'; got {backend!r}"
        )
    return "serial" if backend == "serial" else "process"


def _native_choice(spec: EnvSpec, config: PoolConfig, backend: str) -> NativeChoice | None:
    """The native env that answers the call; None if another backend is to run it."""
    if backend not in ("auto", "native"):
        return None
    try:
        return choose_native(spec, config.num_envs)
    except NotNative as error:
        if backend == "native":
            raise UsageError(f"backend='native' is not available: {error}") from None
        level = logging.WARNING if error.is_surprise else logging.INFO
        logger.log(level, "not native: %s", str(error))  # the exception itself would keep its frames alive
        return None
