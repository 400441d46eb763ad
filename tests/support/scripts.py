"""Scripts that tests run in processes of their own: the folders of this repository, and what Python finds there."""

import os
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
EXAMPLES = ROOT / "examples"


def script_environment(**variables: str) -> dict[str, str]:
    """This process's environment; Python imports there what it imports here."""
    python_path = os.pathsep.join(os.path.abspath(entry) for entry in sys.path)
    return {**os.environ, "PYTHONPATH": python_path, **variables}
