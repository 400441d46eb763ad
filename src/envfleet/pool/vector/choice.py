"""Which vector env answers the user's call, and how it is built."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import gymnasium
from gymnasium.envs.registration import EnvSpec as GymnasiumSpec
from gymnasium.vector import AutoresetMode

from envfleet.contract.episode import Autoreset
from envfleet.contract.errors import MissingExtra, UsageError
from envfleet.contract.pool_config import PoolConfig
from envfleet.contract.spec import NO_STEP_LIMIT, EnvSpec
from envfleet.pool.building import imported, require_env_kwargs, without_module
from envfleet.pool.foreign_envs import hint
from envfleet.pool.simulators.atari_ids import atari_game
from envfleet.pool.vector.envpool import EnvPoolVector
from envfleet.pool.vector.vectorized import AleVector, GymnasiumVector, Vectorized, vectorized

ENVPOOL = "envpool:"  # before the name of an EnvPool task: "envpool:Ant-v5"

# Arguments of envpool.make that make() has under these names.
_OURS = {
    "num_envs": "num_envs",
    "batch_size": "batch_size",
    "seed": "seed",
    "env_seed": "seed",
    "num_threads": "num_workers",
    "max_episode_steps": "max_episode_steps",
}
_SCREEN = (210, 160)  # height and width of what the games show


class VectorBuilder(NamedTuple):
    """Makes the vector env of a pool."""

    build: Callable[[Autoreset], Vectorized]
    takes_mode: bool  # another mode may give a vector env with another mode of its own


def is_envpool_task(env_id: Any) -> bool:
    """Is it the id of an EnvPool task?"""
    return isinstance(env_id, str) and env_id.startswith(ENVPOOL)


def vector_builder(spec: EnvSpec, config: PoolConfig) -> VectorBuilder:
    """What makes the vector env: ids of EnvPool, ALE and Gymnasium, or a factory, called with `num_envs`."""
    kwargs = spec.common_kwargs(config.num_envs)
    if kwargs is None:
        raise UsageError("the envs of a vector env have the same arguments: env_kwargs must not differ")
    if spec.render_mode is not None:
        kwargs["render_mode"] = spec.render_mode
    if spec.id is not None and is_envpool_task(spec.id):
        task_kwargs = _envpool_kwargs(spec, kwargs)
        return VectorBuilder(partial(_envpool, spec.id.removeprefix(ENVPOOL), config, task_kwargs), takes_mode=False)
    if "num_envs" in kwargs:
        raise UsageError("env_kwargs must not have num_envs: make() has an argument num_envs")
    if spec.max_episode_steps is not None:
        raise UsageError("a vector env has its own limit of steps: max_episode_steps is for other backends")
    env_id = "" if spec.id is None else without_module(spec.id)
    if env_id and (game := atari_game(env_id)) is not None:
        return VectorBuilder(partial(_ale, game, config, kwargs), takes_mode=True)
    if config.num_workers is not None:
        raise UsageError("a vector env has its own threads or processes: num_workers is for other backends")
    if spec.id is not None:
        return VectorBuilder(partial(_registered, gymnasium.spec(env_id), config, kwargs), takes_mode=False)
    return _factory_builder(spec.factory, config, kwargs)


def _factory_builder(env: Any, config: PoolConfig, kwargs: dict[str, Any]) -> VectorBuilder:
    if isinstance(env, GymnasiumSpec):
        return VectorBuilder(partial(_registered, env, config, kwargs), takes_mode=False)
    if isinstance(env, str):
        env = imported(env)
    if isinstance(env, Sequence) or not callable(env):
        got = "a list of factories" if isinstance(env, Sequence) else f"{type(env).__name__}{hint(env)}"
        raise UsageError(f"backend='vector' takes one factory that makes a VectorEnv, or an id; got {got}")
    require_env_kwargs(env, kwargs)
    takes_mode = _takes_mode(env)
    return VectorBuilder(partial(_made_by, env, takes_mode, config, kwargs), takes_mode)


def _envpool_kwargs(spec: EnvSpec, kwargs: dict[str, Any]) -> dict[str, Any]:
    for name in kwargs.keys() & _OURS.keys():
        raise UsageError(f"env_kwargs must not have {name}: make() has an argument {_OURS[name]}")
    if spec.max_episode_steps == NO_STEP_LIMIT:
        raise UsageError("EnvPool's tasks always have a limit: max_episode_steps must be at least 1, or None; got -1")
    return kwargs if spec.max_episode_steps is None else {**kwargs, "max_episode_steps": spec.max_episode_steps}


def _envpool(task: str, config: PoolConfig, kwargs: dict[str, Any], mode: Autoreset) -> EnvPoolVector:
    try:
        envpool: Any = importlib.import_module("envpool")
    except ImportError:
        raise MissingExtra(f"{ENVPOOL}{task} needs EnvPool: pip install envpool") from None
    if task not in envpool.list_all_envs():
        raise UsageError(f"EnvPool has no task {task!r}; envpool.list_all_envs() has them all")

    def build(seeds: list[int]) -> Any:
        threads = {} if config.num_workers is None else {"num_threads": config.num_workers}
        return envpool.make(
            task, env_type="gymnasium", num_envs=config.num_envs, env_seed=seeds, **{**threads, **kwargs}
        )

    return EnvPoolVector(build, config.num_envs)


def _ale(game: str, config: PoolConfig, kwargs: dict[str, Any], mode: Autoreset) -> AleVector:
    """With the settings that our own Atari env has."""
    from ale_py.vector_env import AtariVectorEnv

    from envfleet.pool.simulators.atari import AtariSettings

    if kwargs.get("render_mode") is not None:
        raise UsageError("ale-py's own vector env does not draw: render_mode is for backend='process'")
    settings = AtariSettings.of({name: value for name, value in kwargs.items() if name != "render_mode"})
    missing = [name for name in ("mode", "difficulty") if getattr(settings, name) is not None]
    if settings.terminal_on_life_loss:
        missing.append("terminal_on_life_loss")
    if missing:
        raise UsageError(f"ale-py's own vector env has no setting {', '.join(missing)}; backend='process' has")
    height, width = settings.image_size()
    if not (1 <= height <= _SCREEN[0] and 1 <= width <= _SCREEN[1]):
        size = settings.screen_size
        raise UsageError(
            f"screen_size must be at least 1 and not larger than the game's screen, (160, 210); got {size}"
        )
    own_mode = Autoreset.NEXT_STEP if mode is Autoreset.DISABLED else mode
    env = AtariVectorEnv(
        game,
        config.num_envs,
        num_threads=config.num_workers or 0,
        max_num_frames_per_episode=settings.max_num_frames_per_episode,
        repeat_action_probability=settings.repeat_action_probability,
        full_action_space=settings.full_action_space,
        autoreset_mode=AutoresetMode(own_mode.value),
        img_height=height,
        img_width=width,
        grayscale=settings.grayscale_obs,
        stack_num=settings.stack_num,
        frameskip=settings.frame_skip,
        noop_max=settings.noop_max,
        episodic_life=settings.episodic_life,
        reward_clipping=settings.reward_clip,
        use_fire_reset=settings.fire_reset,
    )
    return AleVector(env, config.num_envs)


def _registered(spec: GymnasiumSpec, config: PoolConfig, kwargs: dict[str, Any], mode: Autoreset) -> GymnasiumVector:
    if spec.vector_entry_point is None:
        raise UsageError(f"{spec.id} is not registered with a vector env; other backends run it")
    made = gymnasium.make_vec(spec, config.num_envs, vectorization_mode="vector_entry_point", **kwargs)
    return vectorized(made, config.num_envs)


def _takes_mode(factory: Callable[..., Any]) -> bool:
    """Has it an argument `autoreset_mode`? Others decide for themselves."""
    try:
        return "autoreset_mode" in inspect.signature(factory).parameters
    except (TypeError, ValueError):
        return False


def _made_by(
    factory: Callable[..., Any], takes_mode: bool, config: PoolConfig, kwargs: dict[str, Any], mode: Autoreset
) -> GymnasiumVector:
    if takes_mode:
        kwargs = {"autoreset_mode": AutoresetMode(mode.value), **kwargs}
    return vectorized(factory(num_envs=config.num_envs, **kwargs), config.num_envs)
