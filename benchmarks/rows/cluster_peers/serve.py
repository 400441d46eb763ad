"""The far side of a contender: it is built in this process, and measured for a window whenever the parent asks.

One JSON object a line: to us `{"window_s": 1.0}` or `{"close": true}`; from us what the window held, or an error. The
first line from us says that it is built. Peers may need other versions of packages than envfleet does, so they run
in an interpreter of their own, and this file imports nothing but the standard library.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Served:
    """A contender that is built and warm."""

    run_window: Callable[[float], dict[str, Any]]
    close: Callable[[], object]
    about: dict[str, str] = field(default_factory=dict)  # versions and what was chosen, for the report


def serve(build: Callable[[dict[str, Any]], Served]) -> None:
    """Build with the settings in argv[1], and answer until the parent says close or goes away."""
    # Libraries print as they like: their stdout becomes stderr, and the answers go out by a descriptor of their own.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)

    def answer(make_value: Callable[[], dict[str, Any]]) -> None:
        try:
            value = make_value()
        except Exception as error:  # the parent tells of it in its table
            value = {"error": f"{type(error).__name__}: {error}", "traceback": traceback.format_exc()}
            if isinstance(error, ModuleNotFoundError):
                value["missing"] = str(error.name)
        answers.write(json.dumps(value) + "\n")

    served: Served | None = None

    def built() -> dict[str, Any]:
        nonlocal served
        served = build(json.loads(sys.argv[1]))
        return dict(served.about)

    answer(built)
    if served is None:
        return
    try:
        for line in sys.stdin:
            request = json.loads(line)
            if request.get("close"):
                break
            answer(lambda: served.run_window(request["window_s"]))  # noqa: B023 - called at once
    finally:
        served.close()


def count_for(window_s: float, do_some: Callable[[], int]) -> dict[str, Any]:
    """Call `do_some()`, which says how much it did, until the window is over; what crosses its end is counted."""
    num_done = 0
    now_s = start_s = time.perf_counter()
    while now_s - start_s < window_s:
        num_done += do_some()
        now_s = time.perf_counter()
    return {"count": num_done, "duration_s": now_s - start_s}
