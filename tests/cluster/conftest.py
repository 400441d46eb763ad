"""Modules of this folder can be imported by its tests, and by the workers they start. Runs leave no folder behind."""

import sys
from pathlib import Path

import pytest

from run_folders import own_run_folders

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(autouse=True)
def run_folders(monkeypatch, tmp_path):
    """See own_run_folders. (tmp_path is asked for only to be made before: pytest would make it in this folder.)"""
    with own_run_folders(monkeypatch) as folders:
        yield folders
