"""The trainings of benchmarks/sync.py: which example, which settings, which rules."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import demo
import dqn
import ppo
import sac
from benchmarks.rows.catch_env import CatchAgent, make_catch
from benchmarks.rows.sync_report import Run

PERIODS = ("every:2", "every:4", "every:8")
THRESHOLDS = ("aps:0.002", "aps:0.005", "aps:0.01", "aps:0.02", "aps:0.05")


@dataclass(frozen=True, slots=True)
class Task:
    """One example with settings."""

    train: Callable[[str, str, int], Run]  # task, rule, seed
    rules: Sequence[str] = ("every_update", "aps")
    num_seeds: int = 5
    has_period: bool = False  # also every k-th update, with as many pulls as APS


def matching_period(runs: Sequence[Run]) -> int:
    """The k with which Every(k) pulls as often as these runs did."""
    return max(1, round(statistics.median(run.versions for run in runs) / statistics.median(run.pulls for run in runs)))


def _rule_settings(rule: str) -> dict[str, Any]:
    """`aps:0.05` as settings of an example; `aps` leaves the threshold to it."""
    name, _, number = rule.partition(":")
    return {"sync": "aps", "threshold": float(number)} if name == "aps" and number else {"sync": rule}


def _ppo(settings: ppo.Settings, **more: Any) -> Callable[[str, str, int], Run]:
    def train(task: str, rule: str, seed: int) -> Run:
        alone = {"target": None, "num_eval_episodes": 0}
        trained = ppo.train(dataclasses.replace(settings, seed=seed, **alone, **_rule_settings(rule)), **more)
        return _run(task, rule, seed, trained)

    return train


def _off_policy(example: Any) -> Callable[[str, str, int], Run]:
    def train(task: str, rule: str, seed: int) -> Run:
        trained = example.train(dataclasses.replace(example.Settings(), seed=seed, **_rule_settings(rule)))
        return _run(task, rule, seed, trained)

    return train


def _run(task: str, rule: str, seed: int, trained: Any) -> Run:
    workers = trained.stats.workers
    return Run(
        task=task,
        rule=rule,
        seed=seed,
        mean_return=round(trained.mean_return, 2),
        num_steps=trained.num_steps,
        versions=trained.stats.version,
        pulls=statistics.mean(each.num_pulls for each in workers),
        weight_bytes=sum(each.weight_bytes for each in workers),
        announcement_bytes=sum(each.announcement_bytes for each in workers),
        measure_s=round(trained.stats.measure_s, 4),
        learn_s=round(trained.duration_s - trained.collect_s, 3),
        duration_s=round(trained.duration_s, 1),
    )


# 24 updates of 2 x 32 envs x 128 steps.
CARTPOLE = ppo.Settings(
    num_envs_per_worker=32, total_steps=24 * 64 * 128, num_epochs=6, num_minibatches=8, max_lag=1000
)
CATCH = ppo.Settings(
    num_envs_per_worker=8,
    num_rollout_steps=32,
    total_steps=60 * 16 * 32,
    num_epochs=3,
    num_minibatches=4,
    learning_rate=5e-4,
    num_threads=2,
)

TASKS = {
    "cartpole": Task(_ppo(CARTPOLE), has_period=True),
    "lunarlander": Task(_ppo(dataclasses.replace(demo.DEMO, total_steps=600_000)), has_period=True),
    "dqn": Task(_off_policy(dqn), has_period=True),
    "sac": Task(_off_policy(sac), has_period=True),
    "catch-cnn": Task(_ppo(CATCH, env=make_catch, agent_class=CatchAgent), num_seeds=2),
    "table-decoupled": Task(_ppo(CARTPOLE), ("every_update", *PERIODS, *THRESHOLDS), num_seeds=3),
    "table-plain": Task(
        _ppo(dataclasses.replace(CARTPOLE, plain=True)), ("every_update", "every:4", *THRESHOLDS[2:]), num_seeds=3
    ),
}
