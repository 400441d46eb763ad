"""PixelObservation: an env whose observations are images of it, the newest ones in a stack."""

from __future__ import annotations

import importlib
from collections import deque
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

from envfleet._native import core
from envfleet.contract.arrays import Array
from envfleet.contract.errors import MissingExtra, UsageError
from envfleet.contract.pixels import Pixels
from envfleet.pool.simulators.mujoco_gl import drawing, release

_GREY = np.array([0.2125, 0.7154, 0.0721])  # shares of red, green and blue; as Gymnasium's GrayscaleObservation


class PixelObservation(gymnasium.Wrapper[Array, Any, Any, Any], gymnasium.utils.RecordConstructorArgs):
    """Needs an env with `render_mode="rgb_array"`. Draws once when it is built: an env that cannot fails then."""

    def __init__(self, env: gymnasium.Env[Any, Any], pixels: Pixels) -> None:
        gymnasium.utils.RecordConstructorArgs.__init__(self, pixels=pixels)
        super().__init__(env)
        if env.render_mode != "rgb_array":
            raise UsageError(
                f"pixel observations need an env that was made with render_mode='rgb_array'; this one has "
                f"{env.render_mode!r}: pass render_mode='rgb_array', which a callable must take or set by itself"
            )
        self._pixels = pixels
        self.state_attributes = ("_images",)  # see env_saver.py
        self._resize: core.AreaResize | None = None
        self._mujoco: Any = getattr(env.unwrapped, "mujoco_renderer", None)
        first = self._first_image()
        self._resize = _resize_for(pixels, first)
        shape = self._image(first).shape
        self._images: deque[Array] = deque(maxlen=pixels.stack_num)
        self.observation_space = spaces.Box(0, 255, (pixels.stack_num, *shape), np.uint8)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Array, dict[str, Any]]:
        """The first image of an episode, as often as there is room."""
        _, info = self.env.reset(seed=seed, options=options)
        self._images.extend([self._image(self.render())] * self._pixels.stack_num)
        return np.stack(self._images), info

    def step(self, action: Any) -> tuple[Array, Any, bool, bool, dict[str, Any]]:
        """The images of the last steps."""
        _, reward, terminated, truncated, info = self.env.step(action)
        self._images.append(self._image(self.render()))
        return np.stack(self._images), reward, terminated, truncated, info

    def render(self) -> Any:
        """The image, as large as the env draws it."""
        with drawing(self.env.unwrapped):
            return self.env.render()

    def close(self) -> None:
        """Release what draws, and close the env."""
        release(self.env.unwrapped)
        super().close()

    def _first_image(self) -> Array:
        """Of the same scene for all envs: Gymnasium aims MuJoCo's camera at the first one it sees."""
        if self._mujoco is not None:
            _prepare(self._mujoco, self._pixels)
        self.env.reset(seed=0)
        try:
            image = self.render()
            if self._mujoco is not None and not self._pixels.has_effects:
                flags: Any = importlib.import_module("mujoco").mjtRndFlag
                self._mujoco.viewer.scn.flags[flags.mjRND_REFLECTION] = 0
        except gymnasium.error.DependencyNotInstalled as error:
            raise MissingExtra(f"{error}; or: pip install 'envfleet[render]'") from None
        if not isinstance(image, np.ndarray) or image.ndim != 3 or image.shape[2] != 3 or image.dtype != np.uint8:
            got = f"{image.dtype} {image.shape}" if isinstance(image, np.ndarray) else type(image).__name__
            raise UsageError(f"render() must give an image of uint8, [height, width, 3]; got {got}")
        # The envs of a pool that is not seeded must not all begin alike.
        self.env.reset(seed=int(np.random.SeedSequence().generate_state(1)[0]))
        return image

    def _image(self, drawn: Array) -> Array:
        image = drawn if self._resize is None else self._resize(np.ascontiguousarray(drawn))
        if self._pixels.grayscale:
            image = np.sum(np.multiply(image, _GREY), axis=-1).astype(np.uint8)
        return image


def _prepare(renderer: Any, pixels: Pixels) -> None:
    """Before Gymnasium's renderer of MuJoCo draws its first image: as if the env had been made with these arguments."""
    visual = renderer.model.vis
    if pixels.height is not None:
        renderer.height = visual.global_.offheight = pixels.height
    if pixels.width is not None:
        renderer.width = visual.global_.offwidth = pixels.width
    if not pixels.has_effects:
        visual.quality.shadowsize = visual.quality.offsamples = 0


def _resize_for(pixels: Pixels, image: Array) -> core.AreaResize | None:
    drawn = image.shape[:2]
    wanted = (pixels.height or drawn[0], pixels.width or drawn[1])
    if wanted[0] > drawn[0] or wanted[1] > drawn[1]:
        raise UsageError(
            f"Pixels(height={pixels.height}, width={pixels.width}) is larger than what the env draws, "
            f"{drawn[0]} x {drawn[1]}"
        )
    return None if wanted == drawn else core.AreaResize((drawn[0], drawn[1]), wanted, 3)
