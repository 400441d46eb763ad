"""Measure a row: all contenders are built and warmed up, then measured in turn (A, B, A, B, ...) in short windows.

A disturbance of the machine then meets all of them. Only ratios within a run mean anything.
"""

from __future__ import annotations

import contextlib
import importlib.util
import signal
import sys
from collections.abc import Iterator

from benchmarks.harness.machine import ParallelSpeedup, busy_cores
from benchmarks.harness.rows import NotInstalled, Outcome, Row, RowResult, Running, Settings, Start

BUILD_TIMEOUT_S = 180.0
STUCK_AFTER_S = 60.0  # beyond the window itself
PAUSE_S = 0.2  # between windows: the last contender's processes fall asleep, and we see who else is awake


def progress(text: str) -> None:
    """Show where we are on stderr: one line rewritten on a terminal, a line each elsewhere."""
    sys.stderr.write(f"\r\x1b[K{text}" if sys.stderr.isatty() else f"{text}\n")
    sys.stderr.flush()


@contextlib.contextmanager
def deadline(timeout_s: float, what: str) -> Iterator[None]:
    """Raise TimeoutError in the main thread: a contender that hangs must not take the run with it."""

    def expire(signum: int, frame: object) -> None:
        raise TimeoutError(f"{what} took longer than {timeout_s:g} s")

    previous = signal.signal(signal.SIGALRM, expire)
    signal.setitimer(signal.ITIMER_REAL, timeout_s)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, previous)


def measure(row: Row, settings: Settings, start: Start, speedup: ParallelSpeedup) -> RowResult:
    """Build all contenders of a row, measure them in turn, and close them."""
    outcomes = {contender.name: Outcome() for contender in row.contenders}
    busy_cores_at_rest: list[float] = []
    parallel_speedups: list[float] = []
    with contextlib.ExitStack() as stack:
        running: dict[str, Running] = {}
        for contender in row.contenders:
            progress(f"{row.name}: building {contender.name}")
            built = _built(contender, start, outcomes[contender.name])
            if built is not None:
                running[contender.name] = built
                stack.callback(_close, contender.name, built)
        for name in list(running):
            _attempt(name, running, outcomes, settings.warmup_s)
        for outcome in outcomes.values():
            outcome.windows.clear()
        for round_number in range(1, settings.rounds + 1):
            if row.one_core_peer is not None:
                parallel_speedups.append(speedup.measure())
            for name in list(running):
                progress(f"{row.name}: round {round_number}/{settings.rounds}, {name}")
                busy_cores_at_rest.append(busy_cores(PAUSE_S))
                _attempt(name, running, outcomes, settings.window_s)
        progress(f"{row.name}: closing")
    return RowResult(row, outcomes, busy_cores_at_rest, parallel_speedups)


def not_measured(row: Row) -> RowResult | None:
    """A result without numbers, where modules are missing that all contenders need; None: they are there."""
    missing = [module for module in row.requires if importlib.util.find_spec(module) is None]
    if not missing:
        return None
    outcome = Outcome(absent_because=f"not installed: {', '.join(missing)}")
    return RowResult(row, {contender.name: outcome for contender in row.contenders}, [], [])


def _built(contender: object, start: Start, outcome: Outcome) -> Running | None:
    try:
        with deadline(BUILD_TIMEOUT_S, "building"):
            built = start(contender)
    except NotInstalled as error:
        outcome.absent_because = f"not installed: {error}"
        return None
    except Exception as error:  # a peer may fail in its own way; the others are still worth measuring
        outcome.fail(error)
        return None
    outcome.about = built.about
    return built


def _attempt(name: str, running: dict[str, Running], outcomes: dict[str, Outcome], window_s: float) -> None:
    """Measure one window. A contender that fails is left out of the rounds that follow."""
    try:
        with deadline(window_s + STUCK_AFTER_S, "a window"):
            outcomes[name].windows.append(running[name].run_window(window_s))
    except Exception as error:  # as in _built
        outcomes[name].fail(error)
        del running[name]


def _close(name: str, built: Running) -> None:
    """Close a contender; one that cannot be closed is reported and left to the end of the process."""
    try:
        with deadline(STUCK_AFTER_S, "closing"):
            built.close()
    except Exception as error:  # as in _built
        progress(f"{name} did not close: {error!r}\n")
