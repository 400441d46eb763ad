"""How many pulls does APS spare, and what does it cost in return? Trains the examples under different rules.

    PYTHONPATH=examples python -m benchmarks.sync                    everything, about an hour on 2 cores
    PYTHONPATH=examples python -m benchmarks.sync cartpole dqn       some of the tasks; what was measured is kept
    PYTHONPATH=examples python -m benchmarks.sync --report           only writes the table again

Each training is one line in results/sync_runs.json; results/sync.md is the table made of them.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from typing import Any

from rich.console import Console
from rich.progress import track

from benchmarks.harness.results import RESULTS_DIR, update_pages
from benchmarks.rows import sync_tasks
from benchmarks.rows.sync_report import Run, table

RUNS = RESULTS_DIR / "sync_runs.json"
TABLE = RESULTS_DIR / "sync.md"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("tasks", nargs="*", help=f"of {', '.join(sync_tasks.TASKS)}; none: all")
    parser.add_argument("--seeds", type=int, help="for each rule; default: as many as the task wants")
    parser.add_argument("--again", action="store_true", help="measure anew what was measured before")
    parser.add_argument("--report", action="store_true", help="only write the table")
    arguments = parser.parse_args()
    unknown = [name for name in arguments.tasks if name not in sync_tasks.TASKS]
    if unknown:
        parser.error(f"no task is called {unknown[0]!r}; known: {', '.join(sync_tasks.TASKS)}")
    runs = [Run(**each) for each in json.loads(RUNS.read_text())] if RUNS.exists() else []
    if not arguments.report:
        names = arguments.tasks or list(sync_tasks.TASKS)
        if arguments.again:
            runs = [run for run in runs if run.task not in names]
        for name in names:
            _measure(name, arguments.seeds, runs)
    first_line, rest = table(runs).split("\n", 1)
    if arguments.report and TABLE.exists():  # written again, not measured again: date and version stay
        first_line = TABLE.read_text().split("\n", 1)[0]
    TABLE.write_text(f"{first_line}\n{rest}\n")
    update_pages()
    print(TABLE.read_text())


def _measure(name: str, num_seeds: int | None, runs: list[Run]) -> None:
    """All trainings of a task that are not there yet; kept after each."""
    task = sync_tasks.TASKS[name]
    todo = list(_missing(name, num_seeds or task.num_seeds, task.rules, runs))
    _train_all(name, todo, runs)
    if task.has_period:  # the period that pulls as often as APS did
        matching = sync_tasks.matching_period([run for run in runs if run.task == name and run.rule == "aps"])
        _train_all(name, list(_missing(name, num_seeds or task.num_seeds, [f"every:{matching}"], runs)), runs)


def _missing(name: str, num_seeds: int, rules: Any, runs: list[Run]) -> Iterator[tuple[str, int]]:
    """Rules in turn for each seed, so that a noisy hour strikes them all."""
    done = {(run.task, run.rule, run.seed) for run in runs}
    for seed in range(1, num_seeds + 1):
        yield from ((rule, seed) for rule in rules if (name, rule, seed) not in done)


def _train_all(name: str, todo: list[tuple[str, int]], runs: list[Run]) -> None:
    for rule, seed in track(todo, name, console=Console(stderr=True)):
        run = sync_tasks.TASKS[name].train(name, rule, seed)
        print(run.line, file=sys.stderr, flush=True)
        runs.append(run)
        lines = ",\n".join(json.dumps(each.as_dict()) for each in runs)
        RUNS.write_text(f"[\n{lines}\n]\n")


if __name__ == "__main__":
    main()
