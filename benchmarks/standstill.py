"""How often is the warning "APS stands still" right? Trains PPO with seeds on which its limits were not chosen.

    PYTHONPATH=examples python -m benchmarks.standstill                       all tasks, seeds 201 to 206
    PYTHONPATH=examples python -m benchmarks.standstill cartpole-plain --seeds 301 302

Plain PPO locks up under APS, and is to be warned of; decoupled PPO does not, and is not. The limits in
cluster/standstill.py were chosen with CartPole and seeds 1 and 2: choose others with seeds below 200 only, and test
them with seeds that were not used yet.
"""

from __future__ import annotations

import argparse
import dataclasses
import logging
import sys
import warnings
from dataclasses import dataclass
from typing import Any

import ppo
from benchmarks.harness.machine import describe_machine
from benchmarks.harness.results import RESULTS_DIR, save_json

SEEDS = range(201, 207)
UNDER_APS = ppo.Settings(threshold=0.05, max_lag=64, num_eval_episodes=0)
CARTPOLE = dataclasses.replace(UNDER_APS, num_rollout_steps=64)
CARTPOLE_STEPS = CARTPOLE.num_workers * CARTPOLE.num_envs_per_worker * CARTPOLE.num_rollout_steps  # of an update
LANDER_STEPS = UNDER_APS.num_workers * UNDER_APS.num_envs_per_worker * UNDER_APS.num_rollout_steps


@dataclass(frozen=True, slots=True)
class Task:
    """A training, and whether it is to be warned of."""

    title: str
    settings: ppo.Settings
    is_trap: bool


TASKS = {
    "cartpole-plain": Task(
        "CartPole-v1, plain PPO, 60 updates",
        dataclasses.replace(CARTPOLE, plain=True, total_steps=60 * CARTPOLE_STEPS),
        is_trap=True,
    ),
    "cartpole-decoupled": Task(
        "CartPole-v1, decoupled PPO, 120 updates",
        dataclasses.replace(CARTPOLE, total_steps=120 * CARTPOLE_STEPS),
        is_trap=False,
    ),
    "lander-decoupled": Task(
        "LunarLander-v3, decoupled PPO, 120 updates",
        dataclasses.replace(UNDER_APS, env_id="LunarLander-v3", total_steps=120 * LANDER_STEPS),
        is_trap=False,
    ),
}


class Heard(logging.Handler):
    """Counts updates, and notes after which of them the warning came."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.num_updates = 0
        self.update: int | None = None  # None: it never came
        self.text = ""

    def emit(self, record: logging.LogRecord) -> None:
        if "APS stands still" in (text := record.getMessage()):
            self.update, self.text = self.num_updates, text

    def count(self, update: Any) -> None:
        self.num_updates += 1


def trained(settings: ppo.Settings, seed: int) -> dict[str, Any]:
    """What came of one training."""
    heard, logger = Heard(), logging.getLogger("envfleet.cluster")
    logger.addHandler(heard)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of the example: that plain PPO met old data
            run = ppo.train(dataclasses.replace(settings, seed=seed), heard.count)
    finally:
        logger.removeHandler(heard)
    at = heard.update
    return {
        "seed": seed,
        "warned_after_update": at,
        "text": heard.text,
        "return_then": None if at is None else round(dict(enumerate(run.curve)).get(at, (0, 0.0))[1], 1),
        "return_at_the_end": None if run.mean_return is None else round(run.mean_return, 1),
        "pulls": list(run.pulls[-1]),
        "num_updates": run.num_updates,
    }


def main() -> int:
    """Train, print and save."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("tasks", nargs="*", help=f"of {', '.join(TASKS)}; none: all")
    parser.add_argument("--seeds", nargs="+", type=int, default=list(SEEDS))
    parser.add_argument("--save", default="standstill", help="name of the file in benchmarks/results")
    arguments = parser.parse_args()
    if unknown := [name for name in arguments.tasks if name not in TASKS]:
        parser.error(f"no task is called {unknown[0]!r}; known: {', '.join(TASKS)}")
    report: dict[str, Any] = {"machine": describe_machine(), "runs": {}}
    for name in arguments.tasks or TASKS:
        task, runs = TASKS[name], []
        for seed in arguments.seeds:
            runs.append(trained(task.settings, seed))
            print(f"  {name}: {runs[-1]}", file=sys.stderr, flush=True)
        report["runs"][name] = runs
        num_warned = sum(each["warned_after_update"] is not None for each in runs)
        wanted = len(runs) if task.is_trap else 0
        print(f"{task.title}: warned in {num_warned} of {len(runs)} runs; right would be {wanted}", flush=True)
        save_json(RESULTS_DIR, arguments.save, report)
    return 0


if __name__ == "__main__":
    sys.exit(main())
