"""ATARI_KIND: EnvPool's Atari games, which are our AtariEnv with EnvPool's infos."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from envfleet.compat.envpool.kind import INT32_MAX, InfoColumn, Kind

ATARI_KIND = Kind(
    name="Atari",
    family="atari",
    defaults={
        "stack_num": 4,
        "frame_skip": 4,
        "noop_max": 30,
        "zero_discount_on_life_loss": False,
        "episodic_life": False,
        "reward_clip": False,
        "use_fire_reset": True,
        "img_height": 84,
        "img_width": 84,
        "task": "pong",
        "mode": -1,  # -1: the game's own
        "difficulty": -1,
        "full_action_space": False,
        "repeat_action_probability": 0.0,
        "use_inter_area_resize": True,
        "gray_scale": True,
    },
    variants={},  # the game says which it is: atari_env_id
    infos=(
        InfoColumn("lives", np.int32),
        InfoColumn("reward", np.float32),
        InfoColumn("terminated", np.int32),
        InfoColumn("ram", np.uint8, (128,)),
    ),
    requires="ale_py",
)


def atari_task_id(game: str) -> str:
    """What EnvPool calls a game: "space_invaders" is "SpaceInvaders-v5"."""
    return "".join(part.capitalize() for part in game.split("_")) + "-v5"


def atari_env_kwargs(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of our AtariEnv; AtariSettings knows EnvPool's names."""
    kwargs = {name: settings[name] for name in ATARI_KIND.defaults}
    del kwargs["task"], kwargs["zero_discount_on_life_loss"]  # an affair of the dm_env form alone
    for name in ("mode", "difficulty"):
        if kwargs[name] == -1:
            del kwargs[name]
    limit = settings["max_episode_steps"]
    return {
        **kwargs,
        "envpool_infos": True,
        "max_num_frames_per_episode": 0,
        "max_num_steps_per_game": 0 if limit == INT32_MAX else limit,
    }
