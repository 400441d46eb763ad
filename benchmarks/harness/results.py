"""Files of results: where they are, and the pages that show their tables."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
RESULTS_DIR = ROOT / "benchmarks" / "results"
PAGES = (ROOT / "docs" / "benchmarks.md", ROOT / "README.md")


def save_json(folder: Path, name: str, report: dict[str, Any]) -> Path:
    """Write `name`.json into the folder, which is made if it is not there."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.json"
    path.write_text(json.dumps(report, indent=1) + "\n")
    return path


def update_pages(script: str, markdown: str) -> None:
    """Put a script's table between its marks in the pages, which state nothing that no script has measured."""
    begin, end = f"<!-- begin: benchmarks/{script} -->\n", f"<!-- end: benchmarks/{script} -->"
    for page in PAGES:
        before, found, rest = page.read_text().partition(begin) if page.exists() else ("", "", "")
        if found:  # a page that does not show this table has no marks for it
            page.write_text(before + begin + markdown + end + rest.partition(end)[2])
