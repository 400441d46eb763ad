"""An env with all that adapters pass on: infos, both ways to end, attributes, methods, pictures, a wrapper."""

import gymnasium
import numpy as np


class WalkEnv(gymnasium.Env):
    """A random walk. It ends at +-3; after `max_steps` steps it is cut short."""

    metadata = {"render_modes": ["rgb_array"], "render_fps": 4}  # noqa: RUF012

    def __init__(self, max_steps=7, render_mode=None, has_dict=False, fails_at=None):
        self.max_steps, self.render_mode, self.has_dict, self.fails_at = max_steps, render_mode, has_dict, fails_at
        self.action_space = gymnasium.spaces.Discrete(2)
        place = gymnasium.spaces.Box(-10, 10, (2,), np.float32)
        self.observation_space = place
        if has_dict:
            self.observation_space = gymnasium.spaces.Dict(place=place, steps=gymnasium.spaces.Discrete(100))
        self.speed = 1.0
        self.options = None
        self.num_steps = 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.options = options
        self.place, self.num_steps = self.np_random.uniform(-0.5, 0.5), 0
        return self._obs(), {"start": self.place}

    def step(self, action):
        self.num_steps += 1
        if self.num_steps == self.fails_at:
            raise RuntimeError("lost its way")
        self.place += self.speed * ((1 if action else -1) + self.np_random.normal(scale=0.1))
        has_ended, is_cut = abs(self.place) > 3, self.num_steps >= self.max_steps
        info = {"place": self.place, "is_success": bool(self.place > 0), "where": {"side": int(np.sign(self.place))}}
        return self._obs(), float(self.place), has_ended, is_cut, info

    def render(self):
        return np.full((4, 6, 3), self.num_steps, np.uint8)

    def moved(self, by, times=1):
        """Where the walker would be."""
        return self.place + by * times

    def _obs(self):
        obs = np.array([self.place, self.num_steps], np.float32)
        return {"place": obs, "steps": self.num_steps} if self.has_dict else obs


class Marked(gymnasium.Wrapper):
    """A wrapper to be looked for."""


def marked_walk(**kwargs):
    return Marked(WalkEnv(**kwargs))
