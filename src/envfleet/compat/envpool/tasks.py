"""Tasks: EnvPool's ids that are envs of ours, each with its kind and what EnvPool registers it with."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import gymnasium

from envfleet.compat.envpool.atari_kind import ATARI_KIND, atari_task_id
from envfleet.compat.envpool.classic_kinds import CLASSIC_KINDS
from envfleet.compat.envpool.kind import Kind
from envfleet.compat.envpool.mujoco_kinds import MUJOCO_KINDS
from envfleet.pool.simulators.atari_ids import NAMESPACE, atari_game

KINDS = {kind.name: kind for kind in (*CLASSIC_KINDS, *MUJOCO_KINDS, ATARI_KIND)}
_STEPS_OF_ATARI = 27_000


@dataclass(frozen=True, slots=True)
class Task:
    """One id of EnvPool's."""

    task_id: str
    kind: Kind
    settings: Mapping[str, Any]  # that it is registered with, besides the defaults of its kind

    @property
    def is_available(self) -> bool:
        """Whether the module that its envs need is installed."""
        return self.kind.requires is None or importlib.util.find_spec(self.kind.requires) is not None


def _classic(task_id: str, kind: str, max_episode_steps: int | None, **settings: Any) -> Task:
    limit = {} if max_episode_steps is None else {"max_episode_steps": max_episode_steps}
    return Task(task_id, KINDS[kind], {**limit, **settings})


def _mujoco() -> Iterator[Task]:
    limits = {"GymPusher": 100, "GymReacher": 50}
    for kind in MUJOCO_KINDS:
        for env_id, own in kind.variants.items():
            yield Task(env_id, kind, {"max_episode_steps": limits.get(kind.name, 1000), **own})


_TASKS = {
    task.task_id: task
    for task in (
        _classic("CartPole-v0", "CartPole", 200, reward_threshold=195.0),
        _classic("phys2d/CartPole-v0", "CartPole", 200, reward_threshold=195.0),
        _classic("CartPole-v1", "CartPole", 500, reward_threshold=475.0),
        _classic("phys2d/CartPole-v1", "CartPole", 500, reward_threshold=475.0),
        _classic("Pendulum-v1", "Pendulum", 200, version=1),
        _classic("MountainCar-v0", "MountainCar", 200),
        _classic("MountainCarContinuous-v0", "MountainCarContinuous", 999),
        _classic("Acrobot-v1", "Acrobot", 500),
        _classic("FrozenLake-v1", "FrozenLake", 100, size=4, reward_threshold=0.7),
        _classic("FrozenLake8x8-v1", "FrozenLake", 200, size=8, reward_threshold=0.85),
        _classic("Taxi-v3", "Taxi", 200, reward_threshold=8.0),
        _classic("CliffWalking-v0", "CliffWalking", None, is_slippery=False),
        _classic("CliffWalking-v1", "CliffWalking", None, is_slippery=False),
        _classic("tabular/CliffWalking-v0", "CliffWalking", None, is_slippery=False),
        _classic("CliffWalkingSlippery-v1", "CliffWalking", None, is_slippery=True),
        _classic("Blackjack-v1", "Blackjack", None, sab=True, natural=False),
        _classic("tabular/Blackjack-v0", "Blackjack", None, sab=True, natural=False),
        _classic("LunarLander-v2", "LunarLanderDiscrete", 1000),
        _classic("LunarLander-v3", "LunarLanderDiscrete", 1000),
        _classic("LunarLanderContinuous-v2", "LunarLanderContinuous", 1000),
        _classic("LunarLanderContinuous-v3", "LunarLanderContinuous", 1000),
        _classic("BipedalWalker-v3", "BipedalWalker", 1600, hardcore=False),
        _classic("BipedalWalkerHardcore-v3", "BipedalWalker", 2000, hardcore=True),
        *_mujoco(),
    )
}


def find_task(task_id: str) -> Task | None:
    """The task of this id, if it is an env of ours whose library is installed."""
    task = _TASKS.get(task_id)
    if task is None and task_id in _atari_games():
        settings = {"max_episode_steps": _STEPS_OF_ATARI, "task": _atari_games()[task_id]}
        task = Task(task_id, ATARI_KIND, settings)
    return task if task is not None and task.is_available else None


def task_ids() -> list[str]:
    """The ids of all tasks that are envs of ours and whose library is installed."""
    return [*(task_id for task_id, task in _TASKS.items() if task.is_available), *_atari_games()]


@cache
def _atari_games() -> dict[str, str]:
    """EnvPool's id of each game -> ALE's name of it; none without ale-py."""
    if importlib.util.find_spec("ale_py") is None:
        return {}
    importlib.import_module("ale_py")  # registers its games
    games = {atari_game(env_id) for env_id in gymnasium.registry if env_id.startswith(NAMESPACE)}
    return {atari_task_id(game): game for game in sorted(filter(None, games))}
