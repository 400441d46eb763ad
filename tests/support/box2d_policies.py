"""Policies for environments on Box2D, the same for Gymnasium's and for the native ones."""

import warnings
from dataclasses import dataclass, field
from types import SimpleNamespace

import numpy as np

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # the wheel is made by SWIG, and crashes where its DeprecationWarning is an error
    from gymnasium.envs.box2d.bipedal_walker import BipedalWalkerHeuristics
    from gymnasium.envs.box2d.lunar_lander import heuristic


WALKER_NOISE = 0.1
# Of the first episode. The numbers of iterations were chosen on seeds 0 to 499; these are other episodes.
FIRST_SEED = 10_000


def random_lander(seed):
    rng = np.random.default_rng(seed)
    return lambda obs: int(rng.integers(4))


def good_lander(seed):
    env = SimpleNamespace(unwrapped=SimpleNamespace(continuous=False))
    return lambda obs: heuristic(env, obs)


def random_continuous_lander(seed):
    rng = np.random.default_rng(seed)
    return lambda obs: rng.uniform(-1, 1, 2).astype(np.float32)


def good_continuous_lander(seed):
    env = SimpleNamespace(unwrapped=SimpleNamespace(continuous=True))
    return lambda obs: heuristic(env, obs).astype(np.float32)


def random_walker(seed):
    rng = np.random.default_rng(seed)
    return lambda obs: rng.uniform(-1, 1, 4).astype(np.float32)


def good_walker(seed):
    """With noise: without it every episode of an env is nearly the same one, and hangs on how it begins."""
    walker, rng = BipedalWalkerHeuristics(), np.random.default_rng(seed)
    return lambda obs: (walker.step_heuristic(obs) + rng.normal(0, WALKER_NOISE, 4)).clip(-1, 1).astype(np.float32)


@dataclass(frozen=True)
class Trial:
    """Episodes that are played with Gymnasium's env and with ours, with the same seeds."""

    name: str
    env_id: str
    make_policy: object
    max_episode_steps: int | None = None  # None: as registered
    env_kwargs: dict = field(default_factory=dict)
    num_episodes: int = 500

    def __str__(self):
        return self.name


WIND = {"enable_wind": True}
TRIALS = [
    Trial("lander-random", "LunarLander-v3", random_lander),
    Trial("lander-good", "LunarLander-v3", good_lander),
    Trial("lander-wind", "LunarLander-v3", good_lander, env_kwargs=WIND),
    Trial("continuous-random", "LunarLanderContinuous-v3", random_continuous_lander),
    Trial("continuous-good", "LunarLanderContinuous-v3", good_continuous_lander),
    Trial("walker-random", "BipedalWalker-v3", random_walker, max_episode_steps=400),
    Trial("walker-good", "BipedalWalker-v3", good_walker, max_episode_steps=400),
    Trial("hardcore-good", "BipedalWalkerHardcore-v3", good_walker, max_episode_steps=400),
]
