"""make(): the only file that puts the layers together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

from gymnasium.vector import AutoresetMode

from envfleet.contract.episode import Autoreset
from envfleet.contract.errors import UsageError
from envfleet.pool.backend import Backend, PoolConfig
from envfleet.pool.building import EnvKwargs, EnvLike, env_builders
from envfleet.pool.pool import EnvPool

BACKENDS = ("auto", "process", "serial")


def make(
    env: EnvLike | Sequence[Callable[..., Any]],
    num_envs: int | None = None,
    *,
    batch_size: int | None = None,
    backend: Literal["auto", "process", "serial"] = "auto",
    autoreset_mode: AutoresetMode | Autoreset | str = Autoreset.NEXT_STEP,
    seed: int | None = None,
    env_kwargs: EnvKwargs = None,
    max_episode_steps: int | None = None,
    num_workers: int | None = None,
    pin_workers: bool = True,
    on_env_error: Literal["raise", "restart"] = "raise",
    max_env_restarts: int = 10,
    render_mode: str | None = None,
    timeout_s: float = 60.0,
    start_timeout_s: float = 300.0,
) -> EnvPool:
    """Run `num_envs` environments on this machine, as one `gymnasium.vector.VectorEnv`.

    Args:
        env: A Gymnasium id, an EnvSpec (ours or Gymnasium's), a callable that makes an env, or a list of
            callables, one for each env.
        num_envs: Number of envs; may be left out for a list of callables. One if nothing says otherwise.
        batch_size: Rows of a batch. Less than `num_envs` makes the pool asynchronous: `recv()` returns the
            first that finished.
        backend: "process" runs envs in child processes; "serial" in this thread. "auto" chooses.
        autoreset_mode: What follows the last step of an episode: "next_step", "same_step", "disabled", or
            Gymnasium's AutoresetMode.
        seed: For the first reset() if that has no seed of its own. Env i is seeded with `seed + i`.
        env_kwargs: Arguments for the env: a dict, a list with a dict for each env, or a callable from the
            env's index to a dict.
        max_episode_steps: Truncate episodes after so many steps; None: as registered.
        num_workers: Number of child processes. None: one for each CPU this process may use, and more if the
            env mostly waits, which its first steps show; the log says what was chosen and why.
        pin_workers: Bind each child process to its share of the CPUs, if there are at least as many CPUs.
        on_env_error: "raise": an env that fails, or whose process dies, raises EnvFailed. "restart": its row
            is truncated, `info["env_error"]` says why, and the env is built anew.
        max_env_restarts: With "restart": raise after so many failures of an env without a finished episode.
        render_mode: Gymnasium's; passed to the env.
        timeout_s: The longest wait for results before PoolTimeout.
        start_timeout_s: The longest wait for the envs to be built.
    """
    if num_envs is None:
        num_envs = len(env) if isinstance(env, Sequence) and not isinstance(env, str) else 1
    if on_env_error not in ("raise", "restart"):
        raise UsageError(f"on_env_error must be 'raise' or 'restart'; got {on_env_error!r}")
    if backend not in BACKENDS:
        raise UsageError(f"no backend is called {backend!r}; known: {', '.join(BACKENDS)}")
    config = PoolConfig(
        num_envs=num_envs,
        batch_size=batch_size,
        autoreset=_autoreset(autoreset_mode),
        max_env_restarts=max_env_restarts if on_env_error == "restart" else None,
        num_workers=num_workers,
        pin_workers=pin_workers,
        timeout_s=timeout_s,
        start_timeout_s=start_timeout_s,
    )
    builders = env_builders(
        env, num_envs, env_kwargs=env_kwargs, max_episode_steps=max_episode_steps, render_mode=render_mode
    )
    running: Backend
    if backend == "serial":
        from envfleet.pool.serial import SerialBackend

        running = SerialBackend(builders, config)
    else:
        from envfleet.pool.process import ProcessBackend

        running = ProcessBackend(builders, config)
    return EnvPool(running, config, seed)


def _autoreset(mode: AutoresetMode | Autoreset | str) -> Autoreset:
    if isinstance(mode, Autoreset):
        return mode
    value = mode.value if isinstance(mode, AutoresetMode) else mode
    for each in Autoreset:
        if value in (each.value, each.name, each.name.lower()):
            return each
    known = ", ".join(repr(each.name.lower()) for each in Autoreset)
    raise UsageError(f"autoreset_mode must be one of {known}, or Gymnasium's AutoresetMode; got {mode!r}")
