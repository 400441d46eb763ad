"""Writes the tables of docs/benchmarks.md, and the README's ten numbers, from benchmarks/results.

python docs/generate_benchmarks.py

Each table gets a caption with the version and the date of its measurement. A table from before the current minor
version says that it is older. The prose between the tables is left as it is.
"""

from __future__ import annotations

import re
import runpy
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "benchmarks.md"
README = ROOT / "README.md"
RESULTS = ROOT / "benchmarks" / "results"
SCRIPTS = ("pool", "simulators", "time_shares", "policy_loop", "sb3", "xla")
SCRIPTS += ("first_ready", "cluster", "sync", "releases")


@dataclass(frozen=True, slots=True)
class Figure:
    """One line of the README's table: a row of a script's table, found by the text of some of its cells."""

    what: str
    script: str
    cells: tuple[str, ...]  # each stands in a cell of its own
    columns: tuple[int, int, int]  # of our number, the other's number, and the result
    against: str
    unit: str


STEPS = (3, 5, 6)  # columns of the tables of pool.py and simulators.py: steps/s, steps/s, ratio
FIGURES = (
    Figure("CartPole-v1, 64 envs", "pool", ("`cartpole-64`", "EnvPool sync, 1 thread"), STEPS, "EnvPool", "steps/s"),
    Figure("Python env, no-op, 64 envs", "pool", ("`noop`", "Gymnasium async"), STEPS, "AsyncVectorEnv", "steps/s"),
    Figure("Python env, 40 us, 8 envs", "pool", ("`cpu`", "SB3 SubprocVecEnv"), STEPS, "SubprocVecEnv", "steps/s"),
    Figure("Pong-v5, 16 envs", "simulators", ("`pong-16`", "EnvPool sync, 2 threads"), STEPS, "EnvPool", "steps/s"),
    Figure("Ant-v5, 64 envs", "simulators", ("`ant-64`", "EnvPool sync, 2 threads"), STEPS, "EnvPool", "steps/s"),
    Figure(
        "LunarLander-v3, 64 envs",
        "simulators",
        ("`lunarlander-native`", "EnvPool sync, 2 threads"),
        STEPS,
        "EnvPool",
        "steps/s",
    ),
    Figure(
        "rollouts, CartPole-v1, 2 workers x 8 envs",
        "cluster",
        ("`rollout`", "envfleet rollout", "RLlib env runners"),
        STEPS,
        "RLlib",
        "steps/s",
    ),
    Figure(
        "the same",
        "cluster",
        ("`rollout`", "envfleet rollout", "TorchRL MultiSync, compiled policy"),
        STEPS,
        "TorchRL",
        "steps/s",
    ),
    Figure(
        "`step(actions)`, 2 workers x 64 envs",
        "cluster",
        ("`step`", "envfleet step, ipc", "local pool"),
        STEPS,
        "local pool",
        "us",
    ),
    Figure("pulls of a worker, PPO on CartPole-v1", "sync", ("`cartpole`", "aps"), (5, 4, 6), "every update", "pulls"),
)


def current_version() -> str:
    """The version of this checkout."""
    return str(runpy.run_path(str(ROOT / "src" / "envfleet" / "version.py"))["__version__"])


def minor(version: str) -> tuple[int, ...]:
    """(0, 6) of "0.6.1"."""
    return tuple(int(part) for part in version.split(".")[:2])


def measured(script: str) -> tuple[str, str]:
    """Version and date that the first line of a script's results states."""
    first = (RESULTS / f"{script}.md").read_text().splitlines()[0]
    version, date = re.search(r"envfleet (\d+\.\d+\.\d+)", first), re.search(r"\d{4}-\d\d-\d\d", first)
    if version is None or date is None:
        raise ValueError(f"results/{script}.md must state version and date in its first line; it is {first!r}")
    return version.group(1), date.group(0)


def caption(version: str, date: str, current: str) -> str:
    """The line above a table; it marks a table that is older than the current minor version."""
    text = f"**EnvFleet {version}, {date}.**"
    if minor(version) < minor(current):
        text += f" *Older than {'.'.join(map(str, minor(current)))}: not measured again since.*"
    return text


def section(script: str, current: str) -> str:
    """What stands between the marks of a script."""
    return f"{caption(*measured(script), current)}\n\n{(RESULTS / f'{script}.md').read_text().strip()}\n"


def figures_table() -> str:
    """The README's table."""
    lines = ["| what | EnvFleet | peer | | measured with |", "| --- | --- | --- | --- | --- |"]
    for figure in FIGURES:
        ours, theirs, result = (_cells_of(figure)[column] for column in figure.columns)
        version, _ = measured(figure.script)
        lines.append(
            f"| {figure.what} | {ours} {figure.unit} | {figure.against}: {theirs} {figure.unit} |"
            f" {result.partition(' (')[0]} | {version} |"
        )
    return "\n".join(lines) + "\n"


def _cells_of(figure: Figure) -> list[str]:
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in (RESULTS / f"{figure.script}.md").read_text().splitlines()
        if line.startswith("|")
    ]
    found = [row for row in rows if figure.cells[0] in row[0] and all(cell in row[1:] for cell in figure.cells[1:])]
    if len(found) != 1:
        raise ValueError(f"{len(found)} rows of results/{figure.script}.md have {figure.cells}; one is needed")
    return found[0]


def between_marks(page: str, name: str, text: str) -> str:
    """The page with `text` between the marks of `name`."""
    begin, end = f"<!-- begin: {name} -->\n", f"<!-- end: {name} -->"
    before, found, rest = page.partition(begin)
    if not found or end not in rest:
        raise ValueError(f"the marks {begin.strip()} and {end} must stand in the page")
    return before + begin + text + end + rest.partition(end)[2]


def benchmarks_page(current: str) -> str:
    """docs/benchmarks.md with its tables as they are in benchmarks/results."""
    page = PAGE.read_text()
    for script in SCRIPTS:
        page = between_marks(page, f"benchmarks/{script}.py", section(script, current))
    return page


def readme() -> str:
    """README.md with its table as the results have it."""
    return between_marks(README.read_text(), "docs/generate_benchmarks.py", figures_table())


if __name__ == "__main__":
    PAGE.write_text(benchmarks_page(current_version()))
    README.write_text(readme())
