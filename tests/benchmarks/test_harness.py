"""The harness of the benchmarks: contenders in turn, those that fail left out, files that a run leaves."""

import json
from dataclasses import dataclass, field

import pytest

from benchmarks.harness import command
from benchmarks.harness.command import Benchmark
from benchmarks.harness.machine import ParallelSpeedup
from benchmarks.harness.measure import measure, not_measured
from benchmarks.harness.rows import Comparison, NotInstalled, Row, Settings, Target, Window

SHORT = Settings(window_s=0.001, rounds=3, warmup_s=0.001)


@dataclass(frozen=True)
class Fake:
    name: str
    steps: int = 100
    fails_at: int | None = None  # the window in which it raises
    installed: bool = True


OURS, PEER = Fake("ours", 300), Fake("peer")


@dataclass
class Started:
    fake: Fake
    order: list[str]
    about: dict[str, str] = field(default_factory=dict)
    num_windows: int = 0

    def run_window(self, window_s):
        self.order.append(self.fake.name)
        self.num_windows += 1
        if self.num_windows == self.fake.fails_at:
            raise RuntimeError("broken")
        return Window(self.fake.steps, 1.0)

    def close(self):
        self.order.append(f"{self.fake.name} closed")


def row(*others, **more):
    comparisons = tuple(Comparison(OURS, other, Target.RATIO_AT_LEAST, 2.0) for other in others)
    return Row(
        name="r", title="a title", unit="steps/s", number=lambda window: window.rate, comparisons=comparisons, **more
    )


def run(measured, settings=SHORT):
    order = []

    def start(fake):
        if not fake.installed:
            raise NotInstalled(fake.name)
        return Started(fake, order)

    return measure(measured, settings, start, ParallelSpeedup(2)), order


def test_contenders_are_measured_in_turn_and_closed():
    result, order = run(row(PEER))
    assert order == ["peer", "ours"] * 4 + ["ours closed", "peer closed"]  # a warm-up, then three rounds
    assert result.compared(result.row.comparisons[0]) == (3.0, 3.0, 3.0)
    assert len(result.busy_cores_at_rest) == 6
    assert result.parallel_speedups == []  # nobody in this row uses one core


def test_one_that_fails_or_is_missing_is_left_out_and_named():
    result, order = run(row(Fake("bad", fails_at=2), Fake("absent", installed=False), PEER))
    assert order.count("bad") == 2 and order.count("ours") == 4
    assert result.outcomes["bad"].absent_because == "failed: RuntimeError: broken"
    assert result.outcomes["bad"].has_failed
    assert result.outcomes["absent"].absent_because == "not installed: absent"
    assert not result.outcomes["absent"].has_failed
    assert [result.compared(each) is None for each in result.row.comparisons] == [True, True, False]


def test_a_row_whose_modules_are_missing_is_not_measured():
    result = not_measured(row(PEER, requires=("json", "no_such_module")))
    assert result.outcomes["ours"].absent_because == "not installed: no_such_module"
    assert not_measured(row(PEER, requires=("json",))) is None


@pytest.mark.parametrize("fails_at", [None, 3])
def test_a_whole_run_leaves_its_table(tmp_path, monkeypatch, capsys, fails_at):
    num_updates = []
    monkeypatch.setattr(command, "RESULTS_DIR", tmp_path)
    monkeypatch.setattr(command, "update_pages", lambda: num_updates.append(1))
    benchmark = Benchmark(
        table="some",
        rows=[row(Fake("peer", fails_at=fails_at))],
        start_for=lambda row, machine, arguments: lambda fake: Started(fake, []),
        window_s=0.001,
        rounds=2,
    )
    parser = benchmark.parser("What is measured.\nMore.")
    assert benchmark.run(parser.parse_args(["--results-dir", str(tmp_path)])) == (0 if fails_at is None else 1)
    table = (tmp_path / "some.md").read_text()
    assert ("3.00x (3.00x to 3.00x) | at least 2x | yes" in table) == (fails_at is None)
    assert num_updates == [1], "the pages are written again, from the new table"
    assert json.loads((tmp_path / "some.json").read_text())["rows"][0]["name"] == "r"
    assert table in capsys.readouterr().out


def test_a_trial_does_not_replace_the_record(tmp_path):
    benchmark = Benchmark(
        table="some", rows=[row(PEER)], start_for=lambda *_: lambda fake: Started(fake, []), quick_window_s=0.001
    )
    assert benchmark.run(benchmark.parser(None).parse_args(["--quick", "--results-dir", str(tmp_path)])) == 0
    assert {each.name for each in tmp_path.iterdir()} == {"some-partial.json", "some-partial.md"}
