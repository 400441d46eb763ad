"""Which ids are Atari games. By its id a game is our own env (atari.py); Gymnasium's spec of it stays Gymnasium's."""

from __future__ import annotations

import importlib

import gymnasium
from gymnasium.envs.registration import EnvSpec as GymnasiumSpec

from envfleet.contract.errors import MissingExtra

NAMESPACE = "ALE/"
_ENVPOOL_SPELLING = {"TicTacToe3d-v5": "TicTacToe3D-v5"}  # all others are spelled as ALE does


def atari_spec(env_id: str) -> GymnasiumSpec | None:
    """How our env of this game is built; None if the id is no game's: "ALE/Pong-v5", or EnvPool's "Pong-v5"."""
    game = atari_game(env_id)
    if game is None:
        return None
    return GymnasiumSpec(
        id=env_id,
        entry_point="envfleet.pool.simulators.atari:AtariEnv",
        kwargs={"game": game},
        order_enforce=False,  # pools see to that
        disable_env_checker=True,
    )


def atari_game(env_id: str) -> str | None:
    """The game's name as ALE has it: "space_invaders"."""
    is_ale = env_id.startswith(NAMESPACE)
    if not is_ale and (not env_id.endswith("-v5") or env_id in gymnasium.registry):
        return None
    try:
        importlib.import_module("ale_py")  # registers its games
    except ImportError:
        if not is_ale:
            return None
        raise MissingExtra(f"{env_id} needs ale-py: pip install 'envfleet[atari]'") from None
    registered = gymnasium.registry.get(env_id if is_ale else NAMESPACE + _ENVPOOL_SPELLING.get(env_id, env_id))
    return None if registered is None else str(registered.kwargs["game"])
