"""An sshd for all tests of this folder, and no run that leaves its folder behind."""

import gc
import os
import sys
import tempfile
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from sshd import running_sshd


@pytest.fixture(autouse=True)
def run_folders(monkeypatch, tmp_path):
    """Runs make their folders in one that only this test uses; none is there in the end."""
    with tempfile.TemporaryDirectory(prefix="ef-") as folder, monkeypatch.context() as patch:
        patch.setenv("TMPDIR", folder)
        patch.setattr(tempfile, "tempdir", None)
        yield
        left = [name for name in os.listdir(folder) if name.startswith("envfleet-")]
        if left:
            gc.collect()
            left = [name for name in os.listdir(folder) if name.startswith("envfleet-")]
        assert left == []


@pytest.fixture(scope="session")
def sshd_of_session(tmp_path_factory):
    with running_sshd(tmp_path_factory.mktemp("sshd")) as server:
        yield server


@pytest.fixture
def sshd(sshd_of_session, monkeypatch):
    """A real sshd: `ssh node1` and `ssh node2` get there."""
    monkeypatch.setenv("PATH", f"{sshd_of_session.folder}/bin:{os.environ['PATH']}")
    return sshd_of_session
