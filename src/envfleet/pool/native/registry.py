"""Which envs are native, and which native env answers what the user asked for."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import cache
from typing import Any

import gymnasium
import numpy as np
from gymnasium.envs.registration import EnvSpec as GymnasiumSpec
from gymnasium.envs.registration import load_env_creator

from envfleet._native import core
from envfleet.contract.spec import EnvSpec
from envfleet.pool.building import registered, require_env_kwargs
from envfleet.pool.native.plugins import plugin_names
from envfleet.pool.native.twins import OLDER_IDS, TWINS, NotNative, Twin
from envfleet.pool.simulators.box2d import BOX2D_TWINS
from envfleet.pool.simulators.mujoco import MUJOCO_TWINS

logger = logging.getLogger("envfleet.pool")

_TWINS = {twin.entry_point: twin for twin in (*TWINS, *BOX2D_TWINS, *MUJOCO_TWINS)}
_RENDER_MODES = (None, "rgb_array", "ansi", "depth_array", "rgbd_tuple")  # the others want to draw at every step


@dataclass(frozen=True, slots=True)
class NativeChoice:
    """A native env with all its settings."""

    name: str  # in the C++ registry
    model: core.NativeModel
    kwargs: dict[str, Any]
    max_episode_steps: int  # 0: no limit
    render_mode: str | None
    metadata: dict[str, Any]
    gymnasium_spec: GymnasiumSpec | None = None
    twin: Twin | None = None


def registry() -> list[str]:
    """List the envs that run natively in C++.

    Returns:
        Their ids, in alphabetical order.
    """
    is_available = cache(lambda ask: ask())  # many twins ask the same, and it takes milliseconds
    ids = {*OLDER_IDS, *plugin_names()}
    for env_id, spec in gymnasium.registry.items():
        twin = _twin_of(spec)
        if twin is not None and not spec.additional_wrappers and is_available(twin.is_available):
            ids.add(env_id)
    return sorted(ids)


def newer_id(env_id: str) -> str:
    """The id that Gymnasium has for the env today; the log says so if it is another one."""
    if env_id not in OLDER_IDS:
        return env_id
    text = "Gymnasium no longer has %s: the envs are those of %s, which are the same with default arguments"
    logger.warning(text, env_id, OLDER_IDS[env_id])
    return OLDER_IDS[env_id]


def choose_native(spec: EnvSpec, num_envs: int) -> NativeChoice:
    """The native env that is asked for, or NotNative."""
    kwargs = spec.common_kwargs(num_envs)
    if kwargs is None:
        raise NotNative("the envs of a native pool have the same arguments")
    if spec.render_mode not in _RENDER_MODES:
        raise NotNative(f"native envs are drawn when render() is called, not with render_mode={spec.render_mode!r}")
    env = spec.id if spec.id is not None else spec.factory
    if spec.id in plugin_names():
        model = _model(spec.id, kwargs)
        steps = model.max_episode_steps if spec.max_episode_steps is None else spec.max_episode_steps
        return NativeChoice(spec.id, model, kwargs, max(steps, 0), spec.render_mode, {})
    if spec.id in OLDER_IDS:
        if kwargs:
            raise NotNative(f"{spec.id} is native with its default arguments only; got {', '.join(kwargs)}")
        env = newer_id(spec.id)
    if spec.id:
        env = registered(env)
    if not isinstance(env, GymnasiumSpec):
        raise NotNative("only registered envs can be native, not callables")
    require_env_kwargs(env, kwargs)
    return _choose_twin(env, {**env.kwargs, **kwargs}, spec)


def _choose_twin(spec: GymnasiumSpec, kwargs: dict[str, Any], asked: EnvSpec) -> NativeChoice:
    twin, render_mode = _twin_of(spec), asked.render_mode
    if twin is None:
        raise NotNative(f"{spec.id} has no native twin; envfleet.registry() lists those that have one")
    if spec.additional_wrappers:
        raise NotNative(f"{spec.id} is registered with wrappers, which need a Python env")
    model = _model(twin.native, twin.native_kwargs(kwargs))
    metadata = dict(twin.metadata or _class_of(twin).metadata)
    if model.step_s > 0:
        metadata.setdefault("render_fps", int(np.round(1.0 / model.step_s)))
    if render_mode is not None and render_mode not in metadata["render_modes"]:
        raise NotNative(f"{spec.id} has no render_mode {render_mode!r}; it has {', '.join(metadata['render_modes'])}")
    steps = spec.max_episode_steps if asked.max_episode_steps is None else asked.max_episode_steps
    return NativeChoice(
        name=twin.native,
        model=model,
        kwargs=kwargs,
        max_episode_steps=max(steps or 0, 0),  # Gymnasium's -1 means no limit
        render_mode=render_mode,
        metadata=metadata,
        gymnasium_spec=spec,
        twin=twin,
    )


def _class_of(twin: Twin) -> Any:
    return load_env_creator(twin.entry_point)


def _model(name: str, kwargs: dict[str, Any]) -> core.NativeModel:
    try:
        return core.NativeModel(name, kwargs)
    except (ValueError, OverflowError, RuntimeError) as error:
        raise NotNative(f"the native {name} cannot be built: {error}") from None


def _twin_of(spec: GymnasiumSpec) -> Twin | None:
    entry_point: Any = spec.entry_point
    if callable(entry_point):  # a functools.partial has no name
        entry_point = f"{entry_point.__module__}:{getattr(entry_point, '__qualname__', '')}"
    return _TWINS.get(entry_point or "")
