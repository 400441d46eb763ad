"""CLASSIC_KINDS: EnvPool's classic control, toy texts and Box2D, as far as they are our native envs."""

from __future__ import annotations

import numpy as np

from envfleet.compat.envpool.kind import InfoColumn, Kind, same_names

CLASSIC_KINDS = (
    Kind(
        name="CartPole",
        family="classic_control",
        defaults={"reward_threshold": 195.0},
        variants={"CartPole-v1": {}},
    ),
    Kind(name="Pendulum", family="classic_control", defaults={"version": 1}, variants={"Pendulum-v1": {"version": 1}}),
    Kind(
        name="MountainCar",
        family="classic_control",
        defaults={"reward_threshold": -110.0},
        variants={"MountainCar-v0": {}},
    ),
    Kind(
        name="MountainCarContinuous",
        family="classic_control",
        defaults={"reward_threshold": 90.0},
        variants={"MountainCarContinuous-v0": {}},
    ),
    Kind(
        name="Acrobot",
        family="classic_control",
        defaults={"reward_threshold": -100.0},
        variants={"Acrobot-v1": {}},
        infos=(InfoColumn("state", np.float32, (2,)),),
    ),
    Kind(
        name="FrozenLake",
        family="toy_text",
        defaults={"reward_threshold": 0.7, "size": 4},
        variants={"FrozenLake-v1": {"size": 4}, "FrozenLake8x8-v1": {"size": 8}},
    ),
    Kind(name="Taxi", family="toy_text", defaults={"reward_threshold": 8.0}, variants={"Taxi-v3": {}}),
    Kind(
        name="CliffWalking",
        family="toy_text",
        defaults={"is_slippery": False},
        variants={
            "CliffWalking-v1": {"is_slippery": False},
            "CliffWalkingSlippery-v1": {"is_slippery": True},
        },
        infos=(InfoColumn("prob", np.float32),),
    ),
    Kind(
        name="Blackjack",
        family="toy_text",
        defaults={"natural": False, "sab": True},
        variants={"Blackjack-v1": {}},
        kwargs=same_names("natural", "sab"),
    ),
    Kind(
        name="LunarLanderDiscrete",
        family="box2d",
        defaults={"reward_threshold": 200.0},
        variants={"LunarLander-v3": {}},
    ),
    Kind(
        name="LunarLanderContinuous",
        family="box2d",
        defaults={"reward_threshold": 200.0},
        variants={"LunarLanderContinuous-v3": {}},
    ),
    Kind(
        name="BipedalWalker",
        family="box2d",
        defaults={"reward_threshold": 300.0, "hardcore": False},
        variants={"BipedalWalker-v3": {"hardcore": False}, "BipedalWalkerHardcore-v3": {"hardcore": True}},
    ),
)
