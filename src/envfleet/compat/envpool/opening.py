"""Our pool for the settings of EnvPool's."""

from __future__ import annotations

from typing import Any, NamedTuple

from gymnasium.spaces import Space

from envfleet.compat.envpool.atari_kind import ATARI_KIND, atari_env_kwargs, atari_task_id
from envfleet.compat.envpool.config import Settings
from envfleet.compat.envpool.kind import INT32_MAX, Kind
from envfleet.contract.episode import Autoreset
from envfleet.contract.pool_config import BackendName
from envfleet.pool.make import make
from envfleet.pool.pool import EnvPool


class _OurEnv(NamedTuple):
    env_id: str
    kwargs: dict[str, Any]
    max_episode_steps: int


def open_pool(kind: Kind, settings: Settings, render_mode: str | None, render_kwargs: dict[str, Any]) -> EnvPool:
    """A pool with these settings; episodes that have ended are reset at their next step, as EnvPool does it."""
    env = _our_env(kind, settings)
    return make(
        env.env_id,
        settings["num_envs"],
        batch_size=settings["batch_size"],
        autoreset_mode=Autoreset.NEXT_STEP,
        env_kwargs={**env.kwargs, **render_kwargs},
        max_episode_steps=env.max_episode_steps,
        num_workers=settings["num_threads"] or None,
        pin_workers=True if settings["thread_affinity_offset"] >= 0 else None,
        render_mode=render_mode,
    )


def spaces_of(kind: Kind, settings: Settings) -> tuple[Space[Any], Space[Any]]:
    """Our observation space and action space of one env with these settings."""
    env = _our_env(kind, settings)
    backend: BackendName = "serial" if kind is ATARI_KIND else "auto"  # a game needs no process to be looked at
    with make(env.env_id, 1, backend=backend, env_kwargs=env.kwargs) as pool:
        return pool.single_observation_space, pool.single_action_space


def _our_env(kind: Kind, settings: Settings) -> _OurEnv:
    if kind is ATARI_KIND:
        game = settings["task"]
        game = game.decode() if isinstance(game, bytes) else game
        return _OurEnv(atari_task_id(game), atari_env_kwargs(settings), -1)
    limit = settings["max_episode_steps"]
    return _OurEnv(kind.env_id(settings), kind.env_kwargs(settings), -1 if limit == INT32_MAX else limit)
