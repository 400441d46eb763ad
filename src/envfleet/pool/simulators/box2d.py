"""The native envs on Box2D: their library, which is loaded only for them, and their twins in Gymnasium."""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
from gymnasium import logger as gymnasium_logger

from envfleet._native import FOLDER, core
from envfleet.contract.arrays import Array
from envfleet.contract.errors import MissingExtra
from envfleet.pool.native.twins import NotNative, Twin

_LIBRARY = "libenvfleet_box2d.so"

# As in envs/box2d/box2d_env.h: what the state of a native env holds.
_MAX_STEPS = 2000
_SHOWN_AT = 7
_BODY_SIZE = 6  # x, y, angle, and their velocities
_TRAIL_LENGTH = 8


def is_available() -> bool:
    """Can native envs on Box2D be made here?"""
    return _library_path() is not None and _why_not_loaded() is None


def load() -> None:
    """Make the native envs on Box2D known, or say why not: NotNative if Python envs can do it, else MissingExtra."""
    is_built = _library_path() is not None
    why_not = _why_not_loaded() if is_built else "this build of EnvFleet was made without Box2D (Debian: libbox2d-dev)"
    if why_not is None:
        return
    if importlib.util.find_spec("Box2D") is None:
        raise MissingExtra(f"environments on Box2D need 'envfleet[box2d]': pip install it (not native: {why_not})")
    raise NotNative(f"there are no native environments on Box2D: {why_not}", is_surprise=is_built)


def _library_path() -> Path | None:
    path = FOLDER / _LIBRARY
    return path if path.is_file() else None


@cache
def _why_not_loaded() -> str | None:
    """Load the library. None: it is there."""
    try:
        core.load_plugin(str(_library_path()))
    except RuntimeError as error:
        return str(error)
    return None


@contextmanager
def _while_building() -> Iterator[None]:
    """Gymnasium's class draws, and it needs the wheel, which crashes where its DeprecationWarnings are errors."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            importlib.import_module("gymnasium.envs.box2d")
        yield
    except gymnasium.error.DependencyNotInstalled as error:
        raise MissingExtra(
            f"Gymnasium's class draws the native env, and needs 'envfleet[box2d]': pip install it ({error})"
        ) from None


# -- the twins --


def _lunar_lander_kwargs(kwargs: dict[str, Any]) -> dict[str, Any]:
    load()
    for name, most in (("wind_power", 20.0), ("turbulence_power", 2.0)):
        value = kwargs.get(name, 0.0)
        if isinstance(value, (int, float)) and not 0.0 <= value <= most:
            gymnasium_logger.warn(f"{name} value is recommended to be between 0.0 and {most}, (current value: {value})")
    return kwargs


def _bipedal_walker_kwargs(kwargs: dict[str, Any]) -> dict[str, Any]:
    load()
    return kwargs


class _NotedDraws:
    """Stands in for a random generator: gives the numbers that the native env drew."""

    def __init__(self, draws: Array) -> None:
        self._draws = iter(draws.tolist())

    def random(self) -> float:
        return float(next(self._draws))

    def uniform(self, low: float, high: float, size: tuple[int] | None = None) -> Any:
        if size is None:
            return self.random()
        return np.array([self.random() for _ in range(size[0])])

    def integers(self, low: int, high: int) -> int:
        return int(self.random())


@contextmanager
def _drawing_from(env: Any, draws: Array) -> Iterator[None]:
    own = env.np_random
    env._np_random = _NotedDraws(draws)
    try:
        yield
    finally:
        env._np_random = own


def _give_lunar_lander(env: Any, state: bytes) -> None:
    """Let Gymnasium's env show the state of a native one."""
    numbers = np.frombuffer(state)
    num_steps, num_draws = int(numbers[0]), int(numbers[1])
    if num_steps < 0:  # never reset
        return
    bodies, (left, right, has_crashed, shaping), rest = _split(numbers[_SHOWN_AT:], 3)
    (wind_index, torque_index), trail = rest[:2], rest[2 : 2 + 3 * _TRAIL_LENGTH].reshape(-1, 3)
    after = rest[2 + 3 * _TRAIL_LENGTH :]
    draws, actions = after[:num_draws], after[len(after) - 2 * _MAX_STEPS :].reshape(-1, 2)
    num_drawn_by_reset = num_draws - 2 * min(num_steps, _MAX_STEPS)
    with _drawing_from(env, draws[:num_drawn_by_reset]):
        env.reset()
    if num_steps <= _MAX_STEPS and env.render_mode is not None:
        # The particles are Gymnasium's: it makes them in the last steps, which it takes again from where they began.
        first = max(0, num_steps - _TRAIL_LENGTH)
        with _drawing_from(env, draws[num_drawn_by_reset + 2 * first :]):
            for action, (x, y, angle) in zip(actions[first:num_steps], trail, strict=False):
                _age_particles(env)
                env.lander.transform = ((x, y), angle)
                env.step(action if env.continuous else int(action[0]))
    _place([env.lander, *env.legs], bodies)
    env.legs[0].ground_contact, env.legs[1].ground_contact = bool(left), bool(right)
    env.game_over, env.prev_shaping = bool(has_crashed), shaping
    if env.enable_wind:
        env.wind_idx, env.torque_idx = int(wind_index), int(torque_index)


def _age_particles(env: Any) -> None:
    """As render() does: they look as if every step had been drawn."""
    for particle in env.particles:
        particle.ttl -= 0.15
    env._clean_particles(False)


def _give_bipedal_walker(env: Any, state: bytes) -> None:
    """Let Gymnasium's env show the state of a native one."""
    numbers = np.frombuffer(state)
    num_steps, num_draws = int(numbers[0]), int(numbers[1])
    if num_steps < 0:  # never reset
        return
    bodies, (left, right, has_crashed, shaping), rest = _split(numbers[_SHOWN_AT:], 5)
    rays, draws = rest[:30].reshape(-1, 3), rest[30 : 30 + num_draws]
    with _drawing_from(env, draws):
        env.reset()
    _place([env.hull, *env.legs], bodies)
    env.legs[1].ground_contact, env.legs[3].ground_contact = bool(left), bool(right)
    env.game_over, env.prev_shaping = bool(has_crashed), shaping
    x, y = bodies[0, :2]
    env.scroll = x - 600 / 30.0 / 5
    for lidar, (end_x, end_y, fraction) in zip(env.lidar, rays, strict=True):
        lidar.p1, lidar.p2, lidar.fraction = (x, y), (end_x, end_y), fraction
    env.lidar_render = num_steps % 100  # one ray after the other is drawn


def _split(numbers: Array, num_bodies: int) -> tuple[Any, Any, Any]:
    """What all tasks show: their bodies; contacts, crash and shaping; the rest."""
    size = num_bodies * _BODY_SIZE
    return numbers[:size].reshape(num_bodies, _BODY_SIZE), numbers[size : size + 4], numbers[size + 4 :]


def _place(bodies: list[Any], rows: Array) -> None:
    for body, (x, y, angle, speed_x, speed_y, spin) in zip(bodies, rows.tolist(), strict=True):
        body.transform = ((x, y), angle)
        body.linearVelocity, body.angularVelocity = (speed_x, speed_y), spin


def _twin(
    name: str,
    module: str,
    native_kwargs: Callable[[dict[str, Any]], dict[str, Any]],
    give_state: Callable[[Any, bytes], None],
) -> Twin:
    return Twin(
        native=f"box2d/{name}",
        entry_point=f"gymnasium.envs.box2d.{module}:{name}",
        give_state=give_state,
        is_available=is_available,
        native_kwargs=native_kwargs,
        while_building=_while_building,
        metadata={"render_modes": ["human", "rgb_array"], "render_fps": 50},
    )


BOX2D_TWINS: tuple[Twin, ...] = (
    _twin("LunarLander", "lunar_lander", _lunar_lander_kwargs, _give_lunar_lander),
    _twin("BipedalWalker", "bipedal_walker", _bipedal_walker_kwargs, _give_bipedal_walker),
)
