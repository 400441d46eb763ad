"""Modules of this folder can be imported by its tests, and by the workers they start. Runs leave no folder behind."""

import gc
import os
import sys
import tempfile
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(autouse=True)
def run_folders(monkeypatch, tmp_path):
    """Runs make their folders in one that only this test uses. Says which there are: none in the end.

    (tmp_path is asked for only to be made before: pytest would make it in this folder otherwise.)
    """
    with tempfile.TemporaryDirectory(prefix="ef-") as folder, monkeypatch.context() as patch:
        patch.setenv("TMPDIR", folder)
        patch.setattr(tempfile, "tempdir", None)

        def folders():
            return [name for name in os.listdir(folder) if name.startswith("envfleet-")]

        yield folders
        if folders():
            gc.collect()
        assert folders() == []
