"""The command line of a benchmark that consists of rows, and the files that a run leaves."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.harness.machine import PACKAGES, ParallelSpeedup, describe_machine
from benchmarks.harness.measure import measure, not_measured, progress
from benchmarks.harness.report import to_json, to_markdown
from benchmarks.harness.results import RESULTS_DIR, save_json, update_pages
from benchmarks.harness.rows import Row, RowResult, Settings, Start


@dataclasses.dataclass(frozen=True, slots=True)
class Curve:
    """A row of another form: numbers of one contender, without a comparison."""

    name: str  # for --rows
    measure: Callable[[float, Callable[[str], None]], dict[str, Any]]  # (window_s, progress) -> for JSON
    lines: Callable[[dict[str, Any]], list[str]]  # the same as markdown


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Benchmark:
    """Rows, how their contenders are started, and how long they are measured."""

    table: str  # names the results, and the script whose marks a page has
    rows: Sequence[Row]
    start_for: Callable[[Any, dict[str, Any], argparse.Namespace], Start]  # (row, machine, arguments)
    window_s: float = 1.0
    rounds: int = 11
    quick_window_s: float = 0.3
    packages: Sequence[str] = PACKAGES
    curve: Curve | None = None

    def parser(self, doc: str | None) -> argparse.ArgumentParser:
        """The arguments that all benchmarks have. The first line of `doc` describes the command."""
        parser = argparse.ArgumentParser(description=(doc or "").partition("\n")[0])
        names = [*(row.name for row in self.rows), *([] if self.curve is None else [self.curve.name])]
        parser.add_argument("--rows", nargs="+", choices=names, default=names, metavar="NAME", help=f"of {names}")
        parser.add_argument("--window-s", type=_positive, default=self.window_s, help="of a window (%(default)s)")
        parser.add_argument(
            "--rounds", "--windows", type=_count, default=self.rounds, help="windows of each contender (%(default)s)"
        )
        parser.add_argument("--quick", action="store_true", help="2 rounds of short windows: does it run?")
        parser.add_argument("--results-dir", type=Path, default=RESULTS_DIR)
        return parser

    def run(self, arguments: argparse.Namespace) -> int:
        """Run the rows asked for; 1 if a contender failed, which a missing package does not count as."""
        settings = Settings(window_s=arguments.window_s, rounds=arguments.rounds, warmup_s=min(arguments.window_s, 2.0))
        if arguments.quick:
            settings = Settings(window_s=self.quick_window_s, rounds=2, warmup_s=self.quick_window_s / 3)
        progress("looking at the machine")
        files = _Files(self, arguments.results_dir, describe_machine(self.packages), settings)
        speedup = ParallelSpeedup(files.machine["num_cores"])
        for row in self.rows:
            if row.name in arguments.rows:
                result = not_measured(row)
                if result is None:
                    result = measure(row, settings, self.start_for(row, files.machine, arguments), speedup)
                files.add(result)
        speedup.close()
        if self.curve is not None and self.curve.name in arguments.rows:
            name = self.curve.name
            files.add_curve(self.curve.measure(settings.window_s, lambda text: progress(f"{name}: {text}")))
        files.finish(is_trial=arguments.quick)
        return int(any(each.has_failed for result in files.results for each in result.outcomes.values()))


class _Files:
    """Written after each row, so that a run that is interrupted leaves what it had."""

    def __init__(self, benchmark: Benchmark, folder: Path, machine: dict[str, Any], settings: Settings) -> None:
        self._benchmark, self._folder, self._settings = benchmark, folder, settings
        self.machine = machine
        self.results: list[RowResult] = []
        self._curve: dict[str, Any] | None = None
        self._partial = f"{benchmark.table}-partial"

    def add(self, result: RowResult) -> None:
        self.results.append(result)
        self._write()

    def add_curve(self, curve: dict[str, Any]) -> None:
        self._curve = curve
        self._write()

    def _write(self) -> None:
        report: dict[str, Any] = {
            "machine": self.machine,
            "settings": dataclasses.asdict(self._settings),
            "rows": [to_json(result) for result in self.results],
        }
        markdown = to_markdown(self.results, self.machine, self._settings)
        if self._benchmark.curve is not None:
            report[self._benchmark.curve.name] = self._curve
            if self._curve is not None:
                markdown += "\n" + "\n".join(self._benchmark.curve.lines(self._curve)) + "\n"
        save_json(self._folder, self._partial, report)
        (self._folder / f"{self._partial}.md").write_text(markdown)

    def finish(self, is_trial: bool) -> None:
        """Some rows, or a trial, must not replace the record of a whole run."""
        paths = [self._folder / f"{self._partial}.{form}" for form in ("json", "md")]
        is_whole = len(self.results) == len(self._benchmark.rows)
        is_whole &= self._benchmark.curve is None or self._curve is not None
        if is_whole and not is_trial:
            paths = [path.replace(self._folder / f"{self._benchmark.table}{path.suffix}") for path in paths]
            if self._folder == RESULTS_DIR:
                update_pages()
        progress(f"written: {paths[0]} and {paths[1]}\n")
        print(paths[1].read_text(), end="")


def _positive(text: str) -> float:
    number = float(text)
    if not number > 0:
        raise argparse.ArgumentTypeError(f"must be above 0, got {text}")
    return number


def _count(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {text}")
    return number
