"""AtariEnv: one Atari game with the usual preprocessing, equal to Gymnasium's AtariPreprocessing and frame stack.

ALE runs the game; what follows is C++ of our own: colours, the brighter of the last two frames, the resize (bit for bit
that of OpenCV). ALE holds the GIL while it emulates, so pools run these envs in processes.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

import ale_py
import gymnasium
import numpy as np
from ale_py import roms
from gymnasium import spaces

from envfleet._native import core
from envfleet.contract.checks import true_or_false
from envfleet.contract.errors import UsageError
from envfleet.pool.simulators.ale_states import AleSaver
from envfleet.pool.traits import CLIPS_REWARDS

Image = np.ndarray[Any, np.dtype[np.uint8]]

_ENVPOOL_NAMES = {"gray_scale": "grayscale_obs", "use_fire_reset": "fire_reset"}
# Settings of EnvPool's that have only one value here, and what to use instead of another one.
_FIXED = {
    "zero_discount_on_life_loss": (False, "there are no discounts: use episodic_life, or info['lives']"),
    "use_inter_area_resize": (True, "images are always resized by area"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class AtariSettings:
    """What `env_kwargs` may say for Atari games. The defaults are EnvPool's."""

    frame_skip: int = 4  # frames for which an action is repeated; the observation is the brighter of the last two
    stack_num: int = 4  # number of observations one behind the other, the newest last
    screen_size: int | tuple[int, int] = 84  # of the observation: (width, height), or one number for both
    grayscale_obs: bool = True  # False: RGB, [stack_num, height, width, 3]
    noop_max: int = 30  # an episode starts after 1 to noop_max no-ops; 0: none
    fire_reset: bool = True  # then FIRE, in games that have it as an action: some wait for it
    terminal_on_life_loss: bool = False  # a lost life ends the episode; the next one is a new game (Gymnasium's)
    episodic_life: bool = (
        False  # a lost life, not the last, ends the episode; the next goes on with the game (EnvPool's)
    )
    reward_clip: bool = False  # rewards are -1, 0 or 1; info["reward"] has what the game gave
    repeat_action_probability: float = 0.0  # of the action before, at each frame ("sticky"); Gymnasium's v5 has 0.25
    full_action_space: bool = False  # all 18 actions, also those that mean nothing in this game
    max_num_frames_per_episode: int = 108_000  # then it is truncated; no-ops count; 0: no limit
    max_num_steps_per_game: int = 0  # then it is truncated; lives do not count, no-ops neither; 0: no limit
    envpool_infos: bool = (
        False  # also info["reward"], ["terminated"] (the game is over), ["elapsed_step"] (of the game), ["ram"]
    )
    mode: int | None = None  # the game's modes and difficulties as ALE numbers them; None: its own defaults
    difficulty: int | None = None

    def __post_init__(self) -> None:
        """Refuse what cannot work."""
        counts = (
            *(("frame_skip", 1), ("stack_num", 1), ("noop_max", 0)),
            *(("max_num_frames_per_episode", 0), ("max_num_steps_per_game", 0)),
        )
        choices = [(name, 0) for name in ("mode", "difficulty") if getattr(self, name) is not None]
        for name, least in (*counts, *choices):
            if not _is_whole_number(getattr(self, name), least):
                raise UsageError(f"{name} must be a whole number of at least {least}; got {getattr(self, name)!r}")
        for field in fields(self):
            if field.type == "bool":
                true_or_false(field.name, getattr(self, field.name))
        chance = self.repeat_action_probability
        if not isinstance(chance, int | float) or not 0.0 <= chance < 1.0:
            raise UsageError(f"repeat_action_probability must be at least 0 and less than 1; got {chance!r}")
        if self.terminal_on_life_loss and self.episodic_life:
            raise UsageError(
                "terminal_on_life_loss (then a new game) and episodic_life (then the same game) exclude each other"
            )
        size = self.screen_size
        lengths = size if isinstance(size, tuple | list) and len(size) == 2 else (size,)
        if not all(_is_whole_number(length, 1) for length in lengths):
            raise UsageError(f"screen_size must be a number of at least 1, or (width, height); got {size!r}")

    @classmethod
    def of(cls, kwargs: dict[str, Any]) -> AtariSettings:
        """From `env_kwargs`, by our names or EnvPool's; an unknown name is refused with all that are known."""
        known = [field.name for field in fields(cls)]
        given = {_ENVPOOL_NAMES.get(name, name): value for name, value in kwargs.items()}
        if len(given) < len(kwargs):
            raise UsageError(f"a setting is given by our name and by EnvPool's: {', '.join(kwargs)}")
        for name, (value, instead) in _FIXED.items():
            if given.pop(name, value) != value:
                raise UsageError(f"{name} can only be {value}: {instead}")
        size = (given.pop("img_width", None), given.pop("img_height", None))
        if size != (None, None):
            if "screen_size" in given:
                raise UsageError("img_width and img_height are EnvPool's names for screen_size: give one of them")
            given["screen_size"] = tuple(84 if length is None else length for length in size)
        unknown = [name for name in given if name not in known]
        if unknown:
            raise UsageError(f"Atari envs have no setting {', '.join(unknown)}; known: {', '.join(known)}")
        return cls(**given)

    def __str__(self) -> str:
        """Those that are not the defaults."""
        given = ((field, getattr(self, field.name)) for field in fields(self))
        return ", ".join(f"{field.name}={value!r}" for field, value in given if value != field.default)

    def image_size(self) -> tuple[int, int]:
        """(height, width) of an observation."""
        size = self.screen_size
        width, height = (size, size) if isinstance(size, int) else size
        return height, width


def _is_whole_number(value: Any, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and least <= value < 2**31


class AtariEnv(gymnasium.Env[Image, Any]):
    """One game. An observation is overwritten some steps later: pools copy it at once, others must, too."""

    metadata = {"render_modes": ["rgb_array"], "render_fps": 60}  # noqa: RUF012 - as Gymnasium declares it

    def __init__(self, game: str, render_mode: str | None = None, **settings: Any) -> None:
        """`game` as ALE names it ("space_invaders"); `settings` as AtariSettings has them."""
        if render_mode not in (None, "rgb_array"):
            raise UsageError(f"Atari envs have render_mode 'rgb_array' only; got {render_mode!r}")
        self.render_mode = render_mode
        self.settings = AtariSettings.of(settings)
        self._game = game
        ale_py.ALEInterface.setLoggerMode(ale_py.LoggerMode.Error)
        self.ale = ale_py.ALEInterface()
        self.ale.setFloat("repeat_action_probability", self.settings.repeat_action_probability)
        self.ale.setInt("max_num_frames_per_episode", self.settings.max_num_frames_per_episode)
        self._saver = AleSaver(self.ale, self.settings.repeat_action_probability)
        self._seed_and_load(None)

        is_full = self.settings.full_action_space
        self._actions = self.ale.getLegalActionSet() if is_full else self.ale.getMinimalActionSet()
        self._buttons = [int(action.value) for action in self._actions]  # found faster by ALE than its enum's
        self._fires = self.settings.fire_reset and ale_py.Action.FIRE in self._actions
        self.action_space = spaces.Discrete(len(self._actions))

        screen_size, image_size = self.ale.getScreenDims(), self.settings.image_size()
        if not all(1 <= image <= screen for image, screen in zip(image_size, screen_size, strict=True)):
            raise UsageError(
                f"screen_size must not be larger than {game}'s screen, "
                f"({screen_size[1]}, {screen_size[0]}); got {self.settings.screen_size}"
            )
        channels = () if self.settings.grayscale_obs else (3,)
        self._player = core.FramePlayer(
            self.ale,
            screen_size,
            image_size,
            is_grey=self.settings.grayscale_obs,
            num_frames=self.settings.frame_skip,
            lives_count=self.settings.terminal_on_life_loss or self.settings.episodic_life,
        )
        self._stack = _FrameStack(self.settings.stack_num, (*image_size, *channels))
        self.observation_space = spaces.Box(0, 255, (self.settings.stack_num, *image_size, *channels), np.uint8)
        self.info_columns: dict[str, np.dtype[Any]] = {"lives": np.dtype(np.int64)}
        if self.settings.reward_clip or self.settings.envpool_infos:
            self.info_columns["reward"] = np.dtype(np.float64)
        if self.settings.reward_clip:
            self.metadata = {**self.metadata, CLIPS_REWARDS: True}
        if self.settings.envpool_infos:
            self.info_columns["terminated"] = self.info_columns["elapsed_step"] = np.dtype(np.int64)
            self.info_columns["ram"] = np.dtype((np.uint8, (self.ale.getRAMSize(),)))
        self._game_goes_on = False  # the last episode ended with a life, and the next one is to go on from there
        self._num_steps = 0  # of this game
        self._restored_screen: Image | None = None  # which ALE does not show again before its next frame

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Image, dict[str, Any]]:
        """Start an episode: a new game, or the same one with the next life."""
        goes_on = self._game_goes_on and seed is None
        self._game_goes_on = False
        self._restored_screen = None
        if not goes_on:
            self._start_game(seed)
        noop_max = self.settings.noop_max
        for _ in range(int(self.np_random.integers(1, noop_max + 1)) if noop_max else 0):
            goes_on &= not self._press(ale_py.Action.NOOP, seed)
        if self._fires:
            goes_on &= not self._press(ale_py.Action.FIRE, seed)
        info = self._info(self._player.start(), 0.0)
        return self._stack.push(self._player) if goes_on else self._stack.fill(self._player), info

    def step(self, action: Any) -> tuple[Image, float, bool, bool, dict[str, Any]]:
        """Repeat the action for `frame_skip` frames, or until the episode ends."""
        button = self._buttons[action]
        reward, ended, lost_life, lives = self._player.play(button)
        self._saver.pressed(button)
        self._restored_screen = None
        self._num_steps += 1
        terminated = truncated = False
        if self.settings.episodic_life and lives == 0:  # some games go on after that, as long as it is the last life
            lost_life = False
        if ended or lost_life:
            terminated = lost_life or self.ale.game_over(with_truncation=False)
            truncated = ended and self.ale.game_truncated()
            self._game_goes_on = self.settings.episodic_life and lost_life and not ended
        if self._num_steps == self.settings.max_num_steps_per_game:
            truncated, self._game_goes_on = True, False
        info = self._info(lives, reward)
        if self.settings.reward_clip:
            reward = float((reward > 0.0) - (reward < 0.0))
        return self._stack.push(self._player), reward, terminated, truncated, info

    def render(self) -> Any:
        """The screen in colours, as large as the game has it."""
        if self.render_mode != "rgb_array":
            return None
        return self.ale.getScreenRGB() if self._restored_screen is None else self._restored_screen.copy()

    def get_action_meanings(self) -> list[str]:
        """The names of the actions."""
        return [action.name for action in self._actions]

    # -- saving --

    @property
    def state_name(self) -> str:
        """Which game this is: only its states fit."""
        return ", ".join(filter(None, (self._game, str(self.settings))))

    def get_state(self) -> dict[str, Any]:
        """The game, and what was seen of it; the pool saves the generator of no-ops."""
        lives, shown = self._player.get_state()
        screen = self.render()
        return {
            "ale": self._saver.save(),
            "lives": lives,
            "shown": zlib.compress(shown, 1),
            "stack": zlib.compress(self._stack.newest.tobytes(), 1),
            "screen": None if screen is None else (screen.shape, zlib.compress(screen.tobytes(), 1)),
            "game_goes_on": self._game_goes_on,
            "num_steps": self._num_steps,
        }

    def set_state(self, state: dict[str, Any]) -> None:
        """Go on from a state that get_state() gave, of the same game with the same settings."""
        self._saver.restore(*state["ale"])
        self._player.set_state(state["lives"], zlib.decompress(state["shown"]))
        self._stack.set(zlib.decompress(state["stack"]))
        self._game_goes_on = state["game_goes_on"]
        self._num_steps = state.get("num_steps", 0)  # states of 0.9 have none
        self._restored_screen = None
        if state["screen"] is not None:
            shape, pixels = state["screen"]
            self._restored_screen = np.frombuffer(zlib.decompress(pixels), np.uint8).reshape(shape)

    # -- inside --

    def _info(self, lives: int, reward: float) -> dict[str, Any]:
        info: dict[str, Any] = {"lives": lives}
        if self.settings.reward_clip or self.settings.envpool_infos:
            info["reward"] = reward
        if self.settings.envpool_infos:
            info["terminated"] = int(self.ale.game_over(with_truncation=False))
            info["elapsed_step"] = self._num_steps
            info["ram"] = self.ale.getRAM()
        return info

    def _seed_and_load(self, seed: int | None) -> None:
        """As ale_py's own env does it, so that the same seeds give the same games."""
        own_seed, game_seed = np.random.SeedSequence(seed).generate_state(2)
        self._np_random, self._np_random_seed = gymnasium.utils.seeding.np_random(int(own_seed))
        self.ale.setInt("random_seed", int(game_seed.astype(np.int32)))
        path = roms.get_rom_path(self._game)
        if path is None:
            raise UsageError(f"ALE has no game called {self._game!r}")
        self.ale.loadROM(path)
        self._choose("mode", self.ale.getAvailableModes(), self.ale.setMode)
        self._choose("difficulty", self.ale.getAvailableDifficulties(), self.ale.setDifficulty)

    def _choose(self, name: str, available: list[int], choose: Callable[[int], None]) -> None:
        value = getattr(self.settings, name)
        if value is None:
            return
        if value not in available:
            raise UsageError(f"{name} of {self._game} must be one of {', '.join(map(str, available))}; got {value}")
        choose(value)

    def _start_game(self, seed: int | None) -> None:
        if seed is not None:
            self._seed_and_load(seed)
        self.ale.reset_game()
        self._num_steps = 0
        self._saver.begin()

    def _press(self, button: Any, seed: int | None) -> bool:
        """One frame before the episode; True if the game ended with it, and a new one was started."""
        self.ale.act(button)
        self._saver.pressed(int(button.value))
        if not self.ale.game_over():
            return False
        self._start_game(seed)
        return True


class _FrameStack:
    """The newest images, one behind the other in memory: pushing one moves the others only at the buffer's end."""

    def __init__(self, num_images: int, image_shape: tuple[int, ...]) -> None:
        images = np.zeros((2 * num_images, *image_shape), np.uint8)
        self._images = list(images)
        self._stacks = [images[max(0, i - num_images + 1) : i + 1] for i in range(len(images))]  # by the newest image
        self._num_images = num_images
        self._newest = num_images - 1

    @property
    def newest(self) -> Image:
        """The stack that was returned last."""
        return self._stacks[self._newest]

    def set(self, stack: bytes) -> None:
        """Have these images, one behind the other."""
        self._newest = self._num_images - 1
        newest = self._stacks[self._newest]
        newest[...] = np.frombuffer(stack, np.uint8).reshape(newest.shape)

    def push(self, player: core.FramePlayer) -> Image:
        """Add what the player shows."""
        if self._newest + 1 == len(self._images):
            first, last = self._stacks[self._num_images - 1], self._stacks[self._newest]
            first[:-1] = last[1:]
            self._newest = self._num_images - 2
        self._newest += 1
        player.write_image(self._images[self._newest])
        return self._stacks[self._newest]

    def fill(self, player: core.FramePlayer) -> Image:
        """What the player shows, as often as there is room."""
        self._newest = self._num_images - 1
        stack = self._stacks[self._newest]
        player.write_image(self._images[self._newest])
        stack[:-1] = stack[-1]
        return stack
