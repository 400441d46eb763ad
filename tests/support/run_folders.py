"""Runs of a test make their folders in one of its own, and leave none."""

import contextlib
import gc
import os
import tempfile

from tests.support.waiting import wait_until


@contextlib.contextmanager
def own_run_folders(monkeypatch, for_children=True):
    """Says which folders of runs there are: none in the end. Processes that are started put theirs there, too."""
    with tempfile.TemporaryDirectory(prefix="ef-") as folder, monkeypatch.context() as patch:
        if for_children:
            patch.setenv("TMPDIR", folder)
        patch.setattr(tempfile, "tempdir", None if for_children else folder)

        def folders():
            return [name for name in os.listdir(folder) if name.startswith("envfleet-")]

        yield folders
        if folders():
            gc.collect()
        wait_until(lambda: folders() == [], lambda: f"folders of runs are gone: {folders()}")
