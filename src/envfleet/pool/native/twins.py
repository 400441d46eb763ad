"""TWINS: the native envs, each with the Gymnasium class that it equals. An instance of that class, given the native
state, renders it and answers for its attributes.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np

from envfleet.contract.errors import EnvFleetError


class NotNative(EnvFleetError):
    """No native env does what was asked for; the message says why.

    Attributes:
        is_surprise: The caller would expect a native env, and should hear that another backend runs it.
    """

    def __init__(self, message: str, *, is_surprise: bool = False) -> None:
        super().__init__(message)
        self.is_surprise = is_surprise


@dataclass(frozen=True, slots=True)
class Twin:
    """A native env, and the Gymnasium class that it equals and whose renderer it uses."""

    native: str  # its name in the C++ registry
    entry_point: str  # as Gymnasium registers it
    give_state: Callable[[Any, bytes], None]  # sets the attributes of an (unwrapped) instance of the class
    is_available: Callable[[], bool] = lambda: True
    # The constructor's arguments as C++ takes them. Sees to it that C++ knows the env; may raise NotNative.
    native_kwargs: Callable[[dict[str, Any]], dict[str, Any]] = lambda kwargs: kwargs
    while_building: Callable[[], AbstractContextManager[None]] = nullcontext  # an instance of the class
    while_drawing: Callable[[Any], AbstractContextManager[None]] = nullcontext  # the instance renders
    before_closing: Callable[[Any], None] = lambda env: None
    advice: Callable[[Exception], str | None] = lambda error: None  # what to do, if the instance raises this
    metadata: dict[str, Any] | None = None  # the class's own, if the class may be missing where the native env is not


def _reads(state: np.dtype[Any], give_state: Callable[[Any, np.void], None]) -> Callable[[Any, bytes], None]:
    """The state is a struct; `state` as the C++ struct State."""
    return lambda env, raw: give_state(env, np.frombuffer(raw, state)[0])


def _cart_pole(env: Any, state: np.void) -> None:
    env.state = np.array([state["x"], state["x_dot"], state["theta"], state["theta_dot"]])


def _mountain_car(env: Any, state: np.void) -> None:
    env.state = (state["position"], state["velocity"])


def _mountain_car_continuous(env: Any, state: np.void) -> None:
    dtype = np.float32 if state["is_float32"] else np.float64
    env.state = np.array([state["position"], state["velocity"]], dtype=dtype)


def _pendulum(env: Any, state: np.void) -> None:
    env.state = np.array([state["theta"], state["theta_dot"]])
    env.last_u = state["last_torque"] if state["has_torque"] else None


def _acrobot(env: Any, state: np.void) -> None:
    dtype = np.float32 if state["is_float32"] else np.float64
    env.state = np.array([state[name] for name in ("theta1", "theta2", "theta1_dot", "theta2_dot")], dtype=dtype)


def _table(env: Any, state: np.void) -> None:
    env.s = int(state["s"])
    env.lastaction = None if state["last_action"] < 0 else int(state["last_action"])


def _taxi(env: Any, state: np.void) -> None:
    _table(env, state)
    env.taxi_orientation = int(state["orientation"])
    env.fickle_step = bool(state["fickle_step"])


def _blackjack(env: Any, state: np.void) -> None:
    for name in ("player", "dealer"):
        hand = state[name]
        setattr(env, name, hand["cards"][: hand["num_cards"]].tolist())
    env.dealer_top_card_suit = "CDHS"[state["shown_suit"]]
    shown = env.dealer[0]
    env.dealer_top_card_value_str = "A" if shown == 1 else "JQK"[state["shown_face"]] if shown == 10 else str(shown)


def _struct(*fields: tuple[str, Any]) -> np.dtype[Any]:
    return np.dtype(list(fields), align=True)


_TABLE_FIELDS = (("s", np.int32), ("last_action", np.int32), ("prob", np.float64))
_HAND = _struct(("cards", (np.int8, 22)), ("num_cards", np.int8))

TWINS: tuple[Twin, ...] = (
    Twin(
        native="CartPole",
        entry_point="gymnasium.envs.classic_control.cartpole:CartPoleEnv",
        give_state=_reads(_struct(*((name, np.float64) for name in ("x", "x_dot", "theta", "theta_dot"))), _cart_pole),
    ),
    Twin(
        native="MountainCar",
        entry_point="gymnasium.envs.classic_control.mountain_car:MountainCarEnv",
        give_state=_reads(_struct(("position", np.float64), ("velocity", np.float64)), _mountain_car),
    ),
    Twin(
        native="MountainCarContinuous",
        entry_point="gymnasium.envs.classic_control.continuous_mountain_car:Continuous_MountainCarEnv",
        give_state=_reads(
            _struct(("position", np.float64), ("velocity", np.float64), ("is_float32", np.bool_)),
            _mountain_car_continuous,
        ),
    ),
    Twin(
        native="Pendulum",
        entry_point="gymnasium.envs.classic_control.pendulum:PendulumEnv",
        give_state=_reads(
            _struct(
                ("theta", np.float64), ("theta_dot", np.float64), ("last_torque", np.float32), ("has_torque", np.bool_)
            ),
            _pendulum,
        ),
    ),
    Twin(
        native="Acrobot",
        entry_point="gymnasium.envs.classic_control.acrobot:AcrobotEnv",
        give_state=_reads(
            _struct(
                *((name, np.float64) for name in ("theta1", "theta2", "theta1_dot", "theta2_dot")),
                *((name, np.float64) for name in ("cos1", "sin1", "cos2", "sin2")),
                ("is_float32", np.bool_),
            ),
            _acrobot,
        ),
    ),
    Twin(
        native="FrozenLake",
        entry_point="gymnasium.envs.toy_text.frozen_lake:FrozenLakeEnv",
        give_state=_reads(_struct(*_TABLE_FIELDS), _table),
    ),
    Twin(
        native="CliffWalking",
        entry_point="gymnasium.envs.toy_text.cliffwalking:CliffWalkingEnv",
        give_state=_reads(_struct(*_TABLE_FIELDS), _table),
    ),
    Twin(
        native="Taxi",
        entry_point="gymnasium.envs.toy_text.taxi:TaxiEnv",
        give_state=_reads(_struct(*_TABLE_FIELDS, ("orientation", np.int32), ("fickle_step", np.bool_)), _taxi),
    ),
    Twin(
        native="Blackjack",
        entry_point="gymnasium.envs.toy_text.blackjack:BlackjackEnv",
        give_state=_reads(
            _struct(("player", _HAND), ("dealer", _HAND), ("shown_suit", np.int8), ("shown_face", np.int8)), _blackjack
        ),
    ),
)

# Ids that Gymnasium no longer registers, and the present id with the same behaviour for default arguments.
OLDER_IDS = {"Taxi-v3": "Taxi-v4"}
