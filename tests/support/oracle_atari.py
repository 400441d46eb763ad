"""Gymnasium's wrappers around ale_py's env: what ours must equal."""

import gymnasium
import numpy as np
from ale_py.env import AtariEnv as AleEnv
from gymnasium.wrappers import AtariPreprocessing, FrameStackObservation, TransformReward


class FireAfterNoops(gymnasium.Wrapper):
    """FIRE as the last frame before an episode, which no wrapper of Gymnasium's does; sits below AtariPreprocessing."""

    def __init__(self, env, noop_max):
        super().__init__(env)
        self._noop_max = noop_max

    def reset(self, *, seed=None, options=None):
        self.env.reset(seed=seed, options=options)
        unwrapped = self.unwrapped
        for _ in range(unwrapped.np_random.integers(1, self._noop_max + 1) if self._noop_max else 0):
            unwrapped.step(0)
        fire = unwrapped.get_action_meanings().index("FIRE")
        obs, _, _, _, info = unwrapped.step(fire)
        return obs, info


def make_oracle(
    game,
    *,
    frame_skip=4,
    stack_num=4,
    screen_size=84,
    grayscale_obs=True,
    noop_max=30,
    fire_reset=False,
    terminal_on_life_loss=False,
    reward_clip=False,
    repeat_action_probability=0.0,
    full_action_space=False,
    max_num_frames_per_episode=108_000,
    mode=None,
    difficulty=None,
):
    """The env that these settings mean."""
    env = AleEnv(
        game,
        frameskip=1,
        repeat_action_probability=repeat_action_probability,
        full_action_space=full_action_space,
        max_num_frames_per_episode=max_num_frames_per_episode,
        mode=mode,
        difficulty=difficulty,
    )
    if fire_reset:
        env, noop_max = FireAfterNoops(env, noop_max), 0
    env = AtariPreprocessing(
        env,
        noop_max=noop_max,
        frame_skip=frame_skip,
        screen_size=screen_size,
        terminal_on_life_loss=terminal_on_life_loss,
        grayscale_obs=grayscale_obs,
    )
    if reward_clip:
        env = TransformReward(env, lambda reward: float(np.sign(reward)))
    return FrameStackObservation(env, stack_num)
