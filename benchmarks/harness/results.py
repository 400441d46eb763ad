"""Files of results: where they are, and the pages that show their tables."""

from __future__ import annotations

import json
import runpy
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
RESULTS_DIR = ROOT / "benchmarks" / "results"


def save_json(folder: Path, name: str, report: dict[str, Any]) -> Path:
    """Write `name`.json into the folder, which is made if it is not there."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.json"
    path.write_text(json.dumps(report, indent=1) + "\n")
    return path


def update_pages() -> None:
    """Write docs/benchmarks.md and the README's table again, from what is in RESULTS_DIR."""
    runpy.run_path(str(ROOT / "docs" / "generate_benchmarks.py"), run_name="__main__")
